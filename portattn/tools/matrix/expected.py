"""Expected failures: which cells fail, for which reason, who looks after it, and until when that is all right.

    [[expected]]
    target    = "cuda:sm_120"        # globs
    toolchain = "triton==3.2.*"
    problem   = "dense*fp32*"
    signature = "bytes spilled"      # regular expression that the failure's text must match
    reason    = "why it fails, for people"
    owner     = "who looks after it"
    expires   = 2026-12-31           # the last day on which it is expected

An expected failure must fail for its reason. A cell that passes, fails for another reason, or whose entry has expired
is red.
"""

from __future__ import annotations

import datetime
import fnmatch
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from portattn.errors import DataError
from portattn.schema import toml_reader
from portattn.tools.matrix.cells import Cell

Failing = Literal["FAIL", "ERROR", "TIMEOUT", "CRASH", "NOTE", "NOT_RUN"]


class ExpectedFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry. status: the one that the cells must have; any red one where it is empty.

    line  where it stands in its file
    """

    target: str
    problem: str
    signature: str
    reason: str
    owner: str
    expires: datetime.date
    toolchain: str = "*"
    status: Failing | Literal[""] = ""
    line: int = 0

    def covers(self, cell: Cell) -> bool:
        """Whether the entry is about a cell."""
        return (
            fnmatch.fnmatchcase(cell.target, self.target)
            and fnmatch.fnmatchcase(cell.toolchain, self.toolchain)
            and any(fnmatch.fnmatchcase(name, self.problem) for name in (cell.name, cell.problem.op))
        )

    def fails(self, cell: Cell) -> bool:
        """Whether a cell fails in the way that the entry is about, whatever the reason."""
        return cell.status == self.status if self.status else cell.red

    def explains(self, cell: Cell) -> bool:
        """Whether a cell fails in that way, and for that reason."""
        return self.fails(cell) and re.search(self.signature, failure(cell)) is not None


class ExpectationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the entries say of a run.

    explained   id of each cell that fails as expected -> its entry
    complaints  (kind, cell, text): `unexpected_pass`, `other_reason`, `expired`
    idle        entries that are about no cell of the run
    """

    explained: dict[str, ExpectedFailure]
    complaints: tuple[tuple[str, Cell, str], ...]
    idle: tuple[ExpectedFailure, ...]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    expected: tuple[ExpectedFailure, ...] = ()


def read(path: Path) -> tuple[ExpectedFailure, ...]:
    """Read a list of expected failures. Raises DataError (file, line, key) on whatever departs from its schema."""
    try:
        data, text = toml_reader.read(path)
    except OSError as error:
        raise DataError(path, None, f"cannot be read: {error.strerror}") from None
    found = []
    for number, entry in enumerate(toml_reader.convert(data, _File, path, text).expected):
        where = ("expected", str(number))
        for name in ("target", "toolchain", "problem", "signature", "reason", "owner"):
            if not getattr(entry, name).strip():
                raise DataError(path, toml_reader.line_of(text, *where, name), f"key {name!r}: is empty")
        if entry.line:
            raise DataError(path, toml_reader.line_of(text, *where, "line"), "key 'line': unknown key")
        line = toml_reader.line_of(text, *where, "signature")
        try:
            matches_all = re.search(entry.signature, "") is not None
        except re.error as error:
            raise DataError(path, line, f"key 'signature': not a regular expression: {error}") from None
        if matches_all:
            raise DataError(path, line, "key 'signature': matches every failure, and so names none")
        found.append(msgspec.structs.replace(entry, line=toml_reader.line_of(text, *where) or 0))
    return tuple(found)


def failure(cell: Cell) -> str:
    """The text of a cell's failure, which a signature must match: reason, stage and output."""
    return "\n".join(filter(None, (cell.reason, cell.stage, cell.log)))


def judge(cells: Sequence[Cell], entries: Iterable[ExpectedFailure], today: datetime.date) -> ExpectationOutcome:
    """What expected failures say of the cells of a run on a day."""
    explained: dict[str, ExpectedFailure] = {}
    complaints: list[tuple[str, Cell, str]] = []
    idle, entries = [], tuple(entries)
    for entry in entries:
        mine = [cell for cell in cells if entry.covers(cell)]
        if not mine:
            idle.append(entry)
        for cell in mine:
            if entry.explains(cell) and entry.expires >= today:
                explained.setdefault(cell.id, entry)
    for entry in entries:
        for cell in (cell for cell in cells if entry.covers(cell) and cell.id not in explained):
            said = f"expected to fail (line {entry.line}, {entry.owner}: {entry.reason})"
            if entry.explains(cell):
                complaints.append(("expired", cell, f"was {said} until {entry.expires}, and still fails"))
            elif entry.fails(cell):
                text = f"is {said}, and fails for another reason than {entry.signature!r}: {cell.reason}"
                complaints.append(("other_reason", cell, text))
            elif cell.red:
                text = f"is {said} with status {entry.status}, and is {cell.status}: {cell.reason}"
                complaints.append(("other_reason", cell, text))
            elif cell.status != "NOT_RUN":  # nobody looked: that says nothing
                text = f"is {said}, and does not: {cell.status}; remove the entry"
                complaints.append(("unexpected_pass", cell, text))
    return ExpectationOutcome(explained=explained, complaints=tuple(complaints), idle=tuple(idle))
