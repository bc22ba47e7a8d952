"""`portattn lab`: environments of other compilers, made on demand."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import click

from portattn.cli import INTERRUPTED, RED
from portattn.cli.output import emit_json, json_option, plural, status, table
from portattn.errors import ArgumentError
from portattn.tools import param_types

if TYPE_CHECKING:
    from portattn.tools.lab import Environment, ToolchainState


@click.group()
def lab() -> None:
    """Isolated environments of other compilers, in which `matrix run --toolchain` and others compile."""


@lab.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List every toolchain that the lab knows: made or not, its size, Python and age, and what is broken."""
    from portattn.tools.lab import folders

    states = folders.states()
    if as_json:
        emit_json({"folder": str(folders.root()), "toolchains": [_as_data(state) for state in states]})
        return
    table(["toolchain", "state", "size", "python", "age", ""], [_row(state) for state in states])
    made = [state.environment for state in states if state.environment]
    total = sum(environment.bytes for environment in made)
    click.echo(f"{plural(len(made), 'environment')}, {_megabytes(total)}, in {folders.root()}")


@lab.command()
@click.argument("toolchains", metavar="NAME==VERSION…", type=param_types.TOOLCHAIN, nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every toolchain that `portattn lab list` names.")
@click.option("--python", metavar="PATH", help="The Python to make them with; one that fits is found otherwise.")
@json_option
def create(toolchains: tuple[str, ...], every: bool, python: str | None, as_json: bool) -> None:
    """Make environments: the compiler alone, installed by pip, 140 to 730 MB each. Those that are there stay.

    Any version that the package index has can be named, such as triton==3.3.0. An interrupted or failed creation
    leaves nothing.

    Exit status 1: one could not be made; the others are."""
    from portattn.tools.lab.folders import canonical, programs
    from portattn.tools.lab.folders import toolchains as listed

    if every == bool(toolchains):
        limit = "name toolchains as NAME==VERSION, or give --all" if not every else "goes without toolchains"
        raise ArgumentError("lab create", "--all", every, limit)
    names = list(dict.fromkeys(map(canonical, listed() if every else toolchains)))
    made, failed = create_all(names, python)
    if as_json:
        errors = [{"toolchain": name, "error": text} for name, text in failed.items()]
        emit_json({"environments": [_details(environment) for environment in made], "failed": errors})
    else:
        for environment in made:
            click.echo(f"{environment.toolchain}  {_megabytes(environment.bytes)}  {environment.folder}")
            if _lacking(environment):
                needed = getattr(programs(environment.toolchain), "NEEDED", "")
                click.echo(f"  {_lacking(environment)}: {needed}")
        for text in failed.values():
            click.secho(text, fg="red", err=True)
    if failed:
        raise click.exceptions.Exit(RED)


@lab.command()
@click.argument("toolchains", metavar="NAME==VERSION…", type=param_types.TOOLCHAIN, nargs=-1, required=True)
@json_option
def remove(toolchains: tuple[str, ...], as_json: bool) -> None:
    """Remove environments, broken ones too, and say how much disk that gave back."""
    from portattn.tools.lab import folders

    freed = {}
    for name in dict.fromkeys(map(folders.canonical, toolchains)):
        click.echo(f"removing {name}", err=True)
        freed[name] = folders.remove(name)
        if not as_json:
            click.echo(f"{name}: {_megabytes(freed[name])} given back")
    if as_json:
        emit_json({"removed": [{"toolchain": name, "bytes": number} for name, number in freed.items()]})


def create_or_fail(names: list[str]) -> None:
    """Make environments before a run. Raises LabError if one cannot be made: the run would lack its cells."""
    from portattn.tools.lab import LabError

    _, failed = create_all(names) if names else ([], {})
    if failed:
        raise LabError("\n".join(failed.values()))


def create_all(names: list[str], python: str | None = None) -> tuple[list[Environment], dict[str, str]]:
    """Make environments with progress; return the made ones, and the others' error texts by name."""
    from portattn.tools.lab import LabError, creating

    made: list[Environment] = []
    failed: dict[str, str] = {}
    with status("making environments") as say:
        for name in names:
            try:
                made.append(creating.create(name, lambda text, name=name: say(f"{name}: {text}"), python=python))  # type: ignore[misc]
                say(f"{name}: ready")
            except LabError as error:
                failed[name] = str(error)
                say(f"{name}: failed")
            except KeyboardInterrupt:
                click.echo("interrupted; nothing half made is left", err=True)
                raise click.exceptions.Exit(INTERRUPTED) from None
    return made, failed


def _row(state: ToolchainState) -> tuple[str, ...]:
    made = state.environment
    if made is None:
        return state.toolchain, "broken" if state.broken else "-", "", "", "", state.broken
    days = (datetime.date.today() - made.created).days
    age = "today" if days <= 0 else plural(days, "day")
    return state.toolchain, "made", _megabytes(made.bytes), made.python_version, age, _lacking(made)


def _lacking(made: Environment) -> str:
    """Return an environment's limits without missing programs beside Python (NPUs need them), or ""."""
    from portattn.tools.lab.folders import programs

    lacking = [name for name in getattr(programs(made.toolchain), "ALL", ()) if name not in made.tools]
    return f"lowers, and cannot execute what it lowered: no {', '.join(lacking)}" if lacking else ""


def _megabytes(number: int) -> str:
    return f"{number / 1e6:.0f} MB"


def _as_data(state: ToolchainState) -> dict[str, Any]:
    word = "made" if state.environment else "broken" if state.broken else "missing"
    made = _details(state.environment) if state.environment else {}
    return {"toolchain": state.toolchain, "state": word, "broken": state.broken} | made


def _details(environment: Environment) -> dict[str, Any]:
    import msgspec

    return msgspec.structs.asdict(environment) | {"folder": str(environment.folder)}
