"""Rates against lengths, drawn from a result alone: a figure a set, a panel a head dim, a line a library."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from portattn.errors import PortattnError
from portattn.files import write_whole
from portattn.source_tree import install_extra
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import CORE, MINE, OURS, PREPARED, UNORDERED
from portattn.tools.bench.peers import REFERENCES
from portattn.tools.bench.results import Figures, Result, Row

FORMATS = ("svg", "png")
# One colour a library in every figure: ours dark and thick, the others as far apart as ten can be (Tol's and Okabe and
# Ito's palettes, which colour-blind readers tell apart); and a mark of its own, for print.
STYLES: dict[str, tuple[str, str, str]] = {
    OURS: ("#000000", "o", "-"),
    PREPARED: ("#000000", "s", ":"),
    CORE: ("#777777", "o", "--"),
    UNORDERED: ("#777777", "s", ":"),
    "sdpa": ("#88CCEE", "x", ":"),
    "sdpa-cudnn": ("#0072B2", "^", "-"),
    "sdpa-flash": ("#56B4E9", "v", "-"),
    "sdpa-efficient": ("#44AA99", "<", "-"),
    "fa3": ("#D55E00", "D", "-"),
    "flash_attn": ("#E69F00", "d", "-"),
    "flashmla": ("#CC79A7", "P", "-"),
    "flashinfer": ("#009E73", "X", "-"),
    "flex": ("#882255", ">", "-"),
    "xformers": ("#AA4499", "*", "-"),
    "flag_gems": ("#999933", "h", "-"),
    "torch-varlen": ("#332288", "1", "-"),
    "torch-gather": ("#332288", "2", "-"),
    "sage": ("#661100", "3", "-"),
    "unquantised": ("#777777", "+", "-."),
    "seed": ("#117733", "p", "-"),
}
OTHER = ("#BBBBBB", ".", "-")
Position = tuple[int, int, int]  # keys, batch, query rows: an abscissa
PANEL = (4.4, 3.2)  # inches


def draw(result: Result, folder: Path) -> list[Path]:
    """Write NAME.svg and NAME.png for each set with cases of more than one length; the paths.

    Raises PortattnError where matplotlib is not installed.
    """
    figure = figure_class()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in result.sets:
        rows = [row for row in result.of(name) if any(f.ms is not None for f in row.contenders)]
        if len({_position(row.case) for row in rows}) > 1:
            written += _figure(figure, name, rows, result, folder)
    return written


def figure_class() -> Callable[..., Any]:
    """Matplotlib's Figure, set so that the same figures give the same file. Raises PortattnError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PortattnError(f"bench report: --plots needs matplotlib ({error}): {install_extra('bench')}") from None
    matplotlib.rcParams["svg.hashsalt"] = "portattn"  # else ids are random
    figure: Callable[..., Any] = Figure
    return figure


