"""A release's process as its parent sees it: contenders whose turns are taken there, one process at a time."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from portattn.errors import PortattnError
from portattn.schema.toolchain import Toolchain
from portattn.tools.bench.cases import Case, Timing
from portattn.tools.bench.clock import Ceilings, Clock, Spread
from portattn.tools.bench.contenders import OURS, Contender
from portattn.tools.bench.gate import Admission
from portattn.tools.bench.releases.child import (
    Capture,
    Compile,
    Drop,
    Enqueue,
    Identify,
    Memory,
    Prepare,
    PreparedCase,
    Step,
    Turn,
)
from portattn.tools.bench.releases.named import Release
from portattn.tools.bench.results import BenchRun
from portattn.worker.client import Worker

if TYPE_CHECKING:
    from typing_extensions import Self

TASK = "portattn.tools.bench.releases.child:answer"
PREPARE_S = 900.0  # limit of a preparation, which may compile kernels
TURN_S = 120.0  # limit of a turn, whose kernels are compiled
MOST_DEATHS = 3  # in a row, after which a release takes no further part
LOST = "DeviceLost"


class ReleaseProcessError(PortattnError):
    """A step failed in a release's process, or the process did."""


class ReleaseProcess:
    """Asks a release's process, which is started at the first step, and anew for the case after one that ended it.

    task    the function that answers; tests have one of their own
    turn_s  seconds that a turn may take

    Use it as a context, which ends the process.
    """

    def __init__(self, release: Release, task: str = "", turn_s: float = 0.0) -> None:
        self.release, self._task, self._turn_s = release, task or TASK, turn_s or TURN_S
        self._worker = Worker(environment=release.variables, runs="kernels")
        self._deaths = 0
        self._ended = ""  # why the process that prepared the case is gone
        self.given_up = ""  # why it is asked no more

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process; from any thread. A step under way fails."""
        self._worker.close()

    def identify(self, about: dict[str, Any], seconds: float = PREPARE_S) -> BenchRun:
        """Return the process's Run. Raises ReleaseProcessError if it does not start or has another Triton."""
        try:
            run: BenchRun = self._ask(Identify(about=about), seconds, BenchRun)
        except ReleaseProcessError as failure:
            self.given_up = str(failure)
            raise
        version = self.release.version
        if not Toolchain.parse(run.toolchain).within("triton", f"=={version}"):
            self.given_up = f"its process has {run.toolchain}, and not triton=={version}"
            raise ReleaseProcessError(self.given_up)
        return run

    def prepare(self, case: Case, backend: str, core: bool) -> tuple[Admission, PreparedCase]:
        """The release's contenders of a case, and what else came of it. A failure is a refusal: nothing is raised."""
        self._next_case()
        try:
            if self.given_up:
                raise ReleaseProcessError(self.given_up)
            made: PreparedCase = self._ask(Prepare(case=case, backend=backend, core=core), PREPARE_S, PreparedCase)
        except ReleaseProcessError as failure:
            return Admission(math.nan, refused={OURS: str(failure)}), PreparedCase()
        contenders = {
            name: Contender(RemoteRun(self, name), path=made.paths[name], result_bytes=made.result_bytes[name])
            for name in made.admitted
        }
        errors = {name: math.inf if error is None else error for name, error in made.errors.items()}
        budget = math.nan if made.budget is None else made.budget
        return Admission(budget, contenders=contenders, errors=errors, refused=dict(made.refused)), made

    def compile(self, case: Case, backend: str, core: bool, seconds: float = PREPARE_S) -> str:
        """Run a case once; why it does not run, or an empty text."""
        self._next_case()
        try:
            if self.given_up:
                raise ReleaseProcessError(self.given_up)
            said: str = self._ask(Compile(case=case, backend=backend, core=core), seconds, str)
        except ReleaseProcessError as failure:
            return str(failure)
        return said

    def _next_case(self) -> None:
        """A process that the last case ended is started anew by the next step."""
        self._deaths = self._deaths if self._ended else 0
        self._ended = ""

    def drop(self) -> None:
        """Have the device's memory back."""
        if not self._ended and not self.given_up:
            try:
                self._ask(Drop(), self._turn_s, type(None))
            except ReleaseProcessError:
                return  # its memory went with it; why it ended is in `_ended`, and the next case starts it anew

    def turn(self, step: Step, kind: Any) -> Any:
        """The answer of a step of the case that is prepared. Raises ReleaseProcessError."""
        return self._ask(step, self._turn_s, kind)

    def _ask(self, step: Step, seconds: float, kind: Any) -> Any:
        if self._ended:
            raise ReleaseProcessError(self._ended)
        reply = self._worker.request(self._task, seconds, step=msgspec.json.encode(step).decode())
        if reply.outcome == "ok":
            return msgspec.json.decode(str(reply.facts["answer"]), type=kind)
        why = f"{reply.kind}: {reply.message}" if reply.message and reply.kind else reply.message or reply.kind
        if reply.outcome == "error" and not reply.unavailable and reply.kind != LOST:
            raise ReleaseProcessError(why)
        self._worker.close()
        self._deaths += 1
        self._ended = f"the process of triton=={self.release.version} ended: {why}"
        if self._deaths >= MOST_DEATHS:
            self.given_up = f"{self._ended}; {MOST_DEATHS} times in a row, so that it is asked no more"
        raise ReleaseProcessError(self._ended)


class RemoteRun:
    """A contender's call in a release's process. Turns asks for it; called by itself it is one call.

    graph  the call is replayed from its graph
    """

    def __init__(self, process: ReleaseProcess, name: str, graph: bool = False) -> None:
        self.process, self.name, self.graph = process, name, graph

    def __call__(self) -> None:
        self.turn_ms("hot", 1, 0.0)

    def turn_ms(self, timing: Timing, calls: int, expected_ms: float) -> float:
        step = Turn(name=self.name, graph=self.graph, timing=timing, calls=calls, expected_ms=expected_ms)
        return float(self.process.turn(step, float))

    def host_us(self, expected_ms: float) -> Spread:
        step = Enqueue(name=self.name, graph=self.graph, expected_ms=expected_ms)
        spread: Spread = self.process.turn(step, Spread)
        return spread

    def graphed(self) -> RemoteRun:
        self.process.turn(Capture(name=self.name), type(None))
        return RemoteRun(self.process, self.name, graph=True)

    def extra_bytes(self) -> int:
        return int(self.process.turn(Memory(name=self.name), int))


class TurnsClock:
    """A clock of this process's contenders and of those in releases' processes: one of them works at a time."""

    def __init__(self, here: Clock) -> None:
        self.here = here

    def turn_ms(self, run: Any, timing: Timing, calls: int, expected_ms: float) -> float:
        if isinstance(run, RemoteRun):
            return run.turn_ms(timing, calls, expected_ms)
        return self.here.turn_ms(run, timing, calls, expected_ms)

    def host_us(self, run: Any, expected_ms: float = 0.0) -> Spread:
        return run.host_us(expected_ms) if isinstance(run, RemoteRun) else self.here.host_us(run, expected_ms)

    def graphed(self, contender: Contender) -> Any:
        return contender.run.graphed() if isinstance(contender.run, RemoteRun) else self.here.graphed(contender)

    def peak_extra_bytes(self, run: Any) -> int:
        return run.extra_bytes() if isinstance(run, RemoteRun) else self.here.peak_extra_bytes(run)

    def ceilings(self) -> Ceilings:
        return self.here.ceilings()

    def lost(self) -> str:
        return self.here.lost()
