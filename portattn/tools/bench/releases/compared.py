"""Releases beside each other: of each case which one is fastest, and how far behind the others are.

Only figures of the same rounds compare: each release's rows are of one run with the others'.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from portattn.tools.bench.contenders import MINE
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.goals import Status, geomean, goal_results
from portattn.tools.bench.results import Figures, Result, Row
from portattn.tools.bench.sets import SETS
from portattn.tools.bench.summary import document
from portattn.tools.bench.timing import ratio

SCHEMA = 1  # of releases.json


class OfRelease(msgspec.Struct, frozen=True, kw_only=True):
    """One release's figures of one case and contender.

    ms, graph_ms, host_us  medians: milliseconds of a call and of one from a graph, microseconds to enqueue it
    of_best  the best release's time over this one's, of the same round: the median over rounds; 1 of the best, which
             has the least median, so that another may have a little more
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
    """A release over a set: geometric mean of its `of_best`, and the least of them with its case; the same of its
    `ratio` as ratio and least_ratio, over the cases that have a peer."""

    set: str
    contender: str
    release: str
    cells: int
    of: int
    of_best: float | None
    worst: float | None
    worst_case: str
    ratio: float | None = None
    least_ratio: float | None = None


class FirstCallOfReleases(msgspec.Struct, frozen=True, kw_only=True):
    """First calls of a case, by release."""

    case: str
    releases: dict[str, FirstCall]


class VerdictOfRelease(msgspec.Struct, frozen=True, kw_only=True):
    """What a release's own results say of a goal: as GoalResult has it."""

    status: Status
    value: float | None = None


class GoalOfReleases(msgspec.Struct, frozen=True, kw_only=True):
    """A goal's verdicts, by release."""

    goal: str
    releases: dict[str, VerdictOfRelease]


class ReleaseRun(msgspec.Struct, frozen=True, kw_only=True):
    """A release that was asked for. failed: why it did not start; with a date, it has figures of an earlier run."""

    release: str
    toolchain: str
    date: str
    failed: str
    chip: str = ""  # files of before it was kept have none, and no goals

    @property
    def said(self) -> str:
        """Why it did not start, and of when its figures are; empty where it did."""
        return f"{self.failed}; figures of {self.date}" if self.failed and self.date else self.failed


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """releases.json: all that is said of the releases together."""

    schema: int = SCHEMA
    releases: list[ReleaseRun]
    sets: list[SetOfReleases]
    cases: list[CaseOfReleases]
    first_calls: list[FirstCallOfReleases]
    goals: list[GoalOfReleases] = []

    @property
    def started(self) -> list[str]:
        """The releases that have figures."""
        return [run.release for run in self.releases if run.date or not run.failed]


def cases(results_: Mapping[str, Result]) -> list[CaseOfReleases]:
    """Every case and contender of ours that any release has a row of, set by set, in the sets' own order."""
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
    found.sort(key=_place(found))
    return found


def _place(found: Sequence[CaseOfReleases]) -> Callable[[CaseOfReleases], tuple[int, int]]:
    """Where a case belongs: its set's first place in the list, its own in the set. Cases that a set lacks come last."""
    first = {case.set: at for at, case in reversed(list(enumerate(found)))}
    places = {(name, case.name): at for name in first for at, case in enumerate(SETS.get(name, ()))}
    return lambda case: (first[case.set], places.get((case.set, case.case), len(places)))


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
    groups: dict[tuple[str, str, str], list[tuple[OfRelease, str]]] = {}
    for case in found:
        for release, of in case.releases.items():
            groups.setdefault((case.set, case.contender, release), []).append((of, case.case))
    made = []
    for (set_, contender, release), values in groups.items():
        there = [(of.of_best, case) for of, case in values if of.of_best is not None]
        ratios = [of.ratio for of, _ in values if of.ratio is not None]
        worst, where = min(there, default=(None, ""))
        mean = geomean([value for value, _ in there]) if there else None
        made.append(
            SetOfReleases(
                set=set_, contender=contender, release=release, cells=len(there), of=len(values), of_best=mean,
                worst=worst, worst_case=where, ratio=geomean(ratios) if ratios else None,
                least_ratio=min(ratios, default=None),
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


def goals(results_: Mapping[str, Result]) -> list[GoalOfReleases]:
    """Each goal's verdicts."""
    verdicts = {release: goal_results(result) for release, result in results_.items()}
    return [
        GoalOfReleases(
            goal=row[0].goal.name,
            releases={
                release: VerdictOfRelease(status=v.status, value=v.value)
                for release, v in zip(verdicts, row, strict=True)
            },
        )
        for row in zip(*verdicts.values(), strict=True)
    ]


def comparison(results_: Mapping[str, Result], failed: Mapping[str, str]) -> Comparison:
    """The releases beside each other. failed: those that did not start, and why; some may have earlier results."""
    found = cases(results_)
    runs = {release: result.runs[-1] for release, result in results_.items()}
    started = [
        ReleaseRun(
            release=release, toolchain=run.toolchain, date=run.date, failed=failed.get(release, ""), chip=run.chip
        )
        for release, run in runs.items()
    ]
    missing = [
        ReleaseRun(release=release, toolchain=f"triton=={release}", date="", failed=why)
        for release, why in failed.items()
        if release not in runs
    ]
    return Comparison(
        releases=started + missing, sets=sets(found), cases=found, first_calls=first_calls(results_),
        goals=goals(results_),
    )  # fmt: skip


def with_results(whole: Comparison, results_: Mapping[str, Result]) -> dict[str, Any]:
    """releases.json, and beside it each release's own results as bench.json has them."""
    own = {release: document(result) for release, result in results_.items()}
    return msgspec.structs.asdict(whole) | {"results": own}
