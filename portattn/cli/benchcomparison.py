"""A comparison of releases of Triton: shown as text, and reported from its releases.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from portattn.cli.output import emit_json, heading, table, write_texts

if TYPE_CHECKING:
    from portattn.tools.bench.releases.compared import Comparison


def report(whole: Comparison, markdown: Path | None, as_csv: Path | None, plots: Path | None, as_json: bool) -> None:
    """What `portattn bench report` does with a releases.json."""
    import msgspec

    from portattn.tools.bench.releases import tables

    written = write_texts(whole, ((markdown, tables.as_markdown), (as_csv, tables.as_csv)))
    if plots is not None:
        from portattn.tools.bench.releases.plots import draw

        written += draw(whole, plots)
    if as_json:
        emit_json(msgspec.structs.asdict(whole) | {"written": [str(path) for path in written]})
    else:
        show(whole, written)


def show(whole: Comparison, written: list[Path]) -> None:
    """The comparison as text, and each release's verdicts on the goals."""
    from portattn.tools.bench.releases import tables

    started = whole.started
    for run in whole.releases:
        said = f"did not start: {run.said}" if run.failed else f"{run.toolchain}{', ' * bool(run.chip)}{run.chip}"
        click.echo(f"{run.release}: {said}")
    click.echo(tables.FIGURES)
    table(*tables.case_lines(whole.cases, started))
    if whole.first_calls:
        heading("First calls")
        table(*tables.first_call_lines(whole.first_calls, started))
    heading("Sets: the best peer's time and the best release's time over each one's, geometric means")
    table(*tables.set_lines(whole.sets))
    if whole.goals:
        heading("Goals")
        table(*tables.goal_lines(whole.goals, started))
    for path in written:
        click.echo(f"written: {path}")
