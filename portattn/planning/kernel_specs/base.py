"""Part of every core kernel's data: CoreKernel, tiles, numbers of splits, and problems that warps_apart takes."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from portattn.schema.lowering import Launch, Lowering
from portattn.schema.ops import BACKWARD, COMMON, ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import UNLIMITED
from portattn.schema.symbolic_int import least, most, next_power_of_two, traceable
from portattn.schema.target import Arch
from portattn.schema.tuning import SPLIT_THRESHOLD

WIDEST_TILE = 512  # columns of one tile of Q, K or V
SEARCH = 256  # beginnings of packed sequences that are compared at a time
MOST_TOGETHER = 64  # heads; more even out the end of a launch no further
MIN_NARROW_DEPTH = 32  # columns of 8-bit operands: the depth of one product
MIN_DOT = 16  # rows, columns and depth of the smallest product that every backend's `tl.dot` takes


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# What every core kernel can do beyond plain attention: names of Problem.demands.
TAKES = frozenset({"seqlens_k", "softcap", "return_lse", "negative_scale", "gqa", "head_dim_v", "invariant"})
SCORED = {"causal", "causal_top_left", "window", "chunk"}  # of kernels that know where a key is beside its query


def score_tensors(op: str) -> frozenset[str]:
    """Return the op's features whose tensors its kernel takes."""
    return frozenset(name for name in COMMON if name in ROWS[op].tensors)


class CoreKernel:
    """One kernel of portattn/kernels/ as one op uses it."""

    name: str  # in quirks, tuning and records
    function: str  # ops that share it differ by its optional arguments
    op: str
    choices: tuple[str, ...]  # Lowering fields that it reads
    takes: frozenset[str] = frozenset()  # features beyond plain attention
    max_head_dim = 576
    max_head_dim_v = 512
    splits_keys = False  # whether it spreads one row's keys over programs (Launch.splits)
    of_rows = ""  # second gradient function, with its own tiles (Launch.of_rows)
    forms: tuple[str, ...] = ()  # functions that may replace `function` if warps are apart

    @property
    def functions(self) -> tuple[str, ...]:
        return (self.function, *((self.of_rows,) if self.of_rows else ()), *self.forms)

    def form(self, lowering: Lowering) -> str:
        return self.forms[0] if self.forms and lowering.warps == "apart" else ""

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        """Return (reason, hint) why the kernel cannot serve the problem on any chip; None if it can."""
        for field, widest in (("head_dim", self.max_head_dim), ("head_dim_v", self.max_head_dim_v)):
            width = getattr(problem, field)
            if width > widest:
                return (
                    f"{field} is {width}, and the kernel's tiles take up to {widest}",
                    "backend='reference' takes 576",
                )
        if problem.invariant and (why := varies(problem)):
            return why
        if problem.needs_grad and problem.op not in BACKWARD:
            return "gradients are asked for, and there is no backward kernel", "call it under torch.no_grad()"
        return None

    def read(self, problem: Problem, lowering: Lowering) -> tuple[str, ...]:
        """Return the `choices` that this problem's code depends on, or that `limits` had to decide."""
        unread = {"drops": not problem.dropout, "parts": lowering.dot_precision != "bf16x6"}
        return tuple(name for name in self.choices if not unread.get(name, False))

    def tiles(self, problem: Problem, launch: Launch) -> int:
        """Return the pieces of work, splits included: the number of programs unless the grid is persistent."""
        raise NotImplementedError

    def rows(self, problem: Problem) -> int:
        """Return the most query rows that one tile could hold."""
        return problem.seq_q if problem.total_q is None else average_rows(problem)

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        """Return the choices that the problem forces and no quirk overrules: (choice, value, why)."""
        found = []
        if lowering.load == "descriptor" and not problem.aligned:
            # CUDA driver API, cuTensorMapEncodeTiled: bases and strides are multiples of 16 bytes.
            found.append(("load", "pointer", "descriptors need contiguous rows and 16-byte aligned bases and strides"))
        if problem.invariant and "pipeline" in self.choices and lowering.pipeline != "masked":
            return (*found, ("pipeline", "masked", ONE_ORDER))
        if lowering.pipeline == "single" and not self.in_one_tile(problem, launch):
            found.append(("pipeline", "plain", f"keys are not known to fit one tile of {launch.block_n}"))
        return tuple(found)

    def in_one_tile(self, problem: Problem, launch: Launch) -> bool:
        """Return whether a program's keys fit one tile, for any lengths."""
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
        """Return the launch adapted to the problem's sizes (splits, smaller tiles), except values in `pinned`."""
        # Short queries leave most rows of a large tile empty: no wider than the next power of two, 16 at least.
        # Where the caller asks for results that do not depend on the batch, its lengths must not choose the tile.
        fixed = (problem.invariant and not problem.has_blocks) or (
            problem.num_splits and problem.packed and not problem.has_lists
        )
        if "block_m" not in pinned and not fixed:
            rows = max(next_power_of_two(self.rows(problem)), MIN_DOT)
            launch = msgspec.structs.replace(launch, block_m=min(launch.block_m, rows))
            if launch.rows_m:
                launch = msgspec.structs.replace(launch, rows_m=min(launch.rows_m, rows))
        if problem.block_mask:
            launch = self.in_blocks(problem, launch)
        return launch if self.splits_keys and "splits" in pinned else msgspec.structs.replace(launch, splits=1)

    def in_blocks(self, problem: Problem, launch: Launch) -> Launch:
        """Return the launch with tiles that lie in one block of a block mask each."""
        raise NotImplementedError

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
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
            "WINDOW": problem.window_left != UNLIMITED or problem.chunk > 0,
            "SOFTCAP": problem.softcap,
            "BIAS_BY_KEY": problem.bias_by_key,
            "MASK_BY_KEY": problem.mask_by_key,
            "NEGATED": problem.negative_scale,
            "SEARCH": SEARCH,
        }


