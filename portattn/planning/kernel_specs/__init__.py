"""The planner's data about each core kernel, a module per family on `base`; without torch.

Kernels that fill tensors are here: new keys and values in caches and pages, an indexer's logits, the largest logits."""

from __future__ import annotations

import fnmatch
from collections.abc import Container
from typing import Any

import msgspec

from portattn.planning.kernel_specs.backward import BlockBackward, DenseBackward, VarlenBackward, chunks_of, packed_keys
from portattn.planning.kernel_specs.base import (
    DECIDING,
    MIN_DOT,
    MIN_NARROW_DEPTH,
    ONE_ORDER,
    CoreKernel,
    ceil_div,
    head_columns,
    heads_together,
    invariant_launch,
    occupied_tiles,
    packed_tiles,
    tile_width,
    varies,
)
from portattn.planning.kernel_specs.decode import BlockForward, DecodeSplit, MlaSplit, PagedSplit, SparseSplit
from portattn.planning.kernel_specs.dense import DenseForward, VarlenForward
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem
from portattn.schema.symbolic_int import least, most, next_power_of_two
from portattn.schema.target import Arch
from portattn.schema.tuning import SPLIT_THRESHOLD

__all__ = [
    "CORES",
    "DECIDING",
    "KERNEL_NAMES",
    "MIN_DOT",
    "ONE_ORDER",
    "CacheWrite",
    "CoreKernel",
    "DecodeSplit",
    "DenseBackward",
    "ceil_div",
    "chunks_of",
    "family",
    "head_columns",
    "heads_together",
    "invariant_launch",
    "occupied_tiles",
    "of_gradients",
    "packed_keys",
    "packed_tiles",
    "tile_width",
    "varies",
]

INT32_MAX = 2**31 - 1
NARROW = 8  # columns of a tile that has no 16 numbers beside each other
SCORES_AT_ONCE = 16384  # of a tile of keys and all heads of a row: 64 a thread of eight warps
MOST_HEADS = 512
LEAST_READ = 1024  # numbers of a row that a step of its selection reads: less is all latency
MOST_HELD = 8192  # numbers of a row in registers: 16 a thread of 16 warps
WRITTEN_AT_ONCE = 4096  # numbers in a tile of keys that are written: 32 a thread of four warps


