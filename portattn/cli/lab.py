"""`portattn lab`: environments of other compilers, made on demand."""

from __future__ import annotations

import contextvars
import datetime
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import click

from portattn.cli.errors import INTERRUPTED, RED
from portattn.cli.output import emit_json, json_option, plural, table
from portattn.errors import ArgumentError
from portattn.tools import shell_values

if TYPE_CHECKING:
    from rich.progress import TaskID

    from portattn.tools.lab import Environment, ToolchainState
    from portattn.tools.lab.commands import Say


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
@click.argument("toolchains", metavar="NAME==VERSION…", type=shell_values.TOOLCHAIN, nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every toolchain that `portattn lab list` names.")
@click.option("--jobs", type=click.IntRange(1, 16), default=1, show_default=True, help="Environments made at a time.")
@click.option("--python", metavar="PATH", help="The Python to make them with; one that fits is found otherwise.")
@json_option
def create(toolchains: tuple[str, ...], every: bool, jobs: int, python: str | None, as_json: bool) -> None:
    """Make environments: the compiler alone, installed by pip, 140 to 730 MB each. Those that are there stay.

    Any version that the package index has can be named, such as triton==3.3.0. An interrupted or failed creation
    leaves nothing.

    Exit status 1: one could not be made; the others are.
    """
    from portattn.tools.lab.folders import canonical, programs
    from portattn.tools.lab.folders import toolchains as listed

    if every == bool(toolchains):
        limit = "name toolchains as NAME==VERSION, or give --all" if not every else "goes without toolchains"
        raise ArgumentError("lab create", "--all", every, limit)
    names = list(dict.fromkeys(map(canonical, listed() if every else toolchains)))
    made, failed = create_all(names, jobs, python)
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
@click.argument("toolchains", metavar="NAME==VERSION…", type=shell_values.TOOLCHAIN, nargs=-1, required=True)
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


def create_all(names: list[str], jobs: int = 1, python: str | None = None) -> tuple[list[Environment], dict[str, str]]:
    """Make environments with progress on standard error: those made, and the error text of those not, by name.

    Bad arguments are raised. Ctrl-C ends what is under way, and the command.
    """
    from portattn.tools.lab import LabError, creating
    from portattn.tools.lab.commands import Commands

    commands = Commands()
    made: dict[str, Environment] = {}
    failed: dict[str, str] = {}
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="lab")
    with _Progress() as progress:

        def make(name: str) -> Environment:
            return creating.create(name, progress.teller(name), python=python, commands=commands)

        running: dict[Future[Environment], str] = {
            pool.submit(contextvars.copy_context().run, make, name): name
            for name in names  # with this thread's settings
        }
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name = running.pop(future)
                    try:
                        made[name] = future.result()
                        progress.ended(name, "ready")
                    except LabError as error:
                        failed[name] = str(error)
                        progress.ended(name, "failed")
        except KeyboardInterrupt:
            click.echo("interrupted; nothing half made is left", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        finally:
            if running:
                commands.stop()
            pool.shutdown(cancel_futures=True)
    return [made[name] for name in names if name in made], failed


class _Progress:
    """What each environment is at: a line that changes on a terminal, a line a step elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        self._shown = Progress(*columns, console=console) if console.is_terminal else None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Progress:
        if self._shown:
            self._shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._shown.stop()

    def teller(self, name: str) -> Say:
        """A function that shows the latest step of one environment."""
        if self._shown is None:
            return lambda text: click.echo(f"{name}: {text}", err=True)
        shown, task = self._shown, self._shown.add_task(name, total=1)
        self._tasks[name] = task
        return lambda text: shown.update(task, description=f"{name}: {text[:100]}")

    def ended(self, name: str, how: str) -> None:
        if self._shown is None:
            click.echo(f"{name}: {how}", err=True)
        else:
            self._shown.update(self._tasks[name], completed=1, description=f"{name}: {how}")


def _row(state: ToolchainState) -> tuple[str, ...]:
    made = state.environment
    if made is None:
        return state.toolchain, "broken" if state.broken else "-", "", "", "", state.broken
    return state.toolchain, "made", _megabytes(made.bytes), made.python_version, _age(made.created), _lacking(made)


def _lacking(made: Environment) -> str:
    """What an environment cannot do for want of programs beside Python, as NPUs' need them; empty for any other."""
    from portattn.tools.lab.folders import programs

    lacking = [name for name in getattr(programs(made.toolchain), "ALL", ()) if name not in made.tools]
    return f"lowers, and cannot execute what it lowered: no {', '.join(lacking)}" if lacking else ""


def _age(created: datetime.date) -> str:
    days = (datetime.date.today() - created).days
    return "today" if days <= 0 else plural(days, "day")


def _megabytes(number: int) -> str:
    return f"{number / 1e6:.0f} MB"


def _as_data(state: ToolchainState) -> dict[str, Any]:
    word = "made" if state.environment else "broken" if state.broken else "missing"
    made = _details(state.environment) if state.environment else {}
    return {"toolchain": state.toolchain, "state": word, "broken": state.broken} | made


def _details(environment: Environment) -> dict[str, Any]:
    import msgspec

    return msgspec.structs.asdict(environment) | {"folder": str(environment.folder)}
