"""`portattn matrix`: make the cells of ops × targets, and their page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from portattn.cli import INTERRUPTED, matrix_compare, require_some
from portattn.cli.matrix_compare import PAGE, SHOWN, TARGETS, tell_cells, write_page
from portattn.cli.output import emit_json, json_option, plural, tell_unknown
from portattn.tools import param_types
from portattn.tools.param_types import FILE, FLAG, PATH, options

_LISTED = ("target", "toolchain", "name", "status", "reason")

if TYPE_CHECKING:
    from portattn.tools.compare.verdict import Verdict
    from portattn.tools.matrix.cells import Cell, Run
    from portattn.tools.matrix.problems import SetName


@click.group()
def matrix() -> None:
    """Ops × targets: plan, compile, check and report every cell. No GPU is needed."""


@matrix.command()
@options(("--out", PATH | SHOWN | {"default": Path(".matrix")}, "Folder of the results."))
@matrix_compare.set_options
@options(
    ("--quirk-folder", PATH | {"metavar": "DIR"}, "With --kernels: quirk files of your own, which the cells apply."),
    ("--targets", TARGETS,
     "Targets, as `rocm`, `gfx9*`, `cuda:sm_90` or a family (`rdna3`); repeat it, or use commas."),
)  # fmt: skip
@matrix_compare.cell_options
@options(
    ("--toolchain", {"multiple": True, "type": param_types.TOOLCHAIN, "metavar": "NAME==VERSION"},
     "Plan for this compiler, and compile with it where it is installed or in the lab; repeat it for several."),
    ("--all-toolchains", FLAG, "Every toolchain that `portattn lab list` names."),
    ("--create", FLAG, "First make the lab environments that are missing."),
    ("--ascend-python", {"metavar": "PATH"}, "A Python with triton-ascend, in place of the lab's, for Ascend's cells."),
    ("--run-older/--no-run-older run_ptx_compat", {"default": None},
     "Run the code of older NVIDIA GPUs on a newer one that is here; the default where there is one."),
    ("--resume", FLAG, "Go on with an interrupted run: what it finished is kept."),
    ("--baseline", PATH | {"metavar": "FILE"}, "A baseline, or an earlier run: what is lost since then is red."),
)  # fmt: skip
@matrix_compare.verdict_options
@options(("--host", {"metavar": "NAME"}, "What this machine is called in the record and in merged runs."))
@json_option
def run(
    out: Path, quick: bool, full: bool, shapes: Path | None, kernels: Path | None, quirk_folder: Path | None,
    targets: tuple[str, ...], problems: tuple[str, ...], toolchain: tuple[str, ...], all_toolchains: bool, create: bool,
    ascend_python: str | None, jobs: int, seconds: float, resume: bool, emulate: bool,
    run_ptx_compat: bool | None, host: str | None, baseline: Path | None, fail_on: tuple[str, ...],
    expected: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Make every cell, and write results.jsonl and index.html into --out.

    Each cell is planned, compiled in a child process (with the installed compiler, or in an environment of
    `portattn lab`), checked against the chip (registers, spills, local memory, matrix instructions), run under the
    interpreter on a small problem, AMD's machine code in a model of the chip and Ascend's lowering on this CPU, and
    natively where its target is here, or as an older chip's code on a newer NVIDIA GPU. An earlier results.jsonl is
    kept under its date. Ctrl-C keeps what is finished; --resume goes on.

    Exit status 1: a cell is red (FAIL, ERROR, CRASH or TIMEOUT) and --expected does not say so, an expected failure did
    not come as expected, --baseline has what was lost, or what --fail-on names is there. 3: no cell could be run."""
    from portattn.cli.lab import create_or_fail
    from portattn.cli.output import ProgressCounter
    from portattn.errors import ArgumentError
    from portattn.planning.registry import Registry, devices
    from portattn.testing.executor import lacks
    from portattn.tools.compare import sides
    from portattn.tools.compare.verdict import of_run
    from portattn.tools.matrix import provenance, results, select
    from portattn.tools.matrix.cells import snapshot
    from portattn.tools.matrix.run import Options, execute

    given = matrix_compare.one_set("matrix run", full=full, quick=quick, kernels=kernels, shapes=shapes)
    which: SetName = given or "quick"
    if quirk_folder and not kernels:  # a device's child plans by the installed entries alone
        raise ArgumentError("matrix run", "--quirk-folder", str(quirk_folder), "goes with --kernels; or use `ci`")
    registry = sides.with_quirks("matrix run", Registry.load(), quirk_folder) if quirk_folder else Registry.load()
    # Whatever is wrong with these is said before a run of hours.
    red = matrix_compare.red_kinds(fail_on, "matrix run", baseline is not None)
    listed = matrix_compare.expected_of(expected)
    before = sides.baseline(baseline, which)
    ascend = select.toolchain_of(ascend_python) if ascend_python else None
    tell_unknown(select.toolchains(toolchain))
    globs, names = select.globs(targets), select.commas(problems)
    where = select.targets(globs, select.toolchains(toolchain, all_toolchains), ascend, which)
    pythons = {str(ascend): ascend_python} if ascend_python else {}
    specs = select.specs(select.subjects(which, names, kernels or shapes), where)
    asked_for = sides.MatrixRequest(where, globs, names, which, all_toolchains)
    if before is not None:
        asked_for.must_share(before, specs)
    if create:
        create_or_fail(select.missing(where, pythons))
    _tell_no_lab(select.missing(where, pythons))
    here = tuple(devices())
    if run_ptx_compat and all(missing := [lacks("older", target, here) for target in where]):
        raise ArgumentError("matrix run", "--run-older", "on", missing[0])
    command = matrix_compare.command_line("matrix run")
    left_out = tuple(name for name, off in {"emulated": not emulate, "older": run_ptx_compat is False}.items() if off)
    more: dict[str, Any] = {"seconds": seconds, "left_out": left_out, "host": host or "", "registry": registry}
    made = provenance.this_run(specs, which, command, here, pythons, **more)
    keys, origin = provenance.keys(specs, made.identity), made.identity.id
    options = Options(
        seconds=seconds, jobs=jobs, pythons=pythons, here=here, left_out=left_out, registry=registry
    )  # fmt: skip
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

        with ProgressCounter(len(specs), len(cells), "cells") as progress:

            def done(cell: Cell) -> None:
                cell = msgspec.structs.replace(cell, key=keys[cell.id], origin=origin)
                file.append(cell)
                cells.append(cell)
                progress.matrix_cell(cell)

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
        changes = asked_for.compared(before, snapshot(made, cells, str(out)))
    verdict = of_run(made, cells, fail_on=red, expected=listed, changes=changes, whole=False)
    _tell(made, cells, verdict, out, as_json, interrupted)


