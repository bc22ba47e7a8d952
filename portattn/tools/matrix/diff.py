"""Two runs of the matrix compared: what was lost and won, cell by cell, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

import msgspec

from portattn.tools.matrix.attribution import Cause, causes
from portattn.tools.matrix.snapshot import TIERS, Snapshot, SnapshotCell, columns, evidence, word

# gone         the cell is not there any more
# level        its evidence is less: a lower level, a status that is no PASS, a red one
# core         its path moved from the core kernel or a variant to a vendor's library or the reference, or on to it
# variant      its path moved from a variant to the core kernel
# interpreter  its kernels were interpreted, and are not any more, or not rightly
# facts        the compiler's figures are worse: more bytes spilled, …
# quirks       other quirks are in its plan
# new, won     it was not there before; its evidence or path is better, or its figures are
Kind = Literal["gone", "level", "core", "variant", "interpreter", "facts", "quirks", "new", "won"]
KINDS: tuple[str, ...] = get_args(Kind)
Place = tuple[str, str, str]  # of a cell: target, toolchain, problem
LOST: frozenset[str] = frozenset({"gone", "level", "core", "variant", "interpreter"})  # red by themselves


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one cell.

    kinds         see above; `told` has a clause for each
    was           its toolchain before, where that is another one
    joined, left  quirks of the plan now and not before, and the reverse
    """

    target: str
    toolchain: str
    name: str
    op: str
    kinds: tuple[Kind, ...]
    told: dict[str, str]
    was: str = ""
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    reason: str = ""
    causes: tuple[Cause, ...] = ()

    @property
    def lost(self) -> bool:
        return bool(LOST & set(self.kinds))

    def __str__(self) -> str:
        return f"{self.target}  {self.toolchain}  {self.name}"


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """All that differs. compared: cells that both have; apart: cells of the old run that were not asked for."""

    old: str
    new: str
    compared: int
    changes: tuple[Change, ...]
    apart: int = 0


def compare(old: Snapshot, new: Snapshot, asked: Callable[[SnapshotCell], bool] = lambda _: True) -> Diff:
    """Compare two runs.

    asked  whether a cell of the old run counts: a run of some targets alone has not lost the others

    A cell is compared with the one of the same target, toolchain and problem. Where a target has exactly one toolchain
    that only the old run has, and exactly one of the same compiler that only the new one has, the compiler was
    changed: the two columns are compared.
    """
    counted = [entry for entry in old.entries if asked(entry)]
    places = places_now(counted, new.entries)
    found = {entry.place: entry for entry in new.entries}
    changes, met = [], set()
    for before in counted:
        target, toolchain, name = before.place
        place = places[before.place]
        after = found.get(place)
        if after is None:
            text = f"the cell is gone; it was {word(before)}, path {before.path or 'none'}"
            changes.append(
                Change(
                    target=target, toolchain=toolchain, name=name, op=before.op, kinds=("gone",), told={"gone": text},
                    causes=_gone(before, new),
                )
            )  # fmt: skip
            continue
        met.add(place)
        change = _change(old, before, new, after)
        if change is not None:
            changes.append(change)
    for entry in new.entries:
        if entry.place not in met:
            text = f"a new cell: {word(entry)}, path {entry.path or 'none'}"
            changes.append(
                Change(
                    target=entry.target, toolchain=entry.toolchain, name=entry.name, op=entry.op, kinds=("new",),
                    told={"new": text}, reason=entry.reason,
                )
            )  # fmt: skip
    apart = len(old.entries) - len(counted)
    return Diff(old=old.shown, new=new.shown, compared=len(met), changes=tuple(changes), apart=apart)


def part_of(
    old: Snapshot,
    new: Snapshot,
    target: Callable[[str], bool] | None = None,
    problem: Callable[[SnapshotCell], bool] | None = None,
) -> Callable[[SnapshotCell], bool]:
    """What is asked of an old run where the new one has a part of its cells: the targets and problems that it has, or
    those for which `target` and `problem` hold.

    An entry counts if the new run has its target and problem, or if `target` and `problem` hold. If both runs have a
    target with one toolchain, the old run's other toolchains do not count.
    """
    were, are = columns(old.entries), columns(new.entries)
    shared = {where for where, toolchain in were if (where, toolchain) in are}
    targets = {where for where, _ in are}
    names = {entry.name for entry in new.entries}

    def asked(entry: SnapshotCell) -> bool:
        place = target(entry.target) if target else entry.target in targets
        named = problem(entry) if problem else entry.name in names
        return place and named and ((entry.target, entry.toolchain) in are or entry.target not in shared)

    return asked


