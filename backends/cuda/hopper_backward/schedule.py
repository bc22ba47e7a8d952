"""How the Hopper backward is scheduled: entries of tuning/sm_90.toml, and what repeatable gradients change of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from portattn.backends.cuda.hopper_backward.order import in_turns
from portattn.backends.cuda.schedules import find_schedule

if TYPE_CHECKING:
    from portattn.schema.problem import Problem
    from portattn.schema.toolchain import Toolchain

WIDTHS = (64, 128, 256)  # head dimensions that the kernels have; others are padded by what TMA reads as zeros


class BackwardSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of form.BackwardForm. `keys` counts the keys of a block; `messages` = 0 is a kernel of its own for dQ.

    Raises ValueError for fields that exclude each other.
    """

    keys: int
    stages: int
    messages: int
    late: bool = False
    stagger: int = 0
    turns: bool = False

    def __post_init__(self) -> None:
        if self.late and not self.messages:
            raise ValueError("late is about dQ that is added: messages must not be 0")
        if self.messages and self.keys != 128:
            raise ValueError("dQ is added by blocks of 128 keys")
        if self.turns and (not self.messages or self.stagger):
            raise ValueError("turns are about dQ that is added: messages must not be 0, and stagger must be")


class TimedBackwardSchedule(NamedTuple):
    """A schedule, and the compiler that it was timed with for such problems; empty where it was not."""

    schedule: BackwardSchedule
    timed_with: str


# Of the kernel of dQ: keys of a tile, buffers of K, buffers of V. With 128 columns a second buffer of V made it 1.10
# to 1.12 times as long (H200, bf16, Triton 3.6.0, B·S = 16k, H·D = 2,048: full 1,233 µs for 1,108, causal 660 for 601
# at S = 4,096; causal 2,447 for 2,199 at 16,384).
QUERIES = {64: (128, 2, 2), 128: (128, 2, 1), 256: (64, 2, 1)}


def width(head_dim: int) -> int:
    """The kernels' width for a head."""
    return next((w for w in WIDTHS if w >= head_dim), head_dim)


def choice(problem: Problem, toolchain: Toolchain) -> TimedBackwardSchedule:
    """The schedule of a problem whose heads are at most as wide as the widest of WIDTHS.

    Raises LookupError where the tuning data has no entry for it, which tests forbid.
    """
    found = find_schedule("gluon_backward", problem, toolchain)
    if found is None:
        raise LookupError(f"gluon_backward has no schedule for {problem}: backends/cuda/tuning/sm_90.toml")
    schedule, timed_with = msgspec.convert(found[0], BackwardSchedule), found[1]
    if problem.deterministic and schedule.messages:
        # Repeatable bit by bit: added in turns, or dK and dV with two buffers and dQ by its own kernel.
        if in_turns(problem, schedule.keys):
            return TimedBackwardSchedule(msgspec.structs.replace(schedule, stagger=0, turns=True), "")
        return TimedBackwardSchedule(BackwardSchedule(keys=schedule.keys, stages=2, messages=0), "")
    return TimedBackwardSchedule(schedule, timed_with)
