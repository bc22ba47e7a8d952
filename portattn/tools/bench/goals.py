"""The project's goals as data, and what a result says of them: reported, no exit status depends on it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Literal

import msgspec

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import CORE, OURS, UNORDERED
from portattn.tools.bench.firstcall import COLD_START
from portattn.tools.bench.results import Figures, Result, Row, quickest
from portattn.tools.bench.sets import SETS
from portattn.tools.bench.timing import ratio

Metric = Literal["ratio", "of_floor", "host_us", "host_ratio", "first_s"]
Take = Literal["every", "geomean"]
Status = Literal["met", "done", "missed", "incomplete", "not measured"]


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the goals.

    sets     whose cases count; only: those whose names hold this text; without: those whose names do not hold it
    least_bytes  only cases whose attended keys and values are as large as this in the queries' dtype
    metric   ratio: the peer's device time over ours · of_floor: the least time that the card allows over ours ·
             host_us: time to enqueue a call · host_ratio: the peer's over ours · first_s: seconds of the first call
    take     the limit holds for every cell, or for the geometric mean of all
    against  libraries of which the fastest counts, or another contender of ours; none named: the fastest of all peers
             that can do the case
    mine     which of our contenders
    limit    at least this (a ratio), or at most (a time); done: with which it counts as done, if that is less
    """

    name: str
    sets: tuple[str, ...]
    only: str = ""
    without: str = ""
    least_bytes: int = 0
    metric: Metric = "ratio"
    take: Take = "every"
    against: tuple[str, ...] = ()
    mine: str = OURS
    limit: float
    done: float | None = None

    @property
    def cells(self) -> list[tuple[str, Case]]:
        """(set, case) of every cell that counts."""
        cells = [(name, case) for name in self.sets for case in SETS[name] if self.only in case.name]
        cells = [cell for cell in cells if not self.without or self.without not in cell[1].name]
        return [cell for cell in cells if cell[1].unquantised().read_bytes() >= self.least_bytes]

    @property
    def at_most(self) -> bool:
        return self.metric in ("host_us", "first_s")

    @property
    def held_against(self) -> str:
        """Whom ours are held against, in words; empty where that is nobody."""
        if self.metric in ("ratio", "host_ratio"):
            return ", ".join(self.against) or "best peer"
        return "the card" if self.metric == "of_floor" else ""


