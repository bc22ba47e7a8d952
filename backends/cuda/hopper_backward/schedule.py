"""How the Hopper backward is scheduled, by the width of a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from portattn.schema.problem import Problem

WIDTHS = (64, 128, 256)  # head dimensions that the kernels have; others are padded by what TMA reads as zeros


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """form.Form says what the fields mean. `keys` are those of a block, `messages` = 0 a kernel of its own for dQ.

    Raises ValueError for what does not go together.
    """

    keys: int
    stages: int
    messages: int
    late: bool = False
    stagger: int = 0

    def __post_init__(self) -> None:
        if self.late and not self.messages:
            raise ValueError("late is about dQ that is added: messages must not be 0")
        if self.messages and self.keys != 128:
            raise ValueError("dQ is added by blocks of 128 keys")


# Of the sweeps of one H200 (Triton 3.6.0, bf16, B·S = 16k, H·D = 2048): late dQ gains 7 % with 64 columns, and with 128
# it leaves ptxas too few registers (C7512); starting blocks apart gained 20 % where additions meet.
SUMMED = {
    64: Schedule(keys=128, stages=2, messages=2, late=True, stagger=8),
    128: Schedule(keys=128, stages=2, messages=4, stagger=8),
    256: Schedule(keys=64, stages=2, messages=0),
}
# Repeatable bit by bit: dK and dV as above, dQ by its own kernel.
REPEATABLE = {dim: msgspec.structs.replace(s, messages=0, late=False, stagger=0) for dim, s in SUMMED.items()}
# Of the kernel of dQ: keys of a tile, buffers of K, buffers of V.
QUERIES = {64: (128, 2, 2), 128: (128, 2, 2), 256: (64, 2, 1)}


def width(head_dim: int) -> int:
    """The kernels' width for a head."""
    return next((w for w in WIDTHS if w >= head_dim), head_dim)


def schedule_of(problem: Problem) -> Schedule:
    """The schedule of a problem whose heads are at most as wide as the widest of WIDTHS."""
    dim = width(problem.head_dim)
    if problem.deterministic:
        return REPEATABLE[dim]
    schedule = SUMMED[dim]
    if dim == 64 and (
        problem.causal != "none" or problem.window
    ):  # columns are short: a third buffer fills them sooner
        schedule = msgspec.structs.replace(schedule, stages=3)
    return schedule
