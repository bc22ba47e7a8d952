"""Figures of a result: rates against lengths, a panel a head dim, a line a library; and releases beside each other."""

import functools
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from portattn.errors import PortattnError
from portattn.files import write_whole
from portattn.schema import toml_reader
from portattn.source_tree import install_extra
from portattn.tools.bench.cases import Case
from portattn.tools.bench.comparison import CaseOfReleases, Comparison
from portattn.tools.bench.contenders import MINE, OURS
from portattn.tools.bench.peers import REFERENCES
from portattn.tools.bench.results import Result, Row

OTHER = ("#BBBBBB", ".", "-")
Position = tuple[int, int, int]  # keys, batch, query rows: an abscissa
PANEL = (4.4, 3.2)  # inches


def draw(result: Result, folder: Path) -> list[Path]:
    """Write NAME.svg for each set with several lengths; return the paths. PortattnError without matplotlib."""
    figure = figure_class()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in result.sets:
        rows = [row for row in result.of(name) if any(f.ms is not None for f in row.contenders)]
        if len({_position(row.case) for row in rows}) > 1:
            written.append(save(_figure(figure, name, rows, result), folder / f"{name}.svg"))
    return written


@functools.cache
def styles() -> dict[str, tuple[str, str, str]]:
    """Return colour, mark and line by contender or library. Raises DataError (file, line) if it cannot be read."""
    path = Path(__file__).with_suffix(".toml")
    content, text = toml_reader.read(path)
    return toml_reader.convert(content, dict[str, tuple[str, str, str]], path, text)


def figure_class() -> Callable[..., Any]:
    """Return matplotlib's Figure, set up for reproducible files. Raises PortattnError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PortattnError(f"bench report: --plots needs matplotlib ({error}): {install_extra('bench')}") from None
    matplotlib.rcParams["svg.hashsalt"] = "portattn"  # else ids are random
    figure: Callable[..., Any] = Figure
    return figure


def save(shown: Any, path: Path) -> Path:
    data = io.BytesIO()
    shown.savefig(data, format="svg", metadata={"Date": None})
    write_whole(path, data.getvalue())
    return path


def lines(rows: Iterable[Row]) -> dict[str, dict[Position, float]]:
    """Return a panel's lines, ours last to be drawn on top: TB/s if the op reads a cache, else TFLOP/s."""
    found: dict[str, dict[Position, float]] = {}
    for row in rows:
        for figures in row.contenders:
            value = figures.tbs if row.case.reads_cache else figures.tflops
            if value is None or figures.name in REFERENCES:
                continue
            line = found.setdefault(figures.library if figures.peer else figures.name, {})
            place = _position(row.case)
            line[place] = max(value, line.get(place, 0.0))
    return dict(sorted(found.items(), key=lambda item: item[0] in MINE))


