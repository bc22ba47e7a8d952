"""What the tests of one process share: the options, children that compile, and the run that cells belong to."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cached_property

import msgspec
import pytest

from portattn.integrations.pytest_plugin.options import Chosen, chosen
from portattn.planning.detect_target import devices
from portattn.tools.matrix import provenance
from portattn.tools.matrix.cells import Cell
from portattn.tools.matrix.cells import Run as MatrixRun
from portattn.tools.matrix.run import Checkers, Options, Workers, make_cell
from portattn.tools.matrix.select import Spec

KEY = pytest.StashKey["Shared"]()


class Shared:
    """Made when options are read; children are started when the first test needs one."""

    def __init__(self, asked: Chosen, command: str) -> None:
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

    def cell(self, spec: Spec) -> Cell:
        made = make_cell(spec, self.options, self.workers, self.checkers)
        key = provenance.keys([spec], self.run.identity)[spec.id]
        return msgspec.structs.replace(made, key=key, origin=self.run.identity.id)

    def close(self) -> None:
        if "workers" in self.__dict__:
            self.workers.close()


def begin(config: pytest.Config, nodes: Sequence[str]) -> None:
    """Read the options. Raises pytest.UsageError."""
    command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
    config.stash[KEY] = Shared(chosen(config, nodes), command)


def end(config: pytest.Config) -> None:
    """End the children."""
    shared = config.stash.get(KEY, None)
    if shared is not None:
        shared.close()


def of(config: pytest.Config) -> Shared:
    """What was made by `begin`; where no option was given, with what they are by default."""
    if KEY not in config.stash:
        begin(config, ())
        config.add_cleanup(lambda: end(config))
    return config.stash[KEY]


def header(config: pytest.Config) -> str:
    asked = of(config).asked
    cases = f"; {len(asked.specs)} conformance cases of the {asked.which} set" if asked.which else ""
    return f"portattn: {', '.join(map(str, asked.where))}{cases}"
