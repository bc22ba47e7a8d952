"""Running cells: gate, then time, then one row a cell."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from portattn.tools.bench import firstcall, peers, results, timing
from portattn.tools.bench.backward import GradientContender, own_builds
from portattn.tools.bench.cases import Case
from portattn.tools.bench.clock import Ceilings, Clock
from portattn.tools.bench.contenders import CORE, MINE, OURS, Contender, plan_of
from portattn.tools.bench.gate import FAILURES, Admission, DeviceLost, Say, admit, reason
from portattn.tools.bench.peers import PEERS, Peer
from portattn.tools.bench.provenance import DeviceProbe
from portattn.tools.bench.results import Figures, Row
from portattn.tools.bench.schedule import Cell
from portattn.tools.bench.tensors import Tensors

GRAPH_BELOW_MS = 1.0  # of eager time: in longer calls, what a launch costs is nothing
GRAPH_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How to measure.

    wanted     names of the peers to time, where they are here; others: peers that files brought
    core       the portable core beside the plan's own choice
    only_host  enqueue times and nothing else
    """

    rounds: int = 5
    backend: str = "auto"
    wanted: Sequence[str] = tuple(PEERS)
    others: Mapping[str, Peer] = field(default_factory=dict)
    core: bool = False
    only_host: bool = False


def run_case(
    set_: str, case: Case, index: int, device: torch.device, clock: Clock, limits: Ceilings | None,
    options: BenchOptions, say: Say = lambda what: None,
) -> Row:  # fmt: skip
    """Gate and time one case. Who is wrong, or cannot run it, has a reason instead of a time.

    index  of the run that the row belongs to
    say    is told what is done next: "float64", a contender's name as it is made and checked, "timing"

    Raises DeviceLost when the device takes no more work.
    """
    begun = time.monotonic()
    try:
        t = Tensors.random(case, device)
        builds = own_builds(case, t, options.backend, options.core)
        builds |= peers.contenders(case, t, options.wanted, options.others)
        admitted = admit(case, t, builds, clock.lost, say)
    except torch.OutOfMemoryError as failure:
        empty = {OURS: Figures(name=OURS, refused=reason(failure))}
        return results.row(set_, case, index, limits, None, empty, seconds=time.monotonic() - begun)
    same = same_path(admitted)
    say("timing")
    timing_begun = time.monotonic()
    measured, probe = time_contenders(case, admitted, clock, options)
    timing_s = time.monotonic() - timing_begun
    if same:  # the plan takes the core anyway
        measured[CORE] = msgspec.structs.replace(measured[OURS], name=CORE, admit_s=admitted.admit_s.get(CORE))
    plan = explain_plans(case, t, admitted.contenders.get(OURS), options.backend)
    return results.row(
        set_, case, index, limits, admitted.budget, measured, plan=plan, state=probe.read()[0],
        checked=admitted.checked, seconds=time.monotonic() - begun, reference_s=admitted.reference_s, timing_s=timing_s,
    )  # fmt: skip


def explain_plans(case: Case, t: Tensors, ours: Contender | None, backend: str) -> tuple[str, ...]:
    """What portattn's plan says of itself; of a backward the forward's and, where it tells one, its own."""
    if ours is None:
        return ()
    with ours.around():
        plans = [plan_of(case, t.leaves() if case.backward else t, backend)]
    if isinstance(ours, GradientContender) and ours.plan is not None:
        plans.append(ours.plan)
    return tuple(line for plan in plans for line in plan.explain().splitlines())


def same_path(admitted: Admission) -> bool:
    """Whether the core is what the plan chose; it is not timed twice then. A backward may not tell its path."""
    ours, core = (admitted.contenders.get(name) for name in (OURS, CORE))
    if ours is None or core is None or not ours.path or ours.path != core.path:
        return False
    del admitted.contenders[CORE]
    return True


def time_contenders(
    case: Case, admitted: Admission, clock: Clock, options: BenchOptions, mine: Collection[str] = MINE
) -> tuple[dict[str, Figures], DeviceProbe]:
    """Everything that is measured of who was admitted, and why there is nothing of the others.

    mine  names of portattn's own contenders

    Raises DeviceLost.
    """
    contenders, refused = admitted.contenders, dict(admitted.refused)
    turns, graphs, no_graph = timing.Turns(), timing.Turns(), dict[str, str]()
    probe = DeviceProbe()
    if not options.only_host:
        turns = timing.interleaved(contenders, clock, case.timing, options.rounds)
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


def _extra_bytes(contender: Contender, clock: Clock) -> int:
    """What a call allocates at its peak: a forward's result with it, without a backward's gradients."""
    return max(clock.peak_extra_bytes(contender.run) - contender.result_bytes, 0)


def _graphs(
    case: Case, contenders: Mapping[str, Contender], turns: timing.Turns, clock: Clock
) -> tuple[timing.Turns, dict[str, str]]:
    """The same calls replayed from graphs, taking turns too; and why some have none."""
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
    graphs = timing.interleaved(replays, clock, case.timing, GRAPH_ROUNDS)
    return graphs, without | graphs.failed


def run_cells(
    cells: Sequence[Cell],
    index: int,
    clock: Clock,
    limits: Ceilings | None,
    options: BenchOptions,
    done: Callable[[Row | firstcall.FirstCall], None],
    budget: float | None = None,
    device: torch.device | None = None,
    say: Callable[[str, str], None] = lambda case, what: None,
) -> int:
    """Measure cells as long as `each_cell` does; how many were done. `done` gets each as it is finished."""
    where = device or torch.device("cuda", torch.cuda.current_device())

    def measure(set_: str, case: Case) -> None:
        if set_ == firstcall.COLD_START:
            done(firstcall.measure(case, index))
            return
        try:
            found = run_case(set_, case, index, where, clock, limits, options, functools.partial(say, case.name))
        except DeviceLost as lost:  # kept, so that a run that goes on does not end here again
            who = {lost.name: Figures(name=lost.name, refused=str(lost))}
            done(results.row(set_, case, index, limits, None, who))
            raise
        done(found)
        if where.type == "cuda":
            torch.cuda.empty_cache()

    return each_cell(cells, measure, budget)


def each_cell(cells: Sequence[Cell], measure: Callable[[str, Case], None], budget: float | None = None) -> int:
    """Measure cells until they are all done, or another one would go beyond `budget` seconds if it took as long as the
    median so far: the first one loads libraries and compiles, and those that follow often take less. How many were
    done.
    """
    begun, took = time.monotonic(), list[float]()
    for count, (set_, case) in enumerate(cells):
        since = time.monotonic()
        if budget is not None and took and since - begun + statistics.median(took) > budget:
            return count
        measure(set_, case)
        took.append(time.monotonic() - since)
    return len(cells)