@matrix.command()
@options(
    ("--out", FILE | {"required": True}, "The file of kernels to write."),
    ("--most", SHOWN | {"type": click.IntRange(1, 1000), "default": 3}, "Launches of one kernel that are kept."),
)
@click.argument("command", metavar="COMMAND…", nargs=-1, required=True)
@json_option
def record(out: Path, most: int, command: tuple[str, ...], as_json: bool) -> None:
    """Run a Python command, and write the Triton kernels that it launches into a file for `matrix run --kernels`.

    With a device, or with TRITON_INTERPRET=1 without one; an autotuned kernel then takes its first configuration.

    Exit status: the command's; 2 where it cannot be started, 3 where nothing was recorded."""
    from portattn.errors import ArgumentError
    from portattn.files import takes_no_file
    from portattn.tools.matrix.select import record as recorded

    if why := takes_no_file(out):
        raise ArgumentError("matrix record", "--out", str(out), f"cannot be written: {why}")
    found = recorded(command, out, most)
    for text, number in found.left_out.items():
        click.echo(f"left out, {plural(number, 'launch', 'launches')}: {text}", err=True)
    if as_json:
        emit_json({"file": str(out), "kernels": found.kernels, "left_out": found.left_out, "status": found.status})
    elif found.kernels:
        click.echo(f"{out}: {plural(len(found.kernels), 'kernel')}: {', '.join(found.kernels)}")
    if found.status:
        raise click.exceptions.Exit(found.status)
    require_some(len(found.kernels), "recorded", ["the command launched no Triton kernel"])


