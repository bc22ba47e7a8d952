"""What a run is asked for: its targets as texts, the earlier run that it is compared with, and what counts of that."""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from portattn.errors import ArgumentError
from portattn.schema.target import Target
from portattn.tools.matrix import reading
from portattn.tools.matrix.diff import Diff, compare, part_of
from portattn.tools.matrix.problems import SETS, SetName
from portattn.tools.matrix.select import OP, CellSpec, wanted_name
from portattn.tools.matrix.snapshot import Snapshot, SnapshotCell, columns

NAMED = 3  # columns and problems of a run that an error names


class MatrixRequest(NamedTuple):
    """What a run was asked for. globs and ops are empty where that is everything.

    where       its targets
    which       the set of problems
    every_toolchain  whether it was asked for all of the lab's: without, those that are installed or named are meant
    """

    where: Sequence[Target]
    globs: Sequence[str]
    ops: Sequence[str]
    which: SetName
    every_toolchain: bool = False

    def counts(self, before: Snapshot, after: Snapshot) -> Callable[[SnapshotCell], bool]:
        """Whether a cell of an earlier run was asked for, also where it is of no target any more."""
        place = places({target.name for target in self.where}, self.globs)
        problem = problems(self.ops, self.which, before.set)
        if self.every_toolchain:
            return lambda entry: place(entry.target) and problem(entry)
        return part_of(before, after, place, problem)

    def compared(self, before: Snapshot, after: Snapshot) -> Diff:
        """Compare a run with the requested cells of an earlier one."""
        return compare(before, after, self.counts(before, after))

    def must_share(self, before: Snapshot, specs: Sequence[CellSpec]) -> None:
        """Raise ArgumentError where an earlier run has nothing of what this one is asked for. specs: its cells."""
        must_compare(OP, "--baseline", before, self.counts(before, planned_snapshot(specs, self.which)))


def planned_snapshot(specs: Sequence[CellSpec], which: SetName) -> Snapshot:
    """The snapshot of a run none of whose cells is made yet."""
    return Snapshot(
        shown="this run",
        set=which,
        date=datetime.datetime.now(datetime.timezone.utc),
        problems={},
        identities={},
        entries=tuple(
            SnapshotCell(
                name=spec.named.name, op=spec.named.problem.op, target=spec.target.name,
                toolchain=str(spec.target.toolchain), status="NOT_RUN", level="declared",
            )
            for spec in specs
        ),
    )  # fmt: skip


def must_compare(op: str, argument: str, before: Snapshot, counts: Callable[[SnapshotCell], bool]) -> None:
    """Raise ArgumentError where no cell of an earlier run counts: a comparison of nothing would be green."""
    if any(map(counts, before.entries)):
        return
    where = _few([f"{target} with {toolchain}" for target, toolchain in columns(before.entries)])
    names = _few(list(dict.fromkeys(entry.name for entry in before.entries)))
    has = f"{where} ({names})" if before.entries else "no cell"
    limit = f"has no cell of what is asked for, and nothing would be compared; it has {has}"
    raise ArgumentError(op, argument, before.shown, limit)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def places(names: Collection[str], globs: Sequence[str]) -> Callable[[str], bool]:
    """Whether a target was asked for by globs, also one that is gone. names: those that the globs mean today."""

    def place(target: str) -> bool:
        parts = (target, *target.split(":"))
        return not globs or target in names or any(fnmatch.fnmatchcase(part, glob) for part in parts for glob in globs)

    return place


def problems(globs: Sequence[str], which: SetName, sets: str) -> Callable[[SnapshotCell], bool]:
    """Whether a cell's problem was asked for by a set and globs, also one that is gone.

    sets  those that the earlier run is of: what another one of them has alone was not asked for
    """
    names = {name: {named.name for named in made()} for name, made in SETS.items() if name in sets.split(", ")}
    others = set().union(*names.values()) - names.get(which, set())

    def problem(entry: SnapshotCell) -> bool:
        named = not globs or any(wanted_name(entry.op, entry.name, glob) for glob in globs)
        return named and entry.name not in others

    return problem


def baseline(path: Path | None, which: str) -> Snapshot | None:
    """The run to compare with. Raises ArgumentError where it is of another set or was interrupted, DataError."""
    if path is None:
        return None
    before = reading.whole(path, OP, "--baseline")
    if which not in before.set.split(", "):
        limit = f"is of the {before.set} set, and this run of the {which} one"
        raise ArgumentError(OP, "--baseline", str(path), limit)
    return before
