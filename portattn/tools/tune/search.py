"""Search one class: choose candidates, then drop them by compiling, checking (the benchmarks' gate) and timing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch

from portattn.compile.ensure_compiled import is_compilers
from portattn.errors import ArgumentError, PortattnError
from portattn.launch.torch_compat import synchronize
from portattn.reference.dropout import keep_mask
from portattn.schema.call import Call
from portattn.schema.lowering import Launch
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.testing.bound import LowerBound
from portattn.testing.tolerance import nan_filled_memory
from portattn.tools.bench.cases import Case
from portattn.tools.bench.gate import NAMES, GradientGate, OracleGate, reason, sample_gradients
from portattn.tools.bench.tensors import Tensors, rows_of
from portattn.tools.tune import race
from portattn.tools.tune.classes import WRITTEN, Class, Workload, call_of
from portattn.tools.tune.race import SampleClock, Times
from portattn.tools.tune.records import CandidateRecord, CandidateState, Record, Trying
from portattn.tools.tune.tunable import (
    BuiltCandidate,
    Choice,
    CompileResult,
    NotBuilt,
    Only,
    RunnableCandidate,
    Tunable,
    verdict,
)


class Errors(NamedTuple):
    """Largest and mean absolute error of one run in the gate's sample, and the largest allowed error."""

    largest: float
    mean: float
    budget: float

    @property
    def wrong(self) -> bool:
        """Return whether the error is over the budget or NaN."""
        return not self.largest <= self.budget


class Checker(OracleGate):
    """Compare a candidate's output with the float64 oracle."""

    def errors(self, out: torch.Tensor) -> Errors:
        """Return the errors of `out`, (B, Hq, Sq, Dv) as a Call has it; packed (1, Hq, Tq, Dv)."""
        shown = out[0].transpose(0, 1) if self.case.packed else out
        worst, total, count = 0.0, 0.0, 0
        for sequence, head, rows, expected in self._parts:
            got = rows_of(self.case, shown, sequence, head, rows)
            off = (got.double() - expected).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
            worst, total, count = max(worst, float(off.max())), total + float(off.sum()), count + off.numel()
        return Errors(worst, total / max(count, 1), self.budget)


class GradientChecker:
    """Compare a candidate's gradients with float64: the largest error of each segment, as a part of its budget."""

    def __init__(self, case: Case, t: Tensors, call: Call) -> None:
        self.case, self.call, self.gate = case, call, GradientGate(case, t)
        if case.dropout:
            self.gate.expect([self._kept(sequence * case.heads_q + head) for sequence, head in sample_gradients(case)])

    def _kept(self, number: int) -> torch.Tensor:
        seed = self.call.dropout_seed
        assert seed is not None
        rows, keys = (torch.arange(size, device=seed.device) for size in (self.case.seq_q, self.case.seq_k))
        head = torch.tensor(number, device=seed.device)
        return keep_mask(seed, self.case.dropout, head, rows[:, None], keys[None])

    def errors(self, _: torch.Tensor) -> Errors:
        """Return the errors of the gradients in the call's memory; infinite if one is not finite."""
        found = (self.call.forward_out, *(getattr(self.call, name) for name in WRITTEN))
        results = {name: x[0].transpose(0, 1) if self.case.packed else x for name, x in zip(NAMES, found, strict=True)}
        return Errors(*self.gate.shares(results), self.gate.budget)


def checker(case: Case, t: Tensors, call: Call) -> Checker | GradientChecker:
    return GradientChecker(case, t, call) if case.backward else Checker(case, t)


def start(built: BuiltCandidate, call: Call) -> RunnableCandidate:
    """Return the candidate with outputs that hold NaN, so that unwritten parts show."""
    for name in WRITTEN:
        memory = getattr(call, name)
        if memory is not None:
            memory.fill_(float("nan"))
    with nan_filled_memory():
        return built.start(call)


class TuningDeviceLost(PortattnError):
    """A candidate left the device unusable for this process; the log is whole, and --resume goes on without it."""


