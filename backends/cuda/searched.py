"""What the Gluon variants' tunables share: a candidate is a schedule, built by the variant whatever its entries say."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from portattn.backends.cuda.gluon import described_by
from portattn.launch import meta_call
from portattn.launch.described import signatures
from portattn.schema.plan import Plan
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.tune.choice import Choice
from portattn.tools.tune.core import compile_plan
from portattn.tools.tune.tunable import BuiltCandidate, CompileResult, NotBuilt, RunnableCandidate, bind_launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from portattn.planning.backend import Variant
    from portattn.schema.call import Call
    from portattn.schema.kernel_step import StepLauncher
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target
    from portattn.worker.client import Worker

S = TypeVar("S", bound=msgspec.Struct)


class ScheduleTunable(ABC, Generic[S]):
    """A variant's schedules as candidates of a search.

    variant   that whose schedules they are
    schedule  their type: raises ValueError for flags that do not go together
    working   the kernels with products, where the first launch is none of them
    """

    variant: Variant
    schedule: type[S]
    working: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def ops(self) -> tuple[str, ...]:
        return self.variant.ops

    @abstractmethod
    def flags(self, problem: Problem, base: Choice) -> Iterable[dict[str, Any]]:
        """Schedules to try by their fields, in any order; those that do not go together are left out."""

    @abstractmethod
    def today_of(self, problem: Problem, target: Target) -> S | None:
        """The schedule of the variant's entries for that compiler."""

    @abstractmethod
    def launcher(self, call: Call, schedule: S) -> Callable[[Mapping[str, Any]], None]:
        """What runs calls like this one with a schedule."""

    @abstractmethod
    def steps(self, call: Call, schedule: S) -> StepLauncher:
        """The launches of calls like this one with a schedule."""

    def space(self, problem: Problem, target: Target, base: Choice) -> Iterator[Choice]:
        """What goes together, nearest to the base first."""
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
