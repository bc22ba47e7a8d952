"""`portattn verify` and `report`: run kernels by every means of this machine, or all that its devices can show."""

from __future__ import annotations

import contextlib
import functools
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from portattn.cli import RED, require_some
from portattn.cli.matrix_compare import cell_options, tell_cells
from portattn.cli.output import ProgressCounter, emit_json, json_option, plural, table, target_option, toolchain_option
from portattn.compile.ensure_compiled import first_line
from portattn.config import Settings, current
from portattn.errors import ArgumentError, PortattnError
from portattn.files import takes_no_file
from portattn.planning.backend import Variant
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, devices
from portattn.schema.plan import Plan, kernel_text
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import OPS
from portattn.schema.quirk import LEVELS, Level
from portattn.schema.target import Target
from portattn.testing import canary, findings
from portattn.testing.executor import COMPARE, Interpreter, executors, lacks, request_of
from portattn.testing.findings import Numerics, numerics
from portattn.tools import lab, param_types
from portattn.tools.matrix.run import core_of
from portattn.tools.param_types import FILE, FLAG, LONGEST, FiniteRange, options
from portattn.tools.problem_options import target_from
from portattn.worker.client import Worker

if TYPE_CHECKING:
    from portattn.tools.matrix.cells import Cell
    from portattn.tools.quirks.probe import Job
    from portattn.tools.quirks.probe_results import ProbeResult

Conclusion = Literal["agree", "device", "kernel", "interpreter", "unclear", "unseen", "refused", "compiled", "compiler"]
SENTENCES: Mapping[Conclusion, str] = {
    "agree": "right by every means that ran",
    "device": "right under the interpreter and wrong as machine code: what the compiler made of it, or the chip",
    "kernel": "wrong by every means that ran: the kernel itself, or this lowering of it",
    "interpreter": "wrong under the interpreter only: the interpreter, or what it does not do as a device does",
    "unclear": "wrong, and what ran cannot tell whether the kernel or what a compiler made of it is",
    "unseen": "nothing could run it here",
    "refused": "the core kernel does not take it",
    "compiled": "it compiles to clean code, and nothing here could run it",
    "compiler": "it does not compile to clean code",
}
DEVICE = "device"  # the means that is the chip itself, whose right result is evidence of level `runs`
UNVERIFIED: frozenset[str] = frozenset({"unseen", "refused"})
DIFFERS: frozenset[str] = frozenset({"device", "kernel", "interpreter", "unclear", "compiler"})


class VerificationRow(msgspec.Struct, frozen=True, kw_only=True):
    op: str
    problem: str
    target: str
    toolchain: str
    kernel: str
    form: str = ""  # the kernel's, as in Plan
    path: str
    verdict: Conclusion
    sentence: str
    level: Level = "declared"  # evidence of this row; `declared` if something differs, or only the interpreter ran
    label: str = ""  # the evidence of a level `runs` that was not reached on the chip itself: "sm_80 code on sm_90"
    seen: dict[str, Numerics] = {}


def verification_rows(
    ops: Sequence[str], target: Target, settings: Settings, seconds: float, say: Callable[[str], None],
    emulate: bool = False, run_ptx_compat: bool | None = None,
) -> Iterator[VerificationRow]:  # fmt: skip
    """Verify the canaries of these ops (all when empty) on a target; yield a row as each is finished.

    `emulate`: in a model too; `run_ptx_compat`: on a newer chip (None: if here). Raises ArgumentError or LabError."""
    if target.arch.refused:
        limit = f"must be a chip that kernels are planned for: {target.arch.refused}"
        raise ArgumentError("verify", "target", target.name, limit)
    interpreter = Interpreter(seconds)
    here = any(t.name == target.name and str(t.toolchain) == str(target.toolchain) for t in devices())
    for name, asked in (("emulated", emulate), ("older", run_ptx_compat)):
        if asked and (missing := lacks(name, target, devices())):
            raise ArgumentError("verify", "target", target.name, missing)
    own = executors(target.backend, seconds, devices())
    # Where an older chip's code is not run the row says why, unless that was asked for.
    wanted = {"older": not here and run_ptx_compat is not False, "emulated": emulate}
    means = [own[name] for name, runs in wanted.items() if runs and name in own]
    compiles = any(not one.lacks(target) for one in means)
    levels: dict[str, Level] = {DEVICE: "runs", **{one.name: one.level for one in means}}
    with (
        Worker(runs="interpreter") as interpreting,
        Worker(runs="kernels") as running,
        lab.worker(str(target.toolchain)) if compiles else contextlib.nullcontext(running) as compiling,
    ):
        for op in ops or OPS:
            for problem in canary.of_op(op):
                say(f"{problem}")
                core = _core(problem, target, settings)
                if isinstance(core, str):
                    yield _row(problem, target, None, "refused", {}, sentence=core)
                    continue
                seen = {"interpreter": interpreter.check(core, interpreting)}
                if here and core.path != "interpreter":
                    seen["device"] = _on_device(core, problem, target, running, seconds)
                for executor in means:
                    problems = [problem] if executor.runs_on == "device" else []  # a device takes it at its own size
                    seen[executor.name] = executor.check(
                        core, target, compiling, interpreting if executor.interprets else running, problems
                    )
                verdict = conclusion({name: found.outcome for name, found in seen.items()})
                yield _row(problem, target, core, verdict, seen, levels)
            with contextlib.ExitStack() as opened:

                @functools.lru_cache(maxsize=1)
                def compiler(opened: contextlib.ExitStack = opened) -> Worker:
                    return opened.enter_context(lab.worker(str(target.toolchain)))

                yield from _variants(op, target, settings, seconds, say, running if here else None, compiler)


