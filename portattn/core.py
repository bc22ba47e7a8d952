"""What the planner knows of each core kernel: which op it serves, what it reads, what it cannot do. No torch here."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from portattn.lowering import Launch, Lowering
from portattn.problem import Problem
from portattn.target import Arch

MIN_DOT = 16  # rows, columns and depth of the smallest product that every backend's `tl.dot` takes


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class CoreKernel:
    """One kernel of portattn/kernels/, as the planner sees it.

    name         kernel name in quirks, tuning and verdicts
    op           the op that it serves
    choices      the Lowering fields that it reads
    max_head_dim widest head that its tiles take
    splits_keys  whether it spreads one row's keys over programs (Launch.splits)
    """

    name: str
    op: str
    choices: tuple[str, ...]
    max_head_dim = 256
    splits_keys = False

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        """(reason, hint) why the kernel cannot serve the problem on any chip; None when it can."""
        widest = max(problem.head_dim, problem.head_dim_v)
        if widest > self.max_head_dim:
            return (
                f"head_dim is {widest}, and the kernel's tiles take up to {self.max_head_dim}",
                "backend='reference' takes up to 576",
            )
        if problem.needs_grad:
            return "gradients are asked for, and there is no backward kernel", "call it under torch.no_grad()"
        if problem.dropout:
            return "dropout_p > 0, and the kernel has no dropout", "pass dropout_p=0.0 outside training"
        return None

    def tiles(self, problem: Problem, launch: Launch) -> int:
        """Pieces of work, splits included: the number of programs unless the grid is persistent."""
        raise NotImplementedError

    def rows(self, problem: Problem) -> int:
        """Query rows that one tile could hold at most."""
        return problem.seq_q

    def fit(
        self, problem: Problem, launch: Launch, arch: Arch, resident: int, pinned: Container[str] = frozenset()
    ) -> Launch:
        """The launch with what follows from the problem's sizes filled in (splits, smaller tiles).

        Values whose names are pinned are kept as they are.
        """
        # Short queries leave most rows of a large tile empty: no wider than the next power of two, 16 at least.
        if "block_m" not in pinned:
            rows = max(next_power_of_two(self.rows(problem)), MIN_DOT)
            launch = msgspec.structs.replace(launch, block_m=min(launch.block_m, rows))
        return launch if self.splits_keys and "splits" in pinned else msgspec.structs.replace(launch, splits=1)

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        """The kernel's tl.constexpr arguments."""
        choices = {name.upper(): getattr(lowering, name) for name in self.choices}
        return choices | {
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_D": max(next_power_of_two(problem.head_dim), MIN_DOT),
            "BLOCK_DV": max(next_power_of_two(problem.head_dim_v), MIN_DOT),
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.block_n,
            "CAUSAL": problem.causal,
            "NEGATED": problem.negative_scale,
        }


class DenseForward(CoreKernel):
    name = "dense_forward"
    op = "attention"
    choices = (
        "load", "k_tile", "block_order", "exp", "mask_value", "dot_precision", "grid", "pipeline", "select",
        "q_operand",
    )  # fmt: skip

    def tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.batch * problem.heads_q * ceil_div(problem.seq_q, launch.block_m)


class DecodeSplit(CoreKernel):
    """Decode: the rows of one key/value head's group are packed into a tile, and keys are split over programs."""

    name = "decode_split"
    op = "decode_attention"
    splits_keys = True
    choices = ("load", "k_tile", "block_order", "exp", "mask_value", "dot_precision", "grid", "q_operand")

    # A split is worth its second pass only over this many key tiles, and while the cores are not full anyway.
    # Source: measured on an H200, docs/performance.md.
    FULL_CORES = 0.8
    FEW_KEY_TILES = 4
    WAVE_EFFICIENCY = 0.85
    MAX_SPLITS = 128
    # The number of queries is part of the specialisation: a prefill sent here would compile once for each length.
    MAX_QUERIES = 64

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        if problem.seq_q > self.MAX_QUERIES:
            return (
                f"seq_q is {problem.seq_q}, and decode takes up to {self.MAX_QUERIES}",
                "call attention for a prefill",
            )
        return super().cannot(problem)

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        return super().constexprs(problem, lowering, launch) | {"SEQ_Q": problem.seq_q, "SPLIT": launch.splits > 1}

    def tiles(self, problem: Problem, launch: Launch) -> int:
        row_tiles = ceil_div(self.rows(problem), launch.block_m)
        return problem.batch * problem.heads_k * row_tiles * launch.splits

    def rows(self, problem: Problem) -> int:
        return problem.seq_q * problem.group

    def fit(
        self, problem: Problem, launch: Launch, arch: Arch, resident: int, pinned: Container[str] = frozenset()
    ) -> Launch:
        launch = super().fit(problem, launch, arch, resident, pinned)
        if "splits" in pinned:
            return launch
        programs = self.tiles(problem, launch)
        key_tiles = ceil_div(problem.seq_k, launch.block_n)
        return msgspec.structs.replace(launch, splits=self.splits(programs, key_tiles, arch.cores, resident))

    def splits(self, programs: int, key_tiles: int, cores: int, resident: int) -> int:
        """Fewest splits whose last wave of programs is nearly as full as the best number of splits makes it."""
        if programs >= self.FULL_CORES * cores or key_tiles <= self.FEW_KEY_TILES or programs == 0:
            return 1
        slots = cores * resident
        most = min(self.MAX_SPLITS, key_tiles, max(slots // programs, 1) * 2)
        efficiency = {}
        for count in range(1, most + 1):
            waves = programs * count / slots
            # A split reads whole key tiles: uneven shares leave some programs idle in the last step.
            share = ceil_div(key_tiles, count)
            efficiency[count] = waves / ceil_div(programs * count, slots) * key_tiles / (share * count)
        best = max(efficiency.values())
        return min(count for count, value in efficiency.items() if value >= self.WAVE_EFFICIENCY * best)


CORES: dict[str, CoreKernel] = {k.op: k for k in (DenseForward(), DecodeSplit())}
KERNEL_NAMES = tuple(k.name for k in CORES.values())
