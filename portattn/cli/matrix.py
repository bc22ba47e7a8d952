"""`portattn matrix`: make the cells of ops × targets, and the page that shows them."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from portattn.cli import matrix_compare, matrix_verdict
from portattn.cli.errors import INTERRUPTED
from portattn.cli.matrix_page import PAGE, counts, tell_empty, write_page
from portattn.cli.named import tell_unknown
from portattn.cli.output import emit_json, json_option, plural
from portattn.tools import shell_values
from portattn.tools.number_ranges import SECONDS

if TYPE_CHECKING:
    from portattn.schema.target import Target
    from portattn.tools.matrix.cells import Cell, Run
    from portattn.tools.matrix.problems import SetName
    from portattn.tools.matrix.verdict import Verdict


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
    type=SECONDS,
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
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A baseline, or an earlier run: what is lost since then is red.",
)
@matrix_verdict.verdict_options
@click.option("--host", metavar="NAME", help="What this machine is called in the record and in merged runs.")
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
    host: str | None,
    baseline: Path | None,
    fail_on: tuple[str, ...],
    expected: Path | None,
    junit: Path | None,
    as_json: bool,
) -> None:
    """Make every cell, and write results.jsonl and index.html into --out.

    Each cell is planned, compiled in a child process (with the installed compiler, or in an environment of
    `portattn lab`), checked against the chip (registers, spills, local memory, matrix instructions), run under the
    interpreter on a small problem, AMD's machine code in a model of the chip and Ascend's lowering on this CPU, and
    natively where its target is here, or as an older chip's code on a newer NVIDIA GPU. An earlier results.jsonl is
    kept under its date. Ctrl-C keeps what is finished; --resume goes on.

    Exit status 1: a cell is red (FAIL, ERROR, CRASH or TIMEOUT) and --expected does not say so, an expected failure did
    not come as expected, --baseline has what was lost, or what --fail-on names is there. 3: no cell could be run.
    """
    from portattn.cli.progress import CellProgress
    from portattn.errors import ArgumentError
    from portattn.files import takes_no_file
    from portattn.planning.detect_target import devices
    from portattn.tools.matrix import provenance, request, results, select
    from portattn.tools.matrix.run import Options, execute
    from portattn.tools.matrix.snapshot import snapshot
    from portattn.tools.matrix.verdict import of_run

    if quick and full:
        raise ArgumentError("matrix run", "--full", "on", "goes without --quick")
    which: SetName = "full" if full else "quick"
    # Whatever is wrong with these is said before a run of hours.
    red, listed = (
        matrix_verdict.fail_on(fail_on, "matrix run", baseline is not None),
        matrix_verdict.expected_of(expected),
    )
    before = request.baseline(baseline, which)
    if junit and (why := takes_no_file(junit)):
        raise ArgumentError("matrix run", "--junit", str(junit), f"cannot be written: {why}")
    ascend = select.toolchain_of(ascend_python) if ascend_python else None
    tell_unknown(select.toolchains(toolchain))
    globs, problems = select.globs(targets), select.commas(ops)
    where = select.targets(globs, select.toolchains(toolchain, all_toolchains), ascend, which)
    pythons = {str(ascend): ascend_python} if ascend_python else {}
    specs = select.specs(select.problems(which, problems), where)
    asked_for = request.MatrixRequest(where, globs, problems, which, all_toolchains)
    if before is not None:
        asked_for.must_share(before, specs)
    if create:
        _create(select.missing(where, pythons))
    _tell_no_lab(select.missing(where, pythons))
    here = tuple(devices())
    if run_ptx_compat:
        _older(where, here)
    ours = Path(sys.argv[0]).name in ("portattn", "__main__.py")
    command = shlex.join(["portattn", *sys.argv[1:]]) if ours else "portattn matrix run"
    left_out = tuple(name for name, off in {"emulated": not emulate, "older": run_ptx_compat is False}.items() if off)
    made = provenance.this_run(
        specs, which, command, here, pythons, seconds=seconds, left_out=left_out, host=host or ""
    )  # fmt: skip
    keys, origin = provenance.keys(specs, made.identity), made.identity.id
    options = Options(seconds=seconds, jobs=jobs, pythons=pythons, here=here, left_out=left_out)
    with results.Results(out) as file:
        cells: list[Cell] = []
        if resume:
            resumed = file.resume(made, keys)
            made, cells, kept = resumed.run, resumed.cells, resumed.copy
            if resumed.stale:
                click.echo(f"{plural(len(resumed.stale), 'cell')} made under other conditions: made again", err=True)
        else:
            kept = file.start(made)
        if kept:
            click.echo(f"the results that were there are now {kept}", err=True)
        finished = {cell.id for cell in cells}
        left = [spec for spec in specs if spec.id not in finished]

        with CellProgress(len(specs), len(cells)) as progress:

            def done(cell: Cell) -> None:
                cell = msgspec.structs.replace(cell, key=keys[cell.id], origin=origin)
                file.append(cell)
                cells.append(cell)
                progress.cell(cell)

            interrupted = False
            try:
                execute(left, options, done)
            except KeyboardInterrupt:
                interrupted = True
        file.finish(made, cells)
        write_page(made, cells, out / PAGE)
    cells.sort(key=lambda cell: cell.index)
    changes = None
    if before is not None and not interrupted:
        after = snapshot(made, cells, str(out))
        changes = asked_for.compared(before, after)
    verdict = of_run(made, cells, fail_on=red, expected=listed, changes=changes, whole=False)
    matrix_verdict.write_junit(junit, made, cells, verdict)
    _tell(made, cells, verdict, out, as_json, interrupted)


@matrix.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="The page to write; DIR/index.html by default."
)
@matrix_verdict.fail_on_option("red, note, not_run")
@json_option
def report(folder: Path, html: Path | None, fail_on: tuple[str, ...], as_json: bool) -> None:
    """Write the page for the results in DIR, also of an interrupted run.

    Exit status 0 whatever the cells say, unless --fail-on names red kinds: `red`, `note`, `not_run`. 2 when the
    results cannot be read or are of another schema version.
    """
    from portattn.tools.matrix import results
    from portattn.tools.matrix.verdict import STATUSES, of_run, words

    red = words(fail_on, "matrix report", STATUSES)
    made, cells = results.read(folder / results.NAME)
    page = html or folder / PAGE
    write_page(made, cells, page)
    if as_json:
        emit_json(_summary(made, cells) | {"page": str(page)})
    else:
        click.echo(f"{plural(len(cells), 'cell')}: {counts(cells)}")
        tell_empty(made, cells)
        click.echo(f"page: {page}")
    if red:
        verdict = of_run(made, cells, fail_on=red, whole=False)
        if not as_json:
            matrix_verdict.show(verdict)
        matrix_verdict.leave(verdict, cells)


matrix_compare.add_to(matrix)


def _create(toolchains: list[str]) -> None:
    """Make lab environments before the run. Raises LabError when one cannot be made: the run would lack its cells."""
    from portattn.cli.lab import create_all
    from portattn.tools.lab import LabError

    _, failed = create_all(toolchains) if toolchains else ([], {})
    if failed:
        raise LabError("\n".join(failed.values()))


def _tell_no_lab(toolchains: list[str]) -> None:
    """A line on standard error for compilers that are not in the lab: which folder that is, and what makes them.

    Their cells are NOT_RUN, and the status is 0 if any other cell was run, which is easily taken for a whole run.
    Another PORTATTN_CACHE_DIR than the one that the lab was made under is a common reason.
    """
    from portattn.tools.lab import folders

    if toolchains:
        click.echo(
            f"portattn: no whole environment of {', '.join(toolchains)} in the lab {folders.root()}: its cells are not "
            f"run; `portattn lab create {' '.join(toolchains)}` makes it there, and PORTATTN_CACHE_DIR names another "
            "folder around the lab",
            err=True,
        )


def _older(where: Sequence[Target], here: Sequence[Target]) -> None:
    """Raise ArgumentError where --run-older was asked for, and no target's code can be run as an older chip's."""
    from portattn.errors import ArgumentError
    from portattn.testing.executor import lacks

    missing = [lacks("older", target, here) for target in where]
    if all(missing):
        raise ArgumentError("matrix run", "--run-older", "on", missing[0])


def _tell(made: Run, cells: list[Cell], verdict: Verdict, out: Path, as_json: bool, interrupted: bool) -> None:
    """Print what came of the run, and exit with what it means."""
    if as_json:
        summary = _summary(made, cells) | {"out": str(out), "page": str(out / PAGE), "interrupted": interrupted}
        emit_json(summary | matrix_verdict.document(verdict))
    else:
        matrix_verdict.show(verdict)
        matrix_verdict.show_noted(cells, verdict)
        click.echo(f"{plural(len(cells), 'cell')}: {counts(cells)}")
        tell_empty(made, cells)
        click.echo(f"page: {out / PAGE}")
    if interrupted:
        click.echo(
            f"interrupted after {len(cells)} of {len(made.cells)} cells; the same command with --resume goes on",
            err=True,
        )
        raise click.exceptions.Exit(INTERRUPTED)
    matrix_verdict.leave(verdict, cells)


def _summary(made: Run, cells: list[Cell]) -> dict[str, Any]:
    from portattn.tools.matrix.not_run import gaps
    from portattn.tools.matrix.snapshot import said_label
    from portattn.tools.matrix.verdict import STATUSES

    return {
        "schema": made.schema,
        "cells": len(cells),
        "planned": len(made.cells),
        "statuses": dict(Counter(cell.status for cell in cells)),
        "levels": dict(Counter(cell.level for cell in cells if cell.status == "PASS")),
        "labels": dict(Counter(label for cell in cells if (label := said_label(cell)))),
        "empty": gaps(made, cells),
        # By the words of --fail-on; `notes` of a verdict are something else.
        **{kind: _listed(cells, statuses) for kind, statuses in STATUSES.items()},
    }


def _listed(cells: Sequence[Cell], statuses: Collection[str]) -> list[dict[str, str]]:
    """The cells that have one of the statuses, each with its reason."""
    return [
        {"target": c.target, "toolchain": c.toolchain, "name": c.name, "status": c.status, "reason": c.reason}
        for c in cells
        if c.status in statuses
    ]
