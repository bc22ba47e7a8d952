"""Reading what is compared: a folder of results, a file of results, or a baseline."""

from __future__ import annotations

from pathlib import Path

from portattn.errors import ArgumentError
from portattn.tools.matrix import baseline, results
from portattn.tools.matrix.cells import Cell, Run
from portattn.tools.matrix.snapshot import Snapshot, snapshot


def file_of(path: Path) -> Path:
    """The file that a path means: a folder's is its results.jsonl."""
    return path / results.NAME if path.is_dir() else path


def read_cells(path: Path) -> tuple[Run, list[Cell]]:
    """A run and its cells, of a folder or a file of results. Raises DataError."""
    return results.read(file_of(path))


def read(path: Path) -> Snapshot:
    """The snapshot of a folder or a file of results, or of a baseline. Raises DataError."""
    found = file_of(path)
    if found.suffix == baseline.SUFFIX:
        return baseline.read(found)
    return snapshot(*results.read(found), shown=str(path))


def whole(path: Path, op: str, argument: str) -> Snapshot:
    """Like `read`, for a run that later runs are compared with. Raises ArgumentError if it was interrupted."""
    found = read(path)
    if found.missing:
        cells = f"{found.missing} cell{'' if found.missing == 1 else 's'}"
        limit = f"it was interrupted, and lacks {cells}: nobody would miss them later"
        raise ArgumentError(op, argument, str(path), limit)
    return found


def earlier(path: Path) -> list[Path]:
    """All files of runs that a path means: a folder's earlier results, which have their dates in their names, too."""
    if not path.is_dir():
        return [path]
    return [*sorted(path.glob(f"{Path(results.NAME).stem}-*.jsonl")), path / results.NAME]
