"""What becomes of the figures: a Run is one process, a Row one case of one set, a Figures one contender there.

The schema of rows.jsonl (a Run, then its rows and first calls, a line each, as they are done) and of bench.json, which
holds the same and what follows from it: summaries of the sets and verdicts on the goals. docs/performance/README.md
describes both. What is measured is in Row and Figures; rates, fractions and ratios beside it follow from that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from portattn.tools.bench.cases import Case
from portattn.tools.bench.clock import Ceilings, Spread
from portattn.tools.bench.contenders import MINE
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.peers import REFERENCES, UNQUANTISED, library
from portattn.tools.bench.timing import ratio

SCHEMA = 3


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """Clocks in MHz, power in W, temperature in °C, at one moment. None: cannot be read here."""

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None


class BenchRun(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """One process that measured: chip, toolchain, code, date and command, without which a figure means nothing.

    versions   of torch, cuDNN, CUDA or ROCm, the driver, Python and the peers that are installed
    peers      of each peer "here", or why it is absent
    libraries  op libraries by their files' names: "loaded", or why not
    asked      sets and names of the cells that it was to measure, those that an earlier run has measured among them
    ceilings   None where only enqueuing was timed
    state      after the ceilings were measured: a warm card
    """

    schema: int = SCHEMA
    date: str
    command: str
    commit: str
    portattn: str
    kernels: str
    chip: str
    target: str
    toolchain: str
    device: dict[str, Any]
    versions: dict[str, str]
    peers: dict[str, str]
    libraries: dict[str, str]
    sets: tuple[str, ...]
    cells: int
    asked: tuple[tuple[str, str], ...] = ()
    rounds: int
    backend: str
    core: bool
    only_host: bool
    ceilings: Ceilings | None = None
    state: DeviceState | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One contender of a row.

    path          of portattn's own: the plan's path
    refused       why it was not timed; empty where it was
    error         its largest error against float64; None where it is infinite or never came to be. Of a backward: in
                  parts of the budget, the largest of the result and the three gradients
    rounds_ms     device time of one call, round by round, in milliseconds; graph_ms: replayed from a graph
    no_graph      why there is no graph
    host_us       time to enqueue one call, in microseconds
    admit_s       seconds that it took to make it, which compiles it, and to check it
    extra_bytes   memory allocated at the peak of a call (of our own only); of a backward, beyond the gradients, of all
    ms, tflops    median of rounds_ms, and what follows: tflops, and of ops that read a cache tbs
    of_floor      the least time that the case can take on this card, over the time; tbs and of_floor of a peer that
                  reads a quantised case's numbers in 16 bits count those
    ratio         the best peer's time over this one's, of the same round: the median (of our own only)
    graph_ratio   the same of graphs; the best peer is that of graphs
    """

    name: str
    path: str = ""
    refused: str = ""
    error: float | None = None
    admit_s: float | None = None
    rounds_ms: tuple[float, ...] = ()
    graph_ms: tuple[float, ...] = ()
    no_graph: str = ""
    host_us: Spread | None = None
    extra_bytes: int | None = None
    ms: float | None = None
    tflops: float | None = None
    tbs: float | None = None
    of_floor: float | None = None
    ratio: float | None = None
    graph_ratio: float | None = None

    @property
    def library(self) -> str:
        return library(self.name)

    @property
    def peer(self) -> bool:
        """Whether it is one that ours are compared with."""
        return self.name not in MINE and self.name not in REFERENCES

    @property
    def graph(self) -> float | None:
        return statistics.median(self.graph_ms) if self.graph_ms else None

    @property
    def spread(self) -> float | None:
        """Largest over smallest round, less 1."""
        return max(self.rounds_ms) / min(self.rounds_ms) - 1 if self.rounds_ms else None


class Row(msgspec.Struct, frozen=True, kw_only=True, tag="row"):
    """One case of one set.

    run         index among the result's runs
    floor_ms    the larger of flops over the GEMM ceiling and read_bytes over the copy ceiling; limit: its name
    budget      the largest allowed error; 1 of a backward, whose errors are parts of their budgets
    best_peer   the fastest peer's contender; best_graph: of graphs
    plan        portattn's plan in words
    state       the device's state during the rounds
    checked     part of each contender's result that was compared with float64; all of it is checked to be finite
    seconds     that the row took in all; reference_s, timing_s: shares of the float64 results and of timing
    """

    set: str
    case: Case
    run: int
    flops: int
    read_bytes: int
    floor_ms: float | None
    limit: str
    budget: float | None
    contenders: tuple[Figures, ...]
    best_peer: str = ""
    best_graph: str = ""
    plan: tuple[str, ...] = ()
    state: DeviceState | None = None
    checked: str = ""
    seconds: float = 0.0
    reference_s: float | None = None
    timing_s: float | None = None

    @property
    def name(self) -> str:
        return self.case.name

    def figures(self, name: str) -> Figures | None:
        return next((f for f in self.contenders if f.name == name), None)

    @property
    def failed(self) -> bool:
        """Whether one of portattn's own contenders was wrong or could not run."""
        return any(f.refused for f in self.contenders if f.name in MINE)


