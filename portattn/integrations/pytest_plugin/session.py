"""Shared state of one process's tests: options, children that compile, the matrix's run; and its cells as items."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from portattn.errors import ArgumentError, PortattnError
from portattn.integrations.pytest_plugin import CONFORMANCE, NODES, OPTIONS
from portattn.planning.registry import devices
from portattn.schema.target import Target
from portattn.tools.compare import sides, verdict
from portattn.tools.compare.changes import Change, Diff, Place, compare, places_now
from portattn.tools.compare.verdict import FAIL_ON, STATUSES, ExpectedFailure, RunFinding, Verdict, of_run, words
from portattn.tools.matrix import provenance, select
from portattn.tools.matrix.cells import Cell, Snapshot, entry, snapshot, word
from portattn.tools.matrix.cells import Run as MatrixRun
from portattn.tools.matrix.problems import SETS, SetName
from portattn.tools.matrix.run import Checkers, Options, Workers, make_cell
from portattn.tools.matrix.select import CellSpec
from portattn.tools.param_types import LONGEST

SECONDS = 120.0  # of one compile, where no option says otherwise
# Options of `matrix run` that errors name -> the plug-in's.
NAMES = {
    "--targets": OPTIONS["portattn_target"],
    "--toolchain": OPTIONS["portattn_toolchain"],
    "--problems": OPTIONS["portattn_conformance"],
    "--baseline": OPTIONS["portattn_baseline"],
    "--fail-on": OPTIONS["portattn_fail_on"],
}
NAMES_OF_SETS: tuple[SetName, ...] = tuple(SETS)
OF_CASES = ("portattn_baseline", "portattn_expected")  # options that say something about conformance cases alone


class SessionRequest(NamedTuple):
    """Request of a pytest run, from its options."""

    where: tuple[Target, ...]  # each with one toolchain
    which: SetName | None  # set of problems; empty without --portattn-conformance
    specs: tuple[CellSpec, ...]  # cells to make
    before: Snapshot | None  # earlier run to compare with
    was: dict[Place, Place]  # place of a cell -> its place in `before`
    gone: tuple[Change, ...]  # cells of `before` that this run lacks
    expected: tuple[ExpectedFailure, ...]
    fail_on: frozenset[str]
    seconds: float
    nodes: tuple[str, ...]  # ids of conformance cases among the arguments


def read_options(config: pytest.Config, nodes: Sequence[str]) -> SessionRequest:
    """Return the options' request, or raise pytest.UsageError with option, value and limit."""
    try:
        return _chosen(config, nodes)
    except ArgumentError as error:
        name = NAMES.get(error.argument, error.argument)
        raise pytest.UsageError(f"{name} is {error.value!r}, but {error.limit}") from None
    except PortattnError as error:
        raise pytest.UsageError(str(error)) from None


def _chosen(config: pytest.Config, nodes: Sequence[str]) -> SessionRequest:
    selection: str | None = config.getoption("portattn_conformance")
    texts: list[str] = config.getoption("portattn_target")
    _alone(config, selection, texts, nodes)
    which, ops = _selection(selection)
    fail_on = words(config.getoption("portattn_fail_on"), "pytest", FAIL_ON)
    changes = sorted(fail_on - STATUSES.keys())
    if changes and not config.getoption("portattn_baseline"):
        limit = f"is a change, and needs {OPTIONS['portattn_baseline']} to compare with"
        raise ArgumentError("pytest", "--fail-on", changes[0], limit)
    seconds = config.getoption("portattn_seconds")
    if seconds is not None and not 0 < seconds <= LONGEST:
        limit = f"must be more than 0, and at most {LONGEST:.0f} s"
        raise ArgumentError("pytest", OPTIONS["portattn_seconds"], seconds, limit)
    globs = select.globs(texts)
    if texts and not globs:
        raise ArgumentError("pytest", "--targets", ",".join(texts), "names no target")
    toolchains = select.toolchains(config.getoption("portattn_toolchain"))
    where = select.targets(globs, toolchains, None, which or "full") if globs or which else []
    for toolchain in toolchains:
        if all(str(target.toolchain) != str(toolchain) for target in where):
            raise ArgumentError("pytest", "--toolchain", str(toolchain), "compiles for none of the targets")
    found = _file(config, "portattn_baseline")
    before = sides.baseline(found, which) if which else None
    listed = _file(config, "portattn_expected")
    specs = select.specs(select.problems(which, ops), where) if which else []
    was, gone = _earlier(before, specs, sides.MatrixRequest(where, globs, ops, which or "full"))
    return SessionRequest(
        where=tuple(where),
        which=which,
        specs=tuple(specs),
        before=before,
        was=was,
        gone=gone,
        expected=verdict.read(listed) if listed else (),
        fail_on=fail_on,
        seconds=SECONDS if seconds is None else seconds,
        nodes=tuple(nodes),
    )


