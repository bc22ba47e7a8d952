"""The kernels that split a row's keys over programs: of contiguous caches, pages, latent rows and chosen tokens."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from portattn.planning.kernel_specs.base import (
    MIN_DOT,
    SCORED,
    TAKES,
    WARPS_APART,
    WIDEST_TILE,
    CoreKernel,
    ceil_div,
    head_columns,
    occupied_tiles,
    packed_tiles,
    score_tensors,
    split_evenly,
    warp_split_constants,
    warp_split_limits,
    warp_split_unread,
)
from portattn.planning.kernel_specs.dense import DenseForward
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.ops import ADDED
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import MAX_SPLITS, UNLIMITED, WORD_ALIGNMENT
from portattn.schema.symbolic_int import least, most, next_power_of_two
from portattn.schema.target import Arch
from portattn.schema.tuning import SPLIT_THRESHOLD

ALIGNED = 16  # bytes, as in Problem.aligned


def least_depth(problem: Problem) -> int:
    """Return the least depth of a product of bytes that hold several numbers; 0 for other caches."""
    # Triton 3.6.0 gives operands of int4 a kWidth of 8 for sm_90, of which four threads make 32: with tiles of 16
    # columns the scores were wrong on an H100, 2026-11-25, and with 128 right.
    per_byte = problem.cache_format.per_byte
    return MIN_DOT * per_byte if per_byte > 1 else 0


class DecodeSplit(CoreKernel):
    """Decode: the rows of one key/value head's group are packed into a tile, and keys are split over programs."""

    name = "decode_split"
    function = "decode_split"
    op = "decode_attention"
    takes = TAKES | SCORED | score_tensors(op) | {"leftpad_k", "num_splits", "kv_format", "score_mod", "mask_mod"}
    splits_keys = True
    forms: tuple[str, ...] = (WARPS_APART,)
    choices: tuple[str, ...] = (
        "load", "k_tile", "block_order", "exp", "mask_value", "dot_precision", "grid", "q_operand", "pipeline",
        "reads", "unpack", "warps",
    )  # fmt: skip

    # A split is worth its second pass only over this many key tiles. Source: measured on an H200.
    FEW_KEY_TILES = 4

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        found = super().constexprs(problem, lowering, launch)
        unpack = lowering.unpack if "unpack" in self.choices else "bytes"
        narrowest = 0
        if unpack != "bytes":  # each number of a word has a tile of its own
            narrowest = MIN_DOT * problem.numbers_of_word
        elif lowering.reads != "inside":
            narrowest = least_depth(problem)
        found |= {name: max(found[name], narrowest) for name in ("BLOCK_D", "BLOCK_DV")}
        if found["BLOCK_TAIL"]:
            found["BLOCK_TAIL"] = max(found["BLOCK_TAIL"], narrowest)
        found.pop("WARPS", None)
        pipeline = lowering.pipeline if "pipeline" in self.choices else "plain"
        # Any tile of a list may have holes. Of packed rows a tile's place decides which keys all its rows attend, and a
        # score that is not masked is scaled in the exponential: where a prompt is cut would change a row's last bit.
        if problem.has_lists or problem.invariant or (problem.packed and problem.num_splits):
            pipeline = "masked"
        found |= {
            "PIPELINE": pipeline,
            "SCORE_MOD": problem.score_mod or None,
            "MASK_MOD": problem.mask_mod or None,
            "GROUP": problem.group,
            "SPLIT": launch.splits > 1,
            "LATENT": problem.op == "mla_attention",
            "PAGE_SIZE": problem.page_size,
            "PAGE_LOOP": "slots" if problem.has_lists else lowering.page_loop,
            "KV_FORMAT": problem.kv_format,
            "KV_SCALES": problem.kv_scales,
            "PER": problem.cache_format.per_byte,
            "UNPACK": unpack,
            "ALIGNED": ALIGNED if problem.aligned else WORD_ALIGNMENT,
            # Rows of quantised numbers are 64 to 128 bytes. Of pages that hold a token's heads side by side, memory is
            # read faster where all of them are read at a time.
            "HEADS_FIRST": unpack != "bytes" and bool(problem.page_size) and problem.page_layout == "phd",
            "FOLLOWED": False,  # the launch says so (portattn/launch/decode.py)
        }
        if self.form(lowering):
            return warp_split_constants(found, problem, lowering, launch)
        return found

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        found = super().limits(problem, lowering, launch)
        if self.form(lowering):
            found = warp_split_limits(found, problem, lowering, launch, ("plain",))
        if lowering.unpack == "bytes" or "unpack" not in self.choices:
            return found
        why = no_words(problem)
        if why:
            return (*found, ("unpack", "bytes", why))
        found = tuple(limit for limit in found if limit[0] not in ("load", "pipeline"))
        if lowering.load != "pointer":
            found = (*found, ("load", "pointer", "words are read by pointers"))
        if lowering.pipeline != "plain":
            found = (*found, ("pipeline", "plain", "the loop over words has no other"))
        return found

    def read(self, problem: Problem, lowering: Lowering) -> tuple[str, ...]:
        unread: tuple[str, ...] = ()
        if problem.cache_format.per_byte > 1:  # rows of bytes become rows of numbers, which are transposed then
            unread = "k_tile", "block_order"
        if "unpack" in self.choices and lowering.unpack != "bytes":
            unread = (
                "k_tile",
                "block_order",
                "q_operand",
                "dot_precision",
            )  # kernels/attend_packed16.py has one way of each
        if self.form(lowering):
            unread = warp_split_unread(problem)
        return tuple(name for name in self.choices if name not in unread)

    def natural_scores(self, problem: Problem) -> bool:
        """Return whether the kernel keeps natural scores although its exponentials have base 2 (kernels/softmax.py)."""
        return bool(problem.score_mod) or any(getattr(problem, name) for name in ADDED)

    def tiles(self, problem: Problem, launch: Launch) -> int:
        return self.row_tiles(problem, launch) * self.slots(problem) * problem.heads_k * launch.splits

    def row_tiles(self, problem: Problem, launch: Launch) -> int:
        if problem.has_lists:
            return problem.query_rows[1] * ceil_div(problem.group, launch.block_m)
        if problem.packed:
            return packed_tiles(problem, launch, problem.group)
        return ceil_div(problem.seq_q * problem.group, launch.block_m)

    def slots(self, problem: Problem) -> int:
        return problem.query_rows[0]

    def rows(self, problem: Problem) -> int:
        return problem.group if problem.has_lists else super().rows(problem) * problem.group

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
        launch = super().fit(problem, lowering, launch, arch, occupancy, pinned, split_threshold)
        if problem.cache_format.block and "block_n" not in pinned:  # the depth of the values' product
            launch = msgspec.structs.replace(launch, block_n=most(launch.block_n, least_depth(problem)))
        if "splits" in pinned and not problem.invariant:
            return launch
        if problem.num_splits or problem.invariant:
            return msgspec.structs.replace(launch, splits=problem.num_splits or 1)
        programs = self.tiles(problem, launch)
        if problem.packed and not problem.has_lists:  # programs of empty tiles end at once
            programs = occupied_tiles(problem, launch.block_m, problem.group) * problem.heads_k
        key_tiles = ceil_div(self.keys(problem), launch.block_n)
        return msgspec.structs.replace(
            launch, splits=self.splits(programs, key_tiles, arch.cores, occupancy, split_threshold)
        )

    def keys(self, problem: Problem) -> int:
        """Return the most keys that one row can attend."""
        found = problem.seq_k
        if problem.window_left != UNLIMITED:
            right = 0 if problem.causal != "none" else problem.window_right
            found = least(found, problem.window_left + problem.seq_q + right if right != UNLIMITED else found)
        # The rows of a tile lie in one chunk, or in neighbouring ones.
        return least(found, problem.chunk + problem.seq_q - 1) if problem.chunk else found

    def splits(self, programs: int, key_tiles: int, cores: int, occupancy: int, split_threshold: float) -> int:
        """Return the splits of a row's keys; from `split_threshold` programs per core on, which fill the chip, 1."""
        if programs >= split_threshold * cores or key_tiles <= self.FEW_KEY_TILES or programs == 0:
            return 1
        return split_evenly(programs, key_tiles, cores * occupancy, MAX_SPLITS)


