"""The Gluon variants as tunables: a candidate is a schedule, independent of the tuning entries."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from portattn.backends.cuda.hopper_backward import variant as backward
from portattn.backends.cuda.hopper_backward.variant import BackwardSchedule, BackwardVariant
from portattn.backends.cuda.hopper_forward import variant as forward
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.backends.cuda.schedules import Schedule, described_by
from portattn.launch import meta_call
from portattn.launch.kernelcall import signatures
from portattn.schema.plan import Plan
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.tune.core import compile_plan
from portattn.tools.tune.tunable import (
    BuiltCandidate,
    Choice,
    CompileResult,
    NotBuilt,
    RunnableCandidate,
    bind_launcher,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from portattn.planning.backend import Variant
    from portattn.schema.call import Call
    from portattn.schema.lowering import StepLauncher
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target
    from portattn.worker.client import Worker

S = TypeVar("S", bound=msgspec.Struct)


class ScheduleTunable(ABC, Generic[S]):
    """A variant's schedules as candidates of a search."""

    variant: Variant
    schedule: type[S]  # raises ValueError for flags that do not go together
    working: tuple[str, ...] = ()  # kernels with products, if the first launch has none

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def ops(self) -> tuple[str, ...]:
        return self.variant.ops

    @abstractmethod
    def flags(self, problem: Problem, base: Choice) -> Iterable[dict[str, Any]]:
        """Return schedules to try, by their fields; incompatible ones are omitted."""

    @abstractmethod
    def today_of(self, problem: Problem, target: Target) -> S | None: ...

    @abstractmethod
    def launcher(self, call: Call, schedule: S) -> Callable[[Mapping[str, Any]], None]: ...

    @abstractmethod
    def steps(self, call: Call, schedule: S) -> StepLauncher: ...

    def space(self, problem: Problem, target: Target, base: Choice) -> Iterator[Choice]:
        """Yield the valid schedules, nearest to the base first."""
        found = []
        for flags in self.flags(problem, base):
            try:
                msgspec.convert(flags, self.schedule)
            except msgspec.ValidationError:
                continue
            found.append(Choice(flags=flags))
        yield from sorted(found, key=lambda choice: choice.differs(base))

    def today(self, problem: Problem, target: Target) -> Choice | None:
        chosen = self.today_of(problem, target)
        return None if chosen is None else Choice(flags=msgspec.structs.asdict(chosen))

    def build(self, problem: Problem, choice: Choice, target: Target) -> BuiltCandidate:
        no = self.variant.rejects(problem, target)
        if no is not None:
            raise NotBuilt(f"it {no.reason}")
        try:
            schedule = msgspec.convert(choice.flags, self.schedule)
        except msgspec.ValidationError as error:
            raise NotBuilt(str(error)) from None

        def start(call: Call) -> RunnableCandidate:
            return bind_launcher(self.launcher(call, schedule), call)

        identity = _digest(f"{self.name} {problem} {schedule}".encode())
        if not described_by(installed_toolchain()):
            return BuiltCandidate(identity, start)
        seen = signatures(ScheduledVariant(self, schedule), meta_call(problem))
        made = Plan(
            problem=problem, target=target.name, toolchain=str(target.toolchain), requested=self.name, path=self.name
        )

        def compile_it(worker: Worker, seconds: float) -> CompileResult:
            return compile_plan(made, seen, target, worker, seconds, self.working)

        return BuiltCandidate(identity, start, _digest(msgspec.json.encode(seen, order="deterministic")), compile_it)


class ScheduledVariant(Generic[S]):
    """The variant with this schedule, whatever its tuning data says."""

    def __init__(self, tunable: ScheduleTunable[S], schedule: S) -> None:
        self._tunable, self._schedule = tunable, schedule

    def described(self, call: Call) -> StepLauncher:
        return self._tunable.steps(call, self._schedule)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


