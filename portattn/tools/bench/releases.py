"""Releases of Triton to time, each in a process of its own: the steps of its process, and contenders for the parent."""

import contextlib
import math
import os
import sys
import time
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from packaging.version import Version

from portattn.errors import ArgumentError, PortattnError
from portattn.launch.torch_compat import synchronize, timed_device
from portattn.schema.compilers import TRITON
from portattn.schema.toolchain import Toolchain, installed_toolchain
from portattn.tools import lab
from portattn.tools.bench import firstcall
from portattn.tools.bench.cases import Case, Timing, spread
from portattn.tools.bench.contenders import OURS, Contender, explain_plans, own_builds
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.gate import FAILURES, Admission, DeviceLost, admit, reason, same_path
from portattn.tools.bench.results import BenchRun, this_run
from portattn.tools.bench.rounds import Ceilings, DeviceClock, Spread
from portattn.tools.bench.tensors import Tensors
from portattn.tools.lab.creating import OpenWorker, run_in_threads
from portattn.worker.child import RUNS
from portattn.worker.client import Worker

T = TypeVar("T")


class PreparedCase(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of preparing a case, by contender's name."""

    budget: float | None = None  # the largest allowed error; None if memory for the tensors lacked
    errors: dict[str, float | None] = {}  # of the right contenders; None for an infinite error
    admitted: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    # paths, result_bytes: as in Contender
    paths: dict[str, str] = {}
    result_bytes: dict[str, int] = {}
    same: bool = False  # the plan takes the core anyway, which is not timed twice
    plan: tuple[str, ...] = ()


class Session:
    """The steps of a release's process, on one device; tests pass a clock that needs no device."""

    def __init__(self, device: torch.device, clock: DeviceClock, run: Callable[..., BenchRun] = this_run) -> None:
        self.device, self.clock, self._run = device, clock, run
        self._contenders: dict[str, Contender] = {}
        self._replays: dict[str, Callable[[], Any]] = {}

    def carry_out(self, step: str, arguments: Mapping[str, Any]) -> Any:
        """Run the step, a method's name, and return its answer. Raises its error, or DeviceLost."""
        method = getattr(self, step)
        types = typing.get_type_hints(method)
        try:
            found = method(**{name: msgspec.convert(value, types[name]) for name, value in arguments.items()})
        except FAILURES as failure:
            lost = "" if isinstance(failure, DeviceLost) else self.clock.lost()
            if lost:
                raise DeviceLost(OURS, failure, lost) from None
            raise
        if lost := self.clock.lost():  # it also waits until the device is idle
            raise DeviceLost(OURS, RuntimeError(f"after {step}"), lost)
        return found

    def identify(self, about: dict[str, Any]) -> BenchRun:
        """Return this process's BenchRun; `about`: the fields of this_run that the parent knows."""
        return self._run(**about, ceilings=None)

    def prepare(self, case: Case, backend: str, core: bool) -> PreparedCase:
        """Make a case's tensors and portattn's contenders, and check them, dropping the case before."""
        self.drop()
        try:
            t = Tensors.random(case, self.device)
            admitted = admit(case, t, own_builds(case, t, backend, core), self.clock.lost)
        except torch.OutOfMemoryError as failure:
            return PreparedCase(refused={OURS: reason(failure)})
        same = same_path(admitted)
        self._contenders = admitted.contenders
        return PreparedCase(
            budget=admitted.budget, errors=dict(admitted.errors), refused=admitted.refused,
            admitted=tuple(admitted.contenders), same=same,
            paths={name: one.path for name, one in admitted.contenders.items()},
            result_bytes={name: one.result_bytes for name, one in admitted.contenders.items()},
            plan=explain_plans(case, t, admitted.contenders.get(OURS), backend),
        )  # fmt: skip

    def measure(self, name: str, graph: bool, method: str, arguments: dict[str, Any]) -> Any:
        """Return the answer of the clock's method about a contender's call, or about its replay."""
        with self._contenders[name].around():
            run = self._replays[name] if graph else self._contenders[name].run
            return getattr(self.clock, method)(run, **arguments)

    def capture(self, name: str) -> None:
        self._replays[name] = self.clock.graphed(self._contenders[name])

    def compile(self, case: Case, backend: str, core: bool) -> str:
        """Run a case's contenders once each; return why one fails, or ""; the measurement tries again."""
        failed = ""
        try:
            t = Tensors.random(case, self.device)
            for name, build in own_builds(case, t, backend, core).items():
                try:
                    build().run()
                    synchronize(self.device)
                except FAILURES as failure:
                    failed = f"{name}: {reason(failure)}"
        except FAILURES as failure:  # torch's errors of a device, out of memory among them, are RuntimeErrors
            return reason(failure)
        finally:
            self.drop()  # the next case may be another process's
        return failed

    def drop(self) -> None:
        self._contenders, self._replays = {}, {}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


_session: list[Session] = []


def answer(request: Mapping[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    if not _session:
        device = timed_device() or torch.device("cpu")
        _session.append(Session(device, DeviceClock(device.type)))
    return answer_request(_session[0], request, enter)


def answer_request(session: Session, request: Mapping[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    arguments = msgspec.json.decode(request["arguments"])
    enter(RUNS)
    found = session.carry_out(request["step"], arguments)
    return {"facts": {"answer": msgspec.json.encode(found).decode()}}


OPTION = "--release"


class Release(msgspec.Struct, frozen=True, kw_only=True):
    version: str  # such as 3.8.0
    folder: str = ""  # that holds `triton/`; empty for the installed release

    @classmethod
    def installed(cls) -> "Release":
        return cls(version=installed_toolchain().version)

    @property
    def toolchain(self) -> str:
        return f"{TRITON}=={self.version}"

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment of its processes: its folder first on PYTHONPATH, then this process's sys.path."""
        return {"PYTHONPATH": os.pathsep.join(path for path in (self.folder, *sys.path) if path)}


def releases(texts: Iterable[str]) -> list[Release]:
    """Return the releases of texts: `3.8.0` (installed or in the lab) or `3.8.0=FOLDER`. Raises ArgumentError."""
    found: dict[Version, Release] = {}  # 99 is 99.0.0, though nobody knows how it is written
    for text in texts:
        release = _release(text)
        named = found.setdefault(Version(release.version), release)
        if named is not release:
            raise ArgumentError("bench", OPTION, text, f"must name each release once, and {named.version} was named")
    return list(found.values())


def _release(text: str) -> Release:
    stated, equals, folder = text.strip().removeprefix(f"{TRITON}==").partition("=")
    try:
        version = Toolchain.parse(f"{TRITON}=={stated}").version  # 3.8 and v3.8.0 are 3.8.0: it names a folder
    except ValueError:
        raise ArgumentError("bench", OPTION, text, "must be VERSION or VERSION=FOLDER, such as 3.8.0") from None
    if not equals:
        return Release(version=version, folder=_place(version, text))
    place = Path(folder).absolute()
    if not (place / TRITON / "__init__.py").is_file():
        raise ArgumentError("bench", OPTION, text, f"must name a folder with {TRITON}/__init__.py in it")
    return Release(version=version, folder=str(place))


def _place(version: str, text: str) -> str:
    """Return the lab's folder of a release, or "" for the installed one."""
    own = installed_toolchain()
    if own.distribution == TRITON and own.within(TRITON, f"=={version}"):
        return ""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    made = lab.find(f"{TRITON}=={version}")
    if made is None or not made.python_version.startswith(f"{python}."):
        wrong = f"its lab environment has Python {made.python_version}" if made else "the lab has none"
        helps = "" if made else f"`portattn lab create {TRITON}=={version}` makes one, or "
        limit = f"is not the installed release ({own}), and {wrong}: {helps}give its folder, {version}=FOLDER"
        raise ArgumentError("bench", OPTION, text, f"{limit} (scripts/pack_triton.py makes one for Python {python})")
    return str(made.folder / "lib" / f"python{python}" / "site-packages")


TASK = "portattn.tools.bench.releases:answer"
PREPARE_S = 900.0  # limit of a preparation, which may compile kernels
TURN_S = 120.0  # limit of a turn, whose kernels are compiled
MOST_DEATHS = 3  # in a row, after which a release takes no further part
LOST = "DeviceLost"


class ReleaseProcessError(PortattnError):
    """A step in a release's process failed, or the process itself."""


class ReleaseProcess(contextlib.AbstractContextManager["ReleaseProcess"]):
    """A release's process, a context: started at the first step, and again for the case after one that ended it."""

    def __init__(self, release: Release, task: str = "", turn_s: float = 0.0) -> None:
        self.release, self._task, self._turn_s = release, task or TASK, turn_s or TURN_S
        self._worker = Worker(environment=release.variables, runs="kernels")
        self._deaths = 0
        self._ended = ""  # why the process that prepared the case is gone
        self.given_up = ""  # why it is asked no more

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, from any thread; a step under way fails."""
        self._worker.close()

    def identify(self, about: dict[str, Any], seconds: float = PREPARE_S) -> BenchRun:
        """Return the process's BenchRun. Raises ReleaseProcessError if it does not start or has another Triton."""
        try:
            run: BenchRun = self._ask("identify", seconds, BenchRun, about=about)
        except ReleaseProcessError as failure:
            self.given_up = str(failure)
            raise
        version = self.release.version
        if not Toolchain.parse(run.toolchain).within("triton", f"=={version}"):
            self.given_up = f"its process has {run.toolchain}, and not triton=={version}"
            raise ReleaseProcessError(self.given_up)
        return run

    def prepare(self, case: Case, backend: str, core: bool) -> tuple[Admission, PreparedCase]:
        """Return the release's admitted contenders of a case, and the whole outcome. A failure becomes a refusal."""
        self._next_case()
        try:
            if self.given_up:
                raise ReleaseProcessError(self.given_up)
            made: PreparedCase = self._ask("prepare", PREPARE_S, PreparedCase, case=case, backend=backend, core=core)
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
        """Run a case once; return why it does not run, or ""."""
        self._next_case()
        try:
            if self.given_up:
                raise ReleaseProcessError(self.given_up)
            said: str = self._ask("compile", seconds, str, case=case, backend=backend, core=core)
        except ReleaseProcessError as failure:
            return str(failure)
        return said

    def first_call(self, case: Case, index: int) -> FirstCall:
        if self.given_up:
            return FirstCall(case=case.name, run=index, failed=self.given_up)
        return firstcall.measure(case, index, variables=self.release.variables)

    def _next_case(self) -> None:
        self._deaths = self._deaths if self._ended else 0
        self._ended = ""

    def drop(self) -> None:
        if not self._ended and not self.given_up:
            try:
                self._ask("drop", self._turn_s, type(None))
            except ReleaseProcessError:
                return  # its memory went with it; why it ended is in `_ended`, and the next case starts it anew

    def turn(self, step: str, kind: Any, **arguments: Any) -> Any:
        return self._ask(step, self._turn_s, kind, **arguments)

    def _ask(self, step: str, seconds: float, kind: Any, **arguments: Any) -> Any:
        if self._ended:
            raise ReleaseProcessError(self._ended)
        given = msgspec.json.encode(arguments).decode()
        reply = self._worker.request(self._task, seconds, step=step, arguments=given)
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
    """A contender's call in a release's process, from its graph if `graph`; measured by its clock, or called alone."""

    def __init__(self, process: ReleaseProcess, name: str, graph: bool = False) -> None:
        self.process, self.name, self.graph = process, name, graph

    def __call__(self) -> None:
        self.measure("turn_ms", float, timing="hot", calls=1, expected_ms=0.0)

    def measure(self, method: str, kind: Any, **arguments: Any) -> Any:
        of = {"name": self.name, "graph": self.graph, "method": method, "arguments": arguments}
        return self.process.turn("measure", kind, **of)


class TurnsClock(DeviceClock):
    """A clock for contenders of this process and of releases' processes, one process at a time."""

    def __init__(self, here: DeviceClock) -> None:
        self.here = here

    def _measure(self, method: str, kind: type[T], run: Any, **arguments: Any) -> T:
        remote = isinstance(run, RemoteRun)
        found: T = run.measure(method, kind, **arguments) if remote else getattr(self.here, method)(run, **arguments)
        return found

    def turn_ms(self, run: Any, timing: Timing, calls: int, expected_ms: float) -> float:
        return self._measure("turn_ms", float, run, timing=timing, calls=calls, expected_ms=expected_ms)

    def host_us(self, run: Any, expected_ms: float = 0.0) -> Spread:
        return self._measure("host_us", Spread, run, expected_ms=expected_ms)

    def peak_extra_bytes(self, run: Any) -> int | None:
        return self._measure("peak_extra_bytes", int | None, run)  # type: ignore[arg-type]  # a UnionType

    def graphed(self, contender: Contender) -> Any:
        run = contender.run
        if not isinstance(run, RemoteRun):
            return self.here.graphed(contender)
        run.process.turn("capture", type(None), name=run.name)
        return RemoteRun(run.process, run.name, graph=True)

    def ceilings(self) -> Ceilings:
        return self.here.ceilings()

    def lost(self) -> str:
        return self.here.lost()


PrimeCallback = Callable[[Release, Case, str], None]


def prime_releases(
    releases: Sequence[Release], cases: Sequence[Case], backend: str, core: bool, jobs: int, done: PrimeCallback,
    seconds: float = math.inf, task: str = "",
) -> bool:  # fmt: skip
    """Run every case with every release in `jobs` processes, telling `done` a failure or ""; return whether all ran."""
    ran, end = 0, time.monotonic() + seconds
    for release in releases:  # one after the other: `jobs` is how many processes the device's memory holds

        def compiled(case: Case, opened: OpenWorker, release: Release = release) -> str:
            process: Any = opened(release, lambda: ReleaseProcess(release, task))
            return str(process.compile(case, backend, core, max(min(end - time.monotonic(), PREPARE_S), 0.0)))

        def told(case: Case, failure: str, release: Release = release) -> None:
            nonlocal ran
            ran += 1
            done(release, case, failure)

        run_in_threads(spread(cases), compiled, jobs, told, lambda: time.monotonic() >= end)
    return ran == len(releases) * len(cases)
