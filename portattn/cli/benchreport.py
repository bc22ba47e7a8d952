"""`portattn bench report`, `compare` and `join`: results, and comparisons of Triton's releases, from files alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from portattn.cli import RED, require_some
from portattn.cli.output import emit_json, heading, json_option, table
from portattn.errors import ArgumentError
from portattn.files import write_named, write_whole
from portattn.tools.param_types import FiniteRange

if TYPE_CHECKING:
    from portattn.tools.bench.comparison import Comparison
    from portattn.tools.bench.results import Figures, Result, Row
    from portattn.tools.bench.workloads import WorkloadResult


def show_comparison(whole: Comparison, written: list[Path]) -> None:
    from portattn.tools.bench import comparison

    started = whole.started
    for run in whole.releases:
        said = f"did not start: {run.failed}" if run.failed else f"{run.toolchain}{', ' * bool(run.chip)}{run.chip}"
        click.echo(f"{run.release}: {said}")
    click.echo(comparison.FIGURES)
    table(*comparison.case_lines(whole.cases, started))
    heading("Sets: the best peer's time and the best release's time over each one's, geometric means")
    table(*comparison.set_lines(whole.sets))
    for path in written:
        click.echo(f"written: {path}")


LAUNCH_BOUND_MS = 0.1  # device times below which the time from a graph is shown as well


@click.command()
@click.argument("results", metavar="RESULTS", type=click.Path(path_type=Path, exists=True))
@click.option("--markdown", type=click.Path(path_type=Path, dir_okay=False), help="Write tables to this file.")
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), help="Draw SVGs into this folder.")
@json_option
def report(results: Path, markdown: Path | None, plots: Path | None, as_json: bool) -> None:
    """Summaries, tables and plots of RESULTS: a bench.json, a rows.jsonl (of an interrupted run too), the
    releases.json of a run with --release, or a folder with one of these; the last comes first. No device is needed;
    --plots needs matplotlib (the extra `bench`).

    Exit status 0 whatever the figures say; 2 when they cannot be read."""
    from portattn.tools.bench import comparison, workloads
    from portattn.tools.bench import plots as bench_plots
    from portattn.tools.bench import report as bench_report
    from portattn.tools.bench import results as bench_results

    if markdown is not None and markdown.resolve() == results.resolve():
        raise ArgumentError("bench report", "--markdown", str(markdown), "must be another file than that of RESULTS")
    found: Any = workloads.read(results)
    if found is None:
        compared = comparison.place(results)
        found = bench_results.read(results) if compared is None else comparison.read(compared)
    kinds: dict[type, tuple[Any, ...]] = {
        workloads.WorkloadResult: (workloads, None, msgspec.structs.asdict, show_workload),
        comparison.Comparison: (comparison, bench_plots.draw_releases, msgspec.structs.asdict, show_comparison),
        bench_results.Result: (bench_report, bench_plots.draw, bench_report.document, show),
    }
    texts, draw, data, show_it = kinds[type(found)]
    if plots is not None and draw is None:
        raise ArgumentError("bench report", "--plots", str(plots), f"has no figure for the set {found.set}")
    if plots is not None:
        bench_plots.figure_class()  # without matplotlib nothing is written
    written: list[Path] = []
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        write_named(markdown, texts.as_markdown(found).encode())
        written.append(markdown)
    if plots is not None:
        written += draw(found, plots)
    if as_json:
        emit_json(data(found) | ({"written": [str(path) for path in written]} if draw else {}))
    else:
        show_it(found, written)


@click.command()
@click.argument("before", type=click.Path(path_type=Path, exists=True))
@click.argument("after", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--tolerance", type=FiniteRange(0, 1, max_open=True), default=0.03, show_default=True,
    help="Part of its ratio to the same peer that a case may lose.",
)  # fmt: skip
@json_option
def compare(before: Path, after: Path, tolerance: float, as_json: bool) -> None:
    """What changed from BEFORE to AFTER: how far ahead of the same peer portattn was in each. Times of two runs do not
    compare on a card that is capped in power.

    Exit status 1 when a case has lost more than the tolerance; 3 when no case could be compared."""
    from portattn.tools.bench import report as bench_report

    found = bench_report.changes(_of_a_run("before", before), _of_a_run("after", after))
    slower = bench_report.slower(found, tolerance)
    sets = bench_report.by_set(found)
    if as_json:
        emit_json({"tolerance": tolerance, "sets": sets, "slower": slower, "changes": found})
    else:
        rows = [(c.set, c.case, c.name, c.peer or "no peer in both", _times(c.before), _times(c.after),
                 "" if c.change is None else f"{c.change - 1:+.1%}", f"{c.ms[0] * 1e3:.1f} → {c.ms[1] * 1e3:.1f} µs")
                for c in found]  # fmt: skip
        table(("set", "case", "contender", "against", "before", "after", "change", "own time"), rows)
        for line in sets:
            click.echo(f"{line.set}, {line.name}: {line.change - 1:+.1%} over {line.cells} cells")
        for change in slower:
            assert change.change is not None
            click.echo(f"slower: {change.set}, {change.case}, {change.name}: {change.change - 1:+.1%}", err=True)
    if slower:
        raise SystemExit(RED)
    reasons = [f"{c.case} has no peer in both" for c in found] or ["BEFORE and AFTER share no case"]
    require_some(sum(c.change is not None for c in found), "compared", reasons)


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder for the whole.")
@json_option
def join(results: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Make one result of RESULTS that measured different cases of one thing: the same code, chip, toolchain and
    options, as several GPUs of a host do at a time. --out gets rows.jsonl and bench.json.

    Exit status 2 when they cannot be read, are not of one thing, or two have measured the same case; nothing is
    written then."""
    from portattn.tools.bench import results as bench_results
    from portattn.tools.bench.report import document

    whole = bench_results.merge_results({path: _of_a_run("results", path) for path in results})
    with bench_results.Store(out) as folder:
        if kept := folder.start():
            click.echo(f"the rows that were there are now {kept}", err=True)
        folder.replace(whole)
        written = write(whole, out)
    if as_json:
        emit_json(document(whole) | {"written": [str(path) for path in written]})
    else:
        show(whole, written)


