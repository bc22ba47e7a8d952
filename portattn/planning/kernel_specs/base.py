"""CoreKernel: what the planner asks of every core kernel, and the arithmetic of tiles. No torch here."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from portattn.schema.lowering import Launch, Lowering
from portattn.schema.ops import BACKWARD
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import UNLIMITED
from portattn.schema.symbolic_int import least, most, next_power_of_two
from portattn.schema.target import Arch
from portattn.schema.tuning import SPLIT_THRESHOLD

WIDEST_TILE = 512  # columns of one tile of Q, K or V
SEARCH = 256  # beginnings of packed sequences that are compared at a time
MOST_TOGETHER = 64  # heads; more even out the end of a launch no further
MIN_DOT = 16  # rows, columns and depth of the smallest product that every backend's `tl.dot` takes


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# What every core kernel can do beyond plain attention: names of Problem.demands.
TAKES = frozenset(
    {"seqlens_k", "softcap", "alibi_slopes", "sinks", "return_lse", "negative_scale", "gqa", "head_dim_v"}
)
SCORED = {"causal", "causal_top_left", "window", "chunk"}  # of kernels that know where a key is beside its query
MASKED = {"bias", "mask"}


class CoreKernel:
    """One kernel of portattn/kernels/ as one op uses it, as the planner sees it.

    name         kernel name in quirks, tuning and records
    function     the function in its source; ops that share one differ by its optional arguments
    op           the op that it serves
    choices      the Lowering fields that it reads; of a problem's plan some of them may say nothing (`read`)
    takes        what it can do beyond plain attention; a problem that asks for anything else is not planned for it
    max_head_dim, max_head_dim_v   widest Q and K, and V, that its tiles take
    splits_keys  whether it spreads one row's keys over programs (Launch.splits)
    of_rows      the second function of gradients, whose tiles may be others (Launch.of_rows); empty for other kernels
    forms        the function that runs in place of `function` where warps are apart (`form`), if there is one
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
    forms: tuple[str, ...] = ()

    @property
    def functions(self) -> tuple[str, ...]:
        """Those that compute its products."""
        return (self.function, *((self.of_rows,) if self.of_rows else ()), *self.forms)

    def form(self, lowering: Lowering) -> str:
        """The one of `forms` that runs with a lowering; empty where `function` does."""
        return self.forms[0] if self.forms and lowering.warps == "apart" else ""

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

    def read(self, problem: Problem, lowering: Lowering) -> tuple[str, ...]:
        """Return the `choices` that this problem's code depends on, or that `limits` had to decide."""
        unread = {"drops": not problem.dropout, "parts": lowering.dot_precision != "bf16x6"}
        return tuple(name for name in self.choices if not unread.get(name, False))

    def tiles(self, problem: Problem, launch: Launch) -> int:
        """Pieces of work, splits included: the number of programs unless the grid is persistent."""
        raise NotImplementedError

    def rows(self, problem: Problem) -> int:
        """Query rows that one tile could hold at most."""
        return problem.seq_q if problem.total_q is None else average_rows(problem)

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
            "WINDOW": problem.window_left != UNLIMITED or problem.chunk > 0,
            "SOFTCAP": problem.softcap,
            "BIAS_BY_KEY": problem.bias_by_key,
            "MASK_BY_KEY": problem.mask_by_key,
            "NEGATED": problem.negative_scale,
            "SEARCH": SEARCH,
        }


def drops(problem: Problem, lowering: Lowering) -> str:
    """How kernels tell which scores are dropped (kernels/dropout.py): by random numbers made for each of the `scores`,
    or once for four of them, where `tiles` begin at positions that are multiples of 16: not behind padding on the left.

    A kernel without dropout has one form.
    """
    placed = problem.dropout and not problem.leftpad_k
    return lowering.drops if placed or lowering.drops == "halves" else "scores"


def tile_width(columns: int, exact: bool) -> int:
    """Columns of the tile that holds so many columns of a product's operand."""
    return columns if exact else max(next_power_of_two(columns), MIN_DOT)


def head_columns(problem: Problem) -> tuple[int, int]:
    """(columns of the first product of Q·Kᵀ, columns of the second): a wide head is read in two parts.

    The second is 0 for heads up to 512. A latent row is cut where V ends.
    """
    main = min(problem.head_dim, WIDEST_TILE) if problem.op != "mla_attention" else problem.head_dim_v
    return main, problem.head_dim - main


def average_rows(problem: Problem) -> int:
    """Rows of a packed sequence on average: their lengths are on the device, their number is not."""
    return ceil_div(problem.total_q or 0, max(problem.batch, 1))


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