@dataclass(slots=True)
class Entrant:
    """One candidate of a class; built, errors, times and bounds are by problem."""

    choice: Choice
    built: dict[str, BuiltCandidate]
    incumbent: bool = False
    errors: dict[str, Errors] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)
    bounds: dict[str, LowerBound] = field(default_factory=dict)

    def least(self, name: str) -> float | None:
        return self.bounds[name].us if name in self.bounds else None

    @property
    def codes(self) -> list[tuple[str, BuiltCandidate]]:
        return [(built.key, built) for built in self.built.values()]


@dataclass(slots=True)
class Field:
    """A class with its entrants, the incumbent first, and its dropped candidates."""

    of: Class
    tunable: Tunable
    entrants: list[Entrant] = field(default_factory=list)
    dropped: list[CandidateRecord] = field(default_factory=list)

    def enter(self, choice: Choice, target: Target, seen: dict[tuple[str, ...], Choice], own: bool = False) -> bool:
        """Enter a choice if it can be built for all problems and has no twin in `seen`; else record the reason."""
        built: dict[str, BuiltCandidate] = {}
        for load in self.of.workloads:
            try:
                built[load.name] = self.tunable.build(load.problem, choice, target)
            except NotBuilt as no:
                self.dropped.append(candidate_record(self.of, load, choice, "refused", str(no)))
                return False
        identities = tuple(one.identity for one in built.values())
        if identities in seen:
            twin = f"the same launches as {seen[identities]}"
            self.dropped.append(candidate_record(self.of, self.of.workloads[0], choice, "twin", twin))
            return False
        seen[identities] = choice
        self.entrants.append(Entrant(choice, built, incumbent=own))
        return True


def proposals(
    classes: Sequence[Class], tools: Mapping[str, Tunable], target: Target, most: int, only: Only
) -> list[Field]:
    """Return the entrants of every class. Raises ArgumentError if `only` leaves nothing to try in any of them."""
    found = [propose(one, tools[one.kernel], target, most, only) for one in classes]
    if only and found and not any(not entrant.incumbent for ground in found for entrant in ground.entrants):
        told = ", ".join(f"{name}={value}" for name, values in only.items() for value in values)
        raise ArgumentError("tune", "--setting", told, "must leave a candidate besides today's choice")
    return found


def propose(of: Class, tunable: Tunable, target: Target, most: int, only: Only = MappingProxyType({})) -> Field:
    """Return the entrants of a class; most: the number nearest to the incumbent, 0 for all; only: allowed values."""
    found = Field(of, tunable)
    base = of.incumbent or Choice()
    space = (c for c in tunable.space(of.workloads[0].problem, target, base) if c.among(only))
    choices = [of.incumbent] if of.incumbent is not None else []
    seen: dict[tuple[str, ...], Choice] = {}
    for choice in (*choices, *space):
        own = choice is of.incumbent
        if choice == of.incumbent and not own:
            continue
        entered = found.enter(choice, target, seen, own)
        if entered and most and sum(not one.incumbent for one in found.entrants) >= most:
            break
    return found


def usable_entrants(ground: Field, codes: dict[str, CompileResult], target: Target, most_spilled: int) -> list[Entrant]:
    """Return entrants that compile, fit and do not spill (the incumbent may); records of others go to `dropped`."""
    left = []
    for entrant in ground.entrants:
        for load in ground.of.workloads:
            built = entrant.built[load.name]
            code = codes.get(built.key)
            if built.compile is None and code is None:
                continue
            if code is None:
                why, word = "", "not reached"
            else:
                allowed = 2**31 if entrant.incumbent else most_spilled
                why, word = verdict(code, entrant.choice, target, allowed), "ruled out"
            if code is None or why:
                known = facts_of(built, codes)
                ground.dropped.append(candidate_record(ground.of, load, entrant.choice, word, why, **known))  # type: ignore[arg-type]
                break
        else:
            left.append(entrant)
    return left


def facts_of(built: BuiltCandidate, codes: dict[str, CompileResult]) -> dict[str, Any]:
    code = codes.get(built.key)
    facts = (code.facts if code else None) or {}
    return {name: int(facts[name]) for name in ("registers", "spills", "scratchpad_bytes") if name in facts}