def panels(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((_facet(row.case), row.case.head_dim), []).append(row)
    return found


def _position(case: Case) -> Position:
    return (max(case.keys), case.batch, max(case.queries))


def _facet(case: Case) -> str:
    scales = "inline" if case.inline_scales else case.kv_scales
    words = {
        "full" if case.causal == "none" else "causal": not case.reads_cache,
        f"pages of {case.page_size}": case.page_size, f"{case.kv_format}, scales {scales}": case.quantised,
        "window": case.windowed, "magicpig": case.magicpig, "backward": case.backward,
        "dropout": case.dropout, "deterministic": case.deterministic,
    }  # fmt: skip
    return ", ".join([case.dtype, *(word for word, told in words.items() if told)])


def _figure(figure: Callable[..., Any], name: str, rows: list[Row], result: Result) -> Any:
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
    return shown


def _panel(axes: Any, rows: list[Row], title: str, result: Result, handles: dict[str, Any], batch: bool) -> None:
    axes.set_title(title, fontsize=9)
    if not rows:
        axes.set_axis_off()
        return
    places = sorted({_position(row.case) for row in rows})
    if ceiling := _ceiling(rows[0], result):
        label, value = ceiling
        handles[label] = axes.axhline(value, color="#AAAAAA", linestyle=(0, (1, 2)), linewidth=1)
    for name, line in lines(rows).items():
        colour, mark, dash = styles().get(name, OTHER)
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
    """Return whether ticks must tell the batch: the op decodes, or a panel has one length twice."""
    places = [(rows, {_position(row.case) for row in rows}) for rows in groups]
    return any(rows[0].case.reads_cache or len({keys for keys, *_ in some}) < len(some) for rows, some in places)


def _tick(place: Position, batch: bool) -> str:
    keys = place[0]
    length = f"{keys // 1024}k" if keys % 1024 == 0 else str(keys)
    return f"{length}\nB={place[1]}" if batch else length


def _ceiling(row: Row, result: Result) -> tuple[str, float] | None:
    if (limits := result.runs[row.run].ceilings) is None:
        return None
    return ("copy rate", limits.copy_tbs) if row.case.reads_cache else ("GEMM rate", limits.gemm_tflops)


# A release has a colour and a mark of its own. Okabe and Ito's palette, which colour-blind readers tell apart, without
# its yellow, which is faint on white. Of more releases than colours, pairs still differ: there is one mark more.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKS = ("o", "^", "s", "D", "v", "P", "X", "*")
OF_PEER = "best peer’s time over portattn’s;\nabove 1 is faster"
OF_BEST = "best release’s time over this one’s;\nmedian over rounds"
CASE, LETTER = 0.36, 0.048  # inches: of a figure's width for each case, of its height for a letter of a case's label
BESIDE = 0.6  # of a case's width: releases' marks stand side by side in it, so that equal ones are all seen


def draw_releases(whole: Comparison, folder: Path) -> list[Path]:
    """Write releases-SET.svg for sets with several cases of ours. Raises PortattnError without matplotlib."""
    figure = figure_class()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, cases in of_sets(whole).items():
        metric, series = release_series(cases, whole.started)
        if len(cases) > 1 and any(value is not None for line in series.values() for value in line):
            shown = _releases_figure(figure, name, whole, cases, metric, series)
            written.append(save(shown, folder / f"releases-{name}.svg"))
    return written


def of_sets(whole: Comparison) -> dict[str, list[CaseOfReleases]]:
    found: dict[str, list[CaseOfReleases]] = {}
    for case in whole.cases:
        if case.contender == OURS:
            found.setdefault(case.set, []).append(case)
    return found


def release_series(
    cases: Sequence[CaseOfReleases], releases: Iterable[str]
) -> tuple[str, dict[str, list[float | None]]]:
    """Return the drawn figure (`ratio`, or `of_best` in a set without peers) and its values by release."""
    peers = any(of.ratio is not None for case in cases for of in case.releases.values())
    metric = "ratio" if peers else "of_best"
    return metric, {
        release: [getattr(case.releases.get(release), metric, None) for case in cases] for release in releases
    }


def labels(names: Sequence[str]) -> tuple[str, list[str]]:
    """Split names into common words and the rest; names stay whole if a rest would be empty or repeated."""
    words = [name.split() for name in names]
    shared = [word for word in words[0] if all(word in others for others in words)]
    left = [" ".join(word for word in one if word not in shared) for one in words]
    if not all(left) or len(set(left)) < len(set(names)):
        return "", list(names)
    return " ".join(shared), left


def _releases_figure(
    figure: Callable[..., Any], name: str, whole: Comparison, cases: Sequence[CaseOfReleases], metric: str,
    series: dict[str, list[float | None]],
) -> Any:  # fmt: skip
    shared, texts = labels([case.case for case in cases])
    size = (PANEL[0] + CASE * len(cases), PANEL[1] + 0.9 + LETTER * max(map(len, texts)))
    shown = figure(figsize=size, layout="constrained")
    axes = shown.subplots()
    axes.axhline(1.0, color="#555555", linewidth=0.8, zorder=1)
    for i, (release, values) in enumerate(series.items()):
        aside = BESIDE * ((i + 0.5) / len(series) - 0.5)
        there = [(place + aside, value) for place, value in enumerate(values) if value is not None]
        axes.plot(
            [x for x, _ in there], [y for _, y in there], color=COLOURS[i % len(COLOURS)],
            marker=MARKS[i % len(MARKS)], linestyle="none", markersize=5, label=_plain(release),
        )  # fmt: skip
    for place, case in enumerate(cases):
        if all(values[place] is None for values in series.values()):
            timed = any(of.ms is not None for of in case.releases.values())
            axes.text(
                place, 0.03, "no peer" if timed else "not timed", transform=axes.get_xaxis_transform(), rotation=90,
                ha="center", va="bottom", fontsize=7, color="#777777",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip
    axes.set_xticks(
        range(len(texts)), [_plain(text) for text in texts], fontsize=7, rotation=60, ha="right", rotation_mode="anchor"
    )
    axes.set_xlim(-0.6, len(texts) - 0.4)
    for place in range(1, len(texts)):  # a case's marks lie between two of these
        axes.axvline(place - 0.5, color="#EEEEEE", linewidth=0.6, zorder=0)
    axes.set_xlabel(_plain("case" if shared in ("", name) else f"case; all are {shared}"), fontsize=8)
    axes.set_ylabel(OF_PEER if metric == "ratio" else OF_BEST, fontsize=8)
    axes.grid(True, axis="y", linewidth=0.4, color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", labelsize=7)
    runs = [run for run in whole.releases if not run.failed]
    told = dict.fromkeys((*(run.chip for run in runs if run.chip), *(run.date[:10] for run in runs)))
    shown.suptitle(_plain(f"{name}, releases of Triton: {', '.join(told)}"), fontsize=10)
    shown.legend(loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return shown


def _plain(text: str) -> str:
    """Escape a file's text, which matplotlib would take for a formula."""
    return text.replace("$", r"\$")
