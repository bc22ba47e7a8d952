"""What every command shares in its output: --json, JSON documents, headings and tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

PIPED_WIDTH = 10_000  # columns; no row is wider

F = TypeVar("F", bound=Callable[..., Any])
Shown = TypeVar("Shown")


def json_option(function: F) -> F:
    """Add --json. Errors come as JSON too: the root command sees to that."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(function)


def emit_json(document: Any) -> None:
    """Print a struct, or builtins that may hold structs, as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def heading(text: str) -> None:
    click.echo()
    click.secho(text, bold=True)


def pairs(items: Iterable[tuple[str, str]], indent: int = 2) -> None:
    """Names and values in two columns; a value of several lines stays in its column."""
    rows = list(items)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        first, *rest = value.splitlines() or [""]
        click.echo(f"{'':{indent}}{name:<{width}}  {first}".rstrip())
        for line in rest:
            click.echo(f"{'':{indent + width + 2}}{line}")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table as wide as the terminal; its last column takes what is left and wraps. In a pipe a row is a line."""
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
    """Write each file that is named, with what its function makes of `what`; the paths. Their folders are made."""
    from portattn.files import write_named

    written = []
    for path, text in files:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_named(path, text(what).encode())
            written.append(path)
    return written


def setting(name: str, value: Any) -> str:
    """`block_m = 64`, and with a comparison for a value `block_m >=64`."""
    return f"{name} {value}" if isinstance(value, str) and value[:1] in "<>=!" else f"{name} = {value}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """A line of progress on standard error; in a pipe a line for each thing that is said."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: click.echo(text, err=True)
        return
    with console.status(Text(what)) as shown:
        yield lambda text: shown.update(Text(text))
