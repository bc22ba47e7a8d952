"""Run cells: gate, then time, then write one row a cell."""

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from portattn.launch.torch_compat import timed_device
from portattn.tools.bench import firstcall, peers, results, rounds
from portattn.tools.bench.cases import Case, Cell
from portattn.tools.bench.contenders import CORE, MINE, OURS, Contender, explain_plans, own_builds
from portattn.tools.bench.gate import FAILURES, Admission, DeviceLost, Say, admit, reason, same_path
from portattn.tools.bench.peers import PEERS, Peer
from portattn.tools.bench.releases import PreparedCase, ReleaseProcess
from portattn.tools.bench.results import DeviceProbe, Figures, Row
from portattn.tools.bench.rounds import Ceilings, DeviceClock
from portattn.tools.bench.tensors import Tensors

GRAPH_BELOW_MS = 1.0  # of eager time: in longer calls, what a launch costs is nothing
GRAPH_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class BenchOptions:
    rounds: int = 5
    backend: str = "auto"
    wanted: Sequence[str] = tuple(PEERS)  # names of the peers to time if they are here; others: peers from files
    others: Mapping[str, Peer] = field(default_factory=dict)
    core: bool = False  # the core kernel beside the plan's own choice
    only_host: bool = False  # enqueue times and nothing else


def run_case(
    set_: str, case: Case, indices: Mapping[str, int], device: torch.device, clock: DeviceClock,
    limits: Ceilings | None, options: BenchOptions, processes: Mapping[str, ReleaseProcess] | None = None,
    say: Say = lambda what: None,
) -> dict[str, Row]:  # fmt: skip
    """Gate and time one case, telling `say` each step; return rows by release. Raises DeviceLost.

    Without processes portattn is timed in this process, as the release "". Else each release's contenders take turns as
    `contender @release`. A wrong contender has a reason and no time."""
    begun, here = time.monotonic(), not processes
    everyone, t = Admission(math.nan), None
    if here or options.wanted or options.others:
        try:
            t = Tensors.random(case, device)
            builds = own_builds(case, t, options.backend, options.core) if here else {}
            builds |= peers.contenders(case, t, options.wanted, options.others)
            everyone = admit(case, t, builds, clock.lost, say)
        except torch.OutOfMemoryError as failure:
            everyone = Admission(math.nan, refused=dict.fromkeys([OURS] if here else options.wanted, reason(failure)))
    prepared: dict[str, PreparedCase] = {}
    mine: dict[str, tuple[str, str]] = {}  # name among all -> release and name among its own
    if here:
        plan = explain_plans(case, t, everyone.contenders.get(OURS), options.backend)
        prepared[""] = PreparedCase(budget=everyone.budget, same=same_path(everyone), plan=plan)
        mine = {name: ("", name) for name in (*everyone.contenders, *everyone.refused) if name in MINE}
    for release, process in (processes or {}).items():
        own, prepared[release] = process.prepare(case, options.backend, options.core)
        everyone.contenders |= {f"{name} @{release}": one for name, one in own.contenders.items()}
        everyone.errors |= {f"{name} @{release}": error for name, error in own.errors.items()}
        everyone.refused |= {f"{name} @{release}": why for name, why in own.refused.items()}
        mine |= {f"{name} @{release}": (release, name) for name in (*own.contenders, *own.refused)}
    say("timing")
    timing_begun = time.monotonic()
    measured, probe = time_contenders(case, everyone, clock, options, mine)
    now, state = time.monotonic(), probe.read()[0]
    more: dict[str, Any] = {}
    if here:
        more = {"checked": everyone.checked, "reference_s": everyone.reference_s, "timing_s": now - timing_begun}
    others = {name: figures for name, figures in measured.items() if name not in mine}
    rows = {}
    for release, made in prepared.items():
        found = {
            name: msgspec.structs.replace(measured[whole], name=name)
            for whole, (of, name) in mine.items()
            if of == release
        }
        if made.same:  # the plan takes the core anyway
            found[CORE] = msgspec.structs.replace(found[OURS], name=CORE, admit_s=everyone.admit_s.get(CORE))
        ordered = {name: found[name] for name in MINE if name in found}
        budget = made.budget if made.budget is not None and math.isfinite(made.budget) else None
        rows[release] = results.row(
            set_, case, indices[release], limits, budget, ordered | others, plan=made.plan, state=state,
            seconds=now - begun, **more,
        )  # fmt: skip
    return rows