def _variants(
    op: str, target: Target, settings: Settings, seconds: float, say: Callable[[str], None], running: Worker | None,
    compiler: Callable[[], Worker],
) -> Iterator[VerificationRow]:  # fmt: skip
    for variant in Registry.load().backends[target.backend].variants:
        if op not in variant.ops or target.arch.name not in variant.arches:
            continue
        for problem in (p for p in variant.canaries or canary.CASES[op] if p.op == op):
            made = canary.plan_case(problem, target, settings, variant.name)
            if made is None:
                continue
            say(f"{problem} by {variant.name}")
            seen = {"compiled": _compiled(variant, made, target, compiler, seconds)}
            if running is not None:
                seen["device"] = _on_device(made, problem, target, running, seconds)
            verdict = variant_conclusion({name: found.outcome for name, found in seen.items()})
            yield _row(problem, target, made, verdict, seen)


def _compiled(variant: Variant, made: Plan, target: Target, compiler: Callable[[], Worker], seconds: float) -> Numerics:
    where, problem = str(target), made.problem
    try:
        kernels, failed, function = findings.compile_variant(variant, made, target, compiler(), seconds)
    except (lab.LabError, ArgumentError, findings.LaunchDescriptionError) as error:
        return Numerics(outcome="not_run", where=where, problem=problem, reason=str(error))
    if failed is not None:
        reason = f"{function}: {failed.kind} at {failed.stage}: {first_line(failed.message)}"
        assert failed.outcome != "ok"
        return Numerics(outcome=failed.outcome, where=where, problem=problem, reason=reason)
    broken = findings.broken_gates(findings.check_variant(variant, problem, target, kernels))
    return Numerics(outcome="fail" if broken else "pass", where=where, problem=problem, reason="; ".join(broken))


def variant_conclusion(outcomes: Mapping[str, str]) -> Conclusion:
    on_device, compiled = outcomes.get("device", "not_run"), outcomes["compiled"]
    if on_device != "not_run":
        return "agree" if on_device == "pass" else "unclear"
    if compiled == "not_run":
        return "unseen"
    return "compiled" if compiled == "pass" else "compiler"


def conclusion(outcomes: Mapping[str, str]) -> Conclusion:
    ran = {name: outcome == "pass" for name, outcome in outcomes.items() if outcome != "not_run"}
    if not ran:
        return "unseen"
    if all(ran.values()):
        return "agree"
    if "interpreter" not in ran:
        return "unclear"
    if not any(ran.values()):
        return "kernel" if len(ran) > 1 else "unclear"
    if ran["interpreter"]:
        return "device"
    return "interpreter" if sum(ran.values()) == len(ran) - 1 else "unclear"


def _core(problem: Problem, target: Target, settings: Settings) -> Plan | str:
    """Return the core kernel's plan, also if it was rejected only for being slow; or why there is none."""
    registry = Registry.load()
    named = registry.backends[target.backend].core_path == "interpreter"
    asked = msgspec.structs.replace(settings, backend="interpreter" if named else "auto", fallback="silent")
    try:
        made = plan(problem, target, registry, settings=asked)
    except PortattnError as error:
        return str(error)
    core = core_of(made, target, registry, settings)
    return core or (made.rejected[0].reason if made.rejected else f"the {made.path} path is taken")


def _on_device(core: Plan, problem: Problem, target: Target, worker: Worker, seconds: float) -> Numerics:
    kind = Registry.load().backends[target.backend].device_type
    reply = worker.request(COMPARE, seconds, **request_of(core, problem, core.path, target.name, kind))
    return numerics(reply, str(target), problem)


def _row(
    problem: Problem, target: Target, core: Plan | None, verdict: Conclusion, seen: dict[str, Numerics],
    levels: Mapping[str, Level] | None = None, sentence: str = "",
) -> VerificationRow:  # fmt: skip
    levels = levels or {DEVICE: "runs"}
    passed = {name: levels[name] for name, found in seen.items() if name in levels and found.outcome == "pass"}
    reached: list[Level] = ["compiles" if verdict == "compiled" else "declared"]
    if verdict == "agree":
        reached += passed.values()
    level = max(reached, key=LEVELS.index)
    elsewhere = [seen[name].where for name, of in passed.items() if of == "runs"] if DEVICE not in passed else []
    return VerificationRow(
        op=problem.op, problem=str(problem), target=target.name, toolchain=str(target.toolchain),
        kernel=canary.family(core) if core else "", form=core.form if core else "", path=core.path if core else "",
        verdict=verdict, sentence=sentence or SENTENCES[verdict], level=level,
        label=elsewhere[0] if level == "runs" and elsewhere else "", seen=seen,
    )  # fmt: skip


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

    param_types.check_known("verify", "OP", ops, OPS)
    if save or compare:
        _exchange(ops, save, compare, as_json)
        return
    where = target_from(target, toolchain)
    with Console(stderr=True).status("verifying") as status:
        made = verification_rows(ops, where, current(), seconds, status.update, emulate, run_ptx_compat)
        rows = list(made)
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
    from portattn.testing.tolerance import differences, read_results
    from portattn.tools.matrix.results import write_data

    if save:
        if why := takes_no_file(save):
            raise ArgumentError("verify", "--save", str(save), f"cannot be written: {why}")
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        made = io.BytesIO()
        torch.save(canary.results(ops, device or torch.device("cpu"), lambda call: dispatch.run(call, current())), made)
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


def _shown(seen: Numerics | None) -> str:
    if seen is None:
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
    from portattn.testing.bundle import AUTHOR
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