def _alone(config: pytest.Config, selection: str | None, targets: Sequence[str], nodes: Sequence[str]) -> None:
    """Raise UsageError on an option that needs another one."""
    conformance = OPTIONS["portattn_conformance"]
    if selection is None:
        for name in OF_CASES:
            if config.getoption(name):
                raise pytest.UsageError(f"{OPTIONS[name]} is about conformance cases, and needs {conformance}")
        if nodes:
            raise pytest.UsageError(f"{nodes[0]} is a conformance case, and needs {conformance}")
        if config.getoption("portattn_toolchain") and not targets:
            raise pytest.UsageError(
                f"{OPTIONS['portattn_toolchain']} needs {OPTIONS['portattn_target']}: what it is to compile for"
            )


def _selection(text: str | None) -> tuple[SetName | None, list[str]]:
    """Return a selection's problems and globs; a path is an error: pytest takes it for the option's omitted value."""
    if text is None:
        return None, []
    name = OPTIONS["portattn_conformance"]
    named = set(select.commas([text])) <= set(NAMES_OF_SETS)
    if text.startswith(NODES) or (not named and os.path.exists(text.partition("::")[0])):
        raise pytest.UsageError(f"{name} is {text!r}, which is what pytest is to run: write {name}=quick {text}")
    parts = select.commas([text])
    sets = [known for known in NAMES_OF_SETS if known in parts]
    if len(sets) > 1:
        raise pytest.UsageError(f"{name} is {text!r}, but must name one of {', '.join(sets)}")
    return sets[0] if sets else "quick", [part for part in parts if part not in NAMES_OF_SETS]


def _file(config: pytest.Config, name: str) -> Path | None:
    text = config.getoption(name)
    return config.invocation_params.dir / text if text else None


def _earlier(
    before: Snapshot | None, specs: Sequence[CellSpec], asked_for: sides.MatrixRequest
) -> tuple[dict[Place, Place], tuple[Change, ...]]:
    """Return the map from this run's cells to an earlier run's, and the cells that are gone."""
    if before is None:
        return {}, ()
    asked_for.must_share(before, specs)
    planned = sides.planned_snapshot(specs, asked_for.which)
    counts = asked_for.counts(before, planned)
    counted = [one for one in before.entries if counts(one)]
    gone = [change for change in asked_for.compared(before, planned).changes if "gone" in change.kinds]
    return {now: was for was, now in places_now(counted, planned.entries).items()}, tuple(gone)


KEY = pytest.StashKey["PluginSession"]()


class PluginSession:
    """Made when options are read; children are started when the first test needs one."""

    def __init__(self, asked: SessionRequest, command: str) -> None:
        self.asked, self.command = asked, command

    @cached_property
    def options(self) -> Options:
        return Options(seconds=self.asked.seconds, jobs=1, here=tuple(devices()))

    @cached_property
    def workers(self) -> Workers:
        return Workers(self.options)

    @cached_property
    def checkers(self) -> Checkers:
        return Checkers.of(self.asked.specs, self.options)

    @cached_property
    def run(self) -> MatrixRun:
        """The run of the matrix that this one is a part of: its cells depend on it."""
        return provenance.this_run(
            self.asked.specs, self.asked.which or "", self.command, self.options.here, seconds=self.options.seconds
        )

    def cell(self, spec: CellSpec) -> Cell:
        made = make_cell(spec, self.options, self.workers, self.checkers)
        key = provenance.keys([spec], self.run.identity)[spec.id]
        return msgspec.structs.replace(made, key=key, origin=self.run.identity.id)

    def close(self) -> None:
        if "workers" in self.__dict__:
            self.workers.close()


def begin(config: pytest.Config, nodes: Sequence[str]) -> None:
    command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
    config.stash[KEY] = PluginSession(read_options(config, nodes), command)


def end(config: pytest.Config) -> None:
    shared = config.stash.get(KEY, None)
    if shared is not None:
        shared.close()


