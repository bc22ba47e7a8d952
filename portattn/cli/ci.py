"""`portattn ci`: what another compiler breaks, for a library's CI."""

from __future__ import annotations

import datetime
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from portattn.cli import matrix_verdict
from portattn.cli.errors import INTERRUPTED, RED, require_some
from portattn.cli.output import emit_json, heading, json_option, pairs, plural
from portattn.cli.upgrade_sections import entry_line, names_or_count, show_carried, tell_outcomes
from portattn.errors import ArgumentError, DataError
from portattn.tools import shell_values
from portattn.tools.number_ranges import SECONDS

if TYPE_CHECKING:
    from portattn.tools.ci.cells import SideRun
    from portattn.tools.ci.report import CiReport
    from portattn.tools.ci.request import CiRequest
    from portattn.tools.matrix.expected import ExpectedFailure
    from portattn.tools.matrix.run import Options


def document(found: CiReport) -> dict[str, object]:
    import msgspec

    from portattn.tools.ci.summary import verdict

    return {"verdict": verdict(found), "lost": len(found.losses)} | msgspec.structs.asdict(found)


def show(found: CiReport) -> None:
    """The report as text: losses first."""
    from portattn.tools.ci.report import alike
    from portattn.tools.ci.summary import verdict

    made = found.upgrade
    click.secho(f"{found.before} -> {found.after} on {names_or_count(found.targets, 'target')}", bold=True)
    for loss in found.losses:
        click.secho(f"\nLOST  {', '.join(loss.kinds)}: {loss.what}", fg="red")
        rows = (
            ("on", ", ".join(loss.targets)),
            ("of", names_or_count(loss.problems, "problem")),
            ("cause", loss.cause),
        )
        pairs([row for row in (*rows, ("do", loss.todo)) if row[1]], indent=6)
    for title, changes in (("won", found.won), ("changed", found.changed)):
        if changes:
            heading(f"{title}: {plural(len(changes), 'cell')}")
            for one in alike(changes):
                click.echo(
                    f"  {names_or_count(one.targets, 'target')}; {names_or_count(one.problems, 'problem')}: {one.what}"
                )
    shown = {
        "quirks that fall away": [one for one in made.entries if one.change == "falls away"],
        "quirks that newly apply": [one for one in made.entries if one.change == "newly applies"],
        f"quirks that stay, not probed on every target with {found.after}": [
            one for one in made.entries if one.change == "stays" and one.unprobed
        ],
    }
    tell_outcomes(one for entries in shown.values() for one in entries)
    for title, entries in shown.items():
        if entries:
            heading(f"{title}: {len(entries)}")
            pairs((one.id, entry_line(one)) for one in entries)
    show_carried(made)
    click.echo()
    for note in found.notes:
        click.echo(f"note: {note}")
    click.secho(verdict(found), fg="red" if found.losses else "green")


PATH = click.Path(path_type=Path)
BEFORE, AFTER = "before", "after"  # folders of --out
COMMAND = "portattn ci"
MANY = 1000  # cells that take seconds to plan, and not a fraction of one


def _kinds() -> Iterator[tuple[str, str]]:
    """What --fail-on takes, for the shell."""
    from portattn.tools.ci.report import FAIL_ON

    return ((word, "") for word in FAIL_ON)


