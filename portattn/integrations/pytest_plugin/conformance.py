"""Conformance cases: the cells of the matrix as pytest's items, each red, green or skipped by the matrix's verdict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from portattn.integrations.pytest_plugin import CONFORMANCE, NODES
from portattn.integrations.pytest_plugin import session as sessions
from portattn.tools.matrix.cells import Cell
from portattn.tools.matrix.diff import Change, Diff, compare
from portattn.tools.matrix.select import CellSpec
from portattn.tools.matrix.snapshot import entry, snapshot, word
from portattn.tools.matrix.verdict import RunFinding, Verdict, of_run

ROOT = NODES.removesuffix("::")


class Red(Exception):
    """A case is red; the text is what a reader is shown."""


def collect(session: pytest.Session) -> list[pytest.Item]:
    """The cases of this run, but for those that arguments leave out."""
    nodes = sessions.of(session.config).asked.nodes
    root = Root.from_parent(session, name=ROOT, nodeid=ROOT)
    return [item for item in session.genitems(root) if not nodes or any(_within(item.nodeid, node) for node in nodes)]


def need(config: pytest.Config) -> None:
    """Raise UsageError on an id among the arguments that names none of this run's cases."""
    asked = sessions.of(config).asked
    ids = [f"{NODES}{spec.target.name}::{spec.target.toolchain}::{slug(spec.named.name)}" for spec in asked.specs]
    ids += [f"{NODES}{gone.target}::{gone.toolchain}::{slug(gone.name)}" for gone in asked.gone]
    for node in asked.nodes:
        if not any(_within(one, node) for one in ids):
            raise pytest.UsageError(f"{node} names no conformance case of this run; --collect-only lists them")


def _within(nodeid: str, given: str) -> bool:
    return nodeid == given or nodeid.startswith(given.removesuffix("::") + "::")


def slug(name: str) -> str:
    """A problem's name as a part of an id: without blanks and punctuation that a shell or -k would mind."""
    return re.sub(r"[^\w.=+/-]+", "_", name).strip("_")


class Root(pytest.Collector):
    """All cases of a run."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        asked = sessions.of(self.config).asked
        columns: dict[tuple[str, str], list[CellSpec | Change]] = {}
        for spec in asked.specs:
            columns.setdefault((spec.target.name, str(spec.target.toolchain)), []).append(spec)
        for change in asked.gone:
            columns.setdefault((change.target, change.toolchain), []).append(change)
        for (target, toolchain), cases in columns.items():
            yield ColumnCollector.from_parent(self, name=f"{target}::{toolchain}", cases=cases)


class ColumnCollector(pytest.Collector):
    """The cases of one target and toolchain."""

    def __init__(self, *, cases: list[CellSpec | Change], **fields: Any) -> None:
        super().__init__(**fields)
        self.cases = cases

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        for case in self.cases:
            if isinstance(case, Change):
                yield MissingCellItem.from_parent(self, name=slug(case.name), change=case)
            else:
                yield CellItem.from_parent(self, name=slug(case.named.name), spec=case)


class _Item(pytest.Item):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.add_marker(CONFORMANCE)

    def reportinfo(self) -> tuple[Path, int, str]:
        # The name is no end of the id: pytest would take its dots for those between classes.
        return self.config.rootpath / ROOT, 0, "  ".join(str(value) for _, value in self.user_properties[:3])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What a cell says, without the trace of how it was made."""
        return str(excinfo.value) if isinstance(excinfo.value, Red) else super().repr_failure(excinfo, style)

    def tell(self, **properties: str) -> None:
        """Add to the properties that pytest hands on, to JUnit XML for one."""
        self.user_properties += [(f"portattn_{name}", value) for name, value in properties.items() if value]


class CellItem(_Item):
    """One cell."""

    def __init__(self, *, spec: CellSpec, **fields: Any) -> None:
        super().__init__(**fields)
        self.spec = spec
        self.tell(target=spec.target.name, toolchain=str(spec.target.toolchain), problem=spec.named.name)

    def runtest(self) -> None:
        shared = sessions.of(self.config)
        cell = shared.cell(self.spec)
        asked = shared.asked
        verdict = of_run(
            shared.run, [cell], fail_on=asked.fail_on, expected=asked.expected, changes=self._changes(cell), whole=False
        )
        seen = entry(cell)
        quirks = ", ".join(dict.fromkeys(note.id for note in cell.footnotes))
        self.tell(status=cell.status, level=word(seen), path=seen.path, quirks=quirks)
        about = "\n".join(_about(cell, word(seen)))
        self.add_report_section("call", ROOT, about)
        _end(cell, verdict)

    def _changes(self, cell: Cell) -> Diff | None:
        """The cell compared with the one that it was."""
        shared = sessions.of(self.config)
        before = shared.asked.before
        if before is None:
            return None
        place = (cell.target, cell.toolchain, cell.name)
        was = shared.asked.was.get(place)
        return compare(before, snapshot(shared.run, [cell], "this run"), lambda one: one.place == was)


def _end(cell: Cell, verdict: Verdict) -> None:
    """End the item as its verdict says."""
    if verdict.findings:
        log = [f"what {cell.stage} printed:", cell.log] if cell.log else []
        raise Red("\n".join([*(line for one in verdict.findings for line in _lines(one)), *log]))
    expected = verdict.expected.get(cell.id)
    if expected is not None:
        text = f"expected to fail until {expected.expires} ({expected.owner}): {expected.reason}"
        pytest.xfail(text)
        raise Red(f"{text}\n{cell.status}: {cell.reason}")  # with --runxfail the line before does nothing
    if cell.status != "PASS":
        raise pytest.skip.Exception(f"{cell.status}: {cell.reason}", _use_item_location=True)


class MissingCellItem(_Item):
    """A cell of the baseline that is none of this run's."""

    def __init__(self, *, change: Change, **fields: Any) -> None:
        super().__init__(**fields)
        self.change = change
        self.tell(target=change.target, toolchain=change.toolchain, problem=change.name)

    def runtest(self) -> None:
        causes = [f"cause: {cause}" for cause in self.change.causes]
        raise Red("\n".join([f"gone: {self.change.told['gone']}", *causes]))


def _lines(finding: RunFinding) -> Iterator[str]:
    yield f"{finding.kind}: {finding.text}"
    for cause in finding.causes:
        yield f"  cause: {cause}"


def _about(cell: Cell, level: str) -> Iterator[str]:
    """What a reader of any result wants to know: evidence, reason, path, quirks."""
    yield f"{level}{f': {cell.reason}' if cell.reason else ''}"
    yield f"path: {cell.plan.path if cell.plan else 'none'}"
    for no in cell.plan.rejected if cell.plan else ():
        yield f"  not {no.path}: {no.reason}"
    for note in cell.footnotes:
        yield f"quirk {note.id} ({note.role}): {note.sentence}"