DENSE_PEERS = ("sdpa-cudnn", "fa3")
SDPA = ("sdpa", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient")
GIGABYTE = 10**9
GOALS = (
    Goal(name="dense forward, every cell", sets=("dense18",), against=DENSE_PEERS, limit=1.0, done=0.97),
    Goal(
        name="dense forward, geomean", sets=("dense18",), take="geomean", against=DENSE_PEERS, limit=1.08, done=1.05
    ),
    Goal(name="GQA 8:1", sets=("dense-gqa",), limit=1.0),
    Goal(name="packed random lengths", sets=("dense-packed",), limit=1.0),
    Goal(name="window of 1k", sets=("dense-window",), limit=1.0),
    Goal(name="batch 1, short queries", sets=("dense-short-q",), limit=1.0),
    Goal(name="256, 512, 64k, 128k; fp16", sets=("dense-beyond",), limit=1.0),
    Goal(
        name="portable core, geomean", sets=("dense18",), take="geomean", against=("sdpa-cudnn",), mine=CORE, limit=0.88
    ),
    Goal(name="decode", sets=("decode",), limit=1.0),
    Goal(name="paged decode", sets=("paged",), limit=1.0),
    Goal(
        name="quantised paged decode of 1 GB, of our own unquantised", sets=("paged-quantised",), without="int4",
        least_bytes=GIGABYTE, against=("unquantised",), limit=1.8,
    ),
    Goal(
        name="int4 paged decode of 1 GB, of our own unquantised", sets=("paged-quantised",), only="int4",
        least_bytes=GIGABYTE, against=("unquantised",), limit=3.0,
    ),
    Goal(
        name="quantised paged decode of 1 GB, of the copy rate", sets=("paged-quantised",), least_bytes=GIGABYTE,
        metric="of_floor", limit=0.9,
    ),
    Goal(name="the seed's kernels, each", sets=("seed",), without="magicpig", against=("seed",), limit=1.0),
    Goal(
        name="the seed's kernels, geomean", sets=("seed",), without="magicpig", take="geomean", against=("seed",),
        limit=2.5,
    ),
    Goal(name="small, fp32", sets=("small",), only="fp32", against=("sdpa",), limit=2.5),
    Goal(name="small, fp16", sets=("small",), only="fp16", against=("sdpa",), limit=1.0),
    Goal(name="enqueue time, µs", sets=("host",), metric="host_us", limit=10.0),
    Goal(name="enqueue time below SDPA's", sets=("host",), metric="host_ratio", against=("sdpa",), limit=1.0),
    Goal(name="backward, every cell", sets=("backward18",), limit=1.05, done=0.98),
    Goal(name="backward, geomean", sets=("backward18",), take="geomean", limit=1.08),
    Goal(
        name="backward, portable core of cuDNN", sets=("backward18",), take="geomean", against=("sdpa-cudnn",),
        mine=CORE, limit=0.75,
    ),
    Goal(
        name="backward, portable core of FlexAttention", sets=("backward18",), take="geomean", against=("flex",),
        mine=CORE, limit=1.15,
    ),
    Goal(name="backward, GQA 8:1", sets=("backward_more",), only="gqa", limit=1.0),
    Goal(name="backward, packed", sets=("backward_more",), only="packed", limit=1.0),
    Goal(name="backward, window of 1k", sets=("backward_more",), only="window", limit=1.0),
    Goal(name="backward, fp32", sets=("backward_more",), only="fp32", against=SDPA, limit=1.0),
    Goal(
        name="backward, deterministic in 1.15 of the other's time", sets=("backward_more",), only="deterministic",
        against=(UNORDERED,), limit=1 / 1.15,
    ),
    Goal(name="first call, s", sets=(COLD_START,), metric="first_s", limit=3.0),
)  # fmt: skip


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A goal's metric in one cell. peer: whom it is held against; of of_floor, the card's limit."""

    set: str
    case: str
    value: float
    peer: str = ""


class GoalResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a result says of a goal.

    status   met · done: inside the goal's `done` · missed · incomplete: what is there meets it, but cells are missing ·
             not measured
    value    the worst cell's, or the geometric mean; cells: how many have a value, of how many
    worst    the worst cell; under: cells beyond the limit
    missing  why cells have none, each reason once
    """

    goal: Goal
    status: Status
    value: float | None
    cells: int
    of: int
    worst: Value | None = None
    under: tuple[Value, ...] = ()
    missing: tuple[str, ...] = ()


def goal_results(result: Result, goals: Iterable[Goal] = GOALS) -> list[GoalResult]:
    """A verdict for each goal."""
    return [_goal_result(goal, result) for goal in goals]


def _goal_result(goal: Goal, result: Result) -> GoalResult:
    values, missing = [], dict[str, None]()
    wanted = goal.cells
    for name, case in wanted:
        found = _value(goal, name, case, result)
        if isinstance(found, Value):
            values.append(found)
        else:
            missing[found] = None
    if not values:
        return GoalResult(goal=goal, status="not measured", value=None, cells=0, of=len(wanted), missing=tuple(missing))
    worst = (max if goal.at_most else min)(values, key=lambda v: v.value)
    value = geomean(v.value for v in values) if goal.take == "geomean" else worst.value
    status: Status = "missed"
    if _within(goal, value, goal.limit):
        status = "met"
    elif goal.done is not None and _within(goal, value, goal.done):
        status = "done"
    if len(values) < len(wanted) and status != "missed":
        status = "incomplete"
    under = tuple(v for v in values if not _within(goal, v.value, goal.limit)) if goal.take == "every" else ()
    return GoalResult(
        goal=goal, status=status, value=value, cells=len(values), of=len(wanted), worst=worst, under=under,
        missing=tuple(missing),
    )  # fmt: skip


def _within(goal: Goal, value: float, limit: float) -> bool:
    return value <= limit if goal.at_most else value >= limit


def _value(goal: Goal, set_: str, case: Case, result: Result) -> Value | str:
    """The goal's metric in one cell, or why there is none."""
    if goal.metric == "first_s":
        call = next((c for c in result.first_calls if c.case == case.name), None)
        if call is None or call.empty_s is None:
            return call.failed if call else "cells not run"
        return Value(set=set_, case=case.name, value=call.empty_s)
    row = next((r for r in result.rows if (r.set, r.name) == (set_, case.name)), None)
    if row is None:
        return "cells not run"
    mine = row.figures(goal.mine)
    if mine is None or mine.refused:
        return f"{goal.mine} {'refused: ' + mine.refused if mine else 'was not measured'}"
    if goal.metric in ("host_us", "host_ratio"):
        return _host(goal, row, mine, result)
    if goal.metric == "of_floor":
        if mine.of_floor is None:
            return f"{goal.mine} was not timed, or the card's ceilings were not"
        return Value(set=set_, case=case.name, value=mine.of_floor, peer=row.limit)
    peer = quickest(rivals(row, goal.against))
    if peer is None:
        return f"no figures of {' or '.join(goal.against) or 'any peer'}"
    if not mine.rounds_ms:
        return f"{goal.mine} was not timed"
    return Value(set=set_, case=case.name, value=ratio(peer.rounds_ms, mine.rounds_ms), peer=peer.name)


def _host(goal: Goal, row: Row, mine: Figures, result: Result) -> Value | str:
    """A peer that cannot do this very case counts with its shortest enqueue time in the set: less is not to be had."""
    if mine.host_us is None:
        return f"{goal.mine} was not timed"
    if goal.metric == "host_us":
        return Value(set=row.set, case=row.name, value=mine.host_us.median)
    for rows in ([row], result.of(row.set)):
        theirs = [(f.host_us.median, f.name) for r in rows for f in rivals(r, goal.against) if f.host_us]
        if theirs:
            best, name = min(theirs)
            return Value(set=row.set, case=row.name, value=best / mine.host_us.median, peer=name)
    return f"no figures of {' or '.join(goal.against)}"


def rivals(row: Row, libraries: tuple[str, ...] = ()) -> list[Figures]:
    """Return a row's contenders that were not refused: of the libraries, or all peers."""
    return [f for f in row.contenders if not f.refused and (f.library in libraries if libraries else f.peer)]


def geomean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))
