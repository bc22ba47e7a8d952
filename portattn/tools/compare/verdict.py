"""Judge a run by its cells, its expected failures (TOML) and its losses since another run."""

import datetime
import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from portattn.errors import ArgumentError, DataError
from portattn.schema import toml_reader
from portattn.tools import run_log
from portattn.tools.compare.changes import KINDS, LOST, Change, Diff, Place
from portattn.tools.matrix.cells import RED, Cell, Run

Failing = Literal["FAIL", "ERROR", "TIMEOUT", "CRASH", "NOTE", "NOT_RUN"]


class ExpectedFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry. status: of the cells, any red one if empty; line: its line in the file."""

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
        return (
            fnmatch.fnmatchcase(cell.target, self.target)
            and fnmatch.fnmatchcase(cell.toolchain, self.toolchain)
            and any(fnmatch.fnmatchcase(name, self.problem) for name in (cell.name, cell.op))
        )

    def fails(self, cell: Cell) -> bool:
        return cell.status == self.status if self.status else cell.red

    def explains(self, cell: Cell) -> bool:
        return self.fails(cell) and re.search(self.signature, failure(cell)) is not None


class ExpectationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    explained: dict[str, ExpectedFailure]  # id of each cell that fails as expected -> its entry
    complaints: tuple[tuple[str, Cell, str], ...]  # (kind, cell, text): `unexpected_pass`, `other_reason`, `expired`
    idle: tuple[ExpectedFailure, ...]  # entries that concern no cell of the run


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    expected: tuple[ExpectedFailure, ...] = ()


def read(path: Path) -> tuple[ExpectedFailure, ...]:
    """Read a list of expected failures. Raises DataError (file, line, key) on any departure from its schema."""
    data, text = run_log.read_toml(path)
    found = []
    for number, entry in enumerate(toml_reader.convert(data, _File, path, text).expected):
        where = ("expected", str(number))
        for name, wrong in _wrong(entry):
            raise DataError(path, toml_reader.line_of(text, *where, name), f"key {name!r}: {wrong}")
        found.append(msgspec.structs.replace(entry, line=toml_reader.line_of(text, *where) or 0))
    return tuple(found)


def _wrong(entry: ExpectedFailure) -> Iterator[tuple[str, str]]:
    for name in ("target", "toolchain", "problem", "signature", "reason", "owner"):
        if not getattr(entry, name).strip():
            yield name, "is empty"
    if entry.line:
        yield "line", "unknown key"
    try:
        if re.search(entry.signature, ""):
            yield "signature", "matches every failure, and so names none"
    except re.error as error:
        yield "signature", f"not a regular expression: {error}"


def failure(cell: Cell) -> str:
    return "\n".join(filter(None, (cell.reason, cell.stage, cell.log)))


def judge(cells: Sequence[Cell], entries: Iterable[ExpectedFailure], today: datetime.date) -> ExpectationOutcome:
    explained: dict[str, ExpectedFailure] = {}
    complaints: list[tuple[str, Cell, str]] = []
    covered = [(entry, [cell for cell in cells if entry.covers(cell)]) for entry in entries]
    for entry, mine in covered:
        for cell in mine:
            if entry.explains(cell) and entry.expires >= today:
                explained.setdefault(cell.id, entry)
    for entry, mine in covered:
        for cell in (cell for cell in mine if cell.id not in explained):
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
    idle = tuple(entry for entry, mine in covered if not mine)
    return ExpectationOutcome(explained=explained, complaints=tuple(complaints), idle=idle)


STATUSES = {"note": {"NOTE"}, "not_run": {"NOT_RUN"}, "red": RED}
# What a list of expected failures can complain of, and a run that is not whole: always red.
COMPLAINTS = ("unexpected_pass", "other_reason", "expired", "interrupted")


class RunFinding(msgspec.Struct, frozen=True, kw_only=True):
    kind: str  # `red`, `note` or `not_run` for a cell's status; a kind of change (`diff.KINDS`); or one of COMPLAINTS
    text: str
    target: str = ""
    toolchain: str = ""
    name: str = ""
    cell: str = ""  # the cell's id; empty if it is gone, or the run as a whole is meant
    causes: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        return self.target, self.toolchain, self.name

    def __str__(self) -> str:
        where = "  ".join(filter(None, self.place))
        return f"{where}: {self.text}" if where else self.text


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    findings: tuple[RunFinding, ...]  # its faults; empty if it is all right
    expected: dict[str, ExpectedFailure]  # id of each cell that fails as expected -> its entry
    notes: tuple[str, ...] = ()  # findings that deserve a look, and are no fault


def words(texts: Sequence[str], op: str, known: Collection[str]) -> frozenset[str]:
    found = [part.strip().lower().replace("-", "_") for text in texts for part in text.split(",") if part.strip()]
    for name in found:
        if name not in known:
            raise ArgumentError(op, "--fail-on", name, f"must be one of {', '.join(known)}")
    return frozenset(found)


def of_run(
    run: Run, cells: Sequence[Cell], *, fail_on: Collection[str] = (), expected: Sequence[ExpectedFailure] = (),
    changes: Diff | None = None, today: datetime.date | None = None, whole: bool = True,
) -> Verdict:  # fmt: skip
    """Return the verdict on a run; `fail_on`: more red STATUSES and changes; `whole`: missing cells are red."""
    outcome = judge(cells, expected, today or datetime.datetime.now(datetime.timezone.utc).date())
    findings = [_of_cell(kind, cell, text) for kind, cell, text in outcome.complaints]
    complained = {finding.cell for finding in findings}
    for kind, statuses in STATUSES.items():
        if kind == "red" or kind in fail_on:
            findings += [
                _of_cell(kind, cell, f"{cell.status}: {cell.reason}" if kind == "red" else cell.reason)
                for cell in cells
                if cell.status in statuses and cell.id not in outcome.explained and cell.id not in complained
            ]
    if changes is not None:
        places = {cell.place: cell for cell in cells}
        for change in changes.changes:
            findings += _of_change(change, places.get(change.place), LOST | set(fail_on), outcome.explained)
    missing = run.missing(cells)
    if whole and missing:
        text = f"the run was interrupted: {missing} of {len(run.cells)} cells are missing"
        findings.append(RunFinding(kind="interrupted", text=text))
    idle = [f"the expected failure at line {entry.line} is about no cell of this run" for entry in outcome.idle]
    return Verdict(findings=tuple(findings), expected=outcome.explained, notes=tuple(idle))


def _of_cell(kind: str, cell: Cell, text: str) -> RunFinding:
    return RunFinding(kind=kind, text=text, target=cell.target, toolchain=cell.toolchain, name=cell.name, cell=cell.id)


def _of_change(change: Change, cell: Cell | None, red: Collection[str], explained: Any) -> Iterator[RunFinding]:
    """Yield the losses of one cell; an expected failure may lose its level."""
    excused = {"level", "interpreter"} if cell is not None and cell.id in explained else set()
    for kind in change.kinds:
        if kind in red and kind not in excused:
            why = f": {change.reason}" if kind == "level" and change.reason else ""
            yield RunFinding(
                kind=kind, text=change.told[kind] + why, target=change.target, toolchain=change.toolchain,
                name=change.name, cell=cell.id if cell else "", causes=tuple(map(str, change.causes)),
            )  # fmt: skip


FAIL_ON = (*STATUSES, *KINDS)  # what --fail-on can name
