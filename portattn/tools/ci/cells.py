"""The cells of both sides of an upgrade: planned alone, or compiled as `matrix run` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from portattn.errors import ArgumentError
from portattn.planning.registry import Registry
from portattn.schema.toolchain import Toolchain, installed_for, is_installed
from portattn.tools import lab
from portattn.tools.ci.request import OP, CiRequest
from portattn.tools.matrix import provenance, select
from portattn.tools.matrix.cells import RED, Cell, Run
from portattn.tools.matrix.run import Options, execute, planned_cell
from portattn.tools.matrix.select import CellSpec
from portattn.tools.matrix.snapshot import Snapshot, SnapshotCell
from portattn.tools.upgrade.toolchain_pair import Side

# Devices of this machine are left out: they run what the installed compiler made, and so one side alone.
LEFT_OUT = ("older",)


class SideRun(msgspec.Struct):
    """One side's run, and its cells as they are finished."""

    run: Run
    specs: Sequence[CellSpec]
    registry: Registry
    cells: list[Cell]


def begin_side_run(asked: CiRequest, sides: Sequence[Side], command: str, options: Options) -> SideRun:
    """A side before its cells are made."""
    specs = select.specs(asked.problems, [side.target for side in sides])
    registry = sides[0].registry
    run = provenance.this_run(
        specs, asked.which, command, (), seconds=options.seconds, left_out=options.left_out, registry=registry
    )
    return SideRun(run=run, specs=specs, registry=registry, cells=[])


def plan_all(made: SideRun) -> None:
    """Plan every cell of a side."""
    keys = provenance.keys(made.specs, made.run.identity)
    made.cells += [_placed(planned_cell(spec, made.registry), made, keys) for spec in made.specs]


def compile_all(made: SideRun, options: Options, done: Callable[[Cell], None]) -> None:
    """Make every cell of a side; `done` is called with each one. KeyboardInterrupt keeps those that are finished."""
    keys = provenance.keys(made.specs, made.run.identity)

    def finished(cell: Cell) -> None:
        made.cells.append(_placed(cell, made, keys))
        done(made.cells[-1])

    execute(made.specs, msgspec.structs.replace(options, registry=made.registry), finished)
    made.cells.sort(key=lambda cell: cell.index)


def _placed(cell: Cell, made: SideRun, keys: dict[str, str]) -> Cell:
    return msgspec.structs.replace(cell, key=keys[cell.id], origin=made.run.identity.id)


def as_planned(kept: Snapshot) -> Snapshot:
    """A snapshot as if nothing of it had been compiled: what a plan alone is compared with."""
    return msgspec.structs.replace(kept, entries=tuple(map(_as_planned, kept.entries)))


def _as_planned(entry: SnapshotCell) -> SnapshotCell:
    status = "ERROR" if entry.status in RED and not entry.path else "NOT_RUN"
    return msgspec.structs.replace(
        entry, status=status, level="declared", label="", worse={}, looked=False, numbers="", reason=""
    )


def missing(compilers: Sequence[tuple[str, Toolchain]]) -> list[str]:
    """Which of the compilers nothing here compiles with, and the lab can make.

    compilers  each with the option that named it

    Raises ArgumentError on one that the lab cannot make.
    """
    found = []
    for option, toolchain in compilers:
        name = str(toolchain)
        if is_installed(name):
            continue
        if toolchain.distribution not in lab.distributions():
            here = installed_for((toolchain.distribution,))
            limit = f"goes without --compile: this Python has {here}, and the lab cannot install it"
            raise ArgumentError(OP, option, name, limit)
        if lab.find(name) is None:
            found.append(name)
    return list(dict.fromkeys(found))
