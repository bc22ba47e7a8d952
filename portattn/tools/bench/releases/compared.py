"""Releases beside each other: of each case which one is fastest, and how far behind the others are.

Only figures of the same rounds compare: each release's rows are of one run with the others'.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from portattn.tools.bench.contenders import MINE
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.goals import geomean
from portattn.tools.bench.results import Figures, Result, Row
from portattn.tools.bench.summary import document
from portattn.tools.bench.tables import table
from portattn.tools.bench.timing import ratio

SCHEMA = 1  # of releases.json


class OfRelease(msgspec.Struct, frozen=True, kw_only=True):
    """One release's figures of one case and contender.

    ms, graph_ms, host_us  medians: milliseconds of a call and of one from a graph, microseconds to enqueue it
    of_best  the best release's time over this one's, of the same round: the median; 1 of the best
    ratio    the best peer's time over this one's
    path     the plan's
    refused  why it was not timed
    """

    ms: float | None = None
    graph_ms: float | None = None
    host_us: float | None = None
    of_best: float | None = None
    ratio: float | None = None
    path: str = ""
    refused: str = ""


class CaseOfReleases(msgspec.Struct, frozen=True, kw_only=True):
    """One contender of ours on one case, with each release. best: the one with the least median, if any was timed."""

    set: str
    case: str
    contender: str
    best: str
    releases: dict[str, OfRelease]


class SetOfReleases(msgspec.Struct, frozen=True, kw_only=True):
    """A release over a set: geometric mean of its `of_best`, and the least of them with its case."""

    set: str
    contender: str
    release: str
    cells: int
    of: int
    of_best: float | None
    worst: float | None
    worst_case: str


class FirstCallOfReleases(msgspec.Struct, frozen=True, kw_only=True):
    """First calls of a case, by release."""

    case: str
    releases: dict[str, FirstCall]


def cases(results_: Mapping[str, Result]) -> list[CaseOfReleases]:
    """Every case and contender of ours that any release has a row of."""
    rows: dict[tuple[str, str], dict[str, Row]] = {}
    for release, result in results_.items():
        for row in result.rows:
            rows.setdefault((row.set, row.name), {})[release] = row
    found = []
    for (set_, name), by_release in rows.items():
        for contender in MINE:
            figures = {release: row.figures(contender) for release, row in by_release.items()}
            there = {release: f for release, f in figures.items() if f is not None}
            if there:
                found.append(_case(set_, name, contender, there))
    return found


def _case(set_: str, case: str, contender: str, figures: Mapping[str, Figures]) -> CaseOfReleases:
    timed = {release: f for release, f in figures.items() if f.rounds_ms}
    best = min(timed, key=lambda release: statistics.median(timed[release].rounds_ms), default="")
    made = {
        release: OfRelease(
            ms=f.ms, graph_ms=f.graph, host_us=f.host_us.median if f.host_us else None,
            of_best=ratio(timed[best].rounds_ms, f.rounds_ms) if f.rounds_ms else None,
            ratio=f.ratio, path=f.path, refused=f.refused,
        )
        for release, f in figures.items()
    }  # fmt: skip
    return CaseOfReleases(set=set_, case=case, contender=contender, best=best, releases=made)


def sets(found: Iterable[CaseOfReleases]) -> list[SetOfReleases]:
    """Each release's line of each set."""
    groups: dict[tuple[str, str, str], list[tuple[float | None, str]]] = {}
    for case in found:
        for release, of in case.releases.items():
            groups.setdefault((case.set, case.contender, release), []).append((of.of_best, case.case))
    made = []
    for (set_, contender, release), values in groups.items():
        there = [(value, case) for value, case in values if value is not None]
        worst, where = min(there, default=(None, ""))
        mean = geomean([value for value, _ in there]) if there else None
        made.append(
            SetOfReleases(
                set=set_, contender=contender, release=release, cells=len(there), of=len(values), of_best=mean,
                worst=worst, worst_case=where,
            )
        )  # fmt: skip
    return made


