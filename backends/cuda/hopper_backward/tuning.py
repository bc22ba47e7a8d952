"""The Hopper backward as a tunable: which schedules are tried."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from portattn.backends.cuda.hopper_backward.schedule import BackwardSchedule, choice, width
from portattn.backends.cuda.hopper_backward.variant import BackwardVariant, launcher, steps_of
from portattn.backends.cuda.searched import ScheduleTunable
from portattn.tools.tune.tunable import NotBuilt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from portattn.schema.call import Call
    from portattn.schema.kernel_step import StepLauncher
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target
    from portattn.tools.tune.choice import Choice
    from portattn.tools.tune.tunable import BuiltCandidate

STAGES = (2, 3)
# Of each width in how many parts a tile of dQ is added, beside 0. A part has DIM / 4 / MESSAGES rows of 256 numbers.
MESSAGES = {64: (1, 2, 4), 128: (1, 2, 4, 8), 256: ()}
STAGGER = (0, 4, 8, 16)
KEYS = {64: (128,), 128: (128,), 256: (64,)}  # where dQ has a kernel of its own; where it is added 128


class BackwardTunable(ScheduleTunable[BackwardSchedule]):
    """Of gradients that need not be repeatable: the others' schedules follow from these (schedule.choice)."""

    variant = BackwardVariant()
    schedule = BackwardSchedule
    working = ("scheduled_backward", "scheduled_queries")

    def flags(self, problem: Problem, base: Choice) -> Iterator[dict[str, Any]]:
        dim = width(problem.head_dim)
        alone = {"messages": 0, "late": False, "stagger": 0, "turns": False}
        for keys, stages in itertools.product(KEYS.get(dim, ()), STAGES):
            yield {"keys": keys, "stages": stages, **alone}
        for stages, messages, late, stagger in itertools.product(STAGES, MESSAGES.get(dim, ()), (True, False), STAGGER):
            yield {
                "keys": 128, "stages": stages, "messages": messages, "late": late, "stagger": stagger, "turns": False
            }  # fmt: skip

    def today_of(self, problem: Problem, target: Target) -> BackwardSchedule:
        return choice(problem, target.toolchain).schedule

    def launcher(self, call: Call, schedule: BackwardSchedule) -> Callable[[Mapping[str, Any]], None]:
        return launcher(call, schedule)

    def steps(self, call: Call, schedule: BackwardSchedule) -> StepLauncher:
        return steps_of(call, schedule)

    def build(self, problem: Problem, choice: Choice, target: Target) -> BuiltCandidate:
        if problem.deterministic:
            raise NotBuilt("it searches no schedules of gradients that must be the same bits every time")
        return super().build(problem, choice, target)
