"""What the planner knows of each core kernel: which op it serves, what it reads, what it cannot do. No torch here."""

from __future__ import annotations

import fnmatch
from collections.abc import Container
from typing import Any

import msgspec

from portattn.planning.splits import split_evenly
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.ops import BACKWARD
from portattn.schema.problem import MAX_SPLITS, UNLIMITED, WORD_ALIGNMENT, Problem
from portattn.schema.sizes import least, most, next_power_of_two
from portattn.schema.target import Arch
from portattn.schema.tuning import SPLIT_THRESHOLD

WIDEST_TILE = 512  # columns of one tile of Q, K or V
SEARCH = 256  # beginnings of packed sequences that are compared at a time
MOST_TOGETHER = 64  # heads; more even out the end of a launch no further
INT32_MAX = 2**31 - 1
WRITTEN_AT_ONCE = 4096  # numbers in a tile of keys that are written: 32 a thread of four warps
# The largest numbers of a cache's formats (schema/tensors.py, which has torch).
LARGEST = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0, "e5m2": 57344.0, "e4m3fnuz": 240.0}
MIN_NARROW_DEPTH = 32  # columns of 8-bit operands: the depth of one product
ALIGNED = 16  # bytes: what Problem.aligned says of rows
# Depth of a product of int4 numbers read as bytes. Triton 3.6.0 gives its operands a kWidth of 8 for sm_90, of which
# four threads make 32: with tiles of 16 columns the scores were wrong on an H100, 2026-11-25, and with 128 right.
MIN_DOT_INT4 = 32
MIN_DOT = 16  # rows, columns and depth of the smallest product that every backend's `tl.dot` takes


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# What every core kernel can do beyond plain attention: names of Problem.demands.
_TAKES = frozenset(
    {"seqlens_k", "softcap", "alibi_slopes", "sinks", "return_lse", "negative_scale", "gqa", "head_dim_v"}
)
_SCORED = {"causal", "causal_top_left", "window"}  # of kernels that know where a key is beside its query
_MASKED = {"bias", "mask"}


class CoreKernel:
    """One kernel of portattn/kernels/ as one op uses it, as the planner sees it.

    name         kernel name in quirks, tuning and records
    function     the function in its source; ops that share one differ by its optional arguments
    op           the op that it serves
    choices      the Lowering fields that it reads
    takes        what it can do beyond plain attention; a problem that asks for anything else is not planned for it
    max_head_dim, max_head_dim_v   widest Q and K, and V, that its tiles take
    splits_keys  whether it spreads one row's keys over programs (Launch.splits)
    of_rows      the second function of gradients, whose tiles may be others (Launch.of_rows); empty for other kernels
    """

    name: str
    function: str
    op: str
    choices: tuple[str, ...]
    takes: frozenset[str] = frozenset()
    max_head_dim = 576
    max_head_dim_v = 512
    splits_keys = False
    of_rows = ""

    @property
    def functions(self) -> tuple[str, ...]:
        """Those that compute its products."""
        return (self.function, self.of_rows) if self.of_rows else (self.function,)

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        """(reason, hint) why the kernel cannot serve the problem on any chip; None when it can."""
        for field, widest in (("head_dim", self.max_head_dim), ("head_dim_v", self.max_head_dim_v)):
            width = getattr(problem, field)
            if width > widest:
                return (
                    f"{field} is {width}, and the kernel's tiles take up to {widest}",
                    "backend='reference' takes 576",
                )
        if problem.needs_grad and problem.op not in BACKWARD:
            return "gradients are asked for, and there is no backward kernel", "call it under torch.no_grad()"
        return None

    def tiles(self, problem: Problem, launch: Launch) -> int:
        """Pieces of work, splits included: the number of programs unless the grid is persistent."""
        raise NotImplementedError

    def rows(self, problem: Problem) -> int:
        """Query rows that one tile could hold at most."""
        return problem.seq_q if problem.total_q is None else _average(problem)

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        """Choices that the problem leaves no freedom in, which no quirk overrules: (choice, value, why)."""
        found = []
        if lowering.load == "descriptor" and not problem.aligned:
            # CUDA driver API, cuTensorMapEncodeTiled: bases and strides are multiples of 16 bytes.
            found.append(("load", "pointer", "descriptors need contiguous rows and 16-byte aligned bases and strides"))
        if lowering.pipeline == "single" and not self.in_one_tile(problem, launch):
            found.append(("pipeline", "plain", f"keys are not known to fit one tile of {launch.block_n}"))
        return tuple(found)

    def in_one_tile(self, problem: Problem, launch: Launch) -> bool:
        """Whether a program's keys fit one tile, whatever lengths there are."""
        return False

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
        """The launch with what follows from the problem's sizes filled in (splits, smaller tiles).

        Values whose names are pinned are kept as they are.
        """
        # Short queries leave most rows of a large tile empty: no wider than the next power of two, 16 at least.
        # Where the caller asks for results that do not depend on the batch, packed lengths must not choose the tile.
        if "block_m" not in pinned and not (problem.num_splits and problem.packed):
            rows = max(next_power_of_two(self.rows(problem)), MIN_DOT)
            launch = msgspec.structs.replace(launch, block_m=min(launch.block_m, rows))
            if launch.rows_m:
                launch = msgspec.structs.replace(launch, rows_m=min(launch.rows_m, rows))
        return launch if self.splits_keys and "splits" in pinned else msgspec.structs.replace(launch, splits=1)

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        """The kernel's tl.constexpr arguments."""
        choices = {name.upper(): getattr(lowering, name) for name in self.choices}
        main, tail = head_columns(problem)
        exact = "reads" in self.choices and lowering.reads == "inside"
        return choices | {
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "MAIN": main,
            "BLOCK_D": tile_width(main, exact),
            "BLOCK_TAIL": tile_width(tail, exact) if tail else 0,
            "BLOCK_DV": tile_width(problem.head_dim_v, exact),
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.block_n,
            "CAUSAL": "bottom_right" if problem.window_right != UNLIMITED else problem.causal,
            "WINDOW": problem.window_left != UNLIMITED,
            "SOFTCAP": problem.softcap,
            "BIAS_BY_KEY": problem.bias_by_key,
            "MASK_BY_KEY": problem.mask_by_key,
            "NEGATED": problem.negative_scale,
            "SEARCH": SEARCH,
        }


