"""Progress of a benchmark on standard error: a bar on a terminal, a line a cell elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from portattn.bench.contenders import OURS
from portattn.bench.firstcall import FirstCall
from portattn.bench.results import Row


class BenchProgress:
    """Counts cells as they are finished; standard output stays free for results."""

    def __init__(self, total: int, already: int) -> None:
        self.total, self.count, self.begun = total, already, time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("bench", total=total, completed=already)

    def __enter__(self) -> BenchProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def cell(self, item: Row | FirstCall) -> None:
        """Count one finished cell and say what came out."""
        self.count += 1
        text = f"{item.set}  {_outcome(item)}"
        if self._bar:
            self._bar.update(self._task, advance=1, description=text[:100])
        else:
            spent = time.monotonic() - self.begun
            click.echo(f"[{self.count}/{self.total}] {spent:5.0f} s  {text}", err=True)


def _outcome(item: Row | FirstCall) -> str:
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
