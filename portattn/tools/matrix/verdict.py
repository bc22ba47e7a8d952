"""Judge a run: its cells, the expected failures, and the losses since another run."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from portattn.errors import ArgumentError
from portattn.tools.matrix.cells import RED, Cell, Run
from portattn.tools.matrix.diff import KINDS, LOST, Change, Diff
from portattn.tools.matrix.expected import ExpectedFailure, judge

STATUSES = {"note": {"NOTE"}, "not_run": {"NOT_RUN"}, "red": RED}
# What a list of expected failures can complain of, and a run that is not whole: always red.
COMPLAINTS = ("unexpected_pass", "other_reason", "expired", "interrupted")


class RunFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing for which a run is not all right.

    kind  `red`, `note` or `not_run` for a cell's status; a kind of change (`diff.KINDS`); or one of COMPLAINTS
    cell  the cell's id; empty where it is gone, or the run as a whole is meant
    """

    kind: str
    text: str
    target: str = ""
    toolchain: str = ""
    name: str = ""
    cell: str = ""
    causes: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = "  ".join(filter(None, (self.target, self.toolchain, self.name)))
        return f"{where}: {self.text}" if where else self.text


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of a run.

    findings  its faults; empty if it is all right
    expected  id of each cell that fails as expected -> the entry that says so
    notes     findings that deserve a look, and are no fault
    """

    findings: tuple[RunFinding, ...]
    expected: dict[str, ExpectedFailure]
    notes: tuple[str, ...] = ()


def words(texts: Sequence[str], op: str, known: Collection[str]) -> frozenset[str]:
    """Return the kinds that --fail-on names, repeated or with commas. Raises ArgumentError on an unknown kind."""
    found = [part.strip().lower().replace("-", "_") for text in texts for part in text.split(",") if part.strip()]
    for word in found:
        if word not in known:
            raise ArgumentError(op, "--fail-on", word, f"must be one of {', '.join(known)}")
    return frozenset(found)


def of_run(
    run: Run,
    cells: Sequence[Cell],
    *,
    fail_on: Collection[str] = (),
    expected: Sequence[ExpectedFailure] = (),
    changes: Diff | None = None,
    today: datetime.date | None = None,
    whole: bool = True,
) -> Verdict:
    """The verdict on a run.

    fail_on  what is red beside red cells and losses: names of STATUSES and of changes
    changes  the run compared with an earlier one
    whole    whether cells that are missing make it red
    """
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
        places = {(cell.target, cell.toolchain, cell.name): cell for cell in cells}
        for change in changes.changes:
            cell = places.get((change.target, change.toolchain, change.name))
            findings += _of_change(change, cell, LOST | set(fail_on), outcome.explained)
    missing = len(set(run.cells) - {cell.id for cell in cells})
    if whole and missing:
        text = f"the run was interrupted: {missing} of {len(run.cells)} cells are missing"
        findings.append(RunFinding(kind="interrupted", text=text))
    idle = [f"the expected failure at line {entry.line} is about no cell of this run" for entry in outcome.idle]
    return Verdict(findings=tuple(findings), expected=outcome.explained, notes=tuple(idle))


def _of_cell(kind: str, cell: Cell, text: str) -> RunFinding:
    return RunFinding(kind=kind, text=text, target=cell.target, toolchain=cell.toolchain, name=cell.name, cell=cell.id)


def _of_change(change: Change, cell: Cell | None, red: Collection[str], explained: Any) -> Iterator[RunFinding]:
    """The losses of one cell. A cell that fails as expected has lost its level as expected."""
    excused = {"level", "interpreter"} if cell is not None and cell.id in explained else set()
    for kind in change.kinds:
        if kind in red and kind not in excused:
            why = f": {change.reason}" if kind == "level" and change.reason else ""
            yield RunFinding(
                kind=kind, text=change.told[kind] + why, target=change.target, toolchain=change.toolchain,
                name=change.name, cell=cell.id if cell else "", causes=tuple(map(str, change.causes)),
            )  # fmt: skip


FAIL_ON = (*STATUSES, *KINDS)  # what --fail-on can name