ONE_ORDER = "a row's keys are summed in one order (invariant=True)"
# Launch values and choices that decide the last bits of a row's sums.
DECIDING = frozenset(
    {"block_m", "block_n", "num_warps", "matrix_instr_nonkdim", "kpack", "exp", "mask_value", "dot_precision"}
)


def varies(problem: Problem) -> tuple[str, str] | None:
    """Return (reason, hint) why a row's bits cannot be kept from depending on the rest of the call, or None."""
    if problem.num_splits > 1:
        return f"num_splits is {problem.num_splits}, and invariant=True leaves a row's keys together", "num_splits=1"
    if problem.dropout:
        reason = "dropout_p > 0, whose draws depend on a sequence's place in the batch (invariant=True)"
        return reason, "dropout_p=0.0"
    if problem.block_mask:
        return "block_mask, whose whole blocks come first (invariant=True)", "mask_mod, without lists of blocks"
    if problem.backward and (problem.leftpad_q or problem.leftpad_k):
        return "left padding moves the tiles of gradients (invariant=True)", "pad on the right, or varlen_attention"
    return None


def invariant_launch(problem: Problem) -> Launch:
    """Return the launch that every kernel with matrix products has under invariant=True: one for all sizes and ops.

    Tiles are small enough for the registers and the memory of every chip, with any feature, not the fastest of one."""
    widest, wide = most(problem.head_dim, problem.head_dim_v), problem.dtype == "fp32"
    if problem.kv_format != "as_q" and widest > 256:
        return Launch(block_m=16, block_n=32, num_warps=4, num_stages=1)
    if widest > 256:
        return Launch(block_m=16, block_n=16 if wide else 32, num_warps=4 if wide else 8, num_stages=1)
    if wide:
        return Launch(block_m=32 if widest <= 128 else 16, block_n=32 if widest <= 128 else 16, num_stages=1)
    if widest > 128 or problem.kv_format != "as_q":
        return Launch(block_m=64, block_n=32, num_warps=8 if widest > 128 else 4, num_stages=1)
    # With 64 rows and 4 warps decode_split gave wrong rows and illegal accesses for heads of 40 and values of 24
    # columns on an H200 (Triton 3.6.0, 2026-11-30), and with 32 rows or 8 warps none: quirks cuda-0003 and cuda-0005.
    return Launch(block_m=64 if problem.head_dim_v > 32 else 32, block_n=64, num_warps=4, num_stages=2)


def function_constants(problem: Problem) -> dict[str, Any]:
    """Return the constants of a kernel that calls score and mask functions, and skips blocks."""
    return {
        "LISTED_Q": problem.block_q if problem.block_mask else 0,
        "LISTED_K": problem.block_k if problem.block_mask else 0,
        "SCORE_MOD": problem.score_mod or None,
        "MASK_MOD": problem.mask_mod or None,
    }