def candidate_record(
    of: Class, load: Workload, choice: Choice, word: CandidateState, why: str = "", **known: Any
) -> CandidateRecord:
    return CandidateRecord(name=of.name, problem=load.name, choice=choice, verdict=word, reason=why, **known)


class PreparedWorkload:
    """One workload on a device: its inputs, call and checker."""

    def __init__(self, load: Workload, device: torch.device) -> None:
        self.load, self.device = load, device
        tensors = Tensors.random(load.case, device)
        self.call: Call = call_of(load.case, tensors)
        self.checker = checker(load.case, tensors, self.call)

    def first_run(self, built: BuiltCandidate) -> tuple[RunnableCandidate, Errors]:
        """Run a candidate once into outputs that held NaN. Raises any error of compiler and device."""
        begun = start(built, self.call)
        begun.run()
        synchronize(self.device)
        return begun, self.checker.errors(begun.out)


class Race:
    """Check and time the entrants of a class; after `out_of_time` only incumbent and finalists. `note` gets records."""

    def __init__(
        self, ground: Field, codes: dict[str, CompileResult], device: torch.device, clock: SampleClock,
        note: Callable[[Record], None], fatal: set[tuple[str, str]], out_of_time: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.ground, self.of, self.codes, self.device, self.clock = ground, ground.of, codes, device, clock
        self.note, self.fatal, self.out_of_time = note, fatal, out_of_time
        self.complete = True
        self._stage: PreparedWorkload | None = None

    def stage(self, load: Workload) -> PreparedWorkload:
        """Return the prepared workload; the last one is kept, so that a class of one problem has one."""
        if self._stage is None or self._stage.load is not load:
            self._stage = None  # frees its tensors first
            self._stage = PreparedWorkload(load, self.device)
        return self._stage

    def probe(self, entrants: Sequence[Entrant]) -> list[Entrant]:
        left = list(entrants)
        for load in self.of.workloads:
            best = float("inf")
            kept = []
            for entrant in left:
                if self.out_of_time() and not entrant.incumbent:
                    self.complete = False
                    self._say(load, entrant, "not reached")
                    continue
                times = self._probed(load, entrant)
                if times is None:
                    continue
                entrant.times[load.name] = times
                if times.least > race.ABANDON * best and not entrant.incumbent:
                    self._say(load, entrant, "abandoned", f"{times.median / best:.2f} times the best so far")
                    continue
                best = min(best, times.median)
                kept.append(entrant)
            left = kept
        return left

    def _probed(self, load: Workload, entrant: Entrant) -> Times | None:
        if (load.name, entrant.choice.key) in self.fatal:
            self._say(load, entrant, "broke", "it ended the process when it was first run, in the run that is resumed")
            return None
        begun = self._begun(load, entrant)
        if begun is None:
            return None
        times = Times.of(self.clock.samples(begun.run, load.case.timing, thorough=False))
        if self._spoiled(load, entrant, begun):  # a fast one that is wrong would have the right ones abandoned
            return None
        # Until there is more to say of it; a log that ends here has its figures.
        entrant.times[load.name] = times
        self._say(load, entrant, "slower", "probed")
        return times

    def _begun(self, load: Workload, entrant: Entrant) -> RunnableCandidate | None:
        stage = self.stage(load)
        self.note(Trying(name=self.of.name, problem=load.name, choice=entrant.choice.key))
        try:
            begun, errors = stage.first_run(entrant.built[load.name])
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a candidate raises is its verdict
            # What no child could compile, or does not fit, is ruled out late; what a device raises is a fault.
            word: CandidateState = "ruled out" if compilers_error(error) else "broke"
            self._say(load, entrant, word, f"{type(error).__name__}: {reason(error)}")
            self._alive(entrant)
            return None
        entrant.errors[load.name] = errors
        if errors.wrong:
            self._say(load, entrant, "wrong", f"error {errors.largest:.2e} is over the budget {errors.budget:.2e}")
            return None
        return begun

    def _spoiled(self, load: Workload, entrant: Entrant, begun: RunnableCandidate) -> bool:
        """Return whether the result is wrong after many runs, which give a data race its chance."""
        entrant.errors[load.name] = self.stage(load).checker.errors(begun.out)
        if entrant.errors[load.name].wrong:
            self._say(load, entrant, "wrong", "right at first, and wrong after it was timed")
        return entrant.errors[load.name].wrong

    def _alive(self, entrant: Entrant) -> None:
        try:
            synchronize(self.device)
        except RuntimeError as error:
            raise TuningDeviceLost(f"tune: {entrant.choice} left the device unusable: {reason(error)}") from None

    def ranked(self, entrants: Sequence[Entrant]) -> list[Entrant]:
        names = [load.name for load in self.of.workloads]
        least = [min(one.times[name].median for one in entrants) for name in names] if entrants else []
        return sorted(entrants, key=lambda one: race.mean_ratio([one.times[name].median for name in names], least))

    def finalists(self, entrants: Sequence[Entrant]) -> list[Entrant]:
        """Return the best by their probes, and the incumbent in any case."""
        ranked = self.ranked(entrants)
        own = [one for one in ranked if one.incumbent]
        return [*own, *[one for one in ranked if not one.incumbent][: race.FINALISTS]]

    def final(self, entrants: Sequence[Entrant], rounds: int) -> list[Entrant]:
        """Time the finalists in turns and check them again; return the right ones, the fastest first."""
        left = list(entrants)
        for load in self.of.workloads:
            begun = {one.choice.key: run for one in left if (run := self._begun(load, one)) is not None}
            times = race.take_turns({key: one.run for key, one in begun.items()}, self.clock, load.case.timing, rounds)
            kept = []
            for one in left:
                if one.choice.key not in begun:
                    continue
                one.times[load.name] = times[one.choice.key]
                if not self._spoiled(load, one, begun[one.choice.key]):
                    kept.append(one)
            left = kept
        return self.ranked(left)

    def say_all(self, entrant: Entrant, word: CandidateState, why: str = "") -> None:
        for load in self.of.workloads:
            self._say(load, entrant, word, why)

    def _say(self, load: Workload, entrant: Entrant, word: CandidateState, why: str = "") -> None:
        errors = entrant.errors.get(load.name)
        known: dict[str, Any] = facts_of(entrant.built[load.name], self.codes)
        if errors is not None:
            known |= {"error": errors.largest, "mean_error": errors.mean, "budget": errors.budget}
        # Infinite errors have no place in JSON, and say enough as a verdict.
        known = {name: value for name, value in known.items() if value != float("inf")}
        self.note(
            candidate_record(self.of, load, entrant.choice, word, why, times=entrant.times.get(load.name), **known)
        )


def compilers_error(error: Exception) -> bool:
    """Return whether an error is Triton's about a kernel (it does not compile, or exceeds the chip)."""
    own = type(error).__module__.partition(".")[0] == "triton" or "PassManager" in str(error)
    return own and is_compilers(error)


def witnesses(of: Class) -> list[Problem]:
    """Return problems that the entry will serve as well and that need more registers and memory: LSE, and lengths."""
    found = []
    for load in of.workloads:
        p = load.problem
        if p.backward:
            lengths = {} if p.packed else {"seqlens_q": True, "seqlens_k": True}
            found.append(msgspec.structs.replace(p, grad_lse=True, **lengths))
            continue
        more: dict[str, Any] = {
            "attention": {"seqlens_q": True, "seqlens_k": True},
            "decode_attention": {"leftpad_k": True},
        }
        found.append(msgspec.structs.replace(p, return_lse=True, **more.get(p.op, {})))
    return found


def larger_tiles_first(entrant: Entrant) -> tuple[int, ...]:
    """Return the sort key of untimed candidates: the largest tile, then fewer warps, then a deeper pipeline."""
    launch = Launch().changed(entrant.choice.launch)
    return -launch.block_m * launch.block_n, launch.num_warps, -launch.num_stages
