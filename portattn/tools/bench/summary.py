"""Sets in one line each, and the document that bench.json is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from portattn.tools.bench.contenders import MINE
from portattn.tools.bench.goals import geomean, goal_results
from portattn.tools.bench.results import SCHEMA, Result, Row


class SetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of our contenders over a set.

    cells, of        with figures, and all that the set has in this result
    ratio            geometric mean of the best peer's time over ours; worst, worst_case: the least of them
    graph_ratio      the same from graphs
    of_floor         geometric mean of the least time that the card allows over ours
    """

    set: str
    name: str
    cells: int
    of: int
    ratio: float | None
    worst: float | None
    worst_case: str
    graph_ratio: float | None
    of_floor: float | None


def summaries(result: Result) -> list[SetSummary]:
    """Every set's line for each of our contenders that has figures there."""
    made = []
    for name in result.sets:
        rows = result.of(name)
        for contender in MINE:
            found = [f for f in (r.figures(contender) for r in rows) if f is not None and f.rounds_ms]
            if not found:
                continue
            worst, where = _worst(rows, contender)
            made.append(
                SetSummary(
                    set=name, name=contender, cells=len(found), of=len(rows),
                    ratio=_mean(f.ratio for f in found), worst=worst, worst_case=where,
                    graph_ratio=_mean(f.graph_ratio for f in found), of_floor=_mean(f.of_floor for f in found),
                )
            )  # fmt: skip
    return made


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return geomean(there) if there else None


def _worst(rows: list[Row], contender: str) -> tuple[float | None, str]:
    found = [(f.ratio, r.name) for r in rows for f in r.contenders if f.name == contender and f.ratio is not None]
    return min(found) if found else (None, "")


def document(result: Result) -> dict[str, Any]:
    """bench.json: all that was measured, what was left, the sets' summaries and the verdicts on the goals."""
    return {
        "schema": SCHEMA,
        "runs": result.runs,
        "summaries": summaries(result),
        "goals": goal_results(result),
        "left": [{"set": name, "case": case} for name, case in result.left],
        "rows": result.rows,
        "first_calls": result.first_calls,
    }
