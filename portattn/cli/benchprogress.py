"""Progress of a benchmark on standard error: a bar on a terminal, a line a cell elsewhere."""

from __future__ import annotations

from portattn.cli.progress import ProgressCounter
from portattn.tools.bench.contenders import OURS
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.peers import SLOW, library
from portattn.tools.bench.results import Row


class BenchProgress(ProgressCounter):
    """Counts the cells of a benchmark."""

    def __init__(self, total: int, already: int) -> None:
        super().__init__(total, already, "bench")

    def doing(self, case: str, what: str) -> None:
        """Show the current cell's step; without a bar, print the slow steps only."""
        why = SLOW.get(library(what))
        if self._bar:
            self._bar.update(self._task, description=f"{case}: {what}{f' ({why})' if why else ''}"[:100])
        elif why:
            self.line(f"{case}: {what} is {why}")

    def cell(self, item: Row | FirstCall) -> None:
        """Count one finished cell and say what came out."""
        self.step(f"{item.set}  {outcome(item)}")


def outcome(item: Row | FirstCall) -> str:
    """What came of a cell, in a line without its set."""
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
