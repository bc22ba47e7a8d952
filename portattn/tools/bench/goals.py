"""The project's goals (goals.toml), and a result's verdicts on them; no exit status depends on a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from portattn.schema import toml_reader
from portattn.tools.bench.cases import SETS, Case
from portattn.tools.bench.contenders import OURS
from portattn.tools.bench.results import Figures, Result, Row, quickest
from portattn.tools.bench.rounds import ratio

Metric = Literal["ratio", "of_floor", "host_us", "host_ratio", "first_s"]
Take = Literal["every", "geomean"]
Status = Literal["met", "done", "missed", "incomplete", "not measured"]


class Goal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    sets: tuple[str, ...]  # whose cases count; only, without: text that their names must, and must not, hold
    only: str = ""
    without: str = ""
    least_bytes: int = 0  # least size of a case's attended keys and values in the queries' dtype
    # ratio: the peer's device time over ours · of_floor: the card's least time over ours · host_us: time to enqueue a
    # call · host_ratio: the peer's over ours · first_s: seconds of the first call
    metric: Metric = "ratio"
    take: Take = "every"  # the limit holds for every cell, or for the geometric mean of all
    # the fastest of these libraries, or another contender of ours; empty: the fastest peer of the case
    against: tuple[str, ...] = ()
    mine: str = OURS  # the contender of ours
    limit: float  # at least this ratio, or at most this time
    done: float | None = None  # a weaker limit at which the goal counts as done

    @property
    def cells(self) -> list[tuple[str, Case]]:
        cells = [(name, case) for name in self.sets for case in SETS[name] if self.only in case.name]
        cells = [cell for cell in cells if not self.without or self.without not in cell[1].name]
        return [cell for cell in cells if cell[1].unquantised().read_bytes() >= self.least_bytes]

    @property
    def at_most(self) -> bool:
        return self.metric in ("host_us", "first_s")

    @property
    def held_against(self) -> str:
        if self.metric in ("ratio", "host_ratio"):
            return ", ".join(self.against) or "best peer"
        return "the card" if self.metric == "of_floor" else ""


class _GoalsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    goal: tuple[Goal, ...]


FILE = Path(__file__).parent / "goals.toml"


def read_goals(path: Path = FILE) -> tuple[Goal, ...]:
    """Return a file's goals. Raises DataError (file, line, key) where it departs from Goal's fields."""
    data, text = toml_reader.read(path)
    return toml_reader.convert(data, _GoalsFile, path, text).goal


GOALS = read_goals()


class Value(msgspec.Struct, frozen=True, kw_only=True):
    set: str
    case: str
    value: float
    peer: str = ""


class GoalResult(msgspec.Struct, frozen=True, kw_only=True):
    goal: Goal
    # met · done: inside the goal's `done` · missed · incomplete: met so far, but cells are missing · not measured
    status: Status
    value: float | None  # the worst cell's, or the geometric mean; cells: how many have a value, of how many
    cells: int
    of: int
    worst: Value | None = None  # the worst cell; under: cells beyond the limit
    under: tuple[Value, ...] = ()
    missing: tuple[str, ...] = ()  # why cells have no value, each reason once


def goal_results(result: Result, goals: Iterable[Goal] = GOALS) -> list[GoalResult]:
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
    """Return a host-time metric; a peer that cannot do the case counts with its shortest enqueue time in the set."""
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