def no_words(problem: Problem) -> str:
    """Why a cache's rows cannot be read as 16-bit words (kernels/words.py); empty where they can."""
    if problem.kv_format == "as_q":
        return "the cache is not quantised"
    if not problem.words:
        return f"rows are no whole words of {problem.numbers_of_word} numbers at multiples of {WORD_ALIGNMENT} bytes"
    if head_columns(problem)[1]:
        return f"the loop over words has rows of at most {WIDEST_TILE} columns"
    return ""


def tile_width(columns: int, exact: bool) -> int:
    """Columns of the tile that holds so many columns of a product's operand."""
    return columns if exact else max(next_power_of_two(columns), MIN_DOT)


def head_columns(problem: Problem) -> tuple[int, int]:
    """(columns of the first product of Q·Kᵀ, columns of the second): a wide head is read in two parts.

    The second is 0 for heads up to 512. A latent row is cut where V ends.
    """
    main = min(problem.head_dim, WIDEST_TILE) if problem.op != "mla_attention" else problem.head_dim_v
    return main, problem.head_dim - main


def _average(problem: Problem) -> int:
    """Rows of a packed sequence on average: their lengths are on the device, their number is not."""
    return ceil_div(problem.total_q or 0, max(problem.batch, 1))


class DenseForward(CoreKernel):
    name = "dense_forward"
    function = "dense_forward"
    op = "attention"
    takes = _TAKES | _SCORED | _MASKED | {
        "seqlens_q", "leftpad_q", "leftpad_k", "needs_grad", "dropout", "kv_format", "block_mask",
    }  # fmt: skip
    choices: tuple[str, ...] = (
        "load", "k_tile", "block_order", "exp", "mask_value", "dot_precision", "grid", "pipeline", "select",
        "q_operand", "mulhi", "operands",
    )  # fmt: skip

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        found = super().limits(problem, lowering, launch)
        if lowering.operands == "stored" and problem.q_format == "as_q":
            return (*found, ("operands", "widened", "queries and keys are not quantised"))
        main, tail = head_columns(problem)
        if lowering.operands == "stored" and (tail or tile_width(main, False) < MIN_NARROW_DEPTH):
            why = f"8-bit operands are {MIN_NARROW_DEPTH} to {WIDEST_TILE} columns wide"
            return (*found, ("operands", "widened", why))
        return found

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        return super().constexprs(problem, lowering, launch) | {
            "KV_FORMAT": problem.kv_format,
            "KV_SCALES": problem.kv_scales,
            "Q_FORMAT": problem.q_format,
            "V_FORMAT": problem.v_format,
            # One float16 probability loses as much as a float16 result does, and nothing beside a bfloat16 one.
            "P_TERMS": 2 if problem.v_format != "as_q" and problem.dtype == "fp16" else 1,
            "LISTED_Q": problem.block_q if problem.block_mask else 0,
            "LISTED_K": problem.block_k if problem.block_mask else 0,
        }

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        if problem.block_mask and problem.q_format != "as_q":
            return "block_mask is given beside quantised tensors", "backend='reference'"
        for side in ("block_q", "block_k"):
            size = getattr(problem, side)
            if problem.block_mask and size % MIN_DOT:
                return f"block_mask has {side} {size}, no multiple of {MIN_DOT}", "backend='reference'"
        return super().cannot(problem)

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
        if not problem.block_mask:
            return launch
        # A tile lies in one block: the largest power of two that divides a block's side, or less.
        rows, keys = (size & -size for size in (problem.block_q, problem.block_k))
        return msgspec.structs.replace(launch, block_m=min(launch.block_m, rows), block_n=min(launch.block_n, keys))

    def tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.batch * problem.heads_q * ceil_div(problem.seq_q, launch.block_m)

    def in_one_tile(self, problem: Problem, launch: Launch) -> bool:
        return not problem.packed and problem.seq_k <= launch.block_n


