"""`portattn doctor`: what is installed, what works, and what to know about it. The report always prints."""

from __future__ import annotations

import click

from portattn.cli.errors import RED
from portattn.cli.output import emit_json, heading, json_option, pairs

COLOURS = {"PASS": "green", "FAIL": "red", "SKIP": "yellow"}


@click.command()
@click.option("--emulate", metavar="ARCH", help="Also run a real kernel in the model of an AMD chip, such as gfx942.")
@json_option
def doctor(emulate: str | None, as_json: bool) -> None:
    """Report the toolchain, backends, settings, the quirks that apply here, and one real call per device.

    What cannot be found out is reported as such: one broken part never hides the rest.

    Exit status 1: a call gave wrong numbers or failed, a part of the report could not be made, the cache folder takes
    no files, or an installed backend package is broken.
    """
    from rich.console import Console

    from portattn.cli import probes
    from portattn.errors import ArgumentError

    if emulate is not None:
        from portattn.testing.executor import arches

        known = arches("emulated")
        if emulate not in known:
            raise ArgumentError("doctor", "--emulate", emulate, f"must be one of {', '.join(known)}")
    with Console(stderr=True).status("looking around") as status:
        report = probes.examine(lambda what: status.update(what), emulate or "")
    if as_json:
        emit_json(report)
    else:
        for section in report.sections:
            heading(section.title)
            pairs((item.name, item.value) for item in section.items)
            for line in section.warnings:
                click.secho(f"  ! {line}", fg="yellow")
            for line in section.errors:
                click.secho(f"  ! {line}", fg="red")
            if section.error:
                click.secho(f"  could not be found out: {section.error}", fg="red")
        heading("calls")
        for check in report.checks:
            click.echo("  ", nl=False)
            click.secho(f"{check.outcome:<5}", fg=COLOURS[check.outcome], nl=False)
            click.echo(f"{check.name}: {check.detail}")
    if not report.healthy:
        raise click.exceptions.Exit(RED)
