"""`portattn matrix diff|merge|baseline|check|log|site`: runs of the matrix compared, joined, kept and shown."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from portattn.cli import matrix_verdict
from portattn.cli.errors import RED, require_some
from portattn.cli.matrix_page import PAGE, counts, tell_empty, write_page
from portattn.cli.matrix_site import site
from portattn.cli.output import emit_json, json_option, plural
from portattn.errors import ArgumentError

if TYPE_CHECKING:
    from portattn.tools.matrix.snapshot import Snapshot, SnapshotCell

PATH = click.Path(path_type=Path)


def add_to(group: click.Group) -> None:
    """Add the commands to `portattn matrix`."""
    for command in (diff, merge, baseline, check, log, site):
        group.add_command(command)


@click.command()
@click.argument("old", metavar="OLD", type=PATH)
@click.argument("new", metavar="NEW", type=PATH)
@click.option("--partial", is_flag=True, help="NEW is of some targets and problems: what it lacks is not gone.")
@matrix_verdict.fail_on_option("new, facts, quirks, won")
@json_option
def diff(old: Path, new: Path, partial: bool, fail_on: tuple[str, ...], as_json: bool) -> None:
    """Compare two runs: what was lost and won, cell by cell, and why.

    OLD and NEW are folders of `matrix run` or `matrix merge`, files of results, or baselines.

    Exit status 1: a cell is gone, or has lost its level, the core path, its variant or its interpreted numbers; or what
    --fail-on names has happened. 2: a run cannot be read. 3: the runs share no cell.
    """
    from portattn.tools.matrix import reading
    from portattn.tools.matrix.diff import KINDS, LOST, compare
    from portattn.tools.matrix.verdict import words

    red = LOST | words(fail_on, "matrix diff", KINDS)
    before, after = reading.read(old), reading.read(new)
    if before.missing:
        click.echo(
            f"{old} was interrupted: it lacks {plural(before.missing, 'cell')}, and none can be missed", err=True
        )
    if partial and after.missing:
        limit = f"lacks {plural(after.missing, 'cell')}: which they are is not known; go on with it by --resume"
        raise ArgumentError("matrix diff", "NEW", str(new), f"was interrupted, and {limit}")
    counts = _counts("matrix diff", "OLD", before, after, partial)
    found = compare(before, after, counts)
    lost = [change for change in found.changes if red & set(change.kinds)]
    if as_json:
        emit_json(
            {"old": found.old, "new": found.new, "compared": found.compared, "apart": found.apart, "lost": len(lost)}
            | {"red": sorted(red), "changes": found.changes}
        )
    else:
        matrix_verdict.show_diff(found, red)
    if lost:
        raise click.exceptions.Exit(RED)
    require_some(found.compared, "compared", ["the runs share no cell"])


def _counts(op: str, argument: str, before: Snapshot, after: Snapshot, partial: bool) -> Callable[[SnapshotCell], bool]:
    """Which cells of OLD count. Raises ArgumentError where NEW is a part that has none of them."""
    from portattn.tools.matrix.diff import part_of
    from portattn.tools.matrix.request import must_compare

    if not partial:
        return lambda _: True
    counts = part_of(before, after)
    must_compare(op, argument, before, counts)
    return counts


@click.command()
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=PATH)
@click.option("--out", required=True, type=PATH, metavar="DIR", help="Folder of the merged run.")
@json_option
def merge(runs: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Make one run of several machines' runs, and its page.

    Of several results of a cell the one with most evidence is kept, a red one before any other; the others stay in the
    record. Runs of different kernels, code or data are refused.

    Exit status 1: two runs differ in a cell though all that it depends on is the same. 2: runs that cannot be merged.
    """
    from portattn.tools.matrix import merge as merging
    from portattn.tools.matrix import reading, results

    read = [reading.read_cells(path) for path in runs]
    command = shlex.join(["portattn", "matrix", "merge", *(path.name for path in runs), "--out", out.name])
    merged = merging.merge(read, [str(path) for path in runs], command)
    with results.Results(out, "matrix merge") as file:
        kept = file.replace(merged.run, merged.cells)
        write_page(merged.run, merged.cells, out / PAGE)
    if kept:
        click.echo(f"the results that were there are now {kept}", err=True)
    several = sum(bool(cell.others) for cell in merged.cells)
    if as_json:
        emit_json(
            {"out": str(out), "page": str(out / PAGE), "runs": len(runs), "cells": len(merged.cells)}
            | {"planned": len(merged.run.cells), "several": several, "conflicts": merged.conflicts}
        )
    else:
        for conflict in merged.conflicts:
            click.secho("CONFLICT ", fg="red", nl=False)
            click.echo(str(conflict))
        click.echo(f"{plural(len(merged.cells), 'cell')} of {plural(len(runs), 'run')}: {counts(merged.cells)}")
        tell_empty(merged.run, merged.cells)
        click.echo(f"{plural(several, 'cell')} made by several; page: {out / PAGE}")
    if merged.conflicts:
        raise click.exceptions.Exit(RED)


