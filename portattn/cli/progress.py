"""Progress of a long run on standard error: a bar on a terminal, a line a cell elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from typing_extensions import Self

    from portattn.tools.bench.run import Item
    from portattn.tools.matrix.cells import Cell


EVERY = 500  # written files between two lines


class ProgressCounter:
    def __init__(self, total: int, already: int, what: str) -> None:
        self.total, self.count, self.red, self.begun = total, already, 0, time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=console)
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