@click.command()
@click.option(
    "--from",
    "before",
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="The compiler that is left; the baseline's, or the installed one.",
)
@click.option(
    "--to",
    "after",
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="The compiler that comes; the installed one, where --from or --baseline is given.",
)
@click.option(
    "--targets",
    multiple=True,
    type=shell_values.TARGETS,
    metavar="GLOB",
    help="Targets, as of `matrix run`; repeat it, or use commas. The baseline's, or those of the quick set.",
)
@click.option("--problems", multiple=True, metavar="GLOB", help="Ops, or names of problems; repeat it, or use commas.")
@click.option("--quick", is_flag=True, help="The quick set of problems (the default).")
@click.option("--full", is_flag=True, help="The full set of problems: seconds of plans, hours of compiling.")
@click.option(
    "--baseline",
    type=PATH,
    metavar="FILE",
    help="A baseline, or an earlier run, in place of the old compiler's side.",
)
@click.option(
    "--quirk-folder",
    type=PATH,
    metavar="DIR",
    help="Quirk files of your own that come with the change: they hold on the new side alone.",
)
@click.option("--compile", "compiled", is_flag=True, help="Compile the cells of both sides, as `matrix run` does.")
@click.option("--create", is_flag=True, help="With --compile: first make the lab environments that are missing.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Cells compiled at a time.")
@click.option(
    "--seconds",
    type=SECONDS,
    default=120.0,
    show_default=True,
    help="Limit of each compile and each numerical check.",
)
@click.option("--emulate/--no-emulate", default=True, help="Run AMD's machine code in a model of the chip.")
@click.option("--expected", type=matrix_verdict.FILE, metavar="FILE", help="The expected failures, as of `matrix run`.")
@click.option("--today", type=click.DateTime(["%Y-%m-%d"]), help="The day that expiry dates are compared with.")
@click.option(
    "--fail-on",
    multiple=True,
    type=shell_values.CompletionType("words", _kinds, listed=True),
    metavar="WORDS",
    help="What else is red: new, facts, quirks, won, note, not_run, red; and of what is less sure unprobed, canaries, "
    "schedules, figures. Repeat it, or use commas.",
)
@click.option(
    "--summary",
    type=matrix_verdict.FILE,
    metavar="FILE",
    help="Write the summary in Markdown there, and not to $GITHUB_STEP_SUMMARY.",
)
@click.option(
    "--out",
    type=PATH,
    metavar="DIR",
    help="Keep the runs: DIR/after, and DIR/before where there is no baseline, as of `matrix run`.",
)
@json_option
def ci(
    before: str | None,
    after: str | None,
    targets: tuple[str, ...],
    problems: tuple[str, ...],
    quick: bool,
    full: bool,
    baseline: Path | None,
    quirk_folder: Path | None,
    compiled: bool,
    create: bool,
    jobs: int,
    seconds: float,
    emulate: bool,
    expected: Path | None,
    today: datetime.datetime | None,
    fail_on: tuple[str, ...],
    summary: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Say what breaks with another compiler: cells that lose something, quirks, variants, schedules, figures.

    Without --compile the plans of both compilers are compared, which takes seconds and needs neither of them. The
    summary in Markdown is appended to $GITHUB_STEP_SUMMARY where that is set; on GitHub's runners each loss is an
    annotation, too.

    Exit status 1: a cell is gone, or has lost its level, the core path, its variant or its interpreted numbers; or what
    --fail-on names has happened. 2: bad input. 3: no cell could be compiled. 130: interrupted.
    """  # fmt: skip
    from portattn.files import takes_no_file, takes_no_files
    from portattn.tools.ci.request import read_request
    from portattn.tools.matrix.run import Options

    if quick and full:
        raise ArgumentError("ci", "--full", "on", "goes without --quick")
    if create and not compiled:
        raise ArgumentError("ci", "--create", "on", "goes with --compile")
    red, listed = _fail_on(fail_on, compiled), matrix_verdict.expected_of(expected)
    what = read_request(
        before, after, targets, problems, which="full" if full else "quick" if quick else None, baseline=baseline,
        quirks=quirk_folder,
    )  # fmt: skip
    for option, path, reason in (("--summary", summary, takes_no_file), ("--out", out, takes_no_files)):
        if path and (why := reason(path)):  # said before the work
            raise ArgumentError("ci", option, str(path), f"cannot be written: {why}")
    options = Options(seconds=seconds, jobs=jobs, left_out=_left_out(emulate))
    if compiled:
        _need_compilers(what, create)
    try:
        found = _compared(what, options, compiled, out, targets, problems, red, listed, matrix_verdict.today(today))
    except KeyboardInterrupt:
        kept = f"; what was finished is in {out}" if out and compiled else ""
        click.echo(f"interrupted{kept}", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if as_json:
        emit_json(document(found))
    else:
        show(found)
    _tell_runner(found, summary, as_json)
    if found.losses:
        raise click.exceptions.Exit(RED)
    require_some(not found.idle, "compiled", found.idle)


def _fail_on(texts: tuple[str, ...], compiled: bool) -> frozenset[str]:
    from portattn.tools.ci.report import COMPILED, FAIL_ON
    from portattn.tools.matrix.verdict import words

    found = words(texts, "ci", FAIL_ON)
    blind = sorted(found & COMPILED)
    if blind and not compiled:
        raise ArgumentError("ci", "--fail-on", blind[0], "is about compiled cells, and needs --compile")
    return found


def _left_out(emulate: bool) -> tuple[str, ...]:
    from portattn.tools.ci.cells import LEFT_OUT

    return LEFT_OUT if emulate else (*LEFT_OUT, "emulated")


def _need_compilers(what: CiRequest, create: bool) -> None:
    """Raise ArgumentError where a side cannot be compiled here, and LabError where its environment cannot be made."""
    from portattn.cli.lab import create_all
    from portattn.tools.ci.cells import missing
    from portattn.tools.lab import LabError, folders

    sides = [("--to", what.new)] if what.baseline else [("--from", what.old), ("--to", what.new)]
    for option, toolchain in sides:
        if (names := missing([(option, toolchain)])) and not create:
            limit = (
                f"is neither installed nor in the lab, {folders.root()}: `portattn lab create {names[0]}`, --create, "
                "another PORTATTN_CACHE_DIR, or no --compile"
            )
            raise ArgumentError("ci", option, names[0], limit)
    _, failed = create_all(names) if (names := missing(sides)) else ([], {})
    if failed:
        raise LabError("\n".join(failed.values()))


def _compared(
    what: CiRequest,
    options: Options,
    compiled: bool,
    out: Path | None,
    targets: tuple[str, ...],
    problems: tuple[str, ...],
    red: frozenset[str],
    listed: Sequence[ExpectedFailure],
    today: datetime.date | None,
) -> CiReport:
    """Make the sides that are needed, and compare them."""
    from portattn.tools.ci import cells
    from portattn.tools.ci.report import report
    from portattn.tools.ci.request import counts
    from portattn.tools.matrix.diff import compare
    from portattn.tools.matrix.snapshot import snapshot
    from portattn.tools.upgrade.compare import compare as upgraded

    ours = Path(sys.argv[0]).name in ("portattn", "__main__.py")
    command = shlex.join(["portattn", *sys.argv[1:]]) if ours else COMMAND
    sides = {AFTER: cells.begin_side_run(what, [pair.new for pair in what.pairs], command, options)}
    if what.baseline is None:
        sides = {BEFORE: cells.begin_side_run(what, [pair.old for pair in what.pairs], command, options)} | sides
    _make(sides, options, compiled, out)
    after = sides[AFTER]
    new = snapshot(after.run, after.cells, str(what.new))
    if what.baseline is None:
        old = snapshot(sides[BEFORE].run, sides[BEFORE].cells, str(what.old))
    else:
        old = what.baseline if compiled else cells.as_planned(what.baseline)
    diff = compare(old, new, counts(what, targets, problems))
    upgrade = upgraded(what.pairs, what.problems)
    return report(what, diff, after, upgrade, compiled=compiled, fail_on=red, expected=listed, today=today)


def _make(sides: dict[str, SideRun], options: Options, compiled: bool, out: Path | None) -> None:
    """Make the cells of the sides, and keep them where --out says."""
    from portattn.cli.progress import CellProgress
    from portattn.tools.ci import cells

    if not compiled:
        for name, made in sides.items():
            if len(made.specs) > MANY:
                click.echo(f"planning {len(made.specs)} cells of {name}", err=True)
            cells.plan_all(made)
        _keep(sides, out)
        return
    with CellProgress(sum(len(made.specs) for made in sides.values()), 0) as progress:
        try:
            for made in sides.values():
                cells.compile_all(made, options, progress.cell)
        finally:  # also what was finished before Ctrl-C
            _keep(sides, out)


def _keep(sides: dict[str, SideRun], out: Path | None) -> None:
    """Write each side as a run of the matrix, an earlier one under its date."""
    from portattn.cli.matrix_page import PAGE, write_page
    from portattn.tools.matrix.results import Results

    for name, made in sides.items() if out else ():
        assert out is not None
        with Results(out / name, "ci") as file:
            if kept := file.replace(made.run, made.cells):
                click.echo(f"the results that were there are now {kept}", err=True)
            write_page(made.run, made.cells, out / name / PAGE)


def _tell_runner(found: CiReport, summary: Path | None, as_json: bool) -> None:
    """The summary, where --summary or the runner wants it, and annotations on a runner."""
    from portattn.tools.ci import github
    from portattn.tools.ci.summary import render
    from portattn.tools.matrix.results import write_data

    if github.on_runner(os.environ):
        for line in github.annotation_lines(found):
            click.echo(line, err=as_json)  # a runner reads both streams
    step = os.environ.get(github.SUMMARY)
    try:
        if summary:
            write_data(summary, render(found).encode())
        elif step and not github.append(Path(step), found):
            click.echo("portattn: the step's summary is full, and has none of this", err=True)
    except DataError as error:
        if not found.losses:
            raise
        click.echo(f"portattn: {error}", err=True)  # the losses are what the exit status tells
