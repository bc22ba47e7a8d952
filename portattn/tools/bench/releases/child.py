"""What a release's own process does: the steps of a case, each asked for by the process that takes the turns.

Every step ends with the device idle, so that the next turn may be another process's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from portattn.tools.bench.backward import own_builds
from portattn.tools.bench.cases import Case
from portattn.tools.bench.clock import Clock, DeviceClock
from portattn.tools.bench.contenders import OURS, Contender
from portattn.tools.bench.gate import FAILURES, DeviceLost, admit, reason
from portattn.tools.bench.precompile import PrecompileJob, prime
from portattn.tools.bench.provenance import this_run
from portattn.tools.bench.results import BenchRun
from portattn.tools.bench.run import explain_plans, same_path
from portattn.tools.bench.tensors import Tensors
from portattn.worker.stages import RUNS


class StepRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="step"):
    """A request. Each step is one of its subclasses."""


class Identify(StepRequest, frozen=True, kw_only=True, tag="identify"):
    """What this process measures with. about: the fields of provenance.this_run that are not this process's own."""

    about: dict[str, Any]


class Prepare(StepRequest, frozen=True, kw_only=True, tag="prepare"):
    """Make a case's tensors and portattn's contenders, and check them. What was prepared before goes."""

    case: Case
    backend: str
    core: bool


class Turn(StepRequest, frozen=True, kw_only=True, tag="turn"):
    """A contender's calls in a row; of its graph where `graph` is set."""

    name: str
    graph: bool
    timing: str
    calls: int
    expected_ms: float


class Enqueue(StepRequest, frozen=True, kw_only=True, tag="enqueue"):
    """The host's time of a contender's calls."""

    name: str
    graph: bool
    expected_ms: float


class Capture(StepRequest, frozen=True, kw_only=True, tag="capture"):
    """Capture a contender's call in a graph."""

    name: str


class Memory(StepRequest, frozen=True, kw_only=True, tag="memory"):
    """What a contender's call allocates at its peak."""

    name: str


class Compile(StepRequest, frozen=True, kw_only=True, tag="compile"):
    """Run a case once, so that what it needs is compiled."""

    case: Case
    backend: str
    core: bool


class Drop(StepRequest, frozen=True, kw_only=True, tag="drop"):
    """Give back what the last case took of the device."""


Step = Identify | Prepare | Turn | Enqueue | Capture | Memory | Compile | Drop


class PreparedCase(msgspec.Struct, frozen=True, kw_only=True):
    """What came of preparing a case: of portattn's contenders, by name, what each one is, or why it is none.

    budget  the largest allowed error; None if memory for the tensors lacked
    errors  of the right contenders; None for an infinite error
    paths, result_bytes  as in Contender
    same    the plan takes the core anyway, which is not timed twice
    """

    budget: float | None = None
    errors: dict[str, float | None] = {}
    admitted: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    paths: dict[str, str] = {}
    result_bytes: dict[str, int] = {}
    same: bool = False
    plan: tuple[str, ...] = ()


class Session:
    """The steps on one device. Tests bring a clock that needs none."""

    def __init__(self, device: torch.device, clock: Clock, run: Callable[..., BenchRun] = this_run) -> None:
        self.device, self.clock, self._run = device, clock, run
        self._contenders: dict[str, Contender] = {}
        self._replays: dict[str, Callable[[], Any]] = {}

    def carry_out(self, step: Step) -> Any:
        """The step's answer. Raises what the step raises, and DeviceLost where the device takes no more work."""
        try:
            found = getattr(self, type(step).__name__.lower())(step)
        except FAILURES as failure:
            lost = "" if isinstance(failure, DeviceLost) else self.clock.lost()
            if lost:
                raise DeviceLost(OURS, failure, lost) from None
            raise
        if lost := self.clock.lost():  # it also waits until the device is idle
            raise DeviceLost(OURS, RuntimeError(f"after {type(step).__name__.lower()}"), lost)
        return found

    def identify(self, step: Identify) -> BenchRun:
        return self._run(**step.about, ceilings=None)

    def prepare(self, step: Prepare) -> PreparedCase:
        self.drop(Drop())
        case = step.case
        try:
            t = Tensors.random(case, self.device)
            builds = own_builds(case, t, step.backend, step.core)
            admitted = admit(case, t, builds, self.clock.lost)
        except torch.OutOfMemoryError as failure:
            return PreparedCase(refused={OURS: reason(failure)})
        same = same_path(admitted)
        self._contenders = admitted.contenders
        return PreparedCase(
            budget=admitted.budget, errors=dict(admitted.errors), refused=admitted.refused,
            admitted=tuple(admitted.contenders), same=same,
            paths={name: one.path for name, one in admitted.contenders.items()},
            result_bytes={name: one.result_bytes for name, one in admitted.contenders.items()},
            plan=explain_plans(case, t, admitted.contenders.get(OURS), step.backend),
        )  # fmt: skip

    def turn(self, step: Turn) -> float:
        with self._contenders[step.name].around():
            run = self._called(step.name, step.graph)
            return self.clock.turn_ms(run, step.timing, step.calls, step.expected_ms)  # type: ignore[arg-type]

    def enqueue(self, step: Enqueue) -> Any:
        with self._contenders[step.name].around():
            return self.clock.host_us(self._called(step.name, step.graph), step.expected_ms)

    def capture(self, step: Capture) -> None:
        self._replays[step.name] = self.clock.graphed(self._contenders[step.name])

    def memory(self, step: Memory) -> int:
        with self._contenders[step.name].around():
            return self.clock.peak_extra_bytes(self._contenders[step.name].run)

    def compile(self, step: Compile) -> str:
        return prime(PrecompileJob(case=step.case, backend=step.backend, core=step.core, device=str(self.device)))

    def drop(self, step: Drop) -> None:
        self._contenders, self._replays = {}, {}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _called(self, name: str, graph: bool) -> Callable[[], Any]:
        return self._replays[name] if graph else self._contenders[name].run


_session: list[Session] = []


def answer(request: Mapping[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """A worker's task: carry out the request's `step` on the current device."""
    if not _session:
        _session.append(Session(torch.device("cuda", torch.cuda.current_device()), DeviceClock()))
    return answer_request(_session[0], request, enter)


def answer_request(session: Session, request: Mapping[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """A task's answer by this session: `answer`, as JSON."""
    step = msgspec.json.decode(request["step"], type=Step)
    enter(RUNS)
    return {"facts": {"answer": msgspec.json.encode(session.carry_out(step)).decode()}}