def time_contenders(
    case: Case, admitted: Admission, clock: DeviceClock, options: BenchOptions, mine: Collection[str]
) -> tuple[dict[str, Figures], DeviceProbe]:
    """Return figures of admitted contenders and refusals of the others (`mine`: portattn's own). Raises DeviceLost."""
    contenders, refused = admitted.contenders, dict(admitted.refused)
    turns, graphs, no_graph = rounds.Turns(), rounds.Turns(), dict[str, str]()
    probe = DeviceProbe()
    if not options.only_host:
        turns = rounds.interleaved(contenders, clock, case.timing, options.rounds)
        refused |= {name: f"failed when it was timed: {why}" for name, why in turns.failed.items()}
        contenders = {name: contender for name, contender in contenders.items() if name not in turns.failed}
        graphs, no_graph = _graphs(case, contenders, turns, clock)
    measured = {}
    for name in dict.fromkeys([*admitted.contenders, *refused]):
        contender, admit_s = contenders.get(name), admitted.admit_s.get(name)
        if contender is None:
            error = admitted.errors.get(name)
            measured[name] = Figures(name=name, refused=refused[name], error=error, admit_s=admit_s)
            continue
        try:
            with contender.around():
                taken = turns.ms.get(name) or [clock.turn_ms(contender.run, "hot", 1, 0.0)]
                host = clock.host_us(contender.run, min(taken))
                extra = _extra_bytes(contender, clock) if name in mine or case.backward else None
        except FAILURES as failure:
            if lost := clock.lost():
                raise DeviceLost(name, failure, lost) from None
            why = f"failed when it was timed: {reason(failure)}"
            measured[name] = Figures(name=name, refused=why, error=admitted.errors.get(name))
            continue
        measured[name] = Figures(
            name=name, path=contender.path, error=admitted.errors[name], rounds_ms=tuple(turns.ms.get(name, ())),
            graph_ms=tuple(graphs.ms.get(name, ())), no_graph=no_graph.get(name, ""), host_us=host, extra_bytes=extra,
            admit_s=admit_s,
        )  # fmt: skip
    return measured, probe


def _extra_bytes(contender: Contender, clock: DeviceClock) -> int | None:
    peak = clock.peak_extra_bytes(contender.run)
    return None if peak is None else max(peak - contender.result_bytes, 0)


def _graphs(
    case: Case, contenders: Mapping[str, Contender], turns: rounds.Turns, clock: DeviceClock
) -> tuple[rounds.Turns, dict[str, str]]:
    replays, without = {}, {}
    for name, contender in contenders.items():
        if case.backward:
            without[name] = "not captured: autograd runs a backward on its forward's stream"
            continue
        if min(turns.ms[name]) > GRAPH_BELOW_MS:
            without[name] = f"not captured: longer than {GRAPH_BELOW_MS:g} ms"
            continue
        try:
            replays[name] = Contender(clock.graphed(contender))
        except FAILURES as failure:  # a path that waits for the device cannot be captured
            without[name] = reason(failure)
    graphs = rounds.interleaved(replays, clock, case.timing, GRAPH_ROUNDS)
    return graphs, without | graphs.failed


Item = Row | firstcall.FirstCall


def run_cells(
    cells: Sequence[Cell], indices: Mapping[str, int], clock: DeviceClock, limits: Ceilings | None,
    options: BenchOptions, done: Callable[[dict[str, Item]], None], budget: float | None = None,
    device: torch.device | None = None, say: Callable[[str, str], None] = lambda case, what: None,
    processes: Mapping[str, ReleaseProcess] | None = None,
) -> int:  # fmt: skip
    """Measure cells as `each_cell` does; `done` gets items by release ("": this process), on DeviceLost too."""
    where = device or timed_device() or torch.device("cpu")
    several = processes or {}

    def measure(set_: str, case: Case) -> None:
        if set_ == firstcall.COLD_START:
            if several:
                done({name: process.first_call(case, indices[name]) for name, process in several.items()})
            else:
                done({"": firstcall.measure(case, indices[""])})
            return
        telling = functools.partial(say, case.name)
        try:
            done(dict(run_case(set_, case, indices, where, clock, limits, options, several, telling)))
        except DeviceLost as lost:  # kept, so that a run that goes on does not end here again
            who = {lost.name: Figures(name=lost.name, refused=str(lost))}
            done({name: results.row(set_, case, index, limits, None, who) for name, index in indices.items()})
            raise
        finally:
            for process in several.values():
                process.drop()
            if where.type == "cuda":
                with contextlib.suppress(RuntimeError):  # of a lost device, which the DeviceLost under way tells
                    torch.cuda.empty_cache()

    return each_cell(cells, measure, budget)


def each_cell(cells: Sequence[Cell], measure: Callable[[str, Case], None], budget: float | None = None) -> int:
    """Measure until a median cell (the first one compiles) would exceed `budget` seconds; return how many were done."""
    begun, took = time.monotonic(), list[float]()
    for count, (set_, case) in enumerate(cells):
        since = time.monotonic()
        if budget is not None and took and since - begun + statistics.median(took) > budget:
            return count
        measure(set_, case)
        took.append(time.monotonic() - since)
    return len(cells)
