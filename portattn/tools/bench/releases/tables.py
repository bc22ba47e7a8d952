"""A comparison of releases as lines of tables, as Markdown, and as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.releases.compared import (
    CaseOfReleases,
    Comparison,
    FirstCallOfReleases,
    GoalOfReleases,
    OfRelease,
    SetOfReleases,
    VerdictOfRelease,
)
from portattn.tools.bench.tables import csv_text, table

# What the figures of a case are, above its table.
FIGURES = (
    "Medians; in brackets the best peer's time over this release's; then the best release's time over this one's; the "
    "plan's path."
)


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
    ahead = "" if of.ratio is None else f" ({of.ratio:.2f})"
    behind = "" if of.of_best is None else f", {of.of_best:.2f}"
    return f"{of.ms * 1e3:.1f} µs{ahead}{behind}" + (f", {of.path}" if of.path else "")


def set_lines(found: Iterable[SetOfReleases]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of sets."""
    columns = [
        "set", "contender", "release", "cells", "over the best peer", "least", "of the best release", "least", "in"
    ]  # fmt: skip
    rows = [
        [
            s.set, s.contender, s.release, f"{s.cells}/{s.of}", _part(s.ratio), _part(s.least_ratio), _part(s.of_best),
            _part(s.worst), s.worst_case,
        ]
        for s in found
    ]  # fmt: skip
    return columns, rows


def _part(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


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


def goal_lines(found: Iterable[GoalOfReleases], releases: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of goals: those that at least one release was measured for."""
    measured = [g for g in found if any(verdict.value is not None for verdict in g.releases.values())]
    rows = [[g.goal, *(_verdict(g.releases.get(release)) for release in releases)] for g in measured]
    return ["goal", *releases], rows


def _verdict(verdict: VerdictOfRelease | None) -> str:
    if verdict is None:
        return ""
    return verdict.status if verdict.value is None else f"{verdict.status} ({verdict.value:.3f})"


def as_markdown(whole: Comparison) -> str:
    """The tables as Markdown: releases.md."""
    runs = [
        f"- {run.toolchain}: {run.said}" if run.failed else f"- {run.chip}{', ' * bool(run.chip)}{run.toolchain}"
        for run in whole.releases
    ]
    text = ["\n".join(runs), "## Sets", table(*set_lines(whole.sets))]
    text += ["## Cases", FIGURES, table(*case_lines(whole.cases, whole.started))]
    if whole.first_calls:
        text += ["## First calls", table(*first_call_lines(whole.first_calls, whole.started))]
    return "\n\n".join(text) + "\n"


def as_csv(whole: Comparison) -> str:
    """One line for each release of each case and contender: all figures that a case has of it."""
    figures = OfRelease.__struct_fields__
    rows = [
        (c.set, c.case, c.contender, release, c.best, *(getattr(of, name) for name in figures))
        for c in whole.cases
        for release, of in c.releases.items()
    ]
    return csv_text(("set", "case", "contender", "release", "best", *figures), rows)
