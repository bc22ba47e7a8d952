"""A kernel to be tuned, and one candidate of its search: its settings, its compilation, and whether its code fits."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from portattn.errors import PortattnError
from portattn.schema.call import TENSORS, Call
from portattn.schema.lowering import LAUNCH_FIELDS, Launch, Lowering, OptionValue
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.schema.tuning import SPLIT_THRESHOLD
from portattn.testing.bound import LowerBound
from portattn.testing.findings import Facts, programs_a_core
from portattn.tools import lab
from portattn.tools.lab.creating import OpenWorker, run_in_threads
from portattn.worker.client import Worker

Setting = bool | int | str | None
Only = Mapping[str, tuple[str, ...]]  # values that settings may have, as they are written
_DEFAULTS: dict[str, Any] = msgspec.structs.asdict(Lowering())
# How the usual settings are written in tables: 128×64 w4 s2.
_SHORT = {"num_warps": "w{}", "num_stages": "s{}"}


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a tuning entry sets."""

    launch: dict[str, OptionValue] = {}  # block sizes, warps, stages and compiler options
    lowering: dict[str, str] = {}  # named choices of a core kernel
    flags: dict[str, bool | int | str] = {}  # settings of a variant, by names of its own
    occupancy: int = 1  # expected programs a core at a time, which decides over how many programs keys are split
    split_threshold: float = SPLIT_THRESHOLD  # programs a core from which on keys are not split

    @property
    def settings(self) -> dict[str, Setting]:
        return {
            **self.launch, **self.lowering, "occupancy": self.occupancy, "split_threshold": f"{self.split_threshold:g}",
            **self.flags,
        }  # fmt: skip

    @property
    def key(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:12]

    def differs(self, other: "Choice") -> int:
        """Count the settings in which the two differ. An unset choice counts as its default."""
        ours, theirs = self.settings, other.settings
        return sum(
            ours.get(name, _DEFAULTS.get(name)) != theirs.get(name, _DEFAULTS.get(name))
            for name in ours.keys() | theirs.keys()
        )

    def among(self, only: Only) -> bool:
        """Return whether each of these settings has one of its values. An unset setting has the value None."""
        settings = self.settings
        return all(str(settings.get(name)).lower() in map(str.lower, values) for name, values in only.items())

    def __str__(self) -> str:
        launch: dict[str, Any] = dict(self.launch)
        tile = [str(launch.pop(name)) for name in ("block_m", "block_n") if name in launch]
        words = ["×".join(tile)] if tile else []
        words += [_SHORT[name].format(launch.pop(name)) for name in _SHORT if name in launch]
        words += [f"{name}={value}" for name, value in launch.items()]
        words += [str(value) for value in self.lowering.values()]
        words += [f"{name}={value}" for name, value in self.flags.items()]
        words += [f"occupancy={self.occupancy}"] if self.occupancy != 1 else []
        words += [f"split_threshold={self.split_threshold:g}"] if self.split_threshold != SPLIT_THRESHOLD else []
        return " ".join(words) or "defaults"


def apply_settings(base: Choice, settings: dict[str, Setting], lowering_names: tuple[str, ...]) -> Choice:
    """Return the base with the settings applied; None removes a compiler option."""
    launch, lowering, occupancy = dict(base.launch), dict(base.lowering), base.occupancy
    for name, value in settings.items():
        if name == "occupancy":
            occupancy = int(value or 1)
        elif name in lowering_names:
            lowering[name] = str(value)
        elif value is None:
            launch.pop(name, None)
        else:
            launch[name] = value
    # One order, so that equal choices are written alike.
    names = sorted(launch, key=lambda n: (LAUNCH_FIELDS.index(n) if n in LAUNCH_FIELDS else len(LAUNCH_FIELDS), n))
    made = {name: launch[name] for name in names}
    return Choice(
        launch=made, lowering=lowering, flags=base.flags, occupancy=occupancy, split_threshold=base.split_threshold
    )