class CacheWrite(CoreKernel):
    """Writes new keys and values by write_cache: a tile is block_m rows of one head's key, and of its value."""

    name = "append_write"
    function = "write_cache"
    op = "append_kv"
    takes = frozenset({"seqlens_k", "kv_format", "rotary", "head_dim_v"})
    choices: tuple[str, ...] = ("grid", "reads", "unpack")
    max_head_dim_v = 576

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        if self.all_rows(problem) > INT32_MAX:
            return (
                f"there are {self.all_rows(problem)} rows of keys, and up to {INT32_MAX} are counted",
                "split the call",
            )
        return super().cannot(problem)

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        narrow = least(problem.head_dim, problem.head_dim_v) <= NARROW and problem.kv_scales == "token"
        if lowering.unpack == "ptx" and narrow:
            return (("unpack", "bytes", "ptx takes rows with a scale for each token 16 numbers at a time"),)
        narrows = problem.kv_format != "as_q" and not problem.cache_format.block
        if lowering.unpack == "bytes" or (lowering.unpack == "ptx" and narrows):
            return ()
        why = "a cache is written as numbers, and ptx narrows those of a quantised one alone, nvfp4 left out"
        return (("unpack", "bytes", why),)

    def all_rows(self, problem: Problem) -> int:
        return problem.batch * problem.seq_q * problem.heads_k

    def tiles(self, problem: Problem, launch: Launch) -> int:
        return ceil_div(self.all_rows(problem), launch.block_m)

    def fit(
        self,
        problem: Problem,
        lowering: Lowering,
        launch: Launch,
        arch: Arch,
        occupancy: int,
        pinned: Container[str] = frozenset(),
        split_threshold: float = SPLIT_THRESHOLD,
    ) -> Launch:
        """Return tiles that fit in registers, smaller for few rows so that every core has some."""
        if "block_m" not in pinned:
            room = most(WRITTEN_AT_ONCE // next_power_of_two(most(problem.head_dim, problem.head_dim_v)), 1)
            share = next_power_of_two(most(ceil_div(self.all_rows(problem), most(arch.cores, 1)), 1))
            launch = msgspec.structs.replace(launch, block_m=min(launch.block_m, room, share))
        return msgspec.structs.replace(launch, splits=1)

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        # No product is computed from these tiles: their width needs no least.
        exact = lowering.reads == "inside"
        return {
            "PAGE_SIZE": problem.page_size,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_D": problem.head_dim if exact else next_power_of_two(problem.head_dim),
            "BLOCK_DV": problem.head_dim_v if exact else next_power_of_two(problem.head_dim_v),
            "BLOCK_M": launch.block_m,
            "ROTARY": problem.rotary,
            "ROTARY_DIM": problem.rotary_dim,
            "KV_FORMAT": problem.kv_format,
            "KV_SCALES": problem.kv_scales,
            "LARGEST": problem.cache_format.largest,
            "GRID": lowering.grid,
            "UNPACK": lowering.unpack,
        }


class PagedWrite(CacheWrite):
    """Writes into pages by write_cache: slots name each token's place."""

    name = "paged_write"
    op = "write_pages"
    takes = frozenset({"kv_format", "rotary", "head_dim_v"})


class IndexScores(CoreKernel):
    # A tile is block_m rows of queries and block_n keys.
    name = "index_scores"
    function = "index_scores"
    op = "indexer_logits"
    takes = frozenset({"seqlens_k", "kv_format", "gqa", "paged"})
    choices: tuple[str, ...] = ("dot_precision", "operands", "q_operand", "grid")
    max_head_dim = max_head_dim_v = 256

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        if problem.heads_q > MOST_HEADS:
            return f"there are {problem.heads_q} heads, and a tile has up to {MOST_HEADS}", "backend='reference'"
        return super().cannot(problem)

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        if lowering.operands == "stored" and problem.kv_format == "as_q":
            return (("operands", "widened", "queries and keys are not quantised"),)
        if lowering.operands == "stored" and tile_width(problem.head_dim, False) < MIN_NARROW_DEPTH:
            return (("operands", "widened", f"8-bit operands are at least {MIN_NARROW_DEPTH} columns wide"),)
        return ()

    def tiles(self, problem: Problem, launch: Launch) -> int:
        rows, keys = ceil_div(problem.seq_q, launch.block_m), ceil_div(problem.seq_k, launch.block_n)
        return problem.batch * rows * keys

    def fit(
        self,
        problem: Problem,
        lowering: Lowering,
        launch: Launch,
        arch: Arch,
        occupancy: int,
        pinned: Container[str] = frozenset(),
        split_threshold: float = SPLIT_THRESHOLD,
    ) -> Launch:
        if "block_m" not in pinned:
            launch = msgspec.structs.replace(launch, block_m=min(launch.block_m, next_power_of_two(problem.seq_q)))
        if "block_n" not in pinned:
            room = SCORES_AT_ONCE // tile_width(problem.heads_q, False)
            launch = msgspec.structs.replace(launch, block_n=min(launch.block_n, room))
        return msgspec.structs.replace(launch, splits=1)

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        return {name.upper(): getattr(lowering, name) for name in self.choices} | {
            "HEADS": problem.heads_q,
            "HEAD_DIM": problem.head_dim,
            "BLOCK_H": tile_width(problem.heads_q, False),
            "BLOCK_D": tile_width(problem.head_dim, False),
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.block_n,
            "PAGE_SIZE": problem.page_size,
            "KV_FORMAT": problem.kv_format,
        }


class TopkRows(CoreKernel):
    """The places of each row's largest logits by topk_rows: a program a row, with block_n logits in registers."""

    name = "topk_rows"
    function = "topk_rows"
    op = "topk_indices"
    choices: tuple[str, ...] = ("grid", "reads")

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        if self.tiles(problem, Launch()) > INT32_MAX:
            return f"there are more than {INT32_MAX} rows, and so many are counted", "split the call"
        return super().cannot(problem)

    def tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.batch * problem.seq_q

    def fit(
        self,
        problem: Problem,
        lowering: Lowering,
        launch: Launch,
        arch: Arch,
        occupancy: int,
        pinned: Container[str] = frozenset(),
        split_threshold: float = SPLIT_THRESHOLD,
    ) -> Launch:
        if "block_n" not in pinned:
            # Of a longer row the numbers above a pivot are put into a tile: it must be larger than what is chosen.
            tile = most(launch.block_n, least(2 * next_power_of_two(problem.tokens), MOST_HELD))
            tile = least(tile, next_power_of_two(problem.seq_k))
            launch = msgspec.structs.replace(launch, block_n=most(tile, LEAST_READ))
        return msgspec.structs.replace(launch, splits=1)

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        return {"BLOCK_N": launch.block_n, "LONG": problem.seq_k > launch.block_n} | {
            name.upper(): getattr(lowering, name) for name in self.choices
        }


CORES: dict[str, CoreKernel] = {
    k.op: k
    for k in (
        DenseForward(),
        VarlenForward(),
        DenseBackward(),
        VarlenBackward(),
        DecodeSplit(),
        PagedSplit(),
        SparseSplit(),
        BlockForward(),
        BlockBackward(),
        MlaSplit(),
        CacheWrite(),
        PagedWrite(),
        IndexScores(),
        TopkRows(),
    )
}
KERNEL_NAMES = tuple(k.name for k in CORES.values())
# Kernels whose results have the same bits under invariant=True.
_FAMILIES = (("dense_forward", "varlen_forward", "decode_split", "paged_split"), ("mla_split",), ("block_forward",))


def family(name: str) -> tuple[str, ...]:
    """Return the kernels that share a launch and a lowering under invariant=True; empty for a kernel tuned alone."""
    return next((names for names in _FAMILIES if name in names), ())


def of_gradients(pattern: str) -> bool:
    """Return whether a glob matches gradient kernels and no other core kernels."""
    matched = [kernel for kernel in CORES.values() if fnmatch.fnmatchcase(kernel.name, pattern)]
    return bool(matched) and all(kernel.of_rows for kernel in matched)
