"""`portattn ci`: the breakages of another compiler, for a library's CI."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from portattn.cli import INTERRUPTED, RED, matrix_compare, require_some
from portattn.cli.lifecycle import entry_line, show_carried, tell_outcomes
from portattn.cli.output import emit_json, heading, json_option, pairs, plural
from portattn.errors import ArgumentError, DataError
from portattn.tools import param_types
from portattn.tools.display_text import names_or_count
from portattn.tools.param_types import FILE, FLAG, PATH, CompletionType, options, words

if TYPE_CHECKING:
    from portattn.tools.compare.report import CiReport
    from portattn.tools.compare.sides import CiRequest, SideRun
    from portattn.tools.compare.verdict import ExpectedFailure
    from portattn.tools.matrix.run import Options


def show(found: CiReport) -> None:
    from portattn.tools.compare.report import alike, verdict_line

    made = found.upgrade
    click.secho(f"{found.before} -> {found.after} on {names_or_count(found.targets, 'target')}", bold=True)
    for loss in found.losses:
        click.secho(f"\nLOST  {', '.join(loss.kinds)}: {loss.what}", fg="red")
        on, of = ", ".join(loss.targets), names_or_count(loss.problems, "problem")
        pairs([row for row in (("on", on), ("of", of), ("cause", loss.cause), ("do", loss.todo)) if row[1]], indent=6)
    for title, changes in (("won", found.won), ("changed", found.changed)):
        if changes:
            heading(f"{title}: {plural(len(changes), 'cell')}")
            for one in alike(changes):
                where = f"{names_or_count(one.targets, 'target')}; {names_or_count(one.problems, 'problem')}"
                click.echo(f"  {where}: {one.what}")
    stay = f"quirks that stay, not probed on every target with {found.after}"
    titles = {"falls away": "quirks that fall away", "newly applies": "quirks that newly apply", "stays": stay}
    shown = [one for one in made.entries if one.change != "stays" or one.unprobed]
    tell_outcomes(shown)
    for change, title in titles.items():
        if entries := [one for one in shown if one.change == change]:
            heading(f"{title}: {len(entries)}")
            pairs((one.id, entry_line(one)) for one in entries)
    show_carried(made)
    click.echo()
    for note in found.notes:
        click.echo(f"note: {note}")
    click.secho(verdict_line(found), fg="red" if found.losses else "green")


BEFORE, AFTER = "before", "after"  # folders of --out
MANY = 1000  # cells that take seconds to plan, and not a fraction of one
COMPILER = {"type": param_types.TOOLCHAIN, "metavar": "NAME==VERSION"}


def _kinds() -> Sequence[str]:
    from portattn.tools.compare.report import FAIL_ON

    return FAIL_ON


@click.command()
@options(
    ("--from before", COMPILER, "The compiler that is left; the baseline's, or the installed one."),
    ("--to after", COMPILER, "The compiler that comes; the installed one, where --from or --baseline is given."),
    ("--targets", matrix_compare.TARGETS,
     "Targets, as of `matrix run`; repeat it, or use commas. The baseline's, or those of the quick set."),
)  # fmt: skip
@matrix_compare.cell_options
@matrix_compare.set_options
@options(
    ("--baseline", PATH | {"metavar": "FILE"}, "A baseline, or an earlier run, in place of the old compiler's side."),
    ("--quirk-folder", PATH | {"metavar": "DIR"},
     "Quirk files of your own that come with the change: they hold on the new side alone."),
    ("--compile compiled", FLAG, "Compile the cells of both sides, as `matrix run` does."),
    ("--create", FLAG, "With --compile: first make the lab environments that are missing."),
    ("--expected", FILE, "The expected failures, as of `matrix run`."),
)  # fmt: skip
@matrix_compare.today_option
@options(
    ("--fail-on", {"multiple": True, "metavar": "WORDS", "type": CompletionType("words", words(_kinds), listed=True)},
     "Further changes that are red: new, facts, quirks, won, note, not_run, red; and the less sure unprobed, canaries, "
     "schedules. Repeat it, or use commas."),
    ("--summary", FILE, "Write the summary in Markdown there, and not to $GITHUB_STEP_SUMMARY."),
    ("--out", PATH | {"metavar": "DIR"},
     "Keep the runs: DIR/after, and DIR/before where there is no baseline, as of `matrix run`."),
)  # fmt: skip
@json_option
def ci(
    before: str | None, after: str | None, targets: tuple[str, ...], problems: tuple[str, ...], quick: bool, full: bool,
    shapes: Path | None, kernels: Path | None, baseline: Path | None, quirk_folder: Path | None, compiled: bool,
    create: bool, jobs: int, seconds: float, emulate: bool, expected: Path | None,
    today: datetime.datetime | None, fail_on: tuple[str, ...], summary: Path | None, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Say what breaks with another compiler: cells that lose something, quirks, variants, schedules.

    Without --compile the plans of both compilers are compared, which takes seconds and needs neither of them. The
    summary in Markdown is appended to $GITHUB_STEP_SUMMARY where that is set; on GitHub's runners each loss is an
    annotation, too.

    Exit status 1: a cell is gone, or has lost its level, the core path, its variant, interpreted numbers or speed; or
    what --fail-on names has happened. 2: bad input. 3: no cell could be compiled. 130: interrupted."""
    from portattn.files import takes_no_file, takes_no_files
    from portattn.tools.compare.report import verdict_line
    from portattn.tools.compare.sides import LEFT_OUT, read_request
    from portattn.tools.matrix.run import Options

    which = matrix_compare.one_set("ci", full=full, quick=quick, kernels=kernels, shapes=shapes)
    if create and not compiled:
        raise ArgumentError("ci", "--create", "on", "goes with --compile")
    red, listed = _fail_on(fail_on, compiled), matrix_compare.expected_of(expected)
    if kernels and not compiled:
        raise ArgumentError("ci", "--kernels", str(kernels), "goes with --compile: such kernels have no plan")
    what = read_request(
        before, after, targets, problems, which=which, baseline=baseline, quirks=quirk_folder, file=kernels or shapes
    )
    for option, path, reason in (("--summary", summary, takes_no_file), ("--out", out, takes_no_files)):
        if path and (why := reason(path)):  # said before the work
            raise ArgumentError("ci", option, str(path), f"cannot be written: {why}")
    made = Options(seconds=seconds, jobs=jobs, left_out=LEFT_OUT if emulate else (*LEFT_OUT, "emulated"))
    if compiled:
        _need_compilers(what, create)
    try:
        found = _compared(what, made, compiled, out, red, listed, today.date() if today else None)
    except KeyboardInterrupt:
        kept = f"; what was finished is in {out}" if out and compiled else ""
        click.echo(f"interrupted{kept}", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if as_json:
        emit_json({"verdict": verdict_line(found), "lost": len(found.losses)} | msgspec.structs.asdict(found))
    else:
        show(found)
    _tell_runner(found, summary, as_json)
    if found.losses:
        raise click.exceptions.Exit(RED)
    require_some(not found.idle, "compiled", found.idle)


def _fail_on(texts: tuple[str, ...], compiled: bool) -> frozenset[str]:
    from portattn.tools.compare import verdict
    from portattn.tools.compare.report import COMPILED, FAIL_ON

    found = verdict.words(texts, "ci", FAIL_ON)
    blind = sorted(found & COMPILED)
    if blind and not compiled:
        raise ArgumentError("ci", "--fail-on", blind[0], "is about compiled cells, and needs --compile")
    return found


def _need_compilers(what: CiRequest, create: bool) -> None:
    from portattn.cli.lab import create_or_fail
    from portattn.tools.compare.sides import missing
    from portattn.tools.lab import folders

    sides = [("--to", what.new)] if what.baseline else [("--from", what.old), ("--to", what.new)]
    for option, toolchain in sides:
        if (names := missing([(option, toolchain)])) and not create:
            limit = f"is neither installed nor in the lab, {folders.root()}: `portattn lab create {names[0]}`, --create"
            raise ArgumentError("ci", option, names[0], f"{limit}, another PORTATTN_CACHE_DIR, or no --compile")
    create_or_fail(missing(sides))


def _compared(
    what: CiRequest, options: Options, compiled: bool, out: Path | None, red: frozenset[str],
    listed: Sequence[ExpectedFailure], today: datetime.date | None,
) -> CiReport:  # fmt: skip
    from portattn.tools.compare.changes import compare
    from portattn.tools.compare.registry_changes import compare as upgraded
    from portattn.tools.compare.report import report
    from portattn.tools.compare.sides import as_planned, begin_side_run
    from portattn.tools.matrix.cells import snapshot

    command = matrix_compare.command_line("ci")
    runs = {} if what.baseline else {BEFORE: begin_side_run(what, [pair.old for pair in what.pairs], command, options)}
    runs[AFTER] = after = begin_side_run(what, [pair.new for pair in what.pairs], command, options)
    _make(runs, options, compiled, out)
    if what.baseline is None:
        old = snapshot(runs[BEFORE].run, runs[BEFORE].cells, str(what.old))
    else:
        old = what.baseline if compiled else as_planned(what.baseline)
    diff = compare(old, snapshot(after.run, after.cells, str(what.new)), what.counts())
    upgrade = upgraded(what.pairs, what.problems)
    return report(what, diff, after, upgrade, compiled=compiled, fail_on=red, expected=listed, today=today)


def _make(runs: dict[str, SideRun], options: Options, compiled: bool, out: Path | None) -> None:
    from portattn.cli.output import ProgressCounter

    if not compiled:
        for name, made in runs.items():
            if len(made.specs) > MANY:
                click.echo(f"planning {len(made.specs)} cells of {name}", err=True)
            made.plan()
        _keep(runs, out)
        return
    with ProgressCounter(sum(len(made.specs) for made in runs.values()), 0, "cells") as progress:
        try:
            for made in runs.values():
                made.compile(options, progress.matrix_cell)
        finally:  # also what was finished before Ctrl-C
            _keep(runs, out)


def _keep(runs: dict[str, SideRun], out: Path | None) -> None:
    for name, made in runs.items():
        if out is not None:
            matrix_compare.write_run(out / name, "ci", made.run, made.cells)


def _tell_runner(found: CiReport, summary: Path | None, as_json: bool) -> None:
    from portattn.tools.compare.report import ACTIONS, SUMMARY, annotation_lines, append, render
    from portattn.tools.matrix.results import write_data

    if os.environ.get(ACTIONS) == "true":
        for line in annotation_lines(found):
            click.echo(line, err=as_json)  # a runner reads both streams
    step = os.environ.get(SUMMARY)
    try:
        if summary:
            write_data(summary, render(found).encode())
        elif step and not append(Path(step), found):
            click.echo("portattn: the step's summary is full, and has none of this", err=True)
    except DataError as error:
        if not found.losses:
            raise
        click.echo(f"portattn: {error}", err=True)  # the losses are what the exit status tells
