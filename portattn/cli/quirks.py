"""`portattn quirks`: the registry of known compiler bugs and limits, and probes of them."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
import msgspec

from portattn.cli import INTERRUPTED, RED, lifecycle, output, require_some
from portattn.errors import ArgumentError, PortattnError, QuirkConflict
from portattn.planning.kernel_specs import KERNEL_NAMES
from portattn.planning.registry import Registry, find_backends
from portattn.schema.quirk import Quirk, Symptom, describe_effect
from portattn.tools import param_types
from portattn.tools.display_text import setting
from portattn.tools.param_types import SECONDS
from portattn.tools.problem_options import target_from

if TYPE_CHECKING:
    from portattn.schema.plan import AppliedQuirk, Plan
    from portattn.schema.target import Target
    from portattn.tools.quirks.probe import ProbeResult


OP = "quirks probe"
FOLDER = {"type": click.Path(path_type=Path, exists=True, file_okay=False)}


@click.command()
@click.argument("ids", metavar="[ID]...", nargs=-1, type=param_types.QUIRK)
@output.toolchain_option("The compiler, of the lab or installed, which is the default; repeat it.", multiple=True)
@click.option("--all-toolchains", is_flag=True, help="Every toolchain that the lab has, and the installed one.")
@output.target_option("Another chip than the probe's own.")
@click.option("--record", is_flag=True, help="Write what was seen into the quirks' files, as [[verified]] tables.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Probes run at a time.")
@param_types.options(
    ("--seconds", {"type": SECONDS, "default": 180.0, "show_default": True},
     "Limit of each arm: a compiler that takes longer hangs."),
    ("--folder", FOLDER, "Quirk files to probe; portattn's own and installed packages' by default."),
)  # fmt: skip
@output.json_option
def probe(
    ids: tuple[str, ...], toolchain: tuple[str, ...], all_toolchains: bool, target: str | None, record: bool, jobs: int,
    seconds: float, folder: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compile without and with the work-around of each quirk named by ID (all by default), and say what it means.

    A control kernel comes first. ID may be the beginning of an id up to its number, such as rocm-0015. Verdicts:
    confirmed, absent (out of range, and not there); stale, changed, ineffective, too narrow and broken are red;
    inconclusive; unverified, with what is missing.

    Exit status 1: a verdict is red. 3: no probe could run here. Ctrl-C keeps what has been recorded."""
    from portattn.tools.quirks import probe as probing
    from portattn.tools.quirks.examples import arches_of
    from portattn.tools.quirks.probe_results import record as write

    if toolchain and all_toolchains:
        raise ArgumentError(OP, "--toolchain", ", ".join(toolchain), "goes without --all-toolchains")
    registry = Registry.read(find_backends(), folder) if folder else Registry.load()
    names, missing = _toolchains(toolchain, all_toolchains, registry)
    named = {quirk.id: quirk for quirk in (registry.quirk(text, OP, "ID") for text in ids)}
    quirks = list((named if ids else registry.quirks).values())
    target = registry.target(target, "none").name if target is not None else None
    if target is not None and not ids:
        quirks = [quirk for quirk in quirks if tuple(target.split(":")) in arches_of(quirk, registry)]
    wanted = probing.jobs(quirks, names, target, registry)
    probed: list[tuple[probing.Job, ProbeResult]] = []
    written = 0

    def done(job: probing.Job, result: ProbeResult) -> None:
        nonlocal written
        probed.append((job, result))
        if record:
            written += write(job.quirk, [result])
        colour = {"fg": "red"} if result.red else {}
        text = f"[{len(probed)}/{len(wanted)}] {result.verdict:<12} {job.quirk.id}  {result.target}  {result.toolchain}"
        click.secho(f"{text}  {result.seconds:.0f} s", err=True, **colour)  # type: ignore[arg-type]

    interrupted = False
    try:
        probing.execute(wanted, registry, seconds, jobs, done)
    except KeyboardInterrupt:
        interrupted = True
    order = {(job.quirk.id, job.toolchain): index for index, job in enumerate(wanted)}
    probed.sort(key=lambda pair: order[pair[0].quirk.id, pair[0].toolchain])
    results = probing.with_diffs(probed, registry)
    if as_json:
        found = {"results": results, "red": sum(r.red for r in results), "recorded": written, "missing": missing}
        output.emit_json(found | {"interrupted": interrupted})
    else:
        _tell(results, missing, written if record else None)
    if interrupted:
        click.echo(f"interrupted after {len(results)} of {output.plural(len(wanted), 'probe')}", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if any(result.red for result in results):
        raise click.exceptions.Exit(RED)
    reasons = [result.reason for result in results] or ["no entry has a probe there"]
    require_some(sum(result.verdict != "unverified" for result in results), "probed", reasons)


def _toolchains(named: tuple[str, ...], everything: bool, registry: Registry) -> tuple[list[str], list[str]]:
    """Return (toolchains to probe on, absent toolchains of the lab). Raises LabError if a named toolchain is absent."""
    from portattn.schema.toolchain import installed_beside, installed_toolchain, is_installed
    from portattn.tools import lab
    from portattn.tools.quirks import probe as probing
    from portattn.tools.quirks.probe import STAND_INS

    if everything:
        return probing.toolchains(registry)
    if not named:
        if not installed_toolchain():
            raise PortattnError(
                f"{OP}: Triton is not installed; --toolchain names one of the lab (`portattn lab list`)"
            )
        return [str(one) for one in (installed_toolchain(), *installed_beside())], []
    for name in named:
        if not is_installed(name) and name not in STAND_INS:
            lab.need(name)
    return list(dict.fromkeys(named)), []


def _tell(results: list[ProbeResult], missing: list[str], written: int | None) -> None:
    rows = [
        (r.quirk, r.target, r.toolchain, r.off.word, r.on.word, r.verdict, r.reason * (r.verdict != "confirmed"))
        for r in results
    ]
    output.table(["id", "target", "toolchain", "off", "on", "verdict", "what was seen"], rows)
    for result in results:
        if result.red:
            click.secho(f"{result.verdict}: {result.quirk} on {result.toolchain}: {result.reason}", fg="red")
            if result.diff:
                click.echo(result.diff)
    for name in missing:
        click.echo(f"{name} is not here: `portattn lab create {name}` makes it")
    counts = Counter(result.verdict for result in results)
    verdicts = ", ".join(f"{n} {v}" for v, n in counts.most_common())
    click.echo(f"{output.plural(len(results), 'probe')}: {verdicts or 'none'}")
    if written is not None:
        click.echo(f"{output.plural(written, 'table')} recorded")


@click.group()
def quirks() -> None:
    """Known compiler bugs and limits, as data: what goes wrong where, and what is done about it."""


@quirks.command("list")
@param_types.options(
    ("--backend", {"type": param_types.BACKEND, "metavar": "NAME"}, "Only this backend's, and those of every backend."),
    ("--kind", {"type": param_types.KIND, "metavar": "workaround|limit"},
     "Only work-arounds, or only limits of hardware and language."),
    ("--symptom", {"type": param_types.SYMPTOM, "metavar": "WORD"}, "Only this symptom, such as wrong-result."),
)  # fmt: skip
@output.target_option("Only those that can apply on this target.", "--active-on")
@output.toolchain_option("The compiler for --active-on; the installed one by default.")
@output.json_option
def list_(
    backend: str | None, kind: str | None, symptom: str | None, active_on: str | None, toolchain: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """List quirks: id, symptom, and what goes wrong."""
    registry = Registry.load()
    known = {"--backend": registry.backends, "--kind": ("workaround", "limit"), "--symptom": get_args(Symptom)}
    for (option, words), value in zip(known.items(), (backend, kind, symptom), strict=True):
        param_types.check_known("quirks list", option, [value], words)
    if toolchain and not active_on:
        raise ArgumentError("quirks list", "--toolchain", toolchain, "goes with --active-on")
    target = target_from(active_on, toolchain, "--active-on") if active_on else None
    found = [
        quirk
        for quirk in registry.quirks.values()
        if (backend is None or quirk.when.backend in (None, backend))
        and kind in (None, quirk.kind)
        and symptom in (None, quirk.symptom)
        and (target is None or (quirk.in_range(target.toolchain) and _concerns(quirk, target)))
    ]
    if as_json:
        output.emit_json([_summary(quirk) for quirk in found])
        return
    output.table(["id", "symptom", "kind", "what goes wrong"], [(q.id, q.symptom, q.kind, q.title) for q in found])
    click.echo(output.plural(len(found), "quirk"))


@quirks.command()
@click.argument("quirk_id", metavar="ID", type=param_types.QUIRK)
@output.json_option
def show(quirk_id: str, as_json: bool) -> None:
    """Show everything that is known about one quirk. ID may end with its number, as in cuda-0012."""
    quirk = Registry.load().quirk(quirk_id, "quirks show", "ID")
    if as_json:
        output.emit_json(quirk)
        return
    click.secho(f"{quirk.id}: {quirk.title}", bold=True)
    when = {name: value for name, value in msgspec.structs.asdict(quirk.when).items() if value}
    evidence = quirk.evidence
    rows = [
        ("symptom", f"{quirk.symptom} ({quirk.kind})"),
        *((f"when {name}", _words(value)) for name, value in when.items()),
        ("effect", describe_effect(quirk.effect)), ("cost", quirk.effect.cost), ("signature", evidence.signature),
        ("stage", evidence.stage), ("quotes", "\n".join(evidence.quotes)), ("seen on", ", ".join(evidence.seen_on)),
        *((name.replace("_", " "), str(getattr(evidence, name) or ""))
          for name in ("probe", "needs", "upstream", "source", "last_seen", "review_by")),
        *(("verified", f"{v.toolchain} on {v.target}: {v.level}, off {v.off}, on {v.on}, {v.date}")
          for v in quirk.verified),
        ("file", quirk.file),
    ]  # fmt: skip
    output.pairs((name, value) for name, value in rows if value)


def because(target: Target) -> dict[str, Any]:
    """Return quirks at work with their kernels and problems, quirks that are not with the reason, and conflicts."""
    from portattn.config import current
    from portattn.planning.planner import plan
    from portattn.tools.matrix.problems import quick

    registry = Registry.load()
    uses: dict[str, dict[str, Any]] = {}
    conflicts: list[str] = []
    for named in quick():
        try:
            made = plan(named.problem, target, registry, settings=current())
        except QuirkConflict as conflict:
            conflicts.append(f"{named.name}: {conflict}")
            continue
        for kernel, applied in _applied(made):
            quirk = registry.quirks[applied.id]
            new = {"id": quirk.id, "sentence": applied.sentence, "sets": applied.sets, "cost": quirk.effect.cost}
            new |= {"upstream": quirk.evidence.upstream, "note": applied.note, "kernels": [], "problems": []}
            use = uses.setdefault(applied.id, new)
            for name, value in (("kernels", kernel), ("problems", named.name)):
                use[name] += [value] if value and value not in use[name] else []
    others = [
        {"id": quirk.id, "reason": _why_not(quirk, target)}
        for quirk in registry.quirks.values()
        if quirk.id not in uses and _concerns(quirk, target)
    ]
    where = {"target": target.name, "toolchain": str(target.toolchain)}
    return where | {"applied": list(uses.values()), "others": others, "conflicts": conflicts}


def _applied(made: Plan) -> list[tuple[str, AppliedQuirk]]:
    found = [(made.kernel or made.path, applied) for applied in made.quirks]
    for no in made.rejected:
        if no.choice is not None:
            found += [(no.choice.kernel, applied) for applied in no.choice.quirks]
    return found


def _why_not(quirk: Quirk, target: Target) -> str:
    for name, wanted in quirk.when.toolchain.items():
        if target.toolchain.within(name, wanted) is False:
            version = target.toolchain.component(name)
            return f"{name} {wanted}, and this is {version or target.toolchain}"
    if not quirk.in_range(target.toolchain):
        return f"a slow quirk, last seen on {quirk.evidence.last_seen or 'a toolchain of unknown version'}"
    conditions = [*quirk.when.features]
    for values in (quirk.when.lowering, quirk.when.launch):
        conditions += [setting(name, value) for name, value in values.items()]
    return f"when {', '.join(conditions)}" if conditions else "switched off, or of no effect on these kernels"


@quirks.command()
@click.argument("target", metavar="TARGET", type=param_types.TARGET)
@output.toolchain_option("The compiler; the installed one by default.")
@output.json_option
def why(target: str, toolchain: str | None, as_json: bool) -> None:
    """List the quirks that apply on TARGET, with their kernels, problems and effects.

    TARGET is BACKEND:ARCH or a chip's name. The problems are the quick set, as in `portattn matrix run --quick`. Quirks
    that concern the target but apply to no problem are listed with the reason."""
    where = target_from(target, toolchain, "TARGET")
    output.tell_unknown([where.toolchain] if toolchain else [])
    found = because(where)
    if as_json:
        output.emit_json(found)
        return
    click.secho(f"{found['target']} with {found['toolchain']}", bold=True)
    for use in found["applied"]:
        output.heading(f"{use['id']}: {use['sentence']}")
        shown = use | {"kernels": ", ".join(use["kernels"]), "problems": "\n".join(use["problems"])}
        shown["changes"] = _words(use["sets"]) or "nothing"
        names = ("kernels", "changes", "cost", "note", "problems", "upstream")
        output.pairs((name, shown[name]) for name in names if shown[name])
    if not found["applied"]:
        click.echo("no quirk applies to the problems asked about")
    if found["others"]:
        output.heading("concern this target, and apply to none of these problems")
        output.pairs((other["id"], other["reason"]) for other in found["others"])
    for conflict in found["conflicts"]:
        click.secho(f"conflict: {conflict}", fg="red")
    if found["conflicts"]:
        raise click.exceptions.Exit(RED)


@quirks.command()
@param_types.options(("--folder", FOLDER, "Quirk files to audit; portattn's own and installed packages' by default."))
@click.option("--today", type=click.DateTime(["%Y-%m-%d"]), help="The day that review dates are compared with.")
@output.json_option
def audit(folder: Path | None, today: datetime.datetime | None, as_json: bool) -> None:
    """Check every quirk file: readable, fresh, of use, and at peace with the others.

    The files of --folder are checked among themselves, and beside portattn's own, which they are meant for.

    Exit status 1: an error was found. Findings name file and line."""
    from rich.console import Console

    from portattn.tools.quirks.audit import beside_shipped, run

    with Console(stderr=True).status("auditing quirks"):
        findings = run(folder, today.date() if today else None)
        if folder is not None:
            findings += beside_shipped(folder)
    errors = [finding for finding in findings if finding.severity == "error"]
    if as_json:
        output.emit_json({"errors": len(errors), "warnings": len(findings) - len(errors), "findings": findings})
    else:
        for finding in findings:
            click.echo(str(finding))
        click.echo(f"{output.plural(len(errors), 'error')}, {output.plural(len(findings) - len(errors), 'warning')}")
    if errors:
        raise click.exceptions.Exit(RED)


quirks.add_command(probe)
lifecycle.add_to(quirks)


def _concerns(quirk: Quirk, target: Any) -> bool:
    return any(quirk.concerns(kernel, target) for kernel in KERNEL_NAMES)


def _summary(quirk: Quirk) -> dict[str, Any]:
    own = {name: getattr(quirk, name) for name in ("id", "title", "symptom", "kind", "file")}
    return own | {"backend": quirk.when.backend, "sentence": quirk.sentence(), "upstream": quirk.evidence.upstream}


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(setting(name, item) for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
