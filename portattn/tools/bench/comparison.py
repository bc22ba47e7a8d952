"""Compare releases by rows of one run, whose rounds they share: the fastest of each case, and the others' distance."""

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from portattn.errors import DataError
from portattn.tools import run_log
from portattn.tools.bench.cases import SETS
from portattn.tools.bench.contenders import MINE
from portattn.tools.bench.report import document, mean, number, table
from portattn.tools.bench.results import Figures, Result, Row, decode
from portattn.tools.bench.rounds import ratio
from portattn.tools.run_log import UNREADABLE

SCHEMA = 1  # of releases.json


class OfRelease(msgspec.Struct, frozen=True, kw_only=True):
    # ms, graph_ms, host_us: medians: milliseconds of a call and of one from a graph, microseconds to enqueue it
    ms: float | None = None
    graph_ms: float | None = None
    host_us: float | None = None
    # the best release's time over this one's, of the same round: the median over rounds; 1 for the best, which has the
    # least median, so that another may have a little more
    of_best: float | None = None
    ratio: float | None = None  # the best peer's time over this one's
    path: str = ""
    refused: str = ""  # why it was not timed


class CaseOfReleases(msgspec.Struct, frozen=True, kw_only=True):
    """One contender of ours on one case, with each release; best: the release of the least median."""

    set: str
    case: str
    contender: str
    best: str
    releases: dict[str, OfRelease]


class SetOfReleases(msgspec.Struct, frozen=True, kw_only=True):
    """A release over a set: geometric means and least values of its `of_best`, and of its `ratio` to peers."""

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


class ReleaseRun(msgspec.Struct, frozen=True, kw_only=True):
    """A requested release; failed: why it did not start."""

    release: str
    toolchain: str
    date: str
    failed: str
    chip: str = ""  # files of before it was kept have none


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    releases: list[ReleaseRun]
    sets: list[SetOfReleases]
    cases: list[CaseOfReleases]

    @property
    def started(self) -> list[str]:
        return [run.release for run in self.releases if not run.failed]


def cases(results_: Mapping[str, Result]) -> list[CaseOfReleases]:
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
    groups: dict[tuple[str, str, str], list[tuple[OfRelease, str]]] = {}
    for case in found:
        for release, of in case.releases.items():
            groups.setdefault((case.set, case.contender, release), []).append((of, case.case))
    made = []
    for (set_, contender, release), values in groups.items():
        there = [(of.of_best, case) for of, case in values if of.of_best is not None]
        ratios = [of.ratio for of, _ in values if of.ratio is not None]
        worst, where = min(there, default=(None, ""))
        made.append(SetOfReleases(
            set=set_, contender=contender, release=release, cells=len(there), of=len(values),
            of_best=mean(of.of_best for of, _ in values), worst=worst, worst_case=where,
            ratio=mean(ratios), least_ratio=min(ratios, default=None),
        ))  # fmt: skip
    return made


def comparison(results_: Mapping[str, Result], failed: Mapping[str, str]) -> Comparison:
    """Compare the releases; failed: why others did not start."""
    found = cases(results_)
    runs = {release: result.runs[-1] for release, result in results_.items()}
    started = [
        ReleaseRun(release=release, toolchain=run.toolchain, date=run.date, failed="", chip=run.chip)
        for release, run in runs.items()
    ]
    missing = [
        ReleaseRun(release=release, toolchain=f"triton=={release}", date="", failed=why)
        for release, why in failed.items()
    ]
    return Comparison(releases=started + missing, sets=sets(found), cases=found)


def with_results(whole: Comparison, results_: Mapping[str, Result]) -> dict[str, Any]:
    own = {release: document(result) for release, result in results_.items()}
    return msgspec.structs.asdict(whole) | {"results": own}


NAME = "releases.json"
_SET = re.compile(r"[\w.-]+")  # a set's name is part of a file's


class _Kind(msgspec.Struct):
    """The fields that tell a comparison from a run's results, whatever the file's name."""

    releases: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    runs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def place(path: Path) -> Path | None:
    """Return the path of a comparison, a folder's releases.json or the file itself; None for other files."""
    if path.is_dir():
        return path / NAME if (path / NAME).exists() else None
    if path.name.endswith(NAME):
        return path  # whoever reads it says what is wrong with it
    if path.suffix == ".jsonl" or not path.is_file():
        return None
    try:
        kind = msgspec.json.decode(run_log.read(path), type=_Kind)
    except (DataError, *UNREADABLE):  # whoever reads it as a run's results says so
        return None
    return path if kind.releases is not msgspec.UNSET and kind.runs is msgspec.UNSET else None


def read(path: Path) -> Comparison:
    """Read the comparison in a releases.json. Raises DataError (file) for other files or schema versions."""
    whole = decode(path, run_log.read(path), Comparison, SCHEMA, "comparison of releases by portattn bench")
    for problem in _problems(whole):
        raise DataError(path, None, problem)
    return whole


def _problems(whole: Comparison) -> Iterator[str]:
    """Yield faults that tables and plots could not show: repeated or unknown names."""
    names = [run.release for run in whole.releases]
    yield from (f"`releases` lists {name} twice" for name in names if names.count(name) > 1)
    known = set(whole.started)
    named = [
        *((f"`cases`, {c.set}, {c.case}, {c.contender}", {*c.releases, *filter(None, (c.best,))}) for c in whole.cases),
        *((f"`sets`, {s.set}, {s.contender}, {s.release}", {s.release}) for s in whole.sets),
    ]
    for where, there in named:
        for name in sorted(there - known):
            yield f"{where}: {name} is no release that `releases` lists as started"
    for case in whole.cases:
        if not _SET.fullmatch(case.set):
            yield f"`cases`, {case.case}: {case.set!r} is no name of a set"


FIGURES = (  # above a table of cases
    "Medians; in brackets the best peer's time over this release's; then the best release's time over this one's; the "
    "plan's path."
)


def case_lines(found: Iterable[CaseOfReleases], releases: Sequence[str]) -> tuple[list[str], list[list[str]]]:
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
    columns = [
        "set", "contender", "release", "cells", "over the best peer", "least", "of the best release", "least", "in"
    ]  # fmt: skip
    rows = [[s.set, s.contender, s.release, f"{s.cells}/{s.of}",
             *(number(value, ".3f") for value in (s.ratio, s.least_ratio, s.of_best, s.worst)), s.worst_case]
            for s in found]  # fmt: skip
    return columns, rows


def as_markdown(whole: Comparison) -> str:
    runs = [
        f"- {run.toolchain}: {run.failed}" if run.failed else f"- {run.chip}{', ' * bool(run.chip)}{run.toolchain}"
        for run in whole.releases
    ]
    text = ["\n".join(runs), "## Sets", table(*set_lines(whole.sets))]
    text += ["## Cases", FIGURES, table(*case_lines(whole.cases, whole.started))]
    return "\n\n".join(text) + "\n"