class PagedSplit(DecodeSplit):
    """Decode and chunked prefill over pages, by decode_split."""

    name = "paged_split"
    op = "paged_attention"
    takes = TAKES | SCORED | score_tensors(op) | {"num_splits", "packed", "kv_format", "score_mod", "mask_mod"}
    # The rotated loop begins a step ahead: for an empty share of the keys it would look up a page that is not there.
    choices: tuple[str, ...] = (*(name for name in DecodeSplit.choices if name != "pipeline"), "page_loop")

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        found = super().limits(problem, lowering, launch)
        page_loop = lowering.page_loop
        if page_loop == "by_page":
            bytes_read = "unpack" not in self.choices or any(limit[:2] == ("unpack", "bytes") for limit in found)
            words = lowering.unpack != "bytes" and not bytes_read and lowering.reads == "masked"
            by_apart = self.form(lowering) and not any(limit[:2] == ("warps", "joint") for limit in found)
            if (
                not (words or by_apart)
                or launch.block_n % problem.page_size
                or launch.block_n // problem.page_size not in (2, 4)
            ):
                page_loop = "per_page" if problem.page_size % launch.block_n == 0 else "flat_masked"
                found = (
                    *found,
                    ("page_loop", page_loop, "by_page is for words and warps apart, in tiles of two or four pages"),
                )
        if page_loop == "per_page" and (problem.has_lists or problem.page_size % launch.block_n):
            page_loop = "flat_masked"
            why = f"a tile of {launch.block_n} keys does not lie in one page of {problem.page_size}"
            why = "each key of a list has a slot of its own" if problem.has_lists else why
            found = (*found, ("page_loop", page_loop, why))
        if lowering.load == "descriptor" and not (page_loop == "per_page" and problem.pages_in_line):
            found = (
                *found,
                ("load", "pointer", "a descriptor reads tiles of one matrix: whole pages that lie in line"),
            )
        return found


