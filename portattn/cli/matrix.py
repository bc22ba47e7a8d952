"""`portattn matrix`: make the cells of ops × targets, and the page that shows them."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from portattn.cli.errors import INTERRUPTED, RED
from portattn.cli.named import tell_unknown
from portattn.cli.output import emit_json, json_option, plural
from portattn.tools import shell_values

if TYPE_CHECKING:
    from portattn.schema.target import Target
    from portattn.tools.matrix.cells import Cell, Run
    from portattn.tools.matrix.problems import SetName

PAGE = "index.html"


@click.group()
def matrix() -> None:
    """Ops × targets: plan, compile, check and report every cell. No GPU is needed."""


@matrix.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path(".matrix"), show_default=True, help="Folder of the results."
)
@click.option("--quick", is_flag=True, help="A handful of problems (the default).")
@click.option("--full", is_flag=True, help="Every dtype × head_dim × mask, and each feature: hours.")
@click.option(
    "--targets",
    multiple=True,
    type=shell_values.TARGETS,
    metavar="GLOB",
    help="Targets, as `rocm`, `gfx9*`, `cuda:sm_90` or a family (`rdna3`); repeat it, or use commas.",
)
@click.option("--ops", multiple=True, metavar="GLOB", help="Ops, or names of problems; repeat it, or use commas.")
@click.option(
    "--toolchain",
    multiple=True,
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="Plan for this compiler, and compile with it where it is installed or in the lab; repeat it for several.",
)
@click.option("--all-toolchains", is_flag=True, help="Every toolchain that `portattn lab list` names.")
@click.option("--create", is_flag=True, help="First make the lab environments that are missing.")
@click.option(
    "--ascend-python", metavar="PATH", help="A Python with triton-ascend, in place of the lab's, for Ascend's cells."
)
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Cells made at a time.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Limit of each compile and each numerical check.",
)
@click.option(
    "--emulate/--no-emulate", default=True, help="Run AMD's machine code in a model of the chip; 1 to 5 s a cell."
)
@click.option(
    "--run-older/--no-run-older",
    "run_ptx_compat",
    default=None,
    help="Run the code of older NVIDIA GPUs on a newer one that is here; the default where there is one.",
)
@click.option("--resume", is_flag=True, help="Go on with an interrupted run: what it finished is kept.")
@json_option
def run(
    out: Path,
    quick: bool,
    full: bool,
    targets: tuple[str, ...],
    ops: tuple[str, ...],
    toolchain: tuple[str, ...],
    all_toolchains: bool,
    create: bool,
    ascend_python: str | None,
    jobs: int,
    seconds: float,
    resume: bool,
    emulate: bool,
    run_ptx_compat: bool | None,
    as_json: bool,
) -> None:
    """Make every cell, and write results.jsonl and index.html into --out.

    Each cell is planned, compiled in a child process (with the installed compiler, or in an environment of
    `portattn lab`), checked against the chip (registers, spills, local memory, matrix instructions), run under the
    interpreter on a small problem, AMD's machine code in a model of the chip and Ascend's lowering on this CPU, and
    natively where its target is here, or as an older chip's code on a newer NVIDIA GPU. An earlier results.jsonl is
    kept under its date. Ctrl-C keeps what is finished; --resume goes on.

    Exit status 1: a cell is red (FAIL, ERROR, CRASH or TIMEOUT).
    """
    from portattn.cli.progress import CellProgress
    from portattn.errors import ArgumentError
    from portattn.planning.detect import devices
    from portattn.tools.matrix import provenance, results, select
    from portattn.tools.matrix.run import Options, execute

    if quick and full:
        raise ArgumentError("matrix run", "--full", "on", "goes without --quick")
    which: SetName = "full" if full else "quick"
    ascend = select.toolchain_of(ascend_python) if ascend_python else None
    tell_unknown(select.toolchains(toolchain))
    where = select.targets(_targets(targets), select.toolchains(toolchain, all_toolchains), ascend, which)
    pythons = {str(ascend): ascend_python} if ascend_python else {}
    if create:
        _create(select.missing(where, pythons))
    specs = select.specs(select.problems(which, _commas(ops)), where)
    here = tuple(devices())
    if run_ptx_compat:
        _older(where, here)
    ours = Path(sys.argv[0]).name in ("portattn", "__main__.py")
    command = shlex.join(["portattn", *sys.argv[1:]]) if ours else "portattn matrix run"
    made = provenance.this_run(specs, which, command, here, tuple(pythons))
    left_out = tuple(name for name, off in {"emulated": not emulate, "older": run_ptx_compat is False}.items() if off)
    options = Options(seconds=seconds, jobs=jobs, pythons=pythons, here=here, left_out=left_out)
    with results.Results(out) as file:
        cells = file.resume(made) if resume else []
        kept = None if resume else file.start(made)
        if kept:
            click.echo(f"the results that were there are now {kept}", err=True)
        if resume:
            made = results.read(file.path)[0]
        finished = {cell.id for cell in cells}
        left = [spec for spec in specs if spec.id not in finished]

        with CellProgress(len(specs), len(cells)) as progress:

            def done(cell: Cell) -> None:
                file.append(cell)
                cells.append(cell)
                progress.cell(cell)

            interrupted = False
            try:
                execute(left, options, done)
            except KeyboardInterrupt:
                interrupted = True
        file.finish(made, cells)
        _page(made, cells, out / PAGE)
    _tell(made, sorted(cells, key=lambda c: c.index), out, as_json, interrupted)


@matrix.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="The page to write; DIR/index.html by default."
)
@json_option
def report(folder: Path, html: Path | None, as_json: bool) -> None:
    """Write the page for the results in DIR, those of an interrupted run too.

    Exit status 0 whatever the cells say; 2 when the results cannot be read or are of another schema version.
    """
    from portattn.tools.matrix import results

    made, cells = results.read(folder / results.NAME)
    page = html or folder / PAGE
    _page(made, cells, page)
    if as_json:
        emit_json(_summary(made, cells) | {"page": str(page)})
    else:
        click.echo(f"{plural(len(cells), 'cell')}: {_counts(cells)}")
        click.echo(f"page: {page}")


def _create(toolchains: list[str]) -> None:
    """Make lab environments before the run. Raises LabError when one cannot be made: the run would lack its cells."""
    from portattn.cli.lab import create_all
    from portattn.tools.lab import LabError

    _, failed = create_all(toolchains) if toolchains else ([], {})
    if failed:
        raise LabError("\n".join(failed.values()))


def _older(where: Sequence[Target], here: Sequence[Target]) -> None:
    """Raise ArgumentError where --run-older was asked for, and no target's code can be run as an older chip's."""
    from portattn.errors import ArgumentError
    from portattn.testing.executor import lacks

    missing = [lacks("older", target, here) for target in where]
    if all(missing):
        raise ArgumentError("matrix run", "--run-older", "on", missing[0])


def _page(made: Run, cells: list[Cell], path: Path) -> None:
    from portattn.errors import ArgumentError
    from portattn.files import write_whole
    from portattn.tools.matrix.report import render

    try:
        write_whole(path, render(made, cells).encode())
    except OSError as error:
        raise ArgumentError("matrix", "page", str(path), f"cannot be written: {error.strerror}") from None


def _tell(made: Run, cells: list[Cell], out: Path, as_json: bool, interrupted: bool) -> None:
    """Print what came of the run, and exit with what it means."""
    red = [cell for cell in cells if cell.red]
    if as_json:
        emit_json(_summary(made, cells) | {"out": str(out), "page": str(out / PAGE), "interrupted": interrupted})
    else:
        for cell in red:
            click.secho(f"{cell.status:<8}", fg="red", nl=False)
            click.echo(f"{cell.target}  {cell.toolchain}  {cell.name}: {cell.reason}")
        click.echo(f"{plural(len(cells), 'cell')}: {_counts(cells)}")
        click.echo(f"page: {out / PAGE}")
    if interrupted:
        click.echo(
            f"interrupted after {len(cells)} of {len(made.cells)} cells; the same command with --resume goes on",
            err=True,
        )
        raise click.exceptions.Exit(INTERRUPTED)
    if red:
        raise click.exceptions.Exit(RED)


def _summary(made: Run, cells: list[Cell]) -> dict[str, Any]:
    return {
        "schema": made.schema,
        "cells": len(cells),
        "planned": len(made.cells),
        "statuses": dict(Counter(cell.status for cell in cells)),
        "levels": dict(Counter(cell.level for cell in cells if cell.status == "PASS")),
        "labels": dict(Counter(cell.label for cell in cells if cell.label)),
        "red": [
            {"target": c.target, "toolchain": c.toolchain, "name": c.name, "status": c.status, "reason": c.reason}
            for c in cells
            if c.red
        ],
    }


def _counts(cells: list[Cell]) -> str:
    """`12 runs, 3 runs (sm_80 code on sm_90), 5 NOTE`: passing cells by level, the others by status."""
    counts = Counter(_counted(cell) for cell in cells)
    return ", ".join(f"{number} {word}" for word, number in counts.most_common()) or "none"


def _counted(cell: Cell) -> str:
    if cell.status != "PASS":
        return cell.status
    return f"{cell.level} ({cell.label})" if cell.label else cell.level


def _targets(texts: tuple[str, ...]) -> list[str]:
    """The globs of targets, with names of chips as the targets that they mean."""
    from portattn.errors import ArgumentError
    from portattn.planning.registry import Registry

    registry, found = Registry.load(), []
    for text in _commas(texts):
        try:
            found.append(registry.target(text, "none").name)
        except ArgumentError as error:
            known = text in registry.backends or registry.family(text) or set("*?[") & set(text)
            if not known:
                raise ArgumentError("matrix run", "--targets", text, error.limit) from None
            found.append(text)  # a glob; one that matches nothing is refused with all that could be meant
    return found


def _commas(texts: tuple[str, ...]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
