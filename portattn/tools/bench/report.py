"""Summaries of sets, bench.json, Markdown; results compare by leads over a peer, as a card's clock drifts."""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from portattn.tools.bench.contenders import MINE, OURS
from portattn.tools.bench.results import SCHEMA, Figures, Result, Row
from portattn.tools.bench.rounds import Spread, ratio, within


def geomean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


class SetSummary(msgspec.Struct, frozen=True, kw_only=True):
    set: str
    name: str
    # cells, of: with figures, and all that the set has in this result
    cells: int
    of: int
    ratio: float | None  # geometric mean of the best peer's time over ours; worst, worst_case: the least of them
    worst: float | None
    worst_case: str
    graph_ratio: float | None  # the same from graphs
    of_floor: float | None  # geometric mean of the card's least time over ours


def summaries(result: Result) -> list[SetSummary]:
    made = []
    for name in result.sets:
        rows = result.of(name)
        for contender in MINE:
            found = [(r, f) for r in rows if (f := r.figures(contender)) is not None and f.rounds_ms]
            if found:
                worst, where = min(((f.ratio, r.name) for r, f in found if f.ratio is not None), default=(None, ""))
                made.append(SetSummary(
                    set=name, name=contender, cells=len(found), of=len(rows), worst=worst, worst_case=where,
                    **{n: mean(getattr(f, n) for _, f in found) for n in ("ratio", "graph_ratio", "of_floor")},
                ))  # fmt: skip
    return made


def mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return geomean(there) if there else None


def document(result: Result) -> dict[str, Any]:
    return {
        "schema": SCHEMA, "runs": result.runs, "summaries": summaries(result),
        "left": [{"set": name, "case": case} for name, case in result.left], "rows": result.rows,
        "first_calls": result.first_calls,
    }  # fmt: skip


class ContenderChange(msgspec.Struct, frozen=True, kw_only=True):
    """One of our contenders in one case of both results."""

    set: str
    case: str
    name: str
    peer: str
    # before, after: its ratio to `peer`; None if the results share no peer there
    before: float | None
    after: float | None
    change: float | None  # after over before; above 1 is faster than before
    ms: tuple[float, float]  # its own device times in milliseconds (before, after)


class SetChange(msgspec.Struct, frozen=True, kw_only=True):
    """Geometric mean of a contender's changes over a set; cells: how many there are."""

    set: str
    name: str
    cells: int
    change: float


def changes(before: Result, after: Result) -> list[ContenderChange]:
    earlier = {(row.set, row.name): row for row in before.rows}
    found = []
    for row in after.rows:
        old = earlier.get((row.set, row.name))
        for name in MINE if old else ():
            assert old is not None
            was, now = old.figures(name), row.figures(name)
            if was and now and was.rounds_ms and now.rounds_ms:
                found.append(_change(old, row, was, now))
    return found


def _change(old: Row, row: Row, was: Figures, now: Figures) -> ContenderChange:
    peer = _shared(old, row)
    first = second = None
    if peer:
        first, second = ratio(peer[0].rounds_ms, was.rounds_ms), ratio(peer[1].rounds_ms, now.rounds_ms)
    assert was.ms is not None
    assert now.ms is not None
    return ContenderChange(
        set=row.set, case=row.name, name=now.name, peer=peer[0].name if peer else "", before=first, after=second,
        change=second / first if first and second else None, ms=(was.ms, now.ms),
    )  # fmt: skip


def _shared(old: Row, row: Row) -> tuple[Figures, Figures] | None:
    pairs = [(f, row.figures(f.name)) for f in old.contenders if f.peer and f.rounds_ms]
    both = [(was, now) for was, now in pairs if now is not None and now.rounds_ms]
    return min(both, key=lambda pair: pair[0].ms or float("inf"), default=None)


def by_set(found: Iterable[ContenderChange]) -> list[SetChange]:
    groups: dict[tuple[str, str], list[float]] = {}
    for change in found:
        if change.change is not None:
            groups.setdefault((change.set, change.name), []).append(change.change)
    return [SetChange(set=set_, name=name, cells=len(values), change=geomean(values))
            for (set_, name), values in groups.items()]  # fmt: skip


def slower(found: Sequence[ContenderChange], tolerance: float) -> list[ContenderChange]:
    """Return the changes that lost more than `tolerance` of their lead over the peer."""
    return [change for change in found if change.change is not None and change.change < 1 - tolerance]


def as_markdown(result: Result) -> str:
    values = {"result": result, "summaries": summaries(result), "set_table": set_table}
    return render_template(Path(__file__).with_suffix(".jinja"), **values)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(map(_row, (columns, ["---"] * len(columns), *rows)))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _against(row: Row) -> str:
    """Return ours against the best peer, with half the ratio's confidence interval, which needs two rounds."""
    ours, peer = row.figures(OURS), row.figures(row.best_peer)
    if ours is None or ours.ratio is None or peer is None:
        return ""
    half = within(peer.rounds_ms, ours.rounds_ms)
    return f"{ours.ratio:.2f}{f' ± {half:.2f}' if math.isfinite(half) else ''}× {row.best_peer}"


def set_table(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(f.name for row in rows for f in row.contenders if not f.refused))
    mine = [name for name in MINE if name in names]
    theirs = [name for name in names if name not in mine]
    columns = ["case", *mine, "of the best peer", "of the floor", "from a graph", "host µs", *theirs]
    lines = []
    for row in rows:
        ours = row.figures(OURS)
        floor = f"{ours.of_floor:.0%} {row.limit}" if ours and ours.of_floor is not None else ""
        beside = (_against(row), floor, _from_graph(ours), host(ours.host_us if ours else None))
        lines.append([row.name, *(_shown(row, name) for name in mine), *beside, *(_shown(row, n) for n in theirs)])
    return table(columns, lines)


def _shown(row: Row, name: str) -> str:
    figures = row.figures(name)
    if figures is None:
        return ""
    if figures.refused:
        return "refused"
    if figures.ms is None:
        return host(figures.host_us) and f"host {host(figures.host_us)}"
    told = row.case.backward and figures.extra_bytes is not None
    extra = f", +{(figures.extra_bytes or 0) / 2**20:.1f} MiB" if told else ""
    return f"{figures.ms * 1e3:.1f} µs, {rate(row, figures)}{extra}"


def rate(row: Row, figures: Figures) -> str:
    """Return TB/s if the copy rate is the case's limit, else TFLOP/s."""
    if row.limit == "copy" and figures.tbs is not None:
        return f"{figures.tbs:.2f} TB/s"
    return f"{figures.tflops:.0f} TFLOP/s" if figures.tflops is not None else ""


def _from_graph(figures: Figures | None) -> str:
    if figures is None or figures.graph is None:
        return ""
    beside = f" ({figures.graph_ratio:.2f}×)" if figures.graph_ratio is not None else ""
    return f"{figures.graph * 1e3:.1f} µs{beside}"


def host(spread: Spread | None) -> str:
    return f"{spread.median:.1f} ({spread.low:.1f}–{spread.high:.1f})" if spread else ""


def number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def render_template(template: Path, **values: Any) -> str:
    """Return a Jinja template's text, in which `value | fmt(FORM, UNIT)` is `number` and `cells | row` a table's."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent), trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    made.filters |= {"fmt": number, "row": _row}
    return made.get_template(template.name).render(values)