@matrix.command()
@click.argument("folder", metavar="DIR", **PATH)
@options(
    ("--html", {"type": FILE["type"]}, "The page to write; DIR/index.html by default."),
    ("--markdown", FILE, "Write the cells as a Markdown table, with the source of each one's evidence."),
)
@matrix_compare.fail_on_option("red, note, not_run")
@json_option
def report(folder: Path, html: Path | None, markdown: Path | None, fail_on: tuple[str, ...], as_json: bool) -> None:
    """Write the page for the results in DIR, also of an interrupted run.

    Exit status 0 whatever the cells say, unless --fail-on names red kinds: `red`, `note`, `not_run`. 2 when the
    results cannot be read or are of another schema version."""
    from portattn.tools.compare.verdict import STATUSES, of_run, words
    from portattn.tools.matrix import results, site

    red = words(fail_on, "matrix report", STATUSES)
    made, cells = results.read(results.file_of(folder) if folder.is_dir() else folder / results.NAME)
    page = html or folder / PAGE
    write_page(made, cells, page)
    if markdown:
        results.write_data(markdown, site.markdown(made, cells).encode())
    if as_json:
        emit_json(_summary(made, cells) | {"page": str(page)})
    else:
        tell_cells(made, cells)
        click.echo(f"page: {page}")
    if red:
        verdict = of_run(made, cells, fail_on=red, whole=False)
        if not as_json:
            matrix_compare.show(verdict)
        matrix_compare.leave(verdict, cells)


matrix_compare.add_to(matrix)


def _tell_no_lab(toolchains: list[str]) -> None:
    """Print the lab's folder and the command for missing compilers, whose NOT_RUN cells keep the status at 0.

    A common reason is another PORTATTN_CACHE_DIR than the lab's."""
    from portattn.tools.lab import folders

    if toolchains:
        text = (
            f"portattn: no whole environment of {', '.join(toolchains)} in the lab {folders.root()}: its cells are not "
            f"run; `portattn lab create {' '.join(toolchains)}` makes it there, and PORTATTN_CACHE_DIR names another "
            "folder around the lab"
        )
        click.echo(text, err=True)


def _tell(made: Run, cells: list[Cell], verdict: Verdict, out: Path, as_json: bool, interrupted: bool) -> None:
    if as_json:
        summary = _summary(made, cells) | {"out": str(out), "page": str(out / PAGE), "interrupted": interrupted}
        emit_json(summary | matrix_compare.document(verdict))
    else:
        matrix_compare.show(verdict)
        matrix_compare.show_noted(cells, verdict)
        tell_cells(made, cells)
        click.echo(f"page: {out / PAGE}")
    if interrupted:
        finished = f"{len(cells)} of {len(made.cells)} cells"
        click.echo(f"interrupted after {finished}; the same command with --resume goes on", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    matrix_compare.leave(verdict, cells)


def _summary(made: Run, cells: list[Cell]) -> dict[str, Any]:
    from portattn.tools.compare.verdict import STATUSES
    from portattn.tools.matrix.cell_text import gaps, witness
    from portattn.tools.matrix.cells import said_label

    return {
        "schema": made.schema, "cells": len(cells), "planned": len(made.cells),
        "statuses": dict(Counter(cell.status for cell in cells)),
        "levels": dict(Counter(cell.level for cell in cells if cell.status == "PASS")),
        "labels": dict(Counter(label for cell in cells if (label := said_label(cell)))), "empty": gaps(made, cells),
        "evidence": dict(Counter(found for cell in cells if (found := witness(cell, made)))),
        # By the words of --fail-on; `notes` of a verdict are something else.
        **{
            kind: [{name: getattr(cell, name) for name in _LISTED} for cell in cells if cell.status in statuses]
            for kind, statuses in STATUSES.items()
        },
    }  # fmt: skip
