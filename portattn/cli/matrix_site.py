"""`portattn matrix site`: a static site of one run, or of several merged."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from portattn.cli.errors import INTERRUPTED, RED
from portattn.cli.matrix_page import PAGE, counts, tell_empty
from portattn.cli.output import emit_json, json_option, plural
from portattn.errors import ArgumentError, DataError
from portattn.files import replace_folder

if TYPE_CHECKING:
    from portattn.tools.matrix.site import History

PATH = click.Path(path_type=Path)


@click.command()
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=PATH)
@click.option("--out", required=True, type=PATH, metavar="DIR", help="Folder of the site; an earlier site is replaced.")
@json_option
def site(runs: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Write a static site: the table with filters, a page for each cell and each quirk, and a badge.

    RUN is a folder of `matrix run` or `matrix merge`, or a file of results; several are merged as `matrix merge` does.
    A folder's earlier results are a cell's history. The site needs no server and no network.

    Exit status 0 whatever the cells say. 1: two runs differ in a cell though all that it depends on is the same; the
    site is written. 2: a run cannot be read, runs cannot be merged, or DIR holds what is not a site's.
    """
    from portattn.cli.progress import FileProgress
    from portattn.tools.matrix import badge, merge, reading
    from portattn.tools.matrix import site as pages

    if why := pages.foreign(out):
        raise ArgumentError(pages.OP, "--out", str(out), f"is not written over: {why}")
    read = [reading.read_cells(path) for path in runs]
    run, cells = read[0]
    conflicts = merge.conflicts(cells)  # of a run that was merged before
    if len(read) > 1:
        command = shlex.join(["portattn", "matrix", "merge", *(path.name for path in runs)])
        merged = merge.merge(read, [str(path) for path in runs], command)
        run, cells, conflicts = merged.run, merged.cells, merged.conflicts
    history = _history(runs)
    total = pages.count(cells)
    try:
        with FileProgress(total) as progress:
            files = replace_folder(out, progress.counted(pages.pages(run, cells, history)))
    except OSError as error:
        limit = f"cannot be written: {error.strerror or error}"
        raise ArgumentError(pages.OP, "--out", str(out), limit) from None
    except KeyboardInterrupt:
        click.echo("interrupted: no site was written, and an earlier one is as it was", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    counted = badge.counts(run, cells)
    if as_json:
        emit_json(
            {"out": str(out), "page": str(out / PAGE), "runs": len(runs), "cells": len(cells), "files": files}
            | {"badge": msgspec.structs.asdict(counted), "conflicts": conflicts}
        )
    else:
        for conflict in conflicts:
            click.secho("CONFLICT ", fg="red", nl=False)
            click.echo(str(conflict))
        click.echo(f"{plural(len(cells), 'cell')} of {plural(len(runs), 'run')}: {counts(cells)}")
        tell_empty(run, cells)
        click.echo(f"{plural(files, 'file')}; page: {out / PAGE}; badge: {badge.endpoint(counted)['message']}")
    if conflicts:
        raise click.exceptions.Exit(RED)


def _history(runs: Sequence[Path]) -> History:
    """What each run made of each cell. Earlier results that cannot be read any more are named, and left out."""
    from portattn.tools.matrix import reading
    from portattn.tools.matrix.history import HistoryEntry, history

    found = []
    for file in dict.fromkeys(file for path in runs for file in reading.earlier(path)):
        try:
            found.append(reading.read(file))
        except DataError as error:
            click.echo(f"left out of the history: {error}", err=True)
    seen: dict[tuple[str, str], list[HistoryEntry]] = {}
    for one in history(found, "*"):
        seen.setdefault((one.target, one.name), []).append(one)
    return seen