class BlockForward(DecodeSplit):
    """Chosen blocks: a tile is one query row's heads of a group, which list blocks of keys."""

    name = "block_forward"
    function = "block_forward"
    op = "block_sparse_attention"
    takes = (TAKES - {"softcap"}) | score_tensors(op) | {"causal", "causal_top_left", "num_splits", "needs_grad"}
    forms = ()
    choices = DenseForward.choices  # by its name, tuning and quirks of every forward kernel are its own
    max_head_dim = WIDEST_TILE

    def read(self, problem: Problem, lowering: Lowering) -> tuple[str, ...]:
        return _READ_OF_BLOCKS

    def row_tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.seq_q * ceil_div(problem.group, launch.block_m)

    def rows(self, problem: Problem) -> int:
        return problem.group

    def keys(self, problem: Problem) -> int:
        return problem.tokens * problem.block_k

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        return tuple(limit for limit in super().limits(problem, lowering, launch) if limit[0] in _READ_OF_BLOCKS)

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
        launch = msgspec.structs.replace(launch, block_n=min(launch.block_n, problem.block_k))  # tiles of one block
        return super().fit(problem, lowering, launch, arch, occupancy, pinned, split_threshold)

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        found = super().constexprs(problem, lowering, launch) | {"BLOCK_KEYS": problem.block_k}
        return {name: found[name] for name in (*_OF_BLOCKS, *map(str.upper, _READ_OF_BLOCKS))}


_READ_OF_BLOCKS = ("load", "k_tile", "block_order", "exp", "mask_value", "dot_precision", "grid", "q_operand")
_OF_BLOCKS = (
    "GROUP", "SPLIT", "BLOCK_KEYS", "HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "BLOCK_M", "BLOCK_N", "CAUSAL",
    "NEGATED",
)  # fmt: skip


class MlaSplit(PagedSplit):
    """Decode and short prefill over a latent cache, by decode_split: each row is read once, as key and as value."""

    name = "mla_split"
    op = "mla_attention"
    takes = TAKES | SCORED | score_tensors(op) | {"num_splits", "packed", "kv_format", "tokens"}
    forms = ()
    choices: tuple[str, ...] = tuple(name for name in PagedSplit.choices if name not in ("unpack", "warps"))

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        found = super().limits(problem, lowering, launch)
        if problem.cache_format.latent and lowering.load != "pointer":
            why = f"rows of {problem.kv_format} hold numbers of three types"
            found = (*(limit for limit in found if limit[0] != "load"), ("load", "pointer", why))
        return found


def no_words(problem: Problem) -> str:
    """Return why a cache's rows cannot be read as 16-bit words (kernels/attend_packed16.py); empty if they can."""
    if problem.kv_format == "as_q":
        return "the cache is not quantised"
    if not problem.cache_format.words:
        return f"the loop over words reads no {problem.kv_format}"
    if not problem.words:
        return f"rows are no whole words of {problem.numbers_of_word} numbers at multiples of {WORD_ALIGNMENT} bytes"
    if head_columns(problem)[1]:
        return f"the loop over words has rows of at most {WIDEST_TILE} columns"
    return ""


class SparseSplit(DecodeSplit):
    """Token-sparse decode: chosen rows are gathered, and each head has its own."""

    name = "sparse_split"
    function = "sparse_split"
    op = "sparse_attention"
    takes = TAKES | score_tensors(op) | {"num_splits", "paged", "log_weights", "magicpig", "kv_format"}
    choices: tuple[str, ...] = ("exp", "mask_value", "grid", "reads")
    max_head_dim_v = 576  # no accumulator of a product holds its columns

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        if problem.seq_q != 1:
            return f"seq_q is {problem.seq_q}, and a chosen token is one query's", "pass one query a sequence"
        return super().cannot(problem)

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        return ()

    def natural_scores(self, problem: Problem) -> bool:
        return True

    def row_tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.group

    def rows(self, problem: Problem) -> int:
        return 1

    def keys(self, problem: Problem) -> int:
        return problem.tokens

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        # No product is computed from these tiles: their width needs no least.
        exact = lowering.reads == "inside"
        return {
            **{name.upper(): getattr(lowering, name) for name in self.choices if name != "reads"},
            "SPLIT": launch.splits > 1,
            "PAGE_SIZE": problem.page_size,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_D": problem.head_dim if exact else next_power_of_two(problem.head_dim),
            "BLOCK_DV": problem.head_dim_v if exact else next_power_of_two(problem.head_dim_v),
            "BLOCK_N": launch.block_n,
            # Only loads that feed a product are fetched ahead by themselves: here the loop says it.
            "STAGES": launch.num_stages,
            "SOFTCAP": problem.softcap,
            "NEGATED": problem.negative_scale,
            "KV_FORMAT": problem.kv_format,
            "KV_SCALES": problem.kv_scales,
            "PER": problem.cache_format.per_byte,
        }