@click.command()
@click.argument("run", metavar="RUN", type=PATH)
@click.argument("file", metavar="FILE", type=matrix_verdict.FILE)
@json_option
def baseline(run: Path, file: Path, as_json: bool) -> None:
    """Keep a run as a baseline: a sorted text FILE, a line a cell, to be reviewed and committed.

    `matrix run --baseline FILE` and `matrix check` compare with it.

    Exit status 2: RUN cannot be read or was interrupted, or FILE cannot be written.
    """
    from portattn.tools.matrix import baseline as baselines
    from portattn.tools.matrix import reading
    from portattn.tools.matrix.results import write_data

    if file.suffix != baselines.SUFFIX:
        raise ArgumentError("matrix baseline", "FILE", str(file), f"must end with {baselines.SUFFIX}: it is TOML")
    made = reading.whole(run, "matrix baseline", "RUN")
    write_data(file, baselines.write(made).encode())
    red = sum(entry.red for entry in made.entries)
    dirty = sorted({identity.commit[:10] for identity in made.identities.values() if identity.dirty})
    if as_json:
        emit_json({"file": str(file), "cells": len(made.entries), "red": red, "dirty": dirty})
        return
    click.echo(f"{file}: {plural(len(made.entries), 'cell')}" + (f", {red} of them red" if red else ""))
    if dirty:
        click.echo(f"made of a tree with changes that commit {', '.join(dirty)} lacks", err=True)


@click.command()
@click.argument("run", metavar="RUN", type=PATH)
@click.option("--baseline", "against", type=PATH, metavar="FILE", help="The baseline, or a run, to compare with.")
@click.option("--partial", is_flag=True, help="RUN is of some targets and problems: what it lacks is not gone.")
@click.option("--today", type=click.DateTime(["%Y-%m-%d"]), help="The day that expiry dates are compared with.")
@matrix_verdict.verdict_options
@json_option
def check(
    run: Path,
    against: Path | None,
    partial: bool,
    today: datetime.datetime | None,
    fail_on: tuple[str, ...],
    expected: Path | None,
    junit: Path | None,
    as_json: bool,
) -> None:
    """Say whether a finished run is all right: red cells, expected failures, and what was lost since a baseline.

    Exit status 1: a cell is red and not expected to be, an expected failure passes, fails for another reason or has
    expired, cells are missing, something was lost since the baseline, or what --fail-on names is there. 2: bad input.
    3: no cell of the run was run, nor compared.
    """
    from portattn.tools.matrix import reading
    from portattn.tools.matrix.diff import compare
    from portattn.tools.matrix.snapshot import snapshot
    from portattn.tools.matrix.verdict import of_run

    red = matrix_verdict.fail_on(fail_on, "matrix check", against is not None)
    listed = matrix_verdict.expected_of(expected)
    before = reading.whole(against, "matrix check", "--baseline") if against else None
    made, cells = reading.read_cells(run)
    changes = None
    if before is not None:
        after = snapshot(made, cells, str(run))
        changes = compare(before, after, _counts("matrix check", "--baseline", before, after, partial))
    verdict = of_run(
        made, cells, fail_on=red, expected=listed, changes=changes, today=matrix_verdict.today(today)
    )  # fmt: skip
    matrix_verdict.write_junit(junit, made, cells, verdict)
    if as_json:
        emit_json({"cells": len(cells), "planned": len(made.cells)} | matrix_verdict.document(verdict))
    else:
        matrix_verdict.show(verdict)
        compared = f"; {plural(changes.compared, 'cell')} compared with {changes.old}" if changes else ""
        click.echo(f"{plural(len(cells), 'cell')}: {counts(cells)}{compared}")
        tell_empty(made, cells)
    matrix_verdict.leave(verdict, cells, changes.compared if changes else 0)


@click.command()
@click.argument("cell", metavar="CELL")
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=PATH)
@json_option
def log(cell: str, runs: tuple[Path, ...], as_json: bool) -> None:
    """A cell's history over runs: its level, its path, and what changed it.

    CELL is a glob on a problem's name, on `TARGET NAME` or on `TARGET TOOLCHAIN NAME`. Of a folder its earlier results
    are read, too. Runs are shown by their dates.

    Exit status 2: a run cannot be read, or none has such a cell.
    """
    from portattn.tools.matrix import reading
    from portattn.tools.matrix.history import history

    snapshots = [reading.read(file) for path in runs for file in reading.earlier(path)]
    seen = history(snapshots, cell)
    if not seen:
        known = sorted({f"{entry.target} {entry.name}" for run in snapshots for entry in run.entries})
        shown = ", ".join(known[:3]) or "none"
        raise ArgumentError("matrix log", "CELL", cell, f"no run has such a cell; the first that there are: {shown}")
    if as_json:
        emit_json({"cell": cell, "seen": seen})
        return
    last = None
    for one in seen:
        if (one.target, one.name) != last:
            last = (one.target, one.name)
            click.secho(f"{one.target}  {one.name}", bold=True)
        where = f"{one.commit}  {one.host}".strip()
        click.echo(f"  {one.date:%Y-%m-%d %H:%M}  {one.word:<16}  {one.path:<10}  {one.toolchain}  {where}")
        for kind, text in one.changed.items():
            click.secho(f"{'':20}{kind}: {text}", fg="red" if one.lost else None)
        for cause in one.causes if one.changed else ():
            click.echo(f"{'':20}cause: {cause}")