class NotBuilt(PortattnError):
    """The planner or a variant does not take a candidate for the problem; the text says why."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    failure: str = ""  # why there is no code for it, or why the code does not fit the chip; else empty
    facts: Facts | None = None  # registers, spills, scratchpad_bytes … of the main kernel


@dataclass(frozen=True, slots=True)
class RunnableCandidate:
    """A candidate on a device: `run()` enqueues it on the current stream and fills `out` (B, Hq, Sq, Dv)."""

    run: Callable[[], object]
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class BuiltCandidate:
    """One candidate for one problem."""

    identity: str  # candidates of equal identity have the same launches: one of them is enough
    # brings it onto the device of a Call's tensors; raises the errors of compiler and device
    start: Callable[[Call], RunnableCandidate]
    code: str = ""  # candidates of equal code are compiled once; empty for the identity
    # compiles it in a child process within a number of seconds, also without the chip; None if only a run can
    compile: Callable[[Worker, float], CompileResult] | None = None
    # a lower bound on its time from the facts of its code, if they have what a bound needs
    bound: Callable[[Facts], LowerBound | None] | None = None

    @property
    def key(self) -> str:
        return self.code or self.identity


class Tunable(Protocol):
    """A kernel whose choices can be searched; if swept in parts, `joined(base, ranked)` has choices of timed ones."""

    @property
    def name(self) -> str: ...

    @property
    def ops(self) -> tuple[str, ...]: ...

    def space(self, problem: Problem, target: Target, base: Choice) -> Iterable[Choice]:
        """Return the choices to try, most promising first. base: today's choice, or a choice without settings."""
        ...

    def today(self, problem: Problem, target: Target) -> Choice | None:
        """Return the choice that runs without an entry in the tuning file; None if it is all defaults."""
        ...

    def build(self, problem: Problem, choice: Choice, target: Target) -> BuiltCandidate:
        """Return the candidate for the problem. Raises NotBuilt if there is none."""
        ...


def bind_launcher(launch: Callable[[Mapping[str, torch.Tensor | None]], object], call: Call) -> RunnableCandidate:
    """Bind a variant's launcher to a call: outputs are allocated once, and filled by every run."""
    out = call.new_out()
    lse = call.new_lse() if call.problem.return_lse else None
    tensors = {name: getattr(call, name) for name in TENSORS} | {"out": out, "lse": lse}
    return RunnableCandidate(lambda: launch(tensors), out)


def verdict(compiled: CompileResult, choice: Choice, target: Target, most_spilled: int) -> str:
    """Return why a compiled candidate is ruled out, or ""; most_spilled: allowed bytes of spills."""
    if compiled.failure:
        return compiled.failure
    facts, arch = compiled.facts or {}, target.arch
    used = int(facts.get("scratchpad_bytes", 0))
    if used > arch.scratchpad_bytes:
        return f"{used} bytes of {arch.scratchpad_kind}, {arch.name} has {arch.scratchpad_bytes}"
    if arch.registers and int(facts.get("registers", 0)) > arch.registers:
        return f"{facts['registers']} registers, {arch.name} has {arch.registers}"
    if int(facts.get("spills", 0)) > most_spilled:
        return f"{facts['spills']} bytes spilled, {most_spilled} allowed"
    if facts.get("serialized_wgmma"):
        return "ptxas serialised its wgmma instructions"
    programs = programs_a_core(facts, target.arch)
    if programs is not None and programs < max(choice.occupancy, 1):
        return f"over-subscribed: {choice.occupancy} programs a core are asked for, {programs} fit"
    if programs is not None and Launch().changed(choice.launch).get("maxnreg") and programs < 2:
        return "over-subscribed: maxnreg is for several programs a core, and one fits"
    return ""


def compile_all(
    jobs: Iterable[tuple[str, BuiltCandidate]], toolchain: str, workers: int, seconds: float,
    done: Callable[[str, CompileResult], None], known: Mapping[str, CompileResult],
    make: Callable[[str], Worker] | None = None, out_of_time: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Compile unknown (code, candidate) pairs side by side, telling `done` in this thread. Raises LabError."""
    waiting = {code: built for code, built in jobs if code not in known and built.compile is not None}
    if not waiting:
        return
    make = make or lab.worker
    first: list[Worker] = [make(toolchain)]  # an environment that is missing is said here, not in a thread

    def start() -> Worker:
        try:
            return first.pop()
        except IndexError:
            return make(toolchain)

    def compile_one(job: tuple[str, BuiltCandidate], open_worker: OpenWorker) -> CompileResult:
        assert job[1].compile is not None
        return job[1].compile(open_worker(toolchain, start), seconds)

    try:
        run_in_threads(waiting.items(), compile_one, workers, lambda job, made: done(job[0], made), out_of_time)
    finally:
        for worker in first:
            worker.close()