def first_calls(results_: Mapping[str, Result]) -> list[FirstCallOfReleases]:
    """First calls by case."""
    by_case: dict[str, dict[str, FirstCall]] = {}
    for release, result in results_.items():
        for call in result.first_calls:
            by_case.setdefault(call.case, {})[release] = call
    return [FirstCallOfReleases(case=case, releases=found) for case, found in by_case.items()]


def comparison(results_: Mapping[str, Result], failed: Mapping[str, str]) -> dict[str, Any]:
    """releases.json. failed: releases that did not start, and why."""
    found = cases(results_)
    runs = {release: result.runs[-1] for release, result in results_.items()}
    started: list[dict[str, str]] = [
        {"release": release, "toolchain": run.toolchain, "date": run.date, "failed": ""}
        for release, run in runs.items()
    ]
    missing = [
        {"release": release, "toolchain": f"triton=={release}", "date": "", "failed": why}
        for release, why in failed.items()
    ]
    return {
        "schema": SCHEMA,
        "releases": started + missing,
        "sets": sets(found),
        "cases": found,
        "first_calls": first_calls(results_),
    }


def with_results(results_: Mapping[str, Result], failed: Mapping[str, str]) -> dict[str, Any]:
    """The same, and beside it each release's own results as bench.json has them."""
    own = {release: document(result) for release, result in results_.items()}
    return comparison(results_, failed) | {"results": own}


def case_lines(found: Iterable[CaseOfReleases], releases: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of cases: a column a release."""
    columns = ["set", "case", "contender", *releases, "best"]
    rows = [[c.set, c.case, c.contender, *(_cell(c.releases.get(r)) for r in releases), c.best] for c in found]
    return columns, rows


def _cell(of: OfRelease | None) -> str:
    if of is None:
        return ""
    if of.refused:
        return f"refused: {of.refused}"
    if of.ms is None:
        return "" if of.host_us is None else f"host {of.host_us:.1f} µs"
    behind = "" if of.of_best is None else f", {of.of_best:.2f}"
    return f"{of.ms * 1e3:.1f} µs{behind}" + (f", {of.path}" if of.path else "")


def set_lines(found: Iterable[SetOfReleases]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of sets."""
    columns = ["set", "contender", "release", "cells", "of the best", "worst", "in"]
    rows = [
        [
            s.set, s.contender, s.release, f"{s.cells}/{s.of}", "" if s.of_best is None else f"{s.of_best:.3f}",
            "" if s.worst is None else f"{s.worst:.3f}", s.worst_case,
        ]
        for s in found
    ]  # fmt: skip
    return columns, rows


def first_call_lines(
    found: Iterable[FirstCallOfReleases], releases: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of first calls."""
    rows = [[c.case, *(_first(c.releases.get(release)) for release in releases)] for c in found]
    return ["case", *releases], rows


def _first(call: FirstCall | None) -> str:
    if call is None:
        return ""
    if call.empty_s is None or call.kept_s is None:
        return call.failed or "not measured"
    return f"{call.empty_s:.2f} s, with kept caches {call.kept_s:.2f} s ({call.path})"


def as_markdown(results_: Mapping[str, Result], failed: Mapping[str, str]) -> str:
    """The tables as Markdown."""
    found, names = cases(results_), list(results_)
    parts = [f"- {result.runs[-1].chip}, {result.runs[-1].toolchain}" for result in results_.values()]
    parts += [f"- triton=={release}: {why}" for release, why in failed.items()]
    text = ["\n".join(parts), "## Sets", table(*set_lines(sets(found)))]
    text += ["## Cases", table(*case_lines(found, names))]
    if calls := first_calls(results_):
        text += ["## First calls", table(*first_call_lines(calls, names))]
    return "\n\n".join(text) + "\n"