def _of_a_run(argument: str, path: Path) -> Result:
    """Read the results of one run. Raises ArgumentError for a comparison of releases, beside which each has its own."""
    from portattn.tools.bench import comparison
    from portattn.tools.bench import results as bench_results

    if comparison.place(path) is not None:
        limit = "compares releases of Triton: name the folder of one of them, which lies beside it"
        raise ArgumentError("bench", argument, str(path), limit)
    return bench_results.read(path)


def write(result: Result, folder: Path) -> list[Path]:
    """Write bench.json; return its path. Without a figure no earlier file is overwritten."""
    from portattn.tools.bench.report import document

    path = folder / "bench.json"
    if not result.done and path.exists():
        return []
    write_whole(path, msgspec.json.format(msgspec.json.encode(document(result)), indent=1) + b"\n")
    return [path]


def show(result: Result, written: list[Path]) -> None:
    from portattn.tools.bench.report import summaries

    for run in result.runs:
        limits = run.ceilings
        versions = ", ".join(f"{name} {text}" for name, text in run.versions.items())
        text = f"{run.chip}, {run.toolchain}, {versions}, {run.date}"
        if limits:
            text += f"; ceilings: GEMM {limits.gemm_tflops:.0f} TFLOP/s, copy {limits.copy_tbs:.2f} TB/s"
        click.echo(text)
        for file, state in run.libraries.items():
            click.echo(f"{file}: {state}")
        for name, state in run.peers.items():
            if state != "here":
                click.echo(f"{name}: {state}")
    rows = [line for row in result.rows for line in _lines(row)]
    table(("set", "case", "contender", "µs", "spread", "rate", "of limit", "error", "notes"), rows)
    for call in result.first_calls:
        text = (
            call.failed
            or f"{call.empty_s:.2f} s with empty caches, {call.kept_s:.2f} s with kept ones, "
            f"{call.warmed_s or 0.0:.4f} s after a warm-up of {call.warmup_s or 0.0:.2f} s ({call.path})"
        )
        click.echo(f"{call.case}: {text}")
    heading("Sets: the best peer's time over ours, geometric means")
    table(
        ("set", "contender", "cells", "geomean", "worst", "from graphs", "of the floor", "worst in"),
        [(s.set, s.name, f"{s.cells}/{s.of}", _times(s.ratio), _times(s.worst), _times(s.graph_ratio),
          f"{s.of_floor:.0%}" if s.of_floor is not None else "", s.worst_case) for s in summaries(result)],
    )  # fmt: skip
    for path in written:
        click.echo(f"written: {path}")


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _lines(row: Row) -> list[tuple[str, ...]]:
    from portattn.tools.bench.report import rate

    lines: list[tuple[str, ...]] = []
    for f in row.contenders:
        if f.refused:
            lines.append((row.set, row.name, f.name, "", "", "", "", "", f.refused))
            continue
        lines.append((
            row.set, row.name, f.name, "" if f.ms is None else f"{f.ms * 1e3:.1f}",
            "" if f.spread is None else f"{f.spread:.0%}", rate(row, f),
            "" if f.of_floor is None else f"{f.of_floor:.0%} {row.limit}",
            "" if f.error is None else f"{f.error:.1e}", _notes(row, f),
        ))  # fmt: skip
    return lines


def _notes(row: Row, f: Figures) -> str:
    notes = [f.path] if f.path else []
    if f.ratio is not None:
        notes.append(f"{f.ratio:.2f}× {row.best_peer}")
    if f.no_graph:
        notes.append(f"no graph: {f.no_graph}")
    elif f.graph is not None and f.graph < LAUNCH_BOUND_MS:
        notes.append(f"graph {f.graph * 1e3:.1f} µs")
    if f.host_us is not None:
        notes.append(f"host {f.host_us.median:.1f} µs")
    if f.extra_bytes is not None:
        notes.append(f"+{f.extra_bytes / 2**20:.1f} MiB")
    return "; ".join(notes)


def show_workload(found: WorkloadResult, written: list[Path]) -> None:
    from portattn.tools.bench import workloads

    click.echo(", ".join(str(found.run[name]) for name in ("chip", "toolchain", "torch", "date") if name in found.run))
    if found.rows:
        table(*workloads.shown_table(found.rows))
    for name, why in found.absent.items():
        click.echo(f"{name}: absent: {why}")
    for name in found.left:
        click.echo(f"no time was left for {name}")
    for text in found.wrong:
        click.echo(f"WRONG: {text}", err=True)
    for path in written:
        click.echo(f"written: {path}")