def places_now(old: Sequence[SnapshotCell], new: Sequence[SnapshotCell]) -> dict[Place, Place]:
    """The place of each cell of an old run -> the one in a new run that it is compared with, if that has it."""
    moved = _moved(old, new)
    return {
        (target, toolchain, name): (target, moved.get((target, toolchain), toolchain), name)
        for target, toolchain, name in (entry.place for entry in old)
    }


def _moved(old: Sequence[SnapshotCell], new: Sequence[SnapshotCell]) -> dict[tuple[str, str], str]:
    """(target, toolchain before) -> toolchain now, of compilers that were changed."""
    were, are = columns(old), columns(new)
    moved = {}
    for target, toolchain in were:
        compiler = toolchain.partition("==")[0]
        only_old = [t for name, t in were if name == target and (name, t) not in are and _is(t, compiler)]
        only_new = [t for name, t in are if name == target and (name, t) not in were and _is(t, compiler)]
        if only_old == [toolchain] and len(only_new) == 1:
            moved[target, toolchain] = only_new[0]
    return moved


def _is(toolchain: str, compiler: str) -> bool:
    return toolchain.partition("==")[0] == compiler


def _change(old: Snapshot, before: SnapshotCell, new: Snapshot, after: SnapshotCell) -> Change | None:
    told: dict[Kind, str] = dict(_told(before, after))
    if not told:
        return None
    return Change(
        target=after.target,
        toolchain=after.toolchain,
        name=after.name,
        op=after.op,
        kinds=tuple(told),
        told={str(kind): text for kind, text in told.items()},
        was=before.toolchain if before.toolchain != after.toolchain else "",
        joined=_less(after, before),
        left=_less(before, after),
        reason=after.reason,
        causes=causes(old, before, new, after),
    )


def _less(one: SnapshotCell, other: SnapshotCell) -> tuple[str, ...]:
    """Quirks of one plan that are not in the other."""
    mine, theirs = {*one.quirks, *one.rejected}, {*other.quirks, *other.rejected}
    return tuple(sorted(mine - theirs))


def _told(before: SnapshotCell, after: SnapshotCell) -> Iterator[tuple[Kind, str]]:
    """Each kind of change, with a clause about it."""
    better = []
    known = evidence(after) - evidence(before)
    if known < 0:
        yield "level", f"{word(before)} → {word(after)}"
    elif known > 0:
        better.append(f"{word(before)} → {word(after)}")
    down = TIERS.index(after.tier) - TIERS.index(before.tier)
    path = f"path {before.path or 'none'} → {after.path or 'none'}"
    if down > 0:
        yield ("variant" if (before.tier, after.tier) == ("variant", "core") else "core"), path
    elif down < 0:
        better.append(path)
    if before.numbers == "pass" and after.numbers != "pass" and after.tier in ("variant", "core"):
        yield "interpreter", f"interpreted numbers: pass → {after.numbers or 'none'}"
    if before.looked and after.looked and before.path == after.path:  # of one path: others have other kernels
        worse, less = _figures(before.worse, after.worse)
        if worse:
            yield "facts", "; ".join(worse)
        better += less
    joined, left = _less(after, before), _less(before, after)
    if joined or left:
        yield "quirks", ", ".join((*(f"+{name}" for name in joined), *(f"-{name}" for name in left)))
    if better:
        yield "won", "; ".join(better)


def _figures(before: dict[str, int], after: dict[str, int]) -> tuple[list[str], list[str]]:
    worse: list[str] = []
    better: list[str] = []
    for name in dict.fromkeys((*before, *after)):
        was, now = before.get(name, 0), after.get(name, 0)
        if now != was:
            (worse if now > was else better).append(f"{name} {was} → {now}")
    return worse, better


def _gone(before: SnapshotCell, new: Snapshot) -> tuple[Cause, ...]:
    """Why a cell is not there: the run was interrupted, or has no such target, toolchain or problem."""
    if new.missing:
        text = f"{new.shown} was interrupted: {new.missing} of its cells are missing"
        return (Cause(kind="interrupted", name="", text=text),)
    here = [entry for entry in new.entries if entry.target == before.target]
    if not here:
        return (Cause(kind="target", name=before.target, text=f"the new run has no target {before.target}"),)
    if all(entry.toolchain != before.toolchain for entry in here):
        text = f"the new run has no {before.toolchain} for {before.target}"
        return (Cause(kind="toolchain", name=before.toolchain, text=text),)
    return (Cause(kind="problem", name=before.name, text=f"the new run has no problem of the name {before.name!r}"),)
