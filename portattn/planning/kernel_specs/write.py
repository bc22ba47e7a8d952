"""The kernel that writes new keys and values into contiguous caches and pages."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from portattn.planning.kernel_specs.base import CoreKernel, ceil_div
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem
from portattn.schema.symbolic_int import least, most, next_power_of_two
from portattn.schema.target import Arch
from portattn.schema.tuning import SPLIT_THRESHOLD

INT32_MAX = 2**31 - 1
NARROW = 8  # columns of a tile that has no 16 numbers beside each other
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
