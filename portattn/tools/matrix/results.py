"""results.jsonl: one Run line, then a line a cell. Only whole lines are ever written, so an interrupted run can go on.

Cells are appended as they are finished; a run that ends puts them in the order of its targets and problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from portattn.errors import ArgumentError, DataError
from portattn.files import write_named
from portattn.tools import run_log
from portattn.tools.matrix.cells import SCHEMA, Cell, Run
from portattn.tools.matrix.identity import Identity
from portattn.tools.matrix.snapshot import WORSE
from portattn.tools.run_log import UNREADABLE, RunLog, encode_record, lines

NAME = "results.jsonl"
Place = tuple[str, str, str]  # of a cell: target, toolchain, problem's name
_decoder = msgspec.json.Decoder(Run | Cell)


class ResumedRun(NamedTuple):
    """A run that goes on. copy: where the file went as it was, where cells of it are stale."""

    run: Run
    cells: list[Cell]
    stale: list[Cell]
    copy: Path | None


class _RunVersion(msgspec.Struct):
    schema: int


class Results(RunLog):
    """The results of one run, in a folder. Use it as a context: it holds the folder's lock.

    Raises ArgumentError when the folder cannot be written, or another run writes there at this moment.
    """

    def __init__(self, folder: Path, op: str = "matrix run") -> None:
        super().__init__(folder / NAME, folder / ".lock", op=op, option="--out", shown=folder)
        self.folder = folder

    def start(self, run: Run) -> Path | None:
        """Begin a new file; an earlier one is kept under its date. Returns where it went, if there was one."""
        kept = self.rotate()
        write_data(self.path, encode_record(run))
        return kept

    def replace(self, run: Run, cells: list[Cell]) -> Path | None:
        """Write a whole run; an earlier one is kept under its date. Returns where it is, if there was one."""
        kept = self.dated() if self.path.exists() else None
        if kept:
            write_data(kept, self.path.read_bytes())
        self.finish(run, cells)
        return kept

    def resume(self, run: Run, keys: Mapping[str, str] | None = None) -> ResumedRun:
        """Go on with the file's run: what of its cells is kept, and what is made again. A cut-off line is dropped.

        keys  the key of each cell as it would be made now: a cell of another key is stale, and so is one that ran into
              another time limit. Where there are stale ones, the file as it was is kept under its date

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
        known = {identity.id: identity for identity in begun.identities}
        now = run.identity
        stale = [cell for cell in cells if keys is not None and _stale(cell, keys, known, now)]
        left_out = {cell.id for cell in stale}
        kept = [cell for cell in cells if cell.id not in left_out]
        copy = None
        if stale:
            copy = self.dated()
            write_data(copy, self.path.read_bytes())
        used = {cell.origin for cell in kept} - {now.id}
        identities = (known.get(now.id, now), *(known[name] for name in known if name in used))
        if keys is not None and identities != begun.identities:
            begun = msgspec.structs.replace(
                begun, identities=identities, devices=run.devices, environments=run.environments, versions=run.versions
            )
        self.finish(begun, kept)
        return ResumedRun(run=begun, cells=kept, stale=stale, copy=copy)

    def finish(self, run: Run, cells: list[Cell]) -> None:
        """Write run and cells anew, in order, as a whole file."""
        records = [run, *sorted(cells, key=lambda c: c.index)]
        write_data(self.path, b"".join(map(encode_record, records)))


def read(path: Path, resumed: bool = False) -> tuple[Run, list[Cell]]:
    """The run and its cells, in order. A last line without an end (an interrupted write) is left out.

    resumed  a run will go on with it: see `journal.lines`

    Raises DataError (file, line) on another schema version, on a line that breaks the schema or that no run writes, and
    when the file or its first line is missing.
    """
    data = run_log.read(path)
    run: Run | None = None
    listed: frozenset[str] = frozenset()
    cells: dict[str, Cell] = {}
    met: dict[str | Place, int] = {}  # a cell's id, and its place -> the line
    for number, line in lines(path, data, resumed):
        try:
            version = msgspec.json.decode(line, type=_RunVersion).schema
            if version != SCHEMA:
                raise DataError(path, number, f"schema version {version}; this portattn reads version {SCHEMA}")
            item = _decoder.decode(line)
        except UNREADABLE as error:
            raise DataError(path, number, f"not a line of matrix results: {error}") from None
        if run is None:
            if not isinstance(item, Run):
                break
            run, listed = item, frozenset(item.cells)
        elif isinstance(item, Run):
            raise DataError(path, number, "is the line of a second run: a file has one")
        else:
            # A run writes each of its cells once; --resume writes the file anew without those that it makes again.
            if item.id not in listed:
                raise DataError(path, number, f"is of the cell {item.id}, which the run does not list in line 1")
            earlier = min(met.setdefault(name, number) for name in (item.id, place_of(item)))
            if earlier != number:
                where = "  ".join(place_of(item))
                raise DataError(path, number, f"is of a cell that the file has already (line {earlier}): {where}")
            if wrong := next(_no_figures(item), ""):
                raise DataError(path, number, wrong)
            cells[item.id] = item
    if run is None:
        raise DataError(path, 1, "the first line, which says where the cells come from, is missing")
    return run, sorted(cells.values(), key=lambda c: c.index)


def place_of(cell: Cell) -> Place:
    """What names a cell in every run: a run has one of each."""
    return cell.target, cell.toolchain, cell.name


def _no_figures(cell: Cell) -> Iterator[str]:
    """Facts that are compared and are no numbers."""
    for one in (cell, *cell.others):
        for kernel in one.kernels:
            for fact in WORSE:
                value = kernel.facts.get(fact, 0)
                if not isinstance(value, int) or value < 0:
                    yield f"its {fact} of {kernel.function} are {value!r}, and must be a number of 0 or more"


def write_data(path: Path, data: bytes) -> None:
    """Write a whole file, or leave the one that is there. Raises DataError."""
    try:
        write_named(path, data)
    except OSError as error:
        raise DataError(path, None, f"cannot be written: {error.strerror or error}") from None


def _stale(cell: Cell, keys: Mapping[str, str], known: Mapping[str, Identity], now: Identity) -> bool:
    """Whether a cell would be made otherwise now."""
    if cell.key != keys.get(cell.id):
        return True
    made = known.get(cell.origin)
    return cell.status == "TIMEOUT" and made is not None and made.seconds != now.seconds