class VarlenForward(DenseForward):
    """Packed sequences, by dense_forward: a program finds its sequence by its number."""

    name = "varlen_forward"
    op = "varlen_attention"
    takes = _TAKES | _SCORED | {"needs_grad", "dropout", "kv_format"}

    def tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.heads_q * packed_tiles(problem, launch, 1)


class DenseBackward(CoreKernel):
    """Gradients, by three kernels: backward_keys and backward_rows hold block_m keys or rows, and go through block_n of
    the others at a time. The rows' values may be others than the keys' (Launch.of_rows)."""

    name = "dense_backward"
    function = "backward_keys"
    of_rows = "backward_rows"
    op = "attention_backward"
    takes = _TAKES | _SCORED | _MASKED | {
        "seqlens_q", "leftpad_q", "leftpad_k", "dropout", "grad_lse", "grad_bias", "grad_slopes", "deterministic",
    }  # fmt: skip
    choices: tuple[str, ...] = ("load", "exp", "dot_precision", "grid", "q_operand", "mulhi")
    max_head_dim = 256  # both accumulators of a tile of keys stay in registers
    max_head_dim_v = 256

    def tiles(self, problem: Problem, launch: Launch) -> int:
        """Of the launch that has the most."""
        return most(self.key_tiles(problem, launch), self.row_tiles(problem, launch))

    def key_tiles(self, problem: Problem, launch: Launch) -> int:
        """Tiles of keys of all sequences and key/value heads."""
        return problem.batch * problem.heads_k * ceil_div(problem.seq_k, launch.block_m)

    def row_tiles(self, problem: Problem, launch: Launch) -> int:
        """Tiles of query rows of all sequences and query heads."""
        return problem.batch * problem.heads_q * ceil_div(problem.seq_q, launch.of_rows().block_m)

    def rows(self, problem: Problem) -> int:
        return most(super().rows(problem), problem.seq_k)

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        common = super().constexprs(problem, lowering, launch)
        return {name: common[name] for name in common if name not in _FORWARD_ONLY}


# What the gradients' kernels have no place for: a head's second part, a sign, scores that all rows share.
_FORWARD_ONLY = frozenset({"MAIN", "BLOCK_TAIL", "BIAS_BY_KEY", "MASK_BY_KEY", "NEGATED"})


class VarlenBackward(DenseBackward):
    """Gradients of packed sequences, by the same kernels: a program finds its sequence by its number."""

    name = "varlen_backward"
    op = "varlen_attention_backward"
    takes = _TAKES | _SCORED | {"dropout", "grad_lse", "grad_slopes", "deterministic"}

    def key_tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.heads_k * packed_keys(problem, launch)

    def row_tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.heads_q * packed_tiles(problem, launch.of_rows(), 1)


def packed_keys(problem: Problem, launch: Launch) -> int:
    """As packed_tiles, of packed keys."""
    return (problem.total_k or 0) // launch.block_m + problem.batch + 1