# Tiles to try, by width: (consumer groups, keys of a tile, stages, buffers for Q, parts of the output).
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
_OF_E4M3 = ("halved", "kept")  # of e4m3 operands alone, whose schedules are not searched
FLAGS = tuple(
    field.name
    for field in msgspec.structs.fields(Schedule)
    if field.type in (bool, "bool") and field.name not in _OF_E4M3
)


class ForwardTunable(ScheduleTunable[Schedule]):
    variant = ForwardVariant()
    schedule = Schedule

    def flags(self, problem: Problem, base: Choice) -> Iterator[dict[str, Any]]:
        """Yield every tile of the width with every combination of flags."""
        ordered = forward.uneven(problem)
        for groups, keys, stages, queries, parts in TILES.get(forward.width(problem.head_dim), ()):
            tile = {"groups": groups, "keys": keys, "stages": stages, "queries": queries, "parts": parts}
            for values in itertools.product((True, False), repeat=len(FLAGS)):
                flags = {**base.flags, **tile, **dict(zip(FLAGS, values, strict=True))}
                if ordered or flags["in_turn"] == base.flags.get("in_turn", True):
                    yield flags

    def today_of(self, problem: Problem, target: Target) -> Schedule | None:
        chosen = forward.choice(problem, target.toolchain)
        return None if chosen is None else chosen.schedule

    def launcher(self, call: Call, schedule: Schedule) -> Callable[[Mapping[str, Any]], None]:
        return forward.launcher(call, schedule)

    def steps(self, call: Call, schedule: Schedule) -> StepLauncher:
        return forward.steps_of(call, schedule)


STAGES = (2, 3)
# Numbers of parts in which a tile of dQ is added, by width; 0 too. A part has DIM / 4 / MESSAGES rows of 256 numbers.
MESSAGES = {64: (1, 2, 4), 128: (1, 2, 4, 8), 256: ()}
STAGGER = (0, 4, 8, 16)
KEYS = {64: (128,), 128: (128,), 256: (64,)}  # where dQ has a kernel of its own; where it is added 128


class BackwardTunable(ScheduleTunable[BackwardSchedule]):
    """Schedules of gradients that need not be repeatable: `variant.choice` derives the repeatable ones from these."""

    variant = BackwardVariant()
    schedule = BackwardSchedule
    working = ("scheduled_backward", "scheduled_queries")

    def flags(self, problem: Problem, base: Choice) -> Iterator[dict[str, Any]]:
        dim = backward.width(problem.head_dim)
        always = {"after": base.flags["after"], "turns": False, "apart": False}  # variant.choice decides the first two
        alone = {"messages": 0, "late": False, "stagger": 0, **always}
        for keys, stages in itertools.product(KEYS.get(dim, ()), STAGES):
            yield {"keys": keys, "stages": stages, **alone}
        if not problem.features()["featured"]:  # groups apart compute no functions of scores
            for messages in MESSAGES.get(dim, ())[1:]:
                each = {"keys": 128, "stages": 2, "messages": messages, "late": False, "stagger": 0}
                yield {**each, **always, "apart": True}
        for stages, messages, late, stagger in itertools.product(STAGES, MESSAGES.get(dim, ()), (True, False), STAGGER):
            yield {
                "keys": 128, "stages": stages, "messages": messages, "late": late, "stagger": stagger, **always
            }  # fmt: skip

    def today_of(self, problem: Problem, target: Target) -> BackwardSchedule:
        return backward.choice(problem, target.toolchain).schedule

    def launcher(self, call: Call, schedule: BackwardSchedule) -> Callable[[Mapping[str, Any]], None]:
        return backward.launcher(call, schedule)

    def steps(self, call: Call, schedule: BackwardSchedule) -> StepLauncher:
        return backward.steps_of(call, schedule)

    def build(self, problem: Problem, choice: Choice, target: Target) -> BuiltCandidate:
        if problem.deterministic:
            raise NotBuilt("it searches no schedules of gradients that must be the same bits every time")
        return super().build(problem, choice, target)
