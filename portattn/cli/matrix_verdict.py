"""What commands of `portattn matrix` share that say whether a run is all right: options, output, exit status."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from portattn.cli.errors import RED, require_some
from portattn.cli.output import plural
from portattn.tools import shell_values

if TYPE_CHECKING:
    from portattn.tools.matrix.cells import Cell, Run
    from portattn.tools.matrix.diff import Diff
    from portattn.tools.matrix.expected import ExpectedFailure
    from portattn.tools.matrix.verdict import Verdict

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path, dir_okay=False)


def fail_on_option(words: str) -> Callable[[F], F]:
    """Add --fail-on, whose help names the words that it can have."""
    return click.option(
        "--fail-on",
        multiple=True,
        type=shell_values.FAIL_ON,
        metavar="WORDS",
        help=f"What else is red: {words}; repeat it, or use commas.",
    )


def verdict_options(function: F) -> F:
    """Add --fail-on, --expected and --junit."""
    for option in (
        click.option("--junit", type=FILE, metavar="FILE", help="Write the verdict as JUnit XML."),
        click.option("--expected", type=FILE, metavar="FILE", help="The expected failures (docs/matrix.md)."),
    ):
        function = option(function)
    return fail_on_option("note, not_run; and of what changed since the baseline new, facts, quirks, won")(function)


def fail_on(texts: Sequence[str], op: str, compared: bool) -> frozenset[str]:
    """The words of --fail-on. Raises ArgumentError, also on a kind of change where nothing is compared."""
    from portattn.errors import ArgumentError
    from portattn.tools.matrix.verdict import FAIL_ON, STATUSES, words

    found = words(texts, op, FAIL_ON)
    changes = sorted(found - STATUSES.keys())
    if changes and not compared:
        raise ArgumentError(op, "--fail-on", changes[0], "is a change, and needs --baseline to compare with")
    return found


def expected_of(path: Path | None) -> tuple[ExpectedFailure, ...]:
    from portattn.tools.matrix import expected

    return expected.read(path) if path else ()


def write_junit(path: Path | None, run: Run, cells: Sequence[Cell], verdict: Verdict) -> None:
    from portattn.tools.matrix import junit
    from portattn.tools.matrix.results import write_data

    if path:
        write_data(path, junit.render(run, cells, verdict))


def show(verdict: Verdict) -> None:
    """The findings as text, and how many cells fail as expected."""
    for finding in verdict.findings:
        click.secho(f"{finding.kind.upper():<15} ", fg="red", nl=False)
        click.echo(str(finding))
        for cause in finding.causes:
            click.echo(f"{'':16}cause: {cause}")
    if verdict.expected:
        click.echo(f"{plural(len(verdict.expected), 'cell')} failed as expected")
    for note in verdict.notes:
        click.echo(note, err=True)
    if verdict.findings:
        kinds = Counter(finding.kind for finding in verdict.findings)
        click.echo(f"red: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")


def show_noted(cells: Sequence[Cell], verdict: Verdict) -> None:
    """The cells that are a NOTE, each with its reason: without it nobody knows what kept the cell from its level.

    Those that --fail-on made red stand among the findings, and those that were expected are counted there.
    """
    told = {finding.cell for finding in verdict.findings if finding.kind == "note"}
    for cell in cells:
        if cell.status == "NOTE" and cell.id not in told and cell.id not in verdict.expected:
            click.secho(f"{'NOTE':<15} ", fg="yellow", nl=False)
            click.echo(f"{cell.target}  {cell.toolchain}  {cell.name}: {cell.reason}")


def document(verdict: Verdict) -> dict[str, Any]:
    return {"findings": verdict.findings, "expected": verdict.expected, "notes": verdict.notes}


def leave(verdict: Verdict, cells: Sequence[Cell], compared: int = 0) -> None:
    """Exit with status 1 where there are findings, and with 3 where no cell was run or compared."""
    if verdict.findings:
        raise click.exceptions.Exit(RED)
    ran = sum(cell.status != "NOT_RUN" for cell in cells)
    require_some(ran + compared, "run", [cell.reason for cell in cells] or ["the run has no cells"])


def show_diff(diff: Diff, red: frozenset[str]) -> None:
    """What changed as text: what was lost first."""
    ordered = sorted(diff.changes, key=lambda change: (not red & set(change.kinds), not change.lost))
    for change in ordered:
        lost = bool(red & set(change.kinds))
        word, colour = ("LOST", "red") if lost else ("won", "green") if "won" in change.kinds else ("changed", None)
        word = "new" if change.kinds == ("new",) and not lost else word
        click.secho(f"{word:<8} ", fg=colour, nl=False)
        click.echo(str(change))
        for kind, text in change.told.items():
            click.echo(f"{'':9}{kind}: {text}")
        if change.reason and lost:
            click.echo(f"{'':9}reason: {change.reason}")
        for cause in change.causes if lost else ():
            click.echo(f"{'':9}cause: {cause}")
    counts = Counter(kind for change in diff.changes for kind in change.kinds)
    said = ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "nothing changed"
    apart = f"; {plural(diff.apart, 'cell')} not asked for" if diff.apart else ""
    click.echo(f"{plural(diff.compared, 'cell')} compared: {said}{apart}")
    first = Counter(str(change.causes[0]) for change in diff.changes if red & set(change.kinds) and change.causes)
    for text, count in first.most_common():
        click.echo(f"  {plural(count, 'cell')} lost: {text}")


def today(day: datetime.datetime | None) -> datetime.date | None:
    return day.date() if day else None
