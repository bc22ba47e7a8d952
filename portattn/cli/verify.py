"""`portattn verify` and `report`: run kernels by every means of this machine, or all that its devices can show."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from portattn.cli import RED, require_some
from portattn.cli.matrix_compare import cell_options, tell_cells
from portattn.cli.output import ProgressCounter, emit_json, json_option, plural, table, target_option, toolchain_option
from portattn.errors import ArgumentError
from portattn.schema.plan import kernel_text
from portattn.schema.problem_limits import OPS
from portattn.tools import param_types
from portattn.tools.param_types import FILE, FLAG, LONGEST, FiniteRange, options
from portattn.tools.problem_options import target_from

if TYPE_CHECKING:
    from portattn.tools.matrix.cells import Cell
    from portattn.tools.quirks.probe import Job
    from portattn.tools.quirks.probe_results import ProbeResult
    from portattn.tools.verify import VerificationRow

COLOURS = {"agree": "green", "compiled": "green", "unseen": "yellow", "refused": "yellow"}


@click.command()
@click.argument("ops", metavar="[OP]...", nargs=-1, type=param_types.OP)
@target_option("The chip whose plans are verified; this machine's by default.")
@toolchain_option("The compiler; the installed one by default.")
@options(
    ("--emulate", FLAG, "Also run the machine code in a model of the (AMD) chip."),
    ("--run-older/--no-run-older run_ptx_compat", {"default": None},
     "Run the target's code on a newer NVIDIA GPU that is here; the default where there is one."),
    ("--save", {"type": click.Path(path_type=Path, dir_okay=False), "metavar": "FILE.pt"},
     "Run the problems as calls here, and write results and the bounds of their rows."),
    ("--compare", {"type": click.Path(path_type=Path, exists=True, dir_okay=False), "nargs": 2, "metavar": "FILE FILE"},
     "Compare two machines' results (.pt, .npz, .safetensors), by the bounds in them."),
    ("--seconds", {"type": FiniteRange(min=1.0, max=LONGEST), "default": 120.0}, "Time limit of each run."),
)  # fmt: skip
@json_option
def verify(
    ops: tuple[str, ...], target: str | None, toolchain: str | None, emulate: bool, run_ptx_compat: bool | None,
    seconds: float, save: Path | None, compare: tuple[Path, Path] | None, as_json: bool,
) -> None:  # fmt: skip
    """Run small adversarial problems of each OP (all by default) as they are planned for a target.

    The same kernel, lowering and tile run under Triton's interpreter and, if the target is here, on the device; code
    for an older NVIDIA GPU runs on a newer one ("sm_80 code on sm_90"); with --emulate the compiled code also runs in a
    functional model of the chip. Each result is compared with a float64 oracle. If they disagree, the row says what is
    to blame. Two machines' results are compared by --save on each and --compare on one.

    Exit status 1: something differs, or lies outside its bound. 3: nothing could be run or compiled here."""
    from rich.console import Console

    from portattn.config import current
    from portattn.tools.verify import RED as DIFFERS
    from portattn.tools.verify import UNVERIFIED
    from portattn.tools.verify import verify as rows_of

    param_types.check_known("verify", "OP", ops, OPS)
    if save or compare:
        _exchange(ops, save, compare, as_json)
        return
    where = target_from(target, toolchain)
    with Console(stderr=True).status("verifying") as status:
        rows = list(rows_of(ops, where, current(), seconds, lambda what: status.update(what), emulate, run_ptx_compat))
    red = [row for row in rows if row.verdict in DIFFERS]
    verified = sum(row.verdict not in UNVERIFIED for row in rows)
    if as_json:
        said = {"target": where.name, "toolchain": str(where.toolchain), "verified": verified, "red": len(red)}
        counts = {"levels": Counter(row.level for row in rows), "labels": Counter(r.label for r in rows if r.label)}
        emit_json(said | counts | {"rows": rows})
    else:
        means = sorted({name for row in rows for name in row.seen})
        shown = ((_shown(row.seen.get(name)) for name in means) for row in rows)
        lines = [
            [row.verdict, kernel_text(row.kernel, row.form), *cells, row.problem]
            for row, cells in zip(rows, shown, strict=True)
        ]
        table(["verdict", "kernel", *means, "problem"], lines)
        for row in rows:
            if row.verdict != "agree":
                reasons = "; ".join(f"{name}: {seen.reason}" for name, seen in row.seen.items() if seen.reason)
                colour = COLOURS.get(row.verdict, "red")
                click.secho(f"{row.problem}: {row.sentence}" + (f" ({reasons})" if reasons else ""), fg=colour)
        for reason in dict.fromkeys(r.seen["older"].reason for r in rows if "older" in r.seen and not r.label):
            click.secho(f"not run as {where.arch.name} code: {reason}", fg="yellow")
        reached = Counter(f"{r.level} ({r.label})" if r.label else r.level for r in rows if r.level != "declared")
        levels = "".join(f", {number} {words}" for words, number in reached.most_common())
        counted = f"{plural(len(rows), 'problem')}, {verified} verified, {len(red)} red{levels}"
        click.echo(f"{where.name} with {where.toolchain}: {counted}")
    if red:
        raise click.exceptions.Exit(RED)
    require_some(verified, "verified", (reason for row in rows for reason in _reasons(row)))


def _exchange(ops: tuple[str, ...], save: Path | None, compare: tuple[Path, Path] | None, as_json: bool) -> None:
    import torch

    from portattn.api import dispatch
    from portattn.config import current
    from portattn.files import takes_no_file
    from portattn.testing.canary import results
    from portattn.testing.tolerance import differences, read_results
    from portattn.tools.matrix.results import write_data

    if save:
        if why := takes_no_file(save):
            raise ArgumentError("verify", "--save", str(save), f"cannot be written: {why}")
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        made = io.BytesIO()
        torch.save(results(ops, device or torch.device("cpu"), lambda call: dispatch.run(call, current())), made)
        write_data(save, made.getvalue())
    if not compare:
        return
    shares = differences(*map(read_results, compare))
    outside = [name for name, share in shares.items() if not share <= 1.0]
    if as_json:
        emit_json({"outside": outside, "shares": shares})
    else:
        table(["of its bound", "result"], [[f"{share:.3f}", name] for name, share in shares.items()])
        click.echo(f"{plural(len(shares), 'result')}, {len(outside)} outside their bounds")
    if outside:
        raise click.exceptions.Exit(RED)
    require_some(len(shares), "compared", ["neither file has a tensor"])


def _reasons(row: VerificationRow) -> list[str]:
    return [seen.reason for seen in row.seen.values() if seen.reason] or [row.sentence]


def _shown(seen: object) -> str:
    from portattn.testing.findings import Numerics

    if not isinstance(seen, Numerics):
        return "-"
    if seen.error is None or not seen.budget:
        return seen.outcome
    return f"{seen.outcome} {seen.error / seen.budget:.2f}"


@click.command()
@options(
    ("--out", FILE | {"default": Path("portattn-report.json"), "show_default": True}, "The file to write."),
    ("--sign-off", {"default": "", "metavar": "'NAME <MAIL>'"}, "Who answers for the results; needed to merge them."),
    ("--probes/--no-probes", {"default": True}, "Also run the probes of the quirks that concern the devices."),
)
@cell_options
@json_option
def report(
    out: Path, sign_off: str, probes: bool, problems: tuple[str, ...], jobs: int, seconds: float, emulate: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Run and time the quick problems on this machine's devices, and write the results into one file to send.

    The file has no name of the host or user, and no path. Signed, it is a run of its author for `matrix merge`, `site`.

    Exit status 1: a cell or a probe is red; the file is written. 3: no device is here, and nothing was written."""
    from portattn.files import takes_no_file
    from portattn.planning.registry import Registry, devices
    from portattn.testing.bundle import AUTHOR
    from portattn.testing.executor import executors
    from portattn.tools.matrix import provenance, results, select
    from portattn.tools.matrix.cells import has_chip
    from portattn.tools.matrix.run import Options, execute
    from portattn.tools.quirks import probe
    from portattn.tools.quirks.examples import arches_of

    if sign_off and not AUTHOR.fullmatch(sign_off):
        raise ArgumentError("report", "--sign-off", sign_off, "must be `Name <mail>`")
    if why := takes_no_file(out):
        raise ArgumentError("report", "--out", str(out), f"cannot be written: {why}")
    registry, here = Registry.load(), [target for target in devices() if has_chip(target.name)]
    require_some(len(here), "reported", ["no device is here that a backend knows"])
    specs = select.specs(select.problems("quick", select.commas(problems)), here)
    elsewhere = {name for target in here for name in executors(target.backend)} - ({"emulated"} if emulate else set())
    more: dict[str, Any] = {"seconds": seconds, "left_out": tuple(sorted(elsewhere)), "author": sign_off}
    made = provenance.this_run(specs, "quick", "portattn report", here, **more)
    keys = provenance.keys(specs, made.identity)
    cells: list[Cell] = []
    probed: list[ProbeResult] = []
    wanted = [
        job
        for target in here if probes
        for quirk in registry.quirks.values() if tuple(target.name.split(":")) in arches_of(quirk, registry)
        for job in probe.jobs([quirk], [str(target.toolchain)], target.name, registry)
    ]  # fmt: skip
    with ProgressCounter(len(specs) + len(wanted), 0, "cells") as progress:

        def done(cell: Cell) -> None:
            cells.append(msgspec.structs.replace(cell, key=keys[cell.id], origin=made.identity.id))
            progress.matrix_cell(cell)

        def told(job: Job, result: ProbeResult) -> None:
            probed.append(result)
            progress.step(f"{result.verdict:<12} {job.quirk.id}  {result.target}")

        options_of = Options(seconds=seconds, jobs=jobs, here=tuple(here), left_out=more["left_out"], timed=True)
        execute(specs, options_of, done)
        probe.execute(wanted, registry, seconds, jobs, told)
    found = provenance.MachineReport(run=made, cells=sorted(cells, key=lambda cell: cell.index), probes=tuple(probed))
    results.write_data(out, msgspec.json.format(msgspec.json.encode(provenance.without_paths(found)), indent=1))
    red = sum(cell.red for cell in cells) + sum(one.red for one in probed)
    verdicts = Counter(one.verdict for one in probed)
    if as_json:
        said = {"out": str(out), "devices": made.identity.host.devices, "cells": len(cells), "red": red}
        emit_json(said | {"levels": Counter(cell.level for cell in cells), "probes": verdicts})
    else:
        tell_cells(made, cells)
        click.echo(f"probes: {', '.join(f'{number} {name}' for name, number in verdicts.items()) or 'none'}")
        signed = f"signed by {sign_off}" if sign_off else "unsigned: --sign-off 'Name <mail>' lets others merge it"
        click.echo(f"{out}: {', '.join(map(str, made.identity.host.devices))}; {signed}")
    if red:
        raise click.exceptions.Exit(RED)
