"""The Hopper forward as a tunable: which schedules are tried."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from portattn.backends.cuda.hopper_forward.variant import (
    ForwardVariant,
    Schedule,
    choice,
    launcher,
    steps_of,
    uneven,
    width,
)
from portattn.backends.cuda.searched import ScheduleTunable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from portattn.schema.call import Call
    from portattn.schema.kernel_step import StepLauncher
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target
    from portattn.tools.tune.choice import Choice

# Of each width the tiles to try: (consumer groups, keys of a tile, stages, buffers for Q, parts of the output).
TILES = {
    64: (
        (3, 128, 4, 2, 1),
        (3, 128, 4, 1, 1),
        (2, 128, 4, 2, 1),
        (2, 64, 4, 2, 1),
        (2, 128, 4, 1, 1),
        (2, 128, 2, 2, 1),
    ),
    128: ((2, 128, 2, 2, 1), (2, 64, 4, 2, 1), (2, 128, 2, 1, 1)),
    256: ((2, 64, 2, 1, 1), (2, 64, 2, 1, 2)),
}
_OF_NARROW = ("halved", "kept")  # of e4m3 operands alone, whose schedules are not searched
FLAGS = tuple(
    field.name
    for field in msgspec.structs.fields(Schedule)
    if field.type in (bool, "bool") and field.name not in _OF_NARROW
)


class ForwardTunable(ScheduleTunable[Schedule]):
    variant = ForwardVariant()
    schedule = Schedule

    def flags(self, problem: Problem, base: Choice) -> Iterator[dict[str, Any]]:
        """Every tile of the width with every combination of flags."""
        ordered = uneven(problem)
        for groups, keys, stages, queries, parts in TILES.get(width(problem.head_dim), ()):
            tile = {"groups": groups, "keys": keys, "stages": stages, "queries": queries, "parts": parts}
            for values in itertools.product((True, False), repeat=len(FLAGS)):
                flags = {**base.flags, **tile, **dict(zip(FLAGS, values, strict=True))}
                if ordered or flags["in_turn"] == base.flags.get("in_turn", True):
                    yield flags

    def today_of(self, problem: Problem, target: Target) -> Schedule | None:
        chosen = choice(problem, target.toolchain)
        return None if chosen is None else chosen.schedule

    def launcher(self, call: Call, schedule: Schedule) -> Callable[[Mapping[str, Any]], None]:
        return launcher(call, schedule)

    def steps(self, call: Call, schedule: Schedule) -> StepLauncher:
        return steps_of(call, schedule)
