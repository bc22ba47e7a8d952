"""What the tests of one process share: the options, children that compile, and the run that cells belong to."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import pytest

from portattn.errors import ArgumentError, PortattnError
from portattn.integrations.pytest_plugin import NODES, OPTIONS
from portattn.planning.detect_target import devices
from portattn.schema.target import Target
from portattn.tools.matrix import expected, provenance, request, select
from portattn.tools.matrix.cells import Cell
from portattn.tools.matrix.cells import Run as MatrixRun
from portattn.tools.matrix.diff import Change, Place, places_now
from portattn.tools.matrix.expected import ExpectedFailure
from portattn.tools.matrix.problems import SetName
from portattn.tools.matrix.run import Checkers, Options, Workers, make_cell
from portattn.tools.matrix.select import CellSpec
from portattn.tools.matrix.snapshot import Snapshot
from portattn.tools.matrix.verdict import FAIL_ON, STATUSES, words
from portattn.tools.number_ranges import LONGEST
from portattn.tools.own_kernels import SECONDS

# Options of `matrix run` that errors name -> the plug-in's.
NAMES = {
    "--targets": OPTIONS["portattn_target"],
    "--toolchain": OPTIONS["portattn_toolchain"],
    "--ops": OPTIONS["portattn_conformance"],
    "--baseline": OPTIONS["portattn_baseline"],
    "--fail-on": OPTIONS["portattn_fail_on"],
}
NAMES_OF_SETS: tuple[SetName, ...] = get_args(SetName)
OF_CASES = ("portattn_baseline", "portattn_expected")  # options that say something about conformance cases alone


class SessionRequest(NamedTuple):
    """What a run of pytest was asked for.

    where     targets, each with one toolchain
    which     set of problems; empty without --portattn-conformance
    specs     cells to make
    before    what they are compared with
    was       place of a cell -> its place in that
    gone      cells of that which are none of this run's
    nodes     ids of conformance cases that were given as arguments
    """

    where: tuple[Target, ...]
    which: SetName | None
    specs: tuple[CellSpec, ...]
    before: Snapshot | None
    was: dict[Place, Place]
    gone: tuple[Change, ...]
    expected: tuple[ExpectedFailure, ...]
    fail_on: frozenset[str]
    seconds: float
    nodes: tuple[str, ...]


def read_options(config: pytest.Config, nodes: Sequence[str]) -> SessionRequest:
    """What the options say. Raises pytest.UsageError on any that is wrong, naming option, value and limit."""
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
    before = request.baseline(found, which) if which else None
    listed = _file(config, "portattn_expected")
    specs = select.specs(select.problems(which, ops), where) if which else []
    was, gone = _earlier(before, specs, request.MatrixRequest(where, globs, ops, which or "full"))
    return SessionRequest(
        where=tuple(where),
        which=which,
        specs=tuple(specs),
        before=before,
        was=was,
        gone=gone,
        expected=expected.read(listed) if listed else (),
        fail_on=fail_on,
        seconds=SECONDS if seconds is None else seconds,
        nodes=tuple(nodes),
    )


def _alone(config: pytest.Config, selection: str | None, targets: Sequence[str], nodes: Sequence[str]) -> None:
    """Raise UsageError on an option that means nothing without another one."""
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
    """The set of problems that a selection names, and globs on them. An empty text is the quick set.

    Raises UsageError on a path: pytest gives an option with a value that may be left out what comes next.
    """
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
    """A file that an option names, as pytest was started; pytest itself does not change its folder before it runs."""
    text = config.getoption(name)
    return config.invocation_params.dir / text if text else None


def _earlier(
    before: Snapshot | None, specs: Sequence[CellSpec], asked_for: request.MatrixRequest
) -> tuple[dict[Place, Place], tuple[Change, ...]]:
    """Return the map from this run's cells to an earlier run's, and the cells that are gone."""
    if before is None:
        return {}, ()
    asked_for.must_share(before, specs)
    planned = request.planned_snapshot(specs, asked_for.which)
    counts = asked_for.counts(before, planned)
    counted = [entry for entry in before.entries if counts(entry)]
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
        """The run of the matrix that this one is a part of: what its cells depend on."""
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
    """Read the options. Raises pytest.UsageError."""
    command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
    config.stash[KEY] = PluginSession(read_options(config, nodes), command)


def end(config: pytest.Config) -> None:
    """End the children."""
    shared = config.stash.get(KEY, None)
    if shared is not None:
        shared.close()


def of(config: pytest.Config) -> PluginSession:
    """What was made by `begin`; where no option was given, with what they are by default."""
    if KEY not in config.stash:
        begin(config, ())
        config.add_cleanup(lambda: end(config))
    return config.stash[KEY]


def header(config: pytest.Config) -> str:
    asked = of(config).asked
    cases = f"; {len(asked.specs)} conformance cases of the {asked.which} set" if asked.which else ""
    return f"portattn: {', '.join(map(str, asked.where))}{cases}"
