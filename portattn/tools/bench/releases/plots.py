"""Releases beside each other, drawn from their comparison alone: a figure a set, a mark a release in each case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from portattn.tools.bench.contenders import OURS
from portattn.tools.bench.plots import PANEL, figure_class, save
from portattn.tools.bench.releases.compared import CaseOfReleases, Comparison

# A release has a colour and a mark of its own. Okabe and Ito's palette, which colour-blind readers tell apart, without
# its yellow, which is faint on white. Of more releases than colours, pairs still differ: there is one mark more.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKS = ("o", "^", "s", "D", "v", "P", "X", "*")
OF_PEER = "best peer’s time over portattn’s;\nabove 1 is faster"
OF_BEST = "best release’s time over this one’s;\nmedian over rounds"
CASE, LETTER = 0.36, 0.048  # inches: of a figure's width for each case, of its height for a letter of a case's label
BESIDE = 0.6  # of a case's width: releases' marks stand side by side in it, so that equal ones are all seen


def draw(whole: Comparison, folder: Path) -> list[Path]:
    """Write releases-SET.svg and .png for each set of which portattn has figures in more than one case; the paths.

    Raises PortattnError where matplotlib is not installed.
    """
    figure = figure_class()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, cases in of_sets(whole).items():
        metric, series = lines(cases, whole.started)
        if len(cases) > 1 and any(value is not None for line in series.values() for value in line):
            shown = _figure(figure, name, whole, cases, metric, series)
            written += save(shown, folder, f"releases-{name}")
    return written


def of_sets(whole: Comparison) -> dict[str, list[CaseOfReleases]]:
    """portattn's cases by set, in the comparison's order."""
    found: dict[str, list[CaseOfReleases]] = {}
    for case in whole.cases:
        if case.contender == OURS:
            found.setdefault(case.set, []).append(case)
    return found


def lines(cases: Sequence[CaseOfReleases], releases: Iterable[str]) -> tuple[str, dict[str, list[float | None]]]:
    """(figure that is drawn, its values by release, one a case): `ratio`, or `of_best` of a set that has no peers."""
    peers = any(of.ratio is not None for case in cases for of in case.releases.values())
    metric = "ratio" if peers else "of_best"
    return metric, {
        release: [getattr(case.releases.get(release), metric, None) for case in cases] for release in releases
    }


def labels(names: Sequence[str]) -> tuple[str, list[str]]:
    """(words that all names have, what else each has). Names stay whole where one had nothing left, or two the same."""
    words = [name.split() for name in names]
    shared = [word for word in words[0] if all(word in others for others in words)]
    left = [" ".join(word for word in one if word not in shared) for one in words]
    if not all(left) or len(set(left)) < len(set(names)):
        return "", list(names)
    return " ".join(shared), left


def _figure(
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
    """A file's text, of which matplotlib makes no formula."""
    return text.replace("$", r"\$")
