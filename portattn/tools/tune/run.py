"""A whole run: propose and compile every class, then check and time class by class if the chip is here."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import torch

from portattn.launch.torch_compat import synchronize
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry, parse_target
from portattn.schema.target import Target
from portattn.tools import lab
from portattn.tools.bench.cases import Case
from portattn.tools.bench.gate import reason
from portattn.tools.bench.tensors import Tensors
from portattn.tools.lab.creating import OpenWorker, run_in_threads
from portattn.tools.tune import race, search
from portattn.tools.tune.classes import UNTUNED, Class, call_of, workload
from portattn.tools.tune.core import core_tunable
from portattn.tools.tune.log import History
from portattn.tools.tune.race import SampleClock
from portattn.tools.tune.records import CandidateRecord, CodeRecord, Outcome, ProblemResult, Record
from portattn.tools.tune.tunable import BuiltCandidate, Choice, CompileResult, NotBuilt, Tunable, compile_all, verdict
from portattn.worker.child import RUNS
from portattn.worker.client import Reply, Worker


def tunables(target: Target, registry: Registry | None = None) -> list[Tunable]:
    """Return everything tunable for a target: the core kernels (of gradients' only these), then the backend's."""
    backend = (registry or Registry.load()).backends[target.backend]
    kernels = [kernel for kernel in CORES.values() if kernel.op not in UNTUNED] if backend.core_path else []
    found: list[Tunable] = [core_tunable(kernel) for kernel in kernels]
    return [*found, *backend.tunables(target.arch.name)]


class CandidateJob(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate to run: everything a child needs to build it. code: the key of its result."""

    code: str
    target: str
    kernel: str
    case: Case
    choice: Choice
    device: str


def warm(asked: CandidateJob) -> str:
    """Run a candidate once; return why it does not compile or fit, or "": its check finds other device errors again."""
    target, device = parse_target(asked.target), torch.device(asked.device)
    tunable = next(one for one in tunables(target) if one.name == asked.kernel)
    call = call_of(asked.case, Tensors.random(asked.case, device))
    try:
        tunable.build(workload(asked.case).problem, asked.choice, target).start(call).run()
        synchronize(device)
    except Exception as error:  # noqa: BLE001 - as above
        return f"{type(error).__name__}: {reason(error)}" if search.compilers_error(error) else ""
    return ""


TASK = "portattn.tools.tune.run:answer"


def answer(request: Mapping[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    asked = msgspec.json.decode(request["candidate"], type=CandidateJob)
    enter(RUNS)
    return {"facts": {"failure": warm(asked)}}


def warm_all(
    jobs: Sequence[CandidateJob], processes: int, seconds: float, done: Callable[[str, str], None],
    out_of_time: Callable[[], bool], task: str = TASK,
) -> None:  # fmt: skip
    """Run every candidate in a child, telling `done(code, failure)`; its check tries one whose child ended otherwise.

    seconds: the limit of each; none begins once `out_of_time`"""

    def run(asked: CandidateJob, opened: OpenWorker) -> Reply:
        child: Worker = opened("", lambda: lab.worker(runs="kernels"))
        return child.request(task, seconds, candidate=msgspec.json.encode(asked).decode())

    def told(asked: CandidateJob, reply: Reply) -> None:
        if reply.outcome == "ok":
            done(asked.code, str(reply.facts["failure"]))

    run_in_threads(jobs, run, processes, told, out_of_time)


BOUND_GAIN = 0.05  # by which a candidate's bound must be less than the incumbent's
BOUND_STEP = 0.01
COMPILING_SHARE = 0.5  # of a budget, where something is to be timed as well


class TuneOptions(msgspec.Struct, frozen=True, kw_only=True):
    budget: float | None = None  # seconds for all of it; None for no limit
    jobs: int = 2  # compiles at a time
    seconds: float = 120.0  # time limit of one compile
    spills: int = 0  # bytes of spills that a candidate may have; spills_as_today: as many as today's choice, if more
    spills_as_today: bool = False
    candidates: int = 0  # most candidates of each class, those nearest to the incumbent; 0 for all
    rounds: int = 6  # in which finalists take turns
    only: dict[str, tuple[str, ...]] = {}  # allowed values by setting
    by_bound: bool = False  # what compiles is chosen by lower bounds on its time


class Tuner:
    """A run over classes, only compiled without device and clock; `note` gets records, `begin` steps and lengths."""

    def __init__(
        self, target: Target, tunables: Sequence[Tunable], options: TuneOptions, note: Callable[[Record], None],
        history: History, device: torch.device | None = None, clock: SampleClock | None = None,
        begin: Callable[[str, int], None] = lambda what, steps: None, make: Callable[[str], Worker] | None = None,
    ) -> None:  # fmt: skip
        self.target, self.options, self.note, self.begin, self.make = target, options, note, begin, make
        self.tunables = {tunable.name: tunable for tunable in tunables}
        self.history, self.device, self.clock = history, device, clock
        self.codes: dict[str, CompileResult] = {
            code: CompileResult(record.failure, record.facts) for code, record in history.codes.items()
        }
        self._begun = time.monotonic()

    def run(self, classes: Sequence[Class], done: Callable[[Class, Outcome], None]) -> list[Outcome]:
        left = [one for one in classes if one.name not in self.history.done]
        fields = search.proposals(left, self.tunables, self.target, self.options.candidates, self.options.only)
        for ground in fields:
            for record in ground.dropped:
                self.note(record)
            ground.dropped.clear()
        self.compile(interleaved(fields), COMPILING_SHARE)
        self.warm(fields)
        outcomes = []
        self.begin("classes", len(fields))
        for number, ground in enumerate(fields):
            outcome = self._one(ground, len(fields) - number)
            self.note(outcome)
            self.history.done[outcome.name] = outcome
            outcomes.append(outcome)
            done(ground.of, outcome)
        return outcomes

    def compile(self, codes: Sequence[Sequence[tuple[str, BuiltCandidate]]], share: float = 1.0) -> None:
        jobs = [job for some in codes for job in some]
        new = {code for code, built in jobs if code not in self.codes and built.compile is not None}
        self.begin("compiling", len(new))
        end = self._end(share if self.device is not None else 1.0)

        def done(code: str, made: CompileResult) -> None:
            self.codes[code] = made
            self.note(CodeRecord(code=code, failure=made.failure, facts=made.facts))

        options = self.options
        compile_all(
            jobs, str(self.target.toolchain), options.jobs, options.seconds, done, self.codes, self.make,
            lambda: time.monotonic() >= end,
        )  # fmt: skip

    def warm(self, grounds: Sequence[search.Field]) -> None:
        """Run in children the candidates that could not be compiled there, if there is a device."""
        if self.device is None or self.device.type == "cpu":
            return
        asked = {
            built.key: CandidateJob(
                code=built.key, target=self.target.name, kernel=ground.of.kernel, case=load.case,
                choice=entrant.choice, device=str(self.device),
            )
            for ground in grounds
            for entrant in ground.entrants
            for load in ground.of.workloads
            if (built := entrant.built[load.name]).compile is None
        }  # fmt: skip
        jobs = [one for code, one in asked.items() if code not in self.codes]
        self.begin("first runs, in children", len(jobs))
        end = self._end(COMPILING_SHARE)

        def done(code: str, failure: str) -> None:
            self.codes[code] = CompileResult(failure)
            self.note(CodeRecord(code=code, failure=failure))

        warm_all(jobs, self.options.jobs, self.options.seconds, done, lambda: time.monotonic() >= end)

    def _end(self, share: float = 1.0) -> float:
        return float("inf") if self.options.budget is None else self._begun + self.options.budget * share

    def _one(self, ground: search.Field, classes_left: int) -> Outcome:
        begun = time.monotonic()
        entrants = search.usable_entrants(ground, self.codes, self.target, self._spills(ground))
        for record in ground.dropped:
            self.note(record)
        complete = not any(record.verdict == "not reached" for record in ground.dropped)
        if self.device is None or self.clock is None:
            outcome = self._compile_only(ground, entrants)
        else:
            try:
                outcome = self._timed(ground, entrants, begun + (self._end() - begun) / classes_left)
            except (MemoryError, torch.OutOfMemoryError) as error:
                outcome = self._nothing(ground, f"out of memory: {reason(error)}")
        seconds = round(time.monotonic() - begun, 3)
        return msgspec.structs.replace(outcome, seconds=seconds, complete=complete and outcome.complete)

    def _spills(self, ground: search.Field) -> int:
        most = self.options.spills
        if self.options.spills_as_today:
            own = (code for one in ground.entrants if one.incumbent for code, _ in one.codes)
            found = (self.codes[code].facts or {} for code in own if code in self.codes)
            most = max([most, *(int(facts.get("spills", 0)) for facts in found)])
        return most

    def _nothing(self, ground: search.Field, why: str) -> Outcome:
        nothing = {"name": ground.of.name, "incumbent": ground.of.incumbent, "reason": why}
        return Outcome(choice=None, replaces=False, measured=self.device is not None, **nothing)  # type: ignore[arg-type]

    def serving(self, ground: search.Field, entrants: Sequence[search.Entrant]) -> list[search.Entrant]:
        """Return entrants whose code also fits with features that the class's problems lack (LSE, lengths)."""
        asked: dict[str, list[tuple[str, BuiltCandidate]]] = {}
        for entrant in entrants:
            asked[entrant.choice.key] = []
            for problem in search.witnesses(ground.of):
                try:
                    built = ground.tunable.build(problem, entrant.choice, self.target)
                except NotBuilt:  # it is another candidate's then, or the core's
                    continue
                asked[entrant.choice.key].append((built.key, built))
        self.compile(list(asked.values()))
        left = []
        for entrant in entrants:
            whys = [
                verdict(self.codes[code], entrant.choice, self.target, most_spilled=2**31)
                for code, _ in asked[entrant.choice.key]
                if code in self.codes
            ]
            why = next(filter(None, whys), "")
            if why and not entrant.incumbent:
                for load in ground.of.workloads:
                    known = search.facts_of(entrant.built[load.name], self.codes)
                    told, times = f"with lengths and LSE: {why}", entrant.times.get(load.name)
                    self.note(
                        search.candidate_record(
                            ground.of, load, entrant.choice, "ruled out", told, times=times, **known
                        )
                    )
            else:
                left.append(entrant)
        return left

    def joined(self, ground: search.Field, ranked: Sequence[Choice]) -> list[search.Entrant]:
        """Return the tunable's joined choices of the probed ones (fastest first), compiled: the best of each sweep."""
        join = getattr(ground.tunable, "joined", None)
        if join is None:
            return []
        seen = {tuple(built.identity for built in one.built.values()): one.choice for one in ground.entrants}
        told, before, most = len(ground.dropped), list(ground.entrants), self._spills(ground)
        ground.entrants = []
        for choice in join(ground.of.incumbent or Choice(), ranked):
            if choice.among(self.options.only):
                ground.enter(choice, self.target, seen)
        self.compile([one.codes for one in ground.entrants])
        entrants = search.usable_entrants(ground, self.codes, self.target, most)
        ground.entrants = [*before, *ground.entrants]
        for record in ground.dropped[told:]:
            self.note(record)
        return entrants

    def _compile_only(self, ground: search.Field, entrants: list[search.Entrant]) -> Outcome:
        """Return the incumbent if it does not spill, else the largest tile that does not; or that of least bound."""
        of, chosen = ground.of, None
        own = next((one for one in entrants if one.incumbent), None)
        if any(built.compile is None for one in entrants for built in one.built.values()):
            nothing = self._nothing(ground, f"{of.kernel} cannot be compiled without its chip")
            return msgspec.structs.replace(nothing, choice=of.incumbent)
        why = ""
        if own is not None:
            codes = [self.codes[code] for code, built in own.codes if built.compile is not None]
            verdicts = (verdict(code, own.choice, self.target, self.options.spills) for code in codes)
            why = next(filter(None, verdicts), "")
            chosen = own if of.measured or not why else None
        clean = [one for one in entrants if not one.incumbent or not why]
        by_bound = self.options.by_bound and not of.measured
        ranked = self._ranked_by_bound(ground, own if chosen else None, clean) if by_bound else []
        for one in ranked or ([chosen] if chosen else sorted(clean, key=search.larger_tiles_first)):
            if one is own is chosen or self.serving(ground, [one]):
                chosen = one
                break
        for one in entrants:
            for load in of.workloads:
                if one is chosen:
                    word = "kept" if one.incumbent else "chosen"
                else:
                    word = "ruled out" if one.incumbent and why else "compiles"
                known = search.facts_of(one.built[load.name], self.codes)
                told = (why if one.incumbent else "") or str(one.bounds.get(load.name, ""))
                self.note(search.candidate_record(of, load, one.choice, word, told, **known))  # type: ignore[arg-type]
        if chosen is None:
            return self._nothing(ground, "no candidate compiles, fits and does not spill")
        known = search.facts_of(chosen.built[of.workloads[0].name], self.codes)
        return Outcome(
            name=of.name, choice=chosen.choice, replaces=not chosen.incumbent, measured=False, incumbent=of.incumbent,
            results=tuple(
                ProblemResult(problem=name, bound=chosen.least(name), incumbent_bound=own.least(name) if own else None)
                for name in (load.name for load in of.workloads)
            ),
            counts=_counts(entrants, ground), reason=why, by_bound=chosen in ranked and chosen is not own, **known,
        )  # fmt: skip

    def _ranked_by_bound(
        self, ground: search.Field, own: search.Entrant | None, entrants: Sequence[search.Entrant]
    ) -> list[search.Entrant]:
        """Return candidates whose bounds are less than the incumbent's by BOUND_GAIN, the least first, then it.

        Of bounds that differ by less than a step of BOUND_STEP the candidate nearest to the incumbent comes first."""
        for one in entrants:
            bounds = {
                name: built.bound(self.codes[built.key].facts or {}) if built.bound is not None else None
                for name, built in one.built.items()
            }
            one.bounds = {name: least for name, least in bounds.items() if least is not None}
        names = [load.name for load in ground.of.workloads]
        known = [one for one in entrants if len(one.bounds) == len(names)]
        if not known or (own is not None and own not in known):
            return []
        least = [min(one.bounds[name].us for one in known) for name in names]
        ratios = {one.choice.key: race.mean_ratio([one.bounds[name].us for name in names], least) for one in known}
        most = (1 - BOUND_GAIN) * ratios[own.choice.key] if own is not None else float("inf")
        base = own.choice if own is not None else Choice()
        better = [one for one in known if ratios[one.choice.key] < most]
        better.sort(key=lambda one: (int(ratios[one.choice.key] / BOUND_STEP), one.choice.differs(base)))
        return better + ([own] if own is not None else [])

    def _timed(self, ground: search.Field, entrants: list[search.Entrant], end: float) -> Outcome:
        assert self.device is not None
        assert self.clock is not None
        of = ground.of
        runs = search.Race(
            ground, self.codes, self.device, self.clock, self.note, self.history.fatal, lambda: time.monotonic() >= end
        )
        probed = runs.probe(entrants)
        probed += runs.probe(self.joined(ground, [one.choice for one in runs.ranked(probed)]))
        left = runs.finalists(probed)
        ranked = runs.final(self.serving(ground, left), self.options.rounds)
        if not ranked:
            return self._nothing(ground, "no candidate compiles, fits, is right and does not spill")
        own = next((one for one in ranked if one.incumbent), None)
        best, ratio, noise = ranked[0], None, None
        names = [load.name for load in of.workloads]
        if own is not None:
            ratio, noise = race.against([best.times[n] for n in names], [own.times[n] for n in names])
            if best is not own and not race.replaces(ratio, noise):
                runs.say_all(best, "within noise", f"{ratio:.3f} of the incumbent's time, noise {noise:.1%}")
                best, ratio = own, 1.0
        runs.say_all(best, "kept" if best is own else "chosen")
        other = next((one for one in ranked if one is not best), None)
        for one in ranked:
            if one not in (best, ranked[0]):
                runs.say_all(one, "slower", "in the final")
        results = tuple(
            ProblemResult(
                problem=name, times=best.times[name], error=best.errors[name].largest, budget=best.errors[name].budget,
                incumbent=own.times[name].median if own else None,
                runner_up=other.times[name].median if other else None,
            )
            for name in names
        )  # fmt: skip
        return Outcome(
            name=of.name, choice=best.choice, replaces=best is not own, measured=True, incumbent=of.incumbent,
            runner_up=other.choice if other else None, ratio=ratio, noise=noise, results=results,
            counts=_counts(entrants, ground), complete=runs.complete, timed_with=of.timed_with if own else "",
            **search.facts_of(best.built[names[0]], self.codes),
        )  # fmt: skip


def _counts(entrants: Sequence[search.Entrant], ground: search.Field) -> dict[str, int]:
    return {"looked at": len(entrants)} | dict(Counter(record.verdict for record in ground.dropped))


def interleaved(grounds: Sequence[search.Field]) -> list[list[tuple[str, BuiltCandidate]]]:
    """Return codes of all classes in turn, each class's nearest candidates first: the best order for a short budget."""
    rows = zip_longest(*([entrant.codes for entrant in ground.entrants] for ground in grounds), fillvalue=[])
    return [codes for row in rows for codes in row]


def red(records: Sequence[Record], outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the reasons for exit status 1: candidates that were wrong or broke, and classes without a choice."""
    found = [
        f"{record.verdict}: {record.choice} on {record.problem}: {record.reason}"
        for record in records
        if isinstance(record, CandidateRecord) and record.verdict in ("wrong", "broke")
    ]
    return found + [f"{name}: {one.reason}" for name, one in outcomes.items() if one.choice is None]