def heads_together(problem: Problem, arch: Arch) -> int:
    """Heads whose row tiles are worked on side by side where tiles differ in length (Arch.cache_share): 1 to 64."""
    if not arch.cache_share:
        return 1
    keys = problem.seq_k if problem.total_k is None else ceil_div(problem.total_k, max(problem.batch, 1))
    size = 4 if problem.dtype == "fp32" else 2
    head_bytes = size * keys * (problem.head_dim + problem.head_dim_v)
    fit = most(arch.cache_share // most(head_bytes, 1), 1) * problem.group
    heads = problem.heads_q * (1 if problem.packed else problem.batch)
    return most(least(fit, MOST_TOGETHER, heads), 1)


def packed_tiles(problem: Problem, launch: Launch, per_row: int) -> int:
    """Tiles that hold all packed rows whatever the sequences' lengths (kernels/tiles.py, packed_tile)."""
    return (problem.total_q or 0) * per_row // launch.block_m + problem.batch + 1


class DecodeSplit(CoreKernel):
    """Decode: the rows of one key/value head's group are packed into a tile, and keys are split over programs."""

    name = "decode_split"
    function = "decode_split"
    op = "decode_attention"
    takes = _TAKES | _SCORED | _MASKED | {"tree_mask", "leftpad_k", "num_splits", "kv_format"}
    splits_keys = True
    choices: tuple[str, ...] = (
        "load", "k_tile", "block_order", "exp", "mask_value", "dot_precision", "grid", "q_operand", "pipeline",
        "reads", "unpack",
    )  # fmt: skip

    # A split is worth its second pass only over this many key tiles. Source: measured on an H200.
    FEW_KEY_TILES = 4

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        found = super().constexprs(problem, lowering, launch)
        unpack = lowering.unpack if "unpack" in self.choices else "bytes"
        narrowest = 0
        if unpack != "bytes":  # each number of a word has a tile of its own
            narrowest = MIN_DOT * problem.numbers_of_word
        elif problem.kv_format == "int4" and lowering.reads != "inside":
            narrowest = MIN_DOT_INT4
        found |= {name: max(found[name], narrowest) for name in ("BLOCK_D", "BLOCK_DV")}
        if found["BLOCK_TAIL"]:
            found["BLOCK_TAIL"] = max(found["BLOCK_TAIL"], narrowest)
        return found | {
            "PIPELINE": lowering.pipeline if "pipeline" in self.choices else "plain",
            "GROUP": problem.group,
            "SPLIT": launch.splits > 1,
            "LATENT": problem.op == "mla_attention",
            "PAGE_SIZE": problem.page_size,
            "PAGE_LOOP": lowering.page_loop,
            "KV_FORMAT": problem.kv_format,
            "KV_SCALES": problem.kv_scales,
            "UNPACK": unpack,
            "ALIGNED": ALIGNED if problem.aligned else WORD_ALIGNMENT,
        }

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        found = super().limits(problem, lowering, launch)
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

    def natural_scores(self, problem: Problem) -> bool:
        """Whether the kernel holds scores as they are even where its exponentials have base 2 (kernels/tiles.py)."""
        return problem.alibi_slopes or problem.bias

    def tiles(self, problem: Problem, launch: Launch) -> int:
        return self.row_tiles(problem, launch) * self.slots(problem) * problem.heads_k * launch.splits

    def row_tiles(self, problem: Problem, launch: Launch) -> int:
        """Row tiles of one sequence and key/value head; of packed queries, of all sequences."""
        if problem.packed:
            return packed_tiles(problem, launch, problem.group)
        return ceil_div(problem.seq_q * problem.group, launch.block_m)

    def slots(self, problem: Problem) -> int:
        return problem.query_rows[0]

    def rows(self, problem: Problem) -> int:
        return super().rows(problem) * problem.group

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
        if "splits" in pinned:
            return launch
        if problem.num_splits:
            return msgspec.structs.replace(launch, splits=problem.num_splits)
        programs = self.tiles(problem, launch)
        key_tiles = ceil_div(self.keys(problem), launch.block_n)
        return msgspec.structs.replace(
            launch, splits=self.splits(programs, key_tiles, arch.cores, occupancy, split_threshold)
        )

    def keys(self, problem: Problem) -> int:
        """Most keys that one row can attend."""
        if problem.window_left == UNLIMITED:
            return problem.seq_k
        right = 0 if problem.causal != "none" else problem.window_right
        seen = problem.window_left + problem.seq_q + right if right != UNLIMITED else problem.seq_k
        return least(problem.seq_k, seen)

    def splits(self, programs: int, key_tiles: int, cores: int, occupancy: int, split_threshold: float) -> int:
        """Over how many programs to split a row's keys.

        split_threshold: programs a core from which on keys are not split, as the cores are full anyway
        """
        if programs >= split_threshold * cores or key_tiles <= self.FEW_KEY_TILES or programs == 0:
            return 1
        return split_evenly(programs, key_tiles, cores * occupancy, MAX_SPLITS)


class PagedSplit(DecodeSplit):
    """Decode and chunked prefill over pages, by decode_split."""

    name = "paged_split"
    op = "paged_attention"
    takes = _TAKES | _SCORED | _MASKED | {"tree_mask", "num_splits", "packed", "kv_format"}
    # The rotated loop begins a step ahead: for an empty share of the keys it would look up a page that is not there.
    choices: tuple[str, ...] = (*(name for name in DecodeSplit.choices if name != "pipeline"), "page_loop")

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        found = super().limits(problem, lowering, launch)
        page_loop = lowering.page_loop
        if page_loop == "by_page":
            bytes_read = "unpack" not in self.choices or any(limit[:2] == ("unpack", "bytes") for limit in found)
            words = lowering.unpack != "bytes" and not bytes_read and lowering.reads == "masked"
            if not words or launch.block_n % problem.page_size or launch.block_n // problem.page_size not in (2, 4):
                page_loop = "per_page" if problem.page_size % launch.block_n == 0 else "flat_masked"
                found = (*found, ("page_loop", page_loop, "by_page is for words, in tiles of two or four pages"))
        if page_loop == "per_page" and problem.page_size % launch.block_n:
            page_loop = "flat_masked"
            why = f"a tile of {launch.block_n} keys does not lie in one page of {problem.page_size}"
            found = (*found, ("page_loop", page_loop, why))
        if lowering.load == "descriptor" and not (page_loop == "per_page" and problem.pages_in_line):
            found = (
                *found,
                ("load", "pointer", "a descriptor reads tiles of one matrix: whole pages that lie in line"),
            )
        return found


class MlaSplit(PagedSplit):
    """Decode and short prefill over a latent cache, by decode_split: each row is read once, as key and as value."""

    name = "mla_split"
    op = "mla_attention"
    takes = _TAKES | _SCORED | _MASKED | {"num_splits", "packed", "kv_format"}
    choices: tuple[str, ...] = tuple(name for name in PagedSplit.choices if name != "unpack")

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        found = super().limits(problem, lowering, launch)
        if problem.kv_format == "fp8_ds_mla" and lowering.load != "pointer":
            why = "rows of fp8_ds_mla hold numbers of three types"
            found = (*(limit for limit in found if limit[0] != "load"), ("load", "pointer", why))
        return found


class SparseSplit(DecodeSplit):
    """Token-sparse decode: chosen rows are gathered, and each head has its own."""

    name = "sparse_split"
    function = "sparse_split"
    op = "sparse_attention"
    takes = _TAKES | {"num_splits", "paged", "log_weights", "magicpig", "kv_format"}
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
        }


