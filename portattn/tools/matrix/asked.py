"""What a run is asked for: its targets as texts, the earlier run that it is compared with, and what counts of that."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from portattn.errors import ArgumentError
from portattn.schema.target import Target
from portattn.tools.matrix import reading
from portattn.tools.matrix.diff import Diff, compare, part_of
from portattn.tools.matrix.select import OP, wanted_name
from portattn.tools.matrix.snapshot import Entry, Snapshot


class Asked(NamedTuple):
    """What a run was asked for. globs and ops are empty where that is everything.

    where       its targets
    every_toolchain  whether it was asked for all of the lab's: without, those that are installed or named are meant
    """

    where: Sequence[Target]
    globs: Sequence[str]
    ops: Sequence[str]
    every_toolchain: bool = False

    def counts(self, before: Snapshot, after: Snapshot) -> Callable[[Entry], bool]:
        """Whether a cell of an earlier run was asked for, also where it is of no target any more."""
        place, problem = places({target.name for target in self.where}, self.globs), problems(self.ops)
        if self.every_toolchain:
            return lambda entry: place(entry.target) and problem(entry)
        return part_of(before, after, place, problem)

    def compared(self, before: Snapshot, after: Snapshot) -> Diff:
        """A run compared with an earlier one: with what it was asked for of it."""
        return compare(before, after, self.counts(before, after))


def places(names: Collection[str], globs: Sequence[str]) -> Callable[[str], bool]:
    """Whether a target was asked for by globs, also one that is gone. names: those that the globs mean today."""

    def place(target: str) -> bool:
        parts = (target, *target.split(":"))
        return not globs or target in names or any(fnmatch.fnmatchcase(part, glob) for part in parts for glob in globs)

    return place


def problems(globs: Sequence[str]) -> Callable[[Entry], bool]:
    """Whether a cell's problem was asked for by globs, also one that is gone."""
    return lambda entry: not globs or any(wanted_name(entry.op, entry.name, glob) for glob in globs)


def baseline(path: Path | None, which: str) -> Snapshot | None:
    """The run to compare with. Raises ArgumentError where it is of another set of problems, DataError."""
    if path is None:
        return None
    before = reading.read(path)
    if which not in before.set.split(", "):
        limit = f"is of the {before.set} set, and this run of the {which} one"
        raise ArgumentError(OP, "--baseline", str(path), limit)
    return before
