"""results.jsonl: one Run line, then a line a cell. Only whole lines are ever written, so an interrupted run can go on.

Cells are appended as they are finished; a run that ends puts them in the order of its targets and problems.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from portattn.errors import ArgumentError, DataError
from portattn.files import write_whole
from portattn.tools.matrix.cells import SCHEMA, Cell, Run
from portattn.tools.run_log import UNREADABLE, RunLog, encoded, lines

NAME = "results.jsonl"
_decoder = msgspec.json.Decoder(Run | Cell)


class _Versioned(msgspec.Struct):
    schema: int


class Results(RunLog):
    """The results of one run, in a folder. Use it as a context: it holds the folder's lock.

    Raises ArgumentError when the folder cannot be written, or another run writes there at this moment.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / NAME, folder / ".lock", op="matrix run", option="--out", shown=folder)
        self.folder = folder

    def start(self, run: Run) -> Path | None:
        """Begin a new file; an earlier one is kept under its date. Returns where it went, if there was one."""
        kept = self.rotate()
        write_whole(self.path, encoded(run))
        return kept

    def resume(self, run: Run) -> list[Cell]:
        """Go on with the file's run: its cells so far. A line that was cut off is dropped.

        Raises ArgumentError when there is nothing to go on with, or it is another run's: other cells, other kernels,
        another portattn or compiler.
        """
        if not self.path.exists():
            raise ArgumentError("matrix run", "--resume", str(self.path), "there is no such file to go on with")
        begun, cells = read(self.path, resumed=True)
        for name in ("portattn", "kernels", "compiler", "cells"):
            if getattr(begun, name) != getattr(run, name):
                raise ArgumentError(
                    "matrix run", "--resume", str(self.path), f"it was begun with other {name}; run without --resume"
                )
        self.finish(begun, cells)
        return cells

    def finish(self, run: Run, cells: list[Cell]) -> None:
        """Write run and cells anew, in order, as a whole file."""
        records = [run, *sorted(cells, key=lambda c: c.index)]
        write_whole(self.path, b"".join(map(encoded, records)))


def read(path: Path, resumed: bool = False) -> tuple[Run, list[Cell]]:
    """The run and its cells, in order. A last line without an end (an interrupted write) is left out.

    resumed  a run will go on with it: see `journal.lines`

    Raises DataError (file, line) on another schema version or a line that breaks the schema, and when the file or its
    first line is missing.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(path, None, f"cannot be read: {error.strerror}") from None
    run: Run | None = None
    cells: dict[str, Cell] = {}
    for number, line in lines(path, data, resumed):
        try:
            version = msgspec.json.decode(line, type=_Versioned).schema
            if version != SCHEMA:
                raise DataError(path, number, f"schema version {version}; this portattn reads version {SCHEMA}")
            item = _decoder.decode(line)
        except UNREADABLE as error:
            raise DataError(path, number, f"not a line of matrix results: {error}") from None
        if isinstance(item, Run):
            run = item
        else:
            cells[item.id] = item
    if run is None:
        raise DataError(path, 1, "the first line, which says where the cells come from, is missing")
    return run, sorted(cells.values(), key=lambda c: c.index)
