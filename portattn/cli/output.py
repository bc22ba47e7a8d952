"""Shared output of all commands: --json, JSON documents, headings, tables, progress; names that several take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from portattn.tools import param_types
from portattn.tools.display_text import plural as plural

if TYPE_CHECKING:
    from typing_extensions import Self

    from portattn.schema.toolchain import Toolchain
    from portattn.tools.bench.run import Item
    from portattn.tools.matrix.cells import Cell


PIPED_WIDTH = 10_000  # columns; no row is wider
EVERY = 500  # written files between two lines

F = TypeVar("F", bound=Callable[..., Any])


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


class ProgressCounter:
    """Progress of a long run on standard error: a bar on a terminal, a line a cell elsewhere."""

    def __init__(self, total: int, already: int, what: str) -> None:
        from rich import progress
        from rich.console import Console

        self.total, self.count, self.red, self.begun = total, already, 0, time.monotonic()
        console = Console(stderr=True)
        self._bar: progress.Progress | None = None
        if console.is_terminal:
            bar = progress.BarColumn(), progress.MofNCompleteColumn()
            times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
            self._bar = progress.Progress(progress.TextColumn("{task.description}"), *bar, *times, console=console)
            self._task = self._bar.add_task(what, total=total, completed=already)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, text: str) -> None:
        self.count += 1
        if self._bar:
            self._bar.update(self._task, advance=1, description=text[:100])
        else:
            self.line(text)

    def line(self, text: str) -> None:
        click.echo(f"[{self.count}/{self.total}] {time.monotonic() - self.begun:5.0f} s  {text}", err=True)

    def matrix_cell(self, cell: Cell) -> None:
        from rich.text import Text

        from portattn.tools.matrix.cells import word

        self.red += cell.red
        if self._bar is None:
            self.step(f"{word(cell):<9} {'  '.join(cell.place)}")
            return
        if cell.red:
            self._bar.console.print(Text(f"{cell.status} {'  '.join(cell.place)}: {cell.reason}", style="red"))
        self.step(f"cells, {self.red} red" if self.red else "cells")

    def counted(self, files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        """Count written files, thousands, with a line now and then."""
        for file in files:
            if self._bar is not None:
                self.step("files")
            else:
                self.count += 1
                if self.count % EVERY == 0:
                    self.line("files")
            yield file


class BenchProgress(ProgressCounter):
    def __init__(self, total: int, already: int) -> None:
        super().__init__(total, already, "bench")

    def doing(self, case: str, what: str) -> None:
        """Show the current cell's step; without a bar, print the slow steps only."""
        from portattn.tools.bench.peers import PEERS, library

        peer = PEERS.get(library(what))
        why = peer.slow if peer else ""
        if self._bar:
            self._bar.update(self._task, description=f"{case}: {what}{f' ({why})' if why else ''}"[:100])
        elif why:
            self.line(f"{case}: {what} is {why}")

    def cell(self, items: Mapping[str, Item]) -> None:
        said = " | ".join(f"{name}: {outcome(item)}" if name else outcome(item) for name, item in items.items())
        self.step(f"{next(iter(items.values())).set}  {said}")


def outcome(item: Item) -> str:
    from portattn.tools.bench.contenders import OURS
    from portattn.tools.bench.firstcall import FirstCall

    if isinstance(item, FirstCall):
        return f"{item.case}: {item.failed or f'{item.empty_s:.2f} s with empty caches, {item.kept_s:.2f} s with kept'}"
    ours = item.figures(OURS)
    if ours is None:
        return f"{item.name}: {'; '.join(f.refused for f in item.contenders)}"
    if ours.refused:
        return f"{item.name}: REFUSED: {ours.refused}"
    words = [f"{ours.ms * 1e3:.1f} µs"] if ours.ms is not None else []
    if ours.ratio is not None:
        words.append(f"{ours.ratio:.2f}× {item.best_peer}")
    if ours.host_us is not None:
        words.append(f"host {ours.host_us.median:.1f} µs")
    return f"{item.name}: {', '.join(words)}"


def tell_unknown(toolchains: Iterable[Toolchain]) -> None:
    """Print a line on standard error for each toolchain that is no known release; it is still planned for."""
    for text in dict.fromkeys(toolchain.unknown_release() for toolchain in toolchains):
        if text:
            click.echo(f"portattn: {text}; plans go by its number alone", err=True)