def fastest(contenders: Iterable[Figures], graphs: bool = False) -> Figures | None:
    """The fastest peer, by medians of device time."""
    return quickest((f for f in contenders if f.peer), graphs)


def quickest(contenders: Iterable[Figures], graphs: bool = False) -> Figures | None:
    """The fastest of all that were timed, by medians of device time."""
    timed = [f for f in contenders if (f.graph_ms if graphs else f.rounds_ms)]
    return min(timed, key=lambda f: statistics.median(f.graph_ms if graphs else f.rounds_ms), default=None)


def row(
    set_: str, case: Case, run: int, limits: Ceilings | None, budget: float | None, measured: Mapping[str, Figures],
    **others: Any,
) -> Row:  # fmt: skip
    """A row with everything that follows from what was measured; others: further fields of the Row."""
    flops, read = case.flops(), case.read_bytes()
    floor, limit = limits.floor_ms(flops, read) if limits else (None, "")
    wide = case.unquantised().read_bytes()
    wide_floor = limits.floor_ms(flops, wide)[0] if limits else None
    best, best_graph = (fastest(measured.values(), graphs) for graphs in (False, True))
    made = []
    for figures in measured.values():
        derived: dict[str, float] = {}
        its_read, its_floor = (wide, wide_floor) if figures.library in UNQUANTISED else (read, floor)
        if figures.rounds_ms:
            ms = statistics.median(figures.rounds_ms)
            derived = {"ms": ms, "tflops": flops / ms / 1e9}
            if case.reads_cache:
                derived["tbs"] = its_read / ms / 1e9
            if its_floor:
                derived["of_floor"] = its_floor / ms
            if best and figures.name in MINE:
                derived["ratio"] = ratio(best.rounds_ms, figures.rounds_ms)
        if figures.graph_ms and best_graph and figures.name in MINE:
            derived["graph_ratio"] = ratio(best_graph.graph_ms, figures.graph_ms)
        if figures.error is not None and not math.isfinite(figures.error):
            figures = msgspec.structs.replace(figures, error=None)
        made.append(msgspec.structs.replace(figures, **derived))
    return Row(
        set=set_, case=case, run=run, flops=flops, read_bytes=read, floor_ms=floor, limit=limit, budget=budget,
        contenders=tuple(made), best_peer=best.name if best else "", best_graph=best_graph.name if best_graph else "",
        **others,
    )  # fmt: skip


class Result(msgspec.Struct, kw_only=True):
    """What is in rows.jsonl, in the order in which it was measured."""

    runs: list[BenchRun]
    rows: list[Row]
    first_calls: list[FirstCall] = msgspec.field(default_factory=list)

    def add(self, item: BenchRun | Row | FirstCall) -> None:
        if isinstance(item, BenchRun):
            self.runs.append(item)
        elif isinstance(item, Row):
            self.rows.append(item)
        else:
            self.first_calls.append(item)

    @property
    def sets(self) -> list[str]:
        """Sets of which there is anything, in the order in which the runs named them."""
        named = dict.fromkeys(name for run in self.runs for name in run.sets)
        there = {r.set for r in self.rows} | {c.set for c in self.first_calls}
        return [name for name in named if name in there]

    def of(self, set_: str) -> list[Row]:
        return [r for r in self.rows if r.set == set_]

    @property
    def done(self) -> set[tuple[str, str]]:
        """Return (set, case's name) of each measured cell."""
        return {(r.set, r.name) for r in self.rows} | {(c.set, c.case) for c in self.first_calls}

    @property
    def left(self) -> list[tuple[str, str]]:
        """Return (set, case's name) of each cell that the last run was asked for and that has no measurement."""
        asked = self.runs[-1].asked if self.runs else ()
        return [cell for cell in asked if cell not in self.done]

    @property
    def failed(self) -> bool:
        """Return whether portattn was wrong, or could not run, on any case."""
        return any(r.failed for r in self.rows) or any(c.failed for c in self.first_calls)
