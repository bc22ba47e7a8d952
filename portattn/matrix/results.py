"""results.jsonl: one Run line, then a line a cell. Only whole lines are ever written, so an interrupted run can go on.

Cells are appended as they are finished; a run that ends puts them in the order of its targets and problems.
"""

from __future__ import annotations

import os
from pathlib import Path

import filelock
import msgspec

from portattn.errors import ArgumentError, DataError
from portattn.matrix.cells import SCHEMA, Cell, Run

NAME = "results.jsonl"
_decoder = msgspec.json.Decoder(Run | Cell)


class _Versioned(msgspec.Struct):
    schema: int


class Results:
    """The results of one run, in a folder. Use it as a context: it holds the folder's lock.

    Raises ArgumentError when the folder cannot be written, or another run writes there at this moment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(folder / ".lock")
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ArgumentError("matrix run", "--out", str(folder), "another run is writing there now") from None
        except OSError as error:
            raise ArgumentError("matrix run", "--out", str(folder), f"cannot be written: {error.strerror}") from None

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def start(self, run: Run) -> Path | None:
        """Begin a new file; an earlier one is kept under its date. Returns where it went, if there was one."""
        kept = None
        if self.path.exists():
            kept = self.folder / f"results-{_date_of(self.path)}.jsonl"
            for number in range(2, 1000):
                if not kept.exists():
                    break
                kept = self.folder / f"results-{_date_of(self.path)}-{number}.jsonl"
            self.path.rename(kept)
        write_whole(self.path, msgspec.json.encode(run) + b"\n")
        return kept

    def resume(self, run: Run) -> list[Cell]:
        """Go on with the file's run: its cells so far. A line that was cut off is dropped.

        Raises ArgumentError when there is nothing to go on with, or it is another run's: other cells, other kernels,
        another portattn or compiler.
        """
        if not self.path.exists():
            raise ArgumentError("matrix run", "--resume", str(self.path), "there is no such file to go on with")
        begun, cells = read(self.path)
        for name in ("portattn", "kernels", "compiler", "cells"):
            if getattr(begun, name) != getattr(run, name):
                raise ArgumentError(
                    "matrix run", "--resume", str(self.path), f"it was begun with other {name}; run without --resume"
                )
        self.finish(begun, cells)
        return cells

    def append(self, cell: Cell) -> None:
        """Add a cell: one write of one whole line."""
        line = msgspec.json.encode(cell) + b"\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            written = os.write(handle, line)
        finally:
            os.close(handle)
        if written != len(line):
            raise DataError(self.path, None, "the disk took only part of a line; free space and --resume")

    def finish(self, run: Run, cells: list[Cell]) -> None:
        """Write run and cells anew, in order, as a whole file."""
        lines = [msgspec.json.encode(run), *(msgspec.json.encode(c) for c in sorted(cells, key=lambda c: c.index))]
        write_whole(self.path, b"\n".join(lines) + b"\n")


def read(path: Path) -> tuple[Run, list[Cell]]:
    """The run and its cells, in order. A last line without an end (an interrupted write) is left out.

    Raises DataError (file, line) on another schema version or a line that breaks the schema, and when the file or its
    first line is missing.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(path, None, f"cannot be read: {error.strerror}") from None
    run: Run | None = None
    cells: dict[str, Cell] = {}
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            version = msgspec.json.decode(line, type=_Versioned).schema
            if version != SCHEMA:
                raise DataError(path, number, f"schema version {version}; this portattn reads version {SCHEMA}")
            item = _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise DataError(path, number, f"not a line of matrix results: {error}") from None
        if isinstance(item, Run):
            run = item
        else:
            cells[item.id] = item
    if run is None:
        raise DataError(path, 1, "the first line, which says where the cells come from, is missing")
    return run, sorted(cells.values(), key=lambda c: c.index)


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the file and rename over it: a reader sees the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _date_of(path: Path) -> str:
    """The date of an earlier run, for its file's name; that of the file where its first line cannot be read."""
    import datetime

    try:
        return f"{read(path)[0].date:%Y%m%d-%H%M%S}"
    except DataError:
        return f"{datetime.datetime.fromtimestamp(path.stat().st_mtime):%Y%m%d-%H%M%S}"
