"""Options and output that `portattn matrix` and `ci` share: a run's page, its verdict, JUnit XML and exit status."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from portattn.cli import RED, require_some
from portattn.cli.output import plural
from portattn.errors import ArgumentError
from portattn.files import write_named
from portattn.tools import param_types
from portattn.tools.param_types import FILE, options

if TYPE_CHECKING:
    from portattn.tools.compare.changes import Diff
    from portattn.tools.compare.verdict import ExpectedFailure, Verdict
    from portattn.tools.matrix.cells import Cell, Run
    from portattn.tools.matrix.results import Conflict

PAGE = "index.html"
F = TypeVar("F", bound=Callable[..., Any])
MANY: dict[str, Any] = {"multiple": True, "metavar": "GLOB"}
TARGETS = MANY | {"type": param_types.TARGETS}
SHOWN: dict[str, Any] = {"show_default": True}


def write_page(made: Run, cells: list[Cell], path: Path) -> None:
    from portattn.tools.matrix.site import render

    try:
        write_named(path, render(made, cells).encode())
    except OSError as error:
        raise ArgumentError("matrix", "page", str(path), f"cannot be written: {error.strerror}") from None


def write_run(folder: Path, op: str, made: Run, cells: list[Cell]) -> None:
    from portattn.tools.matrix.results import Results

    with Results(folder, op) as file:
        if kept := file.replace(made, cells):
            click.echo(f"the results that were there are now {kept}", err=True)
        write_page(made, cells, folder / PAGE)


def tell_conflicts(conflicts: Sequence[Conflict]) -> None:
    for conflict in conflicts:
        click.echo(f"{click.style('CONFLICT ', fg='red')}{conflict}")


def counts(cells: Sequence[Cell]) -> str:
    """Return `12 runs, 3 runs (sm_80 code on sm_90), 5 NOTE`: passing cells by level, the others by status."""
    from portattn.tools.matrix.cells import word

    found = Counter(word(cell) for cell in cells)
    return ", ".join(f"{number} {said}" for said, number in found.most_common()) or "none"


def tell_cells(made: Run, cells: Sequence[Cell], of: str = "", more: str = "") -> None:
    from portattn.tools.matrix.cell_text import gaps

    click.echo(f"{plural(len(cells), 'cell')}{of}: {counts(cells)}{more}")
    for gap in gaps(made, cells):
        where = f" ({', '.join(gap.targets)})" if gap.targets else ""
        click.echo(f"{plural(gap.cells, 'cell')} {gap.why.word}{where}: {gap.why.short}")
        click.echo(f"  first: {gap.why.needs}; then: {gap.command}" if gap.why.needs else f"  fill: {gap.command}")


def command_line(name: str) -> str:
    """Return the command of this process for the record, or `portattn NAME` in a process of another name."""
    ours = Path(sys.argv[0]).name in ("portattn", "__main__.py")
    return shlex.join(["portattn", *sys.argv[1:]]) if ours else f"portattn {name}"


def fail_on_option(words: str, kind: click.ParamType = param_types.FAIL_ON) -> Callable[[F], F]:
    text = f"Further changes that are red: {words}; repeat it, or use commas."
    return options(("--fail-on", {"multiple": True, "type": kind, "metavar": "WORDS"}, text))


# Options of making cells.
cell_options = options(
    ("--problems --ops problems", MANY, "Ops, or names of problems; repeat it, or use commas."),
    ("--jobs", SHOWN | {"type": click.IntRange(1, 64), "default": 2}, "Cells made at a time."),
    ("--seconds", SHOWN | {"type": param_types.SECONDS, "default": 120.0},
     "Limit of each compile and each numerical check."),
    ("--emulate/--no-emulate", {"default": True}, "Run AMD's machine code in a model of the chip."),
)  # fmt: skip
today_option = options(
    ("--today", {"type": click.DateTime(["%Y-%m-%d"])}, "The day that expiry dates are compared with.")
)
_verdict_files = options(
    ("--expected", FILE, "The expected failures (docs/ci.md)."), ("--junit", FILE, "Write the verdict as JUnit XML.")
)


def verdict_options(function: F) -> F:
    changes = "note, not_run; and, of changes since the baseline, new, facts, quirks, won"
    return fail_on_option(changes)(_verdict_files(function))


def one_set(op: str, quick: bool, full: bool) -> None:
    if quick and full:
        raise ArgumentError(op, "--full", "on", "goes without --quick")


def fail_on(texts: Sequence[str], op: str, compared: bool) -> frozenset[str]:
    """Return the words of --fail-on. Raises ArgumentError, also on a kind of change without a comparison."""
    from portattn.tools.compare.verdict import FAIL_ON, STATUSES, words

    found = words(texts, op, FAIL_ON)
    changes = sorted(found - STATUSES.keys())
    if changes and not compared:
        raise ArgumentError(op, "--fail-on", changes[0], "is a change, and needs --baseline to compare with")
    return found


def expected_of(path: Path | None) -> tuple[ExpectedFailure, ...]:
    from portattn.tools.compare import verdict

    return verdict.read(path) if path else ()


def write_junit(path: Path | None, run: Run, cells: Sequence[Cell], verdict: Verdict) -> None:
    from portattn.tools.compare.verdict import as_junit
    from portattn.tools.matrix.results import write_data

    if path:
        write_data(path, as_junit(run, cells, verdict))


def show(verdict: Verdict) -> None:
    for finding in verdict.findings:
        click.echo(click.style(f"{finding.kind.upper():<15} ", fg="red") + str(finding))
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
    told = {finding.cell for finding in verdict.findings if finding.kind == "note"}
    for cell in cells:
        if cell.status == "NOTE" and cell.id not in told and cell.id not in verdict.expected:
            click.echo(click.style(f"{'NOTE':<15} ", fg="yellow") + f"{'  '.join(cell.place)}: {cell.reason}")


def document(verdict: Verdict) -> dict[str, Any]:
    return {"findings": verdict.findings, "expected": verdict.expected, "notes": verdict.notes}


def leave(verdict: Verdict, cells: Sequence[Cell], compared: int = 0) -> None:
    if verdict.findings:
        raise click.exceptions.Exit(RED)
    ran = sum(cell.status != "NOT_RUN" for cell in cells)
    require_some(ran + compared, "run", [cell.reason for cell in cells] or ["the run has no cells"])


def show_diff(diff: Diff, red: frozenset[str]) -> None:
    for change in sorted(diff.changes, key=lambda change: (not red & set(change.kinds), not change.lost)):
        lost = bool(red & set(change.kinds))
        word, colour = ("LOST", "red") if lost else ("won", "green") if "won" in change.kinds else ("changed", None)
        word = "new" if change.kinds == ("new",) and not lost else word
        click.echo(click.style(f"{word:<8} ", fg=colour) + str(change))
        lines = [f"{kind}: {text}" for kind, text in change.told.items()]
        lines += [f"reason: {change.reason}"] if change.reason and lost else []
        for line in [*lines, *(f"cause: {cause}" for cause in change.causes if lost)]:
            click.echo(f"{'':9}{line}")
    counts = Counter(kind for change in diff.changes for kind in change.kinds)
    said = ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "nothing changed"
    apart = f"; {plural(diff.apart, 'cell')} not asked for" if diff.apart else ""
    click.echo(f"{plural(diff.compared, 'cell')} compared: {said}{apart}")
    first = Counter(str(change.causes[0]) for change in diff.changes if red & set(change.kinds) and change.causes)
    for text, count in first.most_common():
        click.echo(f"  {plural(count, 'cell')} lost: {text}")


def today(day: datetime.datetime | None) -> datetime.date | None:
    return day.date() if day else None