def save(shown: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure in each of FORMATS, each file whole or not at all; the paths."""
    paths = []
    for form in FORMATS:
        data, path = io.BytesIO(), folder / f"{name}.{form}"
        shown.savefig(data, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
        write_whole(path, data.getvalue())
        paths.append(path)
    return paths


def lines(rows: Iterable[Row]) -> dict[str, dict[Position, float]]:
    """What a panel shows: of each line (one of ours, or a library with the fastest way in which it was called) its rate
    at each position, in TB/s where the op reads a cache and else in TFLOP/s. Ours come last, to lie on top."""
    found: dict[str, dict[Position, float]] = {}
    for row in rows:
        for figures in row.contenders:
            value = _rate(row, figures)
            if value is None or figures.name in REFERENCES:
                continue
            line = found.setdefault(figures.library if figures.peer else figures.name, {})
            place = _position(row.case)
            line[place] = max(value, line.get(place, 0.0))
    return dict(sorted(found.items(), key=lambda item: item[0] in MINE))


def panels(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rows by panel: (what sets a line of panels apart, head dim), in the order of the set."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((_facet(row.case), row.case.head_dim), []).append(row)
    return found


def _rate(row: Row, figures: Figures) -> float | None:
    return figures.tbs if row.case.reads_cache else figures.tflops


def _position(case: Case) -> Position:
    return (max(case.keys), case.batch, max(case.queries))


def _facet(case: Case) -> str:
    words = [case.dtype, "full" if case.causal == "none" else "causal"]
    if case.reads_cache:
        words = [case.dtype]
    if case.page_size:
        words.append(f"pages of {case.page_size}")
    if case.quantised:
        words.append(f"{case.kv_format}, scales {'inline' if case.inline_scales else case.kv_scales}")
    if case.windowed:
        words.append("window")
    if case.magicpig:
        words.append("magicpig")
    if case.backward:
        words.append("backward")
    if case.dropout:
        words.append("dropout")
    if case.deterministic:
        words.append("deterministic")
    return ", ".join(words)


def _figure(figure: Callable[..., Any], name: str, rows: list[Row], result: Result, folder: Path) -> list[Path]:
    by_panel = panels(rows)
    facets, dims = list(dict.fromkeys(facet for facet, _ in by_panel)), sorted({dim for _, dim in by_panel})
    shown = figure(figsize=(PANEL[0] * len(dims), PANEL[1] * len(facets) + 0.9), layout="constrained")
    axes = shown.subplots(len(facets), len(dims), squeeze=False, sharey=True)
    handles: dict[str, Any] = {}
    batch = _batch_varies(by_panel.values())
    for i, facet in enumerate(facets):
        for j, dim in enumerate(dims):
            _panel(axes[i][j], by_panel.get((facet, dim), []), f"D = {dim}, {facet}", result, handles, batch)
        axes[i][0].set_ylabel("TB/s of keys and values" if rows[0].case.reads_cache else "TFLOP/s")
    axes[0][0].set_ylim(bottom=0)  # of all panels, now that each has said how far up it goes
    run = result.runs[rows[0].run]
    shown.suptitle(f"{name}: {run.chip}, {run.toolchain}, {run.date[:10]}", fontsize=11)
    shown.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return save(shown, folder, name)


def _panel(axes: Any, rows: list[Row], title: str, result: Result, handles: dict[str, Any], batch: bool) -> None:
    axes.set_title(title, fontsize=9)
    if not rows:
        axes.set_axis_off()
        return
    places = sorted({_position(row.case) for row in rows})
    ceiling = _ceiling(rows[0], result)
    if ceiling is not None:
        label, value = ceiling
        handles[label] = axes.axhline(value, color="#AAAAAA", linestyle=(0, (1, 2)), linewidth=1)
    for name, line in lines(rows).items():
        colour, mark, dash = STYLES.get(name, OTHER)
        there = [(places.index(place), line[place]) for place in places if place in line]
        (handles[name],) = axes.plot(
            *zip(*there, strict=True), color=colour, marker=mark, linestyle=dash, markersize=5,
            linewidth=2.2 if name == OURS else 1.3, label=name,
        )  # fmt: skip
    axes.set_xticks(range(len(places)), [_tick(place, batch) for place in places], fontsize=7)
    axes.set_xlabel("keys" + ", batch" * batch, fontsize=8)
    axes.grid(True, axis="y", linewidth=0.4, color="#DDDDDD")
    axes.tick_params(labelsize=7)


def _batch_varies(groups: Iterable[Sequence[Row]]) -> bool:
    """Whether an abscissa has to tell its batch: where decoding, or where a panel has one length twice."""
    for rows in groups:
        places = {_position(row.case) for row in rows}
        if len({keys for keys, _, _ in places}) < len(places) or rows[0].case.reads_cache:
            return True
    return False


def _tick(place: Position, batch: bool) -> str:
    keys = place[0]
    length = f"{keys // 1024}k" if keys % 1024 == 0 else str(keys)
    return f"{length}\nB={place[1]}" if batch else length


def _ceiling(row: Row, result: Result) -> tuple[str, float] | None:
    limits = result.runs[row.run].ceilings
    if limits is None:
        return None
    return ("copy rate", limits.copy_tbs) if row.case.reads_cache else ("GEMM rate", limits.gemm_tflops)
