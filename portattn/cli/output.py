"""Shared output of all commands: --json, JSON documents, headings, tables; and names that several commands take."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from portattn.tools import param_types
from portattn.tools.display_text import plural as plural

if TYPE_CHECKING:
    from portattn.planning.registry import Registry
    from portattn.schema.quirk import Quirk
    from portattn.schema.toolchain import Toolchain


PIPED_WIDTH = 10_000  # columns; no row is wider

F = TypeVar("F", bound=Callable[..., Any])
Shown = TypeVar("Shown")


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(function)


def toolchain_option(text: str, *names: str, **more: Any) -> Callable[[F], F]:
    named = names or ("--toolchain",)
    return click.option(*named, type=param_types.TOOLCHAIN, metavar="NAME==VERSION", help=text, **more)


def target_option(help: str, *names: str, **more: Any) -> Callable[[F], F]:
    return click.option(*(names or ("--target",)), type=param_types.TARGET, metavar="BACKEND:ARCH", help=help, **more)


def emit_json(document: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def heading(text: str) -> None:
    click.echo()
    click.secho(text, bold=True)


def pairs(items: Iterable[tuple[str, str]], indent: int = 2) -> None:
    """Print names and values in two columns; a value of several lines stays in its column."""
    rows = list(items)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        first, *rest = value.splitlines() or [""]
        click.echo(f"{'':{indent}}{name:<{width}}  {first}".rstrip())
        for line in rest:
            click.echo(f"{'':{indent + width + 2}}{line}")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as wide as the terminal, whose last column wraps. In a pipe a row is a line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns[:-1]:
        shown.add_column(column, no_wrap=True)
    shown.add_column(columns[-1], overflow="fold")
    for row in rows:
        # Text, not markup: a quirk's title can hold square brackets.
        shown.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=PIPED_WIDTH)
    console.print(shown)


def write_texts(what: Shown, files: Iterable[tuple[Path | None, Callable[[Shown], str]]]) -> list[Path]:
    from portattn.files import write_named

    written = []
    for path, text in files:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_named(path, text(what).encode())
            written.append(path)
    return written


def setting(name: str, value: Any) -> str:
    return f"{name} {value}" if isinstance(value, str) and value[:1] in "<>=!" else f"{name} = {value}"


@contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """Show a line of progress on standard error; in a pipe a line for each text."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: click.echo(text, err=True)
        return
    with console.status(Text(what)) as shown:
        yield lambda text: shown.update(Text(text))


def quirk_of(command: str, text: str, registry: Registry, argument: str = "ID") -> Quirk:
    """Return the living entry of an id, whole or up to its number. Raises ArgumentError, with the nearest ids."""
    return registry.quirk(text, command, argument)


def tell_unknown(toolchains: Iterable[Toolchain]) -> None:
    """Print a line on standard error for each toolchain that is no known release; it is still planned for."""
    for text in dict.fromkeys(toolchain.unknown_release() for toolchain in toolchains):
        if text:
            click.echo(f"portattn: {text}; plans go by its number alone", err=True)
