"""Progress of a long run on standard error: a bar on a terminal, a line a cell elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from typing_extensions import Self

    from portattn.tools.matrix.cells import Cell


class ProgressCounter:
    """Counts what is finished; standard output stays free for results.

    what  the bar's first words
    """

    def __init__(self, total: int, already: int, what: str) -> None:
        self.total, self.count, self.begun = total, already, time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(what, total=total, completed=already)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, text: str) -> None:
        """Count one more that is finished, and say what came out."""
        self.count += 1
        if self._bar:
            self._bar.update(self._task, advance=1, description=text[:100])
        else:
            self.line(text)

    def line(self, text: str) -> None:
        """Say a line where there is no bar: how many, since when, and the text."""
        click.echo(f"[{self.count}/{self.total}] {time.monotonic() - self.begun:5.0f} s  {text}", err=True)


class CellProgress(ProgressCounter):
    """Counts the cells of a matrix, and how many are red."""

    def __init__(self, total: int, already: int) -> None:
        super().__init__(total, already, "cells")
        self.red = 0

    def cell(self, cell: Cell) -> None:
        """Count one finished cell and say how it ended."""
        from portattn.tools.matrix.snapshot import word

        self.count += 1
        self.red += cell.red
        if self._bar is None:
            self.line(f"{word(cell):<9} {cell.target}  {cell.toolchain}  {cell.name}")
            return
        if cell.red:
            self._bar.console.print(
                Text(f"{cell.status} {cell.target}  {cell.toolchain}  {cell.name}: {cell.reason}", style="red")
            )
        self._bar.update(self._task, advance=1, description=f"cells, {self.red} red" if self.red else "cells")


class FileProgress(ProgressCounter):
    """Counts files that are written: thousands, so that a line is printed now and then."""

    EVERY = 500

    def __init__(self, total: int) -> None:
        super().__init__(total, 0, "files")

    def counted(self, files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        """Yield the files, and count each."""
        for file in files:
            self.count += 1
            if self._bar is not None:
                self._bar.update(self._task, advance=1)
            elif self.count % self.EVERY == 0:
                self.line("files")
            yield file