class CacheWrite(CoreKernel):
    """New keys and values into a cache, by write_cache: a tile is block_m rows of one head's key, and of its value."""

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
        if lowering.unpack == "bytes" or (lowering.unpack == "ptx" and problem.kv_format != "as_q"):
            return ()
        return (("unpack", "bytes", "a cache is written as numbers, and ptx narrows those of a quantised one alone"),)

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
        """Tiles that fit in registers, and for few rows small ones, so that every core has some."""
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
            "LARGEST": LARGEST.get(problem.kv_format, 0.0),
            "GRID": lowering.grid,
            "UNPACK": lowering.unpack,
        }


class PagedWrite(CacheWrite):
    """The same into pages, by write_cache: slots say where each token goes."""

    name = "paged_write"
    op = "write_pages"
    takes = frozenset({"kv_format", "rotary", "head_dim_v"})


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
        MlaSplit(),
        CacheWrite(),
        PagedWrite(),
    )
}
KERNEL_NAMES = tuple(k.name for k in CORES.values())


def of_gradients(pattern: str) -> bool:
    """Whether a glob matches kernels of gradients, and no others of the core's."""
    matched = [kernel for kernel in CORES.values() if fnmatch.fnmatchcase(kernel.name, pattern)]
    return bool(matched) and all(kernel.of_rows for kernel in matched)
