"""What `portattn tune` says: what would be searched, what is being done, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from portattn.cli.errors import INTERRUPTED, RED
from portattn.cli.output import emit_json, table

if TYPE_CHECKING:
    from portattn.schema.target import Target
    from portattn.tools.tune.choice import Only
    from portattn.tools.tune.classes import Class
    from portattn.tools.tune.records import Outcome, Record
    from portattn.tools.tune.tunable import Tunable


def dry_run_rows(
    chosen: list[Class], tools: dict[str, Tunable], where: Target, most: int, only: Only, as_json: bool
) -> None:
    from portattn.tools.tune.search import proposals

    rows: list[dict[str, Any]] = []
    for ground in proposals(chosen, tools, where, most, only):
        one = ground.of
        refused = [record for record in ground.dropped if record.verdict == "refused"]
        rows.append(
            {
                "class": one.name,
                "problems": [load.name for load in one.workloads],
                "incumbent": one.incumbent,
                "candidates": len(ground.entrants),
                "twins": sum(record.verdict == "twin" for record in ground.dropped),
                "refused": len(refused),
                "reasons": sorted({record.reason for record in refused}),
            }
        )
    if as_json:
        emit_json({"target": where.name, "toolchain": str(where.toolchain), "classes": rows})
        return
    table(
        ("candidates", "twins", "refused", "today", "class", "problems"),
        [
            (
                str(row["candidates"]), str(row["twins"]), str(row["refused"]), str(row["incumbent"] or "nothing"),
                str(row["class"]), "; ".join(row["problems"]),
            )
            for row in rows
        ],
    )  # fmt: skip
    _legend(chosen)


def _legend(classes: list[Class]) -> None:
    """What the names in the choices mean, below what has them."""
    from portattn.tools import legend

    for line in legend.of_kernels(one.kernel for one in classes):
        click.echo(line)


class SearchProgress:
    """Says on standard error what is being done; a line a finished step where that is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self._task: Any = None

    def __enter__(self) -> SearchProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, what: str, steps: int) -> None:
        self._task = self._bar.add_task(what, total=steps)
        if not self.console.is_terminal and steps:
            click.echo(f"{what}: {steps}", err=True)

    def note(self, record: Record) -> None:
        from portattn.tools.tune.log import row, sentence
        from portattn.tools.tune.records import QUIET, CandidateRecord, CodeRecord, Outcome

        if isinstance(record, CodeRecord | Outcome) and self._task is not None:
            self._bar.update(self._task, advance=1)
        if isinstance(record, Outcome):
            self._say(f"{record.name}: {sentence(record)}")
        elif isinstance(record, CandidateRecord) and record.verdict not in QUIET:
            self._say("  ".join(part for part in row(record) if part))

    def _say(self, line: str) -> None:
        from rich.text import Text

        if self.console.is_terminal:
            self._bar.console.print(Text(line))
        else:
            click.echo(line, err=True)


def tell(
    chosen: list[Class],
    records: list[Record],
    outcomes: dict[str, Outcome],
    path: Path,
    log_path: Path,
    written: list[str],
    ended: str,
    as_json: bool,
) -> None:
    """Print what came of the run, and exit with what it means."""
    from portattn.tools.tune.log import sentence
    from portattn.tools.tune.run import red

    bad = red(records, outcomes)
    if as_json:
        emit_json(
            {
                "origin": records[0],
                "classes": [outcomes[one.name] for one in chosen if one.name in outcomes],
                "red": bad,
                "written": written,
                "out": str(path) if path.exists() else None,
                "log": str(log_path),
                "table": str(log_path.with_suffix(".txt")),
                "ended": ended,
            }
        )
    else:
        for one in chosen:
            if one.name in outcomes:
                click.echo(f"{one.name}\n  {sentence(outcomes[one.name])}")
                for result in outcomes[one.name].results:
                    if result.times:
                        was = f", was {result.incumbent:.1f}" if result.incumbent else ""
                        click.echo(f"  {result.times.median:8.1f} µs{was}  {result.problem}")
        for line in bad:
            click.secho(line, fg="red")
        _legend([one for one in chosen if one.name in outcomes])
        entries = "1 entry" if len(written) == 1 else f"{len(written)} entries"
        click.echo(f"{entries} written: {path}" if written else "nothing new to write")
        click.echo(f"log: {log_path}, {log_path.with_suffix('.txt')}")
    if ended == "interrupted":
        click.echo("interrupted; the same command with --resume goes on", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if ended:
        click.echo(f"{ended}; the same command with --resume goes on without it", err=True)
        raise click.exceptions.Exit(RED)
    if bad:
        raise click.exceptions.Exit(RED)