def of(config: pytest.Config) -> PluginSession:
    if KEY not in config.stash:
        begin(config, ())
        config.add_cleanup(lambda: end(config))
    return config.stash[KEY]


def header(config: pytest.Config) -> str:
    asked = of(config).asked
    cases = f"; {len(asked.specs)} conformance cases of the {asked.which} set" if asked.which else ""
    return f"portattn: {', '.join(map(str, asked.where))}{cases}"


# Conformance cases: cells of the matrix as pytest's items, each red, green or skipped by the matrix's verdict.

ROOT = NODES.removesuffix("::")


class Red(Exception):
    """A red case, with the text for the reader."""


def collect_cases(session: pytest.Session) -> list[pytest.Item]:
    nodes = of(session.config).asked.nodes
    root = Root.from_parent(session, name=ROOT, nodeid=ROOT)
    return [item for item in session.genitems(root) if not nodes or any(_within(item.nodeid, node) for node in nodes)]


def check_nodes(config: pytest.Config) -> None:
    asked = of(config).asked
    ids = [f"{NODES}{spec.target.name}::{spec.target.toolchain}::{slug(spec.named.name)}" for spec in asked.specs]
    ids += [f"{NODES}{gone.target}::{gone.toolchain}::{slug(gone.name)}" for gone in asked.gone]
    for node in asked.nodes:
        if not any(_within(one, node) for one in ids):
            raise pytest.UsageError(f"{node} names no conformance case of this run; --collect-only lists them")


def _within(nodeid: str, given: str) -> bool:
    return nodeid == given or nodeid.startswith(given.removesuffix("::") + "::")


def slug(name: str) -> str:
    """Return a problem's name as a part of an id, without blanks and punctuation that a shell or -k would mind."""
    return re.sub(r"[^\w.=+/-]+", "_", name).strip("_")


class Root(pytest.Collector):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        asked = of(self.config).asked
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
        """Return the cell's text, without a traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, Red) else super().repr_failure(excinfo, style)

    def tell(self, **properties: str) -> None:
        """Add to the properties that pytest hands on, to JUnit XML for one."""
        self.user_properties += [(f"portattn_{name}", value) for name, value in properties.items() if value]


class CellItem(_Item):
    def __init__(self, *, spec: CellSpec, **fields: Any) -> None:
        super().__init__(**fields)
        self.spec = spec
        self.tell(target=spec.target.name, toolchain=str(spec.target.toolchain), problem=spec.named.name)

    def runtest(self) -> None:
        shared = of(self.config)
        cell = shared.cell(self.spec)
        asked = shared.asked
        judged = of_run(
            shared.run, [cell], fail_on=asked.fail_on, expected=asked.expected, changes=self._changes(cell), whole=False
        )
        seen = entry(cell)
        quirks = ", ".join(dict.fromkeys(note.id for note in cell.footnotes))
        self.tell(status=cell.status, level=word(seen), path=seen.path, quirks=quirks)
        about = "\n".join(_about(cell, word(seen)))
        self.add_report_section("call", ROOT, about)
        _report(cell, judged)

    def _changes(self, cell: Cell) -> Diff | None:
        shared = of(self.config)
        before = shared.asked.before
        if before is None:
            return None
        place = (cell.target, cell.toolchain, cell.name)
        was = shared.asked.was.get(place)
        return compare(before, snapshot(shared.run, [cell], "this run"), lambda one: one.place == was)


def _report(cell: Cell, judged: Verdict) -> None:
    if judged.findings:
        log = [f"what {cell.stage} printed:", cell.log] if cell.log else []
        raise Red("\n".join([*(line for one in judged.findings for line in _lines(one)), *log]))
    expected = judged.expected.get(cell.id)
    if expected is not None:
        text = f"expected to fail until {expected.expires} ({expected.owner}): {expected.reason}"
        pytest.xfail(text)
        raise Red(f"{text}\n{cell.status}: {cell.reason}")  # with --runxfail the line before does nothing
    if cell.status != "PASS":
        raise pytest.skip.Exception(f"{cell.status}: {cell.reason}", _use_item_location=True)


class MissingCellItem(_Item):
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
    yield f"{level}{f': {cell.reason}' if cell.reason else ''}"
    yield f"path: {cell.plan.path if cell.plan else 'none'}"
    for no in cell.plan.rejected if cell.plan else ():
        yield f"  not {no.path}: {no.reason}"
    for note in cell.footnotes:
        yield f"quirk {note.id} ({note.role}): {note.sentence}"