def cannot_list(problem: Problem) -> tuple[str, str] | None:
    """Return (reason, hint) why a kernel cannot skip the blocks of a block mask; None if it can."""
    for side in ("block_q", "block_k"):
        size = getattr(problem, side)
        if problem.block_mask and size % MIN_DOT:
            return f"block_mask has {side} {size}, no multiple of {MIN_DOT}", "backend='reference'"
    return None


def block_sides(problem: Problem) -> tuple[int, int]:
    """Return the most rows and keys of a tile that lies in one block: powers of two that divide the block's sides."""
    return problem.block_q & -problem.block_q, problem.block_k & -problem.block_k


def drops(problem: Problem, lowering: Lowering) -> str:
    """Return how kernels draw dropout: a random number per score ("scores"), or one for four ("tiles").

    Tiles must begin at multiples of 16 positions, which left padding prevents. A kernel without dropout has one form.
    """
    placed = problem.dropout and not problem.leftpad_k
    return lowering.drops if placed or lowering.drops == "halves" else "scores"


def tile_width(columns: int, exact: bool) -> int:
    """Return the columns of the tile that holds `columns` of a product's operand."""
    return columns if exact else max(next_power_of_two(columns), MIN_DOT)


def head_columns(problem: Problem) -> tuple[int, int]:
    """Return the columns of a wide head's two products (0 for the second up to 512); latent rows are cut after V."""
    main = min(problem.head_dim, WIDEST_TILE) if problem.op != "mla_attention" else problem.head_dim_v
    return main, problem.head_dim - main


def average_rows(problem: Problem) -> int:
    """Return the average rows of a packed sequence: the host knows no lengths, only their number."""
    return ceil_div(problem.total_q or 0, max(problem.batch, 1))


