"""Snapshot: what of a run is compared with another run. Made of results, or read back from a baseline."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from portattn.planning.registry import Registry
from portattn.schema.problem import Problem
from portattn.schema.quirk import LEVELS, Level
from portattn.tools.matrix.cells import RED, Cell, PlanSummary, Run, Status
from portattn.tools.matrix.identity import Identity, digest

# Kinds of paths, the best first: what a cell loses when its path moves down.
TIERS = ("variant", "core", "vendor", "reference", "none")
Tier = Literal["variant", "core", "vendor", "reference", "none"]
# Facts of compiled kernels of which more is worse: bytes spilled, products made to wait, deaths of the compiler.
WORSE = ("spills", "serialized_wgmma", "deaths")
CPU_NUMBERS = "reference numbers on this CPU, not a chip's"


class SnapshotCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cell, as it is compared.

    tier      kind of the planned path
    quirks    ids of the quirks that changed the plan
    rejected  ids of the quirks that ruled a path out
    why_not   path -> why it is not taken; not kept in a baseline
    worse     "function fact" -> its amount, of facts of which more is worse; zeros are left out
    looked    whether a compiler was asked
    numbers   outcome of the interpreter's numerics; empty without them
    reason    why it has no level; not kept in a baseline
    origin    id of its identity
    """

    name: str
    op: str
    target: str
    toolchain: str
    status: Status
    level: Level
    label: str = ""
    path: str = ""
    tier: Tier = "none"
    quirks: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    why_not: dict[str, str] = {}
    worse: dict[str, int] = {}
    looked: bool = True
    numbers: str = ""
    reason: str = ""
    origin: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """What names a cell in every run: target, toolchain, problem."""
        return self.target, self.toolchain, self.name

    @property
    def red(self) -> bool:
        return self.status in RED

    def __str__(self) -> str:
        return f"{self.target}  {self.toolchain}  {self.name}"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run, to compare.

    shown       where it was read
    set         the set of problems that it was made of
    problems    digest of each problem by its name: a name can mean another problem later
    identities  by id
    missing     how many of its cells are not there, as it was interrupted
    """

    shown: str
    set: str
    date: datetime.datetime
    problems: dict[str, str]
    identities: dict[str, Identity]
    entries: tuple[SnapshotCell, ...]
    missing: int = 0

    def identity(self, entry: SnapshotCell) -> Identity | None:
        return self.identities.get(entry.origin)


def snapshot(run: Run, cells: Sequence[Cell], shown: str) -> Snapshot:
    """The snapshot of a run's results."""
    return Snapshot(
        shown=shown,
        set=run.problems,
        date=run.date,
        problems={cell.name: problem_digest(cell.problem) for cell in cells},
        identities={identity.id: identity for identity in run.identities},
        entries=tuple(entry(cell) for cell in cells),
        missing=len(set(run.cells) - {cell.id for cell in cells}),
    )


def entry(cell: Cell) -> SnapshotCell:
    plan = cell.plan
    return SnapshotCell(
        name=cell.name,
        op=cell.problem.op,
        target=cell.target,
        toolchain=cell.toolchain,
        status=cell.status,
        level=cell.level,
        label=cell.label,
        path=plan.path if plan else "",
        tier=_tier(plan, cell.target),
        quirks=_ids(cell, "applied"),
        rejected=_ids(cell, "rejected"),
        why_not=_why_not(plan) if plan else {},
        worse=_worse(cell),
        looked=bool(cell.kernels),
        numbers=cell.interpreter.outcome if cell.interpreter else "",
        reason=cell.reason,
        origin=cell.origin,
    )


def evidence(seen: SnapshotCell | Cell) -> int:
    """How much is known of a cell: the more the better. A red one knows that something is wrong: least of all.

    A NOTE is as much as `declared`: it was looked at, and no level was reached. A level of `runs` that rests on another
    chip is less than one that rests on the chip itself.
    """
    if seen.status in RED:
        return -1
    if seen.status == "NOT_RUN":
        return 0
    level = LEVELS.index(seen.level) if seen.status == "PASS" else 0
    return 2 * (1 + level) - bool(seen.label)


def word(one: SnapshotCell | Cell) -> str:
    """`emulated`, `runs (sm_80 code on sm_90)`, `NOTE`."""
    if one.status != "PASS":
        return one.status
    label = said_label(one)
    return f"{one.level} ({label})" if label else one.level


def said_label(one: SnapshotCell | Cell) -> str:
    """What a level of `runs` rests on where that is not the chip itself; empty elsewhere.

    Results keep no label of a CPU's numbers: they are the reference wherever they are made.
    """
    if one.label or one.status != "PASS" or LEVELS.index(one.level) < LEVELS.index("runs"):
        return one.label
    return "" if has_chip(one.target) else CPU_NUMBERS


def has_chip(target: str) -> bool:
    """Whether a target is a chip, and not the machine's own processor."""
    backend = Registry.load().backends.get(target.partition(":")[0])
    return backend is None or backend.device_type != "cpu"


def problem_digest(problem: Problem) -> str:
    """Digest a problem's fields: a field that a later portattn adds changes no digest while it has its default."""
    said = {field.name: getattr(problem, field.name) for field in msgspec.structs.fields(problem)}
    defaults = {field.name: field.default for field in msgspec.structs.fields(problem)}
    return digest({name: value for name, value in said.items() if value != defaults[name]})


def _worse(cell: Cell) -> dict[str, int]:
    """The facts of which more is worse; of several compilations of one function the worst."""
    found: dict[str, int] = {}
    for kernel in cell.kernels:
        for fact in WORSE:
            if value := int(kernel.facts.get(fact, 0)):
                name = f"{kernel.function} {fact}"
                found[name] = max(value, found.get(name, 0))
    return found


def _why_not(plan: PlanSummary) -> dict[str, str]:
    """Path -> why it is not taken. Of a variant, where the core runs instead, a note says so."""
    said = (re.match(r"not (\w+): (.*)", note, re.DOTALL) for note in plan.notes)
    return {found[1]: found[2] for found in said if found} | {no.path: no.reason for no in plan.rejected}


def _ids(cell: Cell, role: str) -> tuple[str, ...]:
    return tuple(sorted({note.id for note in cell.footnotes if note.role == role}))


def _tier(plan: PlanSummary | None, target: str) -> Tier:
    """What kind of path a plan takes, also of a backend whose package is not installed here."""
    if plan is None:
        return "none"
    backend = Registry.load().backends.get(target.partition(":")[0])
    if backend is not None and plan.path == backend.core_path:
        return "core"
    if plan.path == "reference":
        return "reference"
    if plan.schedule or (backend is not None and any(variant.name == plan.path for variant in backend.variants)):
        return "variant"
    return "core" if plan.core_taken and plan.kernel else "vendor"


def columns(entries: Iterable[SnapshotCell]) -> dict[tuple[str, str], list[SnapshotCell]]:
    """The entries of each target and toolchain."""
    found: dict[tuple[str, str], list[SnapshotCell]] = {}
    for one in entries:
        found.setdefault((one.target, one.toolchain), []).append(one)
    return found
