"""A result as CSV, and as Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence

from portattn.tools.bench.clock import Spread
from portattn.tools.bench.contenders import MINE, OURS
from portattn.tools.bench.goals import GoalResult, goal_results
from portattn.tools.bench.results import Figures, Result, Row
from portattn.tools.bench.summary import summaries
from portattn.tools.bench.timing import within

OF_CASE = ("set", "case", "op", "timing", "flops", "read_bytes", "floor_ms", "limit", "budget", "best_peer")
OF_CONTENDER = (
    "contender", "path", "ms", "ms_low", "ms_high", "tflops", "tbs", "of_floor", "ratio", "graph_ms", "graph_ratio",
    "host_us", "host_us_low", "host_us_high", "extra_bytes", "error", "refused", "no_graph",
)  # fmt: skip
WORDS = {"met": "met", "done": "done", "missed": "**missed**", "incomplete": "incomplete", "not measured": "–"}


def as_csv(result: Result) -> str:
    """One line for each contender of each row."""
    rows = []
    for row in result.rows:
        of_case = [
            row.set, row.name, row.case.op, row.case.timing, row.flops, row.read_bytes, row.floor_ms, row.limit,
            row.budget, row.best_peer,
        ]  # fmt: skip
        rows += [(*of_case, *_cells(figures)) for figures in row.contenders]
    return csv_text((*OF_CASE, *OF_CONTENDER), rows)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lines of CSV under their columns. What is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return text.getvalue()


def _cells(f: Figures) -> list[object]:
    low, high = (min(f.rounds_ms), max(f.rounds_ms)) if f.rounds_ms else (None, None)
    host = f.host_us
    spread = (host.median, host.low, host.high) if host else (None, None, None)
    return [
        f.name, f.path, f.ms, low, high, f.tflops, f.tbs, f.of_floor, f.ratio, f.graph, f.graph_ratio, *spread,
        f.extra_bytes, f.error, f.refused, f.no_graph,
    ]  # fmt: skip


def as_markdown(result: Result) -> str:
    """Provenance, goals, summaries, then a table a set."""
    parts = [_provenance(result), "## Goals", _goals(goal_results(result)), "## Sets", _summaries(result)]
    for name in result.sets:
        rows = result.of(name)
        parts += [f"## {name}", set_table(rows) if rows else _first_calls(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. A bar inside a cell would end it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _provenance(result: Result) -> str:
    lines = []
    for run in result.runs:
        versions = ", ".join(f"{name} {text}" for name, text in run.versions.items())
        limits, state = run.ceilings, run.state
        lines.append(f"- {run.chip}, {run.toolchain}, {versions}; {run.date}; commit {run.commit or 'unknown'}")
        lines.append(f"- `{run.command}`")
        if limits:
            lines.append(f"- ceilings: GEMM {limits.gemm_tflops:.0f} TFLOP/s, copy {limits.copy_tbs:.2f} TB/s")
        if state:
            known = [("SM", state.sm_mhz, "MHz"), ("power", state.power_w, "W"), ("of", state.power_limit_w, "W")]
            lines.append("- warm: " + ", ".join(f"{name} {v:.0f} {unit}" for name, v, unit in known if v is not None))
        lines.append("- peers: " + "; ".join(f"{name}: {text}" for name, text in run.peers.items()))
    return "\n".join(lines)


def _goals(found: Iterable[GoalResult]) -> str:
    rows = []
    for verdict in found:
        goal = verdict.goal
        sign = "≤" if goal.at_most else "≥"
        done = f" (done {sign} {goal.done:g})" if goal.done is not None else ""
        worst = verdict.worst
        worst_text = f"{worst.case}: {worst.value:.2f}" + f" of {worst.peer}" * bool(worst.peer) if worst else ""
        rows.append(
            (
                goal.name, goal.held_against,
                f"{goal.take} {sign} {goal.limit:g}{done}", number(verdict.value, ".2f"),
                f"{verdict.cells} of {verdict.of}", worst_text, WORDS[verdict.status], "; ".join(verdict.missing),
            )
        )  # fmt: skip
    return table(("goal", "against", "limit", "measured", "cells", "worst cell", "verdict", "missing"), rows)


def _summaries(result: Result) -> str:
    rows = [
        (
            s.set, s.name, f"{s.cells} of {s.of}", number(s.ratio, ".2f", "×"), number(s.worst, ".2f", "×"),
            s.worst_case, number(s.graph_ratio, ".2f", "×"), number(s.of_floor, ".0%"),
        )
        for s in summaries(result)
    ]  # fmt: skip
    columns = ("set", "contender", "cells", "geomean", "worst", "in", "geomean from graphs", "of the floor")
    return table(columns, rows) if rows else ""


def _against(row: Row) -> str:
    """Ours against the best peer, with half the width of the ratio's confidence interval, which one round has not."""
    ours, peer = row.figures(OURS), row.figures(row.best_peer)
    if ours is None or ours.ratio is None or peer is None:
        return ""
    half = within(peer.rounds_ms, ours.rounds_ms)
    return f"{ours.ratio:.2f}{f' ± {half:.2f}' if math.isfinite(half) else ''}× {row.best_peer}"


def set_table(rows: Sequence[Row]) -> str:
    """A set's cases: time and rate of each of ours and of each peer, ratios and fractions of ours; and of backwards the
    memory that they take beyond the gradients."""
    names = list(dict.fromkeys(f.name for row in rows for f in row.contenders if not f.refused))
    mine = [name for name in MINE if name in names]
    theirs = [name for name in names if name not in mine]
    columns = ["case", *mine, "of the best peer", "of the floor", "from a graph", "host µs", *theirs]
    lines = []
    for row in rows:
        ours = row.figures(OURS)
        lines.append(
            [
                row.name,
                *(_shown(row, name) for name in mine),
                _against(row),
                f"{ours.of_floor:.0%} {row.limit}" if ours and ours.of_floor is not None else "",
                _from_graph(ours),
                host(ours.host_us if ours else None),
                *(_shown(row, name) for name in theirs),
            ]
        )
    return table(columns, lines)


def _shown(row: Row, name: str) -> str:
    figures = row.figures(name)
    if figures is None:
        return ""
    if figures.refused:
        return "refused"
    if figures.ms is None:
        return host(figures.host_us) and f"host {host(figures.host_us)}"
    extra = ""
    if row.case.backward and figures.extra_bytes is not None:
        extra = f", +{figures.extra_bytes / 2**20:.1f} MiB"
    return f"{figures.ms * 1e3:.1f} µs, {rate(row, figures)}{extra}"


def rate(row: Row, figures: Figures) -> str:
    """TB/s where the copy rate is the case's limit, else TFLOP/s."""
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


def _first_calls(result: Result) -> str:
    rows = [
        (
            c.case, c.path, number(c.empty_s, ".2f"), number(c.kept_s, ".2f"), number(c.second_s, ".4f"), c.failed,
        )
        for c in result.first_calls
    ]  # fmt: skip
    columns = ("case", "path", "empty caches, s", "kept caches, s", "second call, s", "failed")
    return table(columns, rows)


def number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