def heads_together(problem: Problem, arch: Arch) -> int:
    """Return how many heads' row tiles run side by side if tiles differ in length (Arch.cache_share): 1 to 64."""
    if not arch.cache_share:
        return 1
    keys = problem.seq_k if problem.total_k is None else ceil_div(problem.total_k, max(problem.batch, 1))
    size = 4 if problem.dtype == "fp32" else 2
    head_bytes = size * keys * (problem.head_dim + problem.head_dim_v)
    fit = most(arch.cache_share // most(head_bytes, 1), 1) * problem.group
    heads = problem.heads_q * (1 if problem.packed else problem.batch)
    return most(least(fit, MOST_TOGETHER, heads), 1)


def packed_tiles(problem: Problem, launch: Launch, per_row: int) -> int:
    """Return the tiles that hold all packed rows for any sequence lengths (kernels/tiles.py, packed_tile)."""
    return (problem.total_q or 0) * per_row // launch.block_m + problem.batch + 1


def occupied_tiles(problem: Problem, rows: int, per_row: int) -> int:
    """Return about the most of a head's packed tiles, of `rows` rows, that hold any; packed_tiles has room for more.

    Either every sequence has a row and some have all further ones, or all are as long as the longest."""
    batch, further = problem.batch, most((problem.total_q or 0) - problem.batch, 0)
    one_long = batch * ceil_div(per_row, rows) + ceil_div(further * per_row, rows)
    return least(one_long, batch * ceil_div(problem.seq_q * per_row, rows))


NEARLY = 85  # per cent of the best: fewer splits than the best are taken where they are nearly as good


@traceable("split_evenly")
def split_evenly(programs: int, key_tiles: int, slots: int, limit: int) -> int:
    """Return the fewest splits that cost nearly as little as the best, in waves · key tiles of the longest share.

    `programs` is their number without splits, `slots` as many as the chip runs at a time. A split reads whole key
    tiles, so uneven shares leave some programs idle in the last step."""
    count = range(1, min(limit, key_tiles, max(slots // programs, 1) * 2) + 1)
    costs = [ceil_div(programs * splits, slots) * ceil_div(key_tiles, splits) for splits in count]
    best = min(costs)
    return next(splits for splits, cost in zip(count, costs, strict=True) if 100 * best >= NEARLY * cost)


@traceable("split_cheapest")
def split_cheapest(
    programs: int, key_tiles: int, cores: int, limit: int, ends: int, merge_once: int, merge_each: int
) -> int:
    """Return the fewest splits of least time, one program a core at a time, counted in key tiles.

    `ends` is a program's start and end, `merge_once` the merge of partial results, `merge_each` its part for each wave.
    """

    def cost(splits: int) -> int:
        once, each = (merge_once, merge_each) if splits > 1 else (0, 0)
        return ceil_div(programs * splits, cores) * (ceil_div(key_tiles, splits) + ends + each) + once

    return min(range(1, limit + 1), key=cost)


WARPS_APART = "warps_apart"  # of the kernels that have the choice
# What its loop can do.
WARP_SPLIT_FEATURES = frozenset(
    {"seqlens_k", "leftpad_k", "causal", "causal_top_left", "sinks", "return_lse", "negative_scale", "gqa",
     "head_dim_v", "num_splits", "packed"}
)  # fmt: skip
MAX_WARP_SPLIT = 8
WARP_SPLIT_PRECISIONS = ("bf16x6", "tf32x3")  # of float32; products as they are have no matrix instructions
# Its constants that decode_split has too.
WARP_SPLIT_CONSTANTS = (
    "GROUP", "SPLIT", "PAGE_SIZE", "HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "BLOCK_M", "BLOCK_N", "CAUSAL",
    "NEGATED", "SEARCH", "EXP", "MASK_VALUE", "PAGE_LOOP", "FOLLOWED", "PIPELINE",
)  # fmt: skip
Limits = tuple[tuple[str, str, str], ...]


def no_warp_split(problem: Problem, lowering: Lowering, launch: Launch) -> str:
    """Return why warps cannot attend keys of their own; empty if they can."""
    asked = sorted(set(problem.demands()) - WARP_SPLIT_FEATURES - {"needs_grad"})
    dense, warps = problem.op == "attention", launch.num_warps
    reasons = {
        f"their loop takes no {', '.join(asked)}": bool(asked),
        "decodes have 16-bit numbers": not dense and (problem.dtype == "fp32" or problem.kv_format != "as_q"),
        "tensors have float32 numbers": dense and (problem.dtype != "fp32" or problem.kv_format != "as_q"),
        f"dot_precision is one of {', '.join(WARP_SPLIT_PRECISIONS)}": dense
        and lowering.dot_precision not in WARP_SPLIT_PRECISIONS,
        "tensors have as many key heads as query heads": dense and problem.group > 1,
        f"their loop has rows of at most {WIDEST_TILE} columns": head_columns(problem)[1] != 0,
        "their tiles are powers of two": lowering.reads == "inside",
        f"a warp has at least {MIN_DOT} keys of a tile": launch.block_n < MIN_DOT * warps,
        f"1, 2, 4 or {MAX_WARP_SPLIT} warps' results are merged": warps > MAX_WARP_SPLIT or warps & (warps - 1) != 0,
    }
    return next((text for text, holds in reasons.items() if holds), "")


def warp_split_limits(
    found: Limits, problem: Problem, lowering: Lowering, launch: Launch, pipelines: tuple[str, ...]
) -> Limits:
    """Add the limits of a lowering with warps apart, or "joint" if the problem cannot have it."""
    why = no_warp_split(problem, lowering, launch)
    if why:
        return (*found, ("warps", "joint", why))
    single = [limit for limit in found if limit[0] == "pipeline" and lowering.pipeline == "single"]
    found = tuple(limit for limit in found if limit[0] not in ("load", "pipeline"))
    if lowering.grid != "tiles":
        found = (*found, ("grid", "tiles", "warps apart have a program for each tile"))
    if lowering.load != "pointer":
        found = (*found, ("load", "pointer", "warps apart read by pointers"))
    if lowering.pipeline not in pipelines:
        return (*found, ("pipeline", "plain", "the loop of warps apart has no other"))
    return (*found, *single)


def warp_split_constants(found: dict[str, Any], problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
    precision = lowering.dot_precision if problem.dtype == "fp32" else "ieee"  # products of 16-bit numbers have one
    return {name: found[name] for name in WARP_SPLIT_CONSTANTS} | {
        "PARTS": launch.num_warps,
        "DOT_PRECISION": precision,
    }


def warp_split_unread(problem: Problem) -> tuple[str, ...]:
    return ("k_tile", "block_order", "q_operand", *(() if problem.dtype == "fp32" else ("dot_precision",)))
