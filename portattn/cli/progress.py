"""Progress of a long run on standard error: a bar on a terminal, a line a cell elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from portattn.matrix.cells import Cell


class CellProgress:
    """Counts cells as they are finished; standard output stays free for results."""

    def __init__(self, total: int, already: int) -> None:
        self.total, self.count, self.red = total, already, 0
        self.begun = time.monotonic()
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
            self._task = self._bar.add_task("cells", total=total, completed=already)

    def __enter__(self) -> CellProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def cell(self, cell: Cell) -> None:
        """Count one finished cell and say how it ended."""
        self.count += 1
        self.red += cell.red
        word = cell.level if cell.status == "PASS" else cell.status
        if self._bar is None:
            spent = time.monotonic() - self.begun
            where = f"{cell.target}  {cell.toolchain}"
            click.echo(f"[{self.count}/{self.total}] {spent:5.0f} s  {word:<9} {where}  {cell.name}", err=True)
            return
        if cell.red:
            self._bar.console.print(
                Text(f"{cell.status} {cell.target}  {cell.toolchain}  {cell.name}: {cell.reason}", style="red")
            )
        self._bar.update(self._task, advance=1, description=f"cells, {self.red} red" if self.red else "cells")
