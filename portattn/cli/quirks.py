"""`portattn quirks`: the registry of known compiler bugs and limits."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from portattn.cli import lifecycle
from portattn.cli.errors import RED
from portattn.cli.named import quirk_of, tell_unknown
from portattn.cli.output import emit_json, heading, json_option, pairs, plural, setting, table
from portattn.cli.probe import probe
from portattn.errors import ArgumentError
from portattn.tools import shell_values
from portattn.tools.problem_text import target_from

if TYPE_CHECKING:
    from portattn.schema.quirk import Quirk


@click.group()
def quirks() -> None:
    """Known compiler bugs and limits, as data: what goes wrong where, and what is done about it."""


@quirks.command("list")
@click.option(
    "--backend",
    type=shell_values.BACKEND,
    metavar="NAME",
    help="Only this backend's, and those of every backend.",
)
@click.option(
    "--kind",
    type=shell_values.KIND,
    metavar="workaround|limit",
    help="Only work-arounds, or only limits of hardware and language.",
)
@click.option("--symptom", type=shell_values.SYMPTOM, metavar="WORD", help="Only this symptom, such as wrong-result.")
@click.option(
    "--active-on", type=shell_values.TARGET, metavar="BACKEND:ARCH", help="Only those that can apply on this target."
)
@click.option(
    "--toolchain",
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="The compiler for --active-on; the installed one by default.",
)
@json_option
def list_(
    backend: str | None,
    kind: str | None,
    symptom: str | None,
    active_on: str | None,
    toolchain: str | None,
    as_json: bool,
) -> None:
    """List quirks: id, symptom, and what goes wrong."""
    from portattn.planning.registry import Registry
    from portattn.schema.quirk import Symptom

    registry = Registry.load()
    _check("--backend", backend, tuple(registry.backends))
    _check("--kind", kind, ("workaround", "limit"))
    _check("--symptom", symptom, Symptom.__args__)  # type: ignore[attr-defined]
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
        emit_json([_summary(quirk) for quirk in found])
        return
    table(["id", "symptom", "kind", "what goes wrong"], [(q.id, q.symptom, q.kind, q.title) for q in found])
    click.echo(plural(len(found), "quirk"))


@quirks.command()
@click.argument("quirk_id", metavar="ID", type=shell_values.QUIRK)
@json_option
def show(quirk_id: str, as_json: bool) -> None:
    """Show everything that is known about one quirk. ID may end with its number, as in cuda-0012."""
    import msgspec

    from portattn.planning.registry import Registry
    from portattn.schema.quirk import describe_effect

    quirk = quirk_of("quirks show", quirk_id, Registry.load())
    if as_json:
        emit_json(quirk)
        return
    click.secho(f"{quirk.id}: {quirk.title}", bold=True)
    when = {name: value for name, value in msgspec.structs.asdict(quirk.when).items() if value}
    evidence = quirk.evidence
    rows = [
        ("symptom", f"{quirk.symptom} ({quirk.kind})"),
        *((f"when {name}", _words(value)) for name, value in when.items()),
        ("effect", describe_effect(quirk.effect)),
        ("cost", quirk.effect.cost),
        ("signature", evidence.signature),
        ("stage", evidence.stage),
        ("quotes", "\n".join(evidence.quotes)),
        ("seen on", ", ".join(evidence.seen_on)),
        ("probe", evidence.probe),
        ("needs", evidence.needs),
        ("upstream", evidence.upstream),
        ("source", evidence.source),
        ("last seen", evidence.last_seen),
        ("review by", str(evidence.review_by or "")),
        *(
            ("verified", f"{v.toolchain} on {v.target}: {v.level}, off {v.off}, on {v.on}, {v.date}")
            for v in quirk.verified
        ),
        ("file", quirk.file),
    ]
    pairs((name, value) for name, value in rows if value)


@quirks.command()
@click.argument("target", metavar="TARGET", type=shell_values.TARGET)
@click.option(
    "--toolchain",
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="The compiler; the installed one by default.",
)
@json_option
def why(target: str, toolchain: str | None, as_json: bool) -> None:
    """List the quirks that apply on TARGET, with their kernels, problems and effects.

    TARGET is BACKEND:ARCH or a chip's name. The problems are the quick set, as in `portattn matrix run --quick`. Quirks
    that concern the target but apply to no problem are listed with the reason.
    """
    from portattn.cli.why import because

    where = target_from(target, toolchain, "TARGET")
    tell_unknown([where.toolchain] if toolchain else [])
    found = because(where)
    if as_json:
        emit_json(found)
        return
    click.secho(f"{found.target} with {found.toolchain}", bold=True)
    for use in found.applied:
        heading(f"{use.id}: {use.sentence}")
        pairs(
            (name, value)
            for name, value in [
                ("kernels", ", ".join(use.kernels)),
                ("changes", _words(use.sets) or "nothing"),
                ("cost", use.cost),
                ("note", use.note),
                ("problems", "\n".join(use.problems)),
                ("upstream", use.upstream),
            ]
            if value
        )
    if not found.applied:
        click.echo("no quirk applies to the problems asked about")
    if found.others:
        heading("concern this target, and apply to none of these problems")
        pairs((other.id, other.reason) for other in found.others)
    for conflict in found.conflicts:
        click.secho(f"conflict: {conflict}", fg="red")
    if found.conflicts:
        raise click.exceptions.Exit(RED)


@quirks.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Quirk files to audit; portattn's own and installed packages' by default.",
)
@click.option("--today", type=click.DateTime(["%Y-%m-%d"]), help="The day that review dates are compared with.")
@json_option
def audit(folder: Path | None, today: datetime.datetime | None, as_json: bool) -> None:
    """Check every quirk file: readable, fresh, of use, and at peace with the others.

    The files of --folder are checked among themselves, and beside portattn's own, which they are meant for.

    Exit status 1: an error was found. Findings name file and line.
    """
    from rich.console import Console

    from portattn.tools.quirks.audit import beside_shipped, run

    with Console(stderr=True).status("auditing quirks"):
        findings = run(folder, today.date() if today else None)
        if folder is not None:
            findings += beside_shipped(folder)
    errors = [finding for finding in findings if finding.severity == "error"]
    if as_json:
        emit_json({"errors": len(errors), "warnings": len(findings) - len(errors), "findings": findings})
    else:
        for finding in findings:
            click.echo(str(finding))
        click.echo(f"{plural(len(errors), 'error')}, {plural(len(findings) - len(errors), 'warning')}")
    if errors:
        raise click.exceptions.Exit(RED)


quirks.add_command(probe)
lifecycle.add_to(quirks)


def _check(option: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ArgumentError("quirks list", option, value, f"must be one of {', '.join(known)}")


def _concerns(quirk: Quirk, target: Any) -> bool:
    from portattn.planning.kernel_specs import KERNEL_NAMES

    return any(quirk.concerns(kernel, target) for kernel in KERNEL_NAMES)


def _summary(quirk: Quirk) -> dict[str, Any]:
    return {
        "id": quirk.id,
        "title": quirk.title,
        "symptom": quirk.symptom,
        "kind": quirk.kind,
        "backend": quirk.when.backend,
        "sentence": quirk.sentence(),
        "upstream": quirk.evidence.upstream,
        "file": quirk.file,
    }


def _words(value: Any) -> str:
    """A condition's value on one line: `head_dim>=128, causal`, or `triton <3.5`."""
    if isinstance(value, dict):
        return ", ".join(setting(name, item) for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
