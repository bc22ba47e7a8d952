"""Compare two runs of the matrix; a change's cause is a quirk that joined or left the plan, or the runs differ."""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from portattn.testing.kernel_cases import KERNELS
from portattn.tools.matrix.cells import (
    TIERS,
    HistoryEntry,
    Identity,
    Snapshot,
    SnapshotCell,
    columns,
    digests_of,
    evidence,
    word,
)

# What a digest's name means to people.
DATA = {"quirks": "quirks of {}", "arches": "arches of {}", "tuning": "tuning of {}", "backends": "code of {}"}
# The words of QuirkConflict, which a cell's reason keeps.
_CONFLICT = re.compile(r"quirks (\S+) and (\S+) both apply and set ")


class Cause(msgspec.Struct, frozen=True):
    # `conflict` of two quirks that leave no plan; `quirk`; `plan` if no quirk explains a path not taken; else the part
    # of the identities that differs: toolchain, compiler, digest, commit, executor, device, variable, version, seconds,
    # problem; `nothing` if no part does, and `unknown` if an identity is not recorded
    kind: str
    name: str  # the quirk's id (both of a conflict with a blank between), the toolchain, the digest's name, …
    text: str

    def __str__(self) -> str:
        return self.text


def causes(old: Snapshot, before: SnapshotCell, new: Snapshot, after: SnapshotCell) -> tuple[Cause, ...]:
    """Return possible causes, nearest first: quirks that joined or left the plan, then differences behind them."""
    found = [*_contradicting(after), *_joined(before, after)]
    if old.problems.get(before.name) != new.problems.get(after.name):
        what = "kernel's source or its entry in the file" if after.op == KERNELS else "problem of this name"
        found.append(Cause("problem", after.name, f"the {what} is another one"))
    if before.toolchain != after.toolchain:
        found.append(_differs("toolchain", after.toolchain, "toolchain", before.toolchain, after.toolchain))
    found += _left(before, after)
    was, now = old.identity(before), new.identity(after)
    if was is None or now is None:
        return (*found, Cause("unknown", "", "one of the runs does not say what its cells depend on"))
    found += _differing(was, now, before, after)
    nothing = "nothing that is recorded differs: the same code, data and compilers gave another result"
    return tuple(found) or (Cause("nothing", "", nothing),)


def _differs(kind: str, name: str, what: str, was: object, now: object) -> Cause:
    return Cause(kind, name, f"{what} {was} → {now}")


def _contradicting(after: SnapshotCell) -> Iterator[Cause]:
    if found := _CONFLICT.search(after.reason) if not after.path else None:
        text = f"quirks {found[1]} and {found[2]} contradict each other: there is no plan"
        yield Cause("conflict", f"{found[1]} {found[2]}", text)


def _joined(before: SnapshotCell, after: SnapshotCell) -> Iterator[Cause]:
    """Yield quirks that are new in the plan, quirks that rule out the earlier path first."""
    joined = [name for name in (*after.rejected, *after.quirks) if name not in (*before.rejected, *before.quirks)]
    why_not = after.why_not.get(before.path) if before.path != after.path else None
    ruling = [name for name in joined if why_not is not None and (name in after.rejected or name in why_not)]
    for name in ruling:
        yield Cause("quirk", name, f"quirk {name} rules out the path {before.path}")
    for name in joined:
        if name not in ruling:
            yield Cause("quirk", name, f"quirk {name} changes the plan")
    if why_not is not None and not ruling:
        yield Cause("plan", before.path, f"the path {before.path} is not taken: {why_not}")


def _left(before: SnapshotCell, after: SnapshotCell) -> Iterator[Cause]:
    for name in (*before.rejected, *before.quirks):
        if name not in (*after.rejected, *after.quirks, *after.noted):
            yield Cause("quirk", name, f"quirk {name} is no more in the plan")


def _differing(was: Identity, now: Identity, before: SnapshotCell, after: SnapshotCell) -> Iterator[Cause]:
    backend = after.target.partition(":")[0]
    differ = list(_changed(digests_of(was, backend), digests_of(now, backend)))
    for name in differ:
        part, slash, whose = name.partition("/")
        shown = DATA[part].format("every backend" if whose == "any" else whose) if slash else f"digest of the {name}"
        yield Cause("digest", name, f"{shown} ({was.digests.get(name, 'none')} → {now.digests.get(name, 'none')})")
    if differ and was.code() != now.code():
        yield _differs("commit", now.commit, "commit", was.code(), now.code())
    if was.portattn != now.portattn:
        yield _differs("version", "portattn", "portattn", was.portattn, now.portattn)
    old, new = was.toolchains.get(before.toolchain, ""), now.toolchains.get(after.toolchain, "")
    if old != new and before.toolchain == after.toolchain:
        what = f"{after.toolchain} is compiled with by"
        yield _differs("compiler", after.toolchain, what, old or "nothing", new or "nothing")
    for name in _changed(was.versions, now.versions):
        yield _differs("version", name, name, was.versions.get(name, "none"), now.versions.get(name, "none"))
    for name in _changed(was.variables, now.variables):
        values = [repr(one.variables.get(name, "unset")) for one in (was, now)]
        yield _differs("variable", name, f"variable {name}", *values)
    for name in _changed(was.executors, now.executors):
        target, executor = name.split()[:2]
        if target in (after.target, "any"):
            runs = [(one.executors[name] or "runs") if name in one.executors else "not there" for one in (was, now)]
            yield _differs("executor", executor, f"{executor}:", *runs)
    here = [[str(d) for d in one.host.devices if d.target.partition(":")[0] == backend] for one in (was, now)]
    devices = [", ".join(names) or "none" for names in here]
    if devices[0] != devices[1]:
        yield _differs("device", backend, f"devices of {backend}:", *devices)
    if "TIMEOUT" in (before.status, after.status) and was.seconds != now.seconds:
        yield _differs("seconds", "seconds", "time limit", f"{was.seconds:g} s", f"{now.seconds:g} s")


def _changed(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*was, *now)):
        if was.get(name) != now.get(name):
            yield name


# gone         the cell is not there any more
# level        its evidence is less: a lower level, a status that is no PASS, a red one
# core         its path moved from the core kernel or a variant to a vendor's library or the reference, or on to it
# variant      its path moved from a variant to the core kernel
# interpreter  its kernels were interpreted, and are not any more, or not rightly
# speed        the compiler's code of the same launch is twice as slow in a figure: SLOWER
# facts        the compiler's figures are worse: more bytes spilled, …
# quirks       other quirks are in its plan
# new, won     it was not there before; its evidence or path is better, or its figures are
Kind = Literal["gone", "level", "core", "variant", "interpreter", "speed", "facts", "quirks", "new", "won"]
KINDS: tuple[str, ...] = get_args(Kind)
Place = tuple[str, str, str]  # of a cell: target, toolchain, problem
LOST: frozenset[str] = frozenset({"gone", "level", "core", "variant", "interpreter", "speed"})  # red by themselves


class Change(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    toolchain: str
    name: str
    op: str
    kinds: tuple[Kind, ...]  # see above; `told` has a clause for each
    told: dict[str, str]
    was: str = ""  # its earlier toolchain, if that differs
    # joined, left: quirks of the plan now and not before, and the reverse
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    reason: str = ""
    causes: tuple[Cause, ...] = ()

    @property
    def place(self) -> Place:
        return self.target, self.toolchain, self.name

    @property
    def lost(self) -> bool:
        return bool(LOST & set(self.kinds))

    def __str__(self) -> str:
        return "  ".join(self.place)


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """All differences. compared: cells in both runs; apart: cells of the old run that were not requested."""

    old: str
    new: str
    compared: int
    changes: tuple[Change, ...]
    apart: int = 0


def compare(old: Snapshot, new: Snapshot, asked: Callable[[SnapshotCell], bool] = lambda _: True) -> Diff:
    """Compare two runs; `asked` tells whether a cell of the old run counts (a run of some targets has not lost others).

    A target's only vanished toolchain is compared with its only new one of the same compiler."""
    counted = [entry for entry in old.entries if asked(entry)]
    places = places_now(counted, new.entries)
    found = {entry.place: entry for entry in new.entries}
    changes, met = [], set()
    for before in counted:
        place = places[before.place]
        after = found.get(place)
        if after is None:
            text = f"the cell is gone; it was {word(before)}, path {before.path or 'none'}"
            changes.append(_alone(before, "gone", text, causes=_gone(before, new)))
            continue
        met.add(place)
        if (change := _change(old, before, new, after)) is not None:
            changes.append(change)
    for entry in new.entries:
        if entry.place not in met:
            text = f"a new cell: {word(entry)}, path {entry.path or 'none'}"
            changes.append(_alone(entry, "new", text, reason=entry.reason))
    apart = len(old.entries) - len(counted)
    return Diff(old=old.shown, new=new.shown, compared=len(met), changes=tuple(changes), apart=apart)


def _alone(entry: SnapshotCell, kind: Kind, text: str, **more: Any) -> Change:
    target, toolchain, name = entry.place
    told = {str(kind): text}
    return Change(target=target, toolchain=toolchain, name=name, op=entry.op, kinds=(kind,), told=told, **more)


def part_of(
    old: Snapshot, new: Snapshot, target: Callable[[str], bool] | None = None,
    problem: Callable[[SnapshotCell], bool] | None = None,
) -> Callable[[SnapshotCell], bool]:  # fmt: skip
    """Return a predicate of an old run's cells: a partial new run has their place, or the arguments hold."""
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
    """Map each place in an old run to its counterpart in a new run, whether or not the new run has it."""
    moved = _moved(old, new)
    return {
        (target, toolchain, name): (target, moved.get((target, toolchain), toolchain), name)
        for target, toolchain, name in (entry.place for entry in old)
    }


def _moved(old: Sequence[SnapshotCell], new: Sequence[SnapshotCell]) -> dict[tuple[str, str], str]:
    were, are = columns(old), columns(new)
    moved = {}
    for target, toolchain in were:
        compiler = toolchain.partition("==")[0]
        gone, come = (
            [name for where, name in found if where == target and name.partition("==")[0] == compiler]
            for found in (were.keys() - are.keys(), are.keys() - were.keys())
        )
        if gone == [toolchain] and len(come) == 1:
            moved[target, toolchain] = come[0]
    return moved


def _change(old: Snapshot, before: SnapshotCell, new: Snapshot, after: SnapshotCell) -> Change | None:
    told: dict[Kind, str] = dict(_told(before, after))
    if not told:
        return None
    return Change(
        target=after.target, toolchain=after.toolchain, name=after.name, op=after.op, kinds=tuple(told),
        told={str(kind): text for kind, text in told.items()},
        was=before.toolchain if before.toolchain != after.toolchain else "", joined=_less(after, before),
        left=_less(before, after), reason=after.reason, causes=causes(old, before, new, after),
    )  # fmt: skip


def _less(one: SnapshotCell, other: SnapshotCell) -> tuple[str, ...]:
    mine, theirs = {*one.quirks, *one.rejected}, {*other.quirks, *other.rejected}
    return tuple(sorted(mine - theirs - {*one.noted, *other.noted}))


def _told(before: SnapshotCell, after: SnapshotCell) -> Iterator[tuple[Kind, str]]:
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
        for name in sorted(before.speed.keys() & after.speed.keys()) if before.tile == after.tile else ():
            was, now = before.speed[name], after.speed[name]
            share = 100 * (now - was) / was
            if name.endswith(" cycles") and abs(share) >= SHARE:
                (worse if share > 0 else less).append(f"{name} {was} → {now}, {share:+.0f} %")
        if worse:
            yield "facts", "; ".join(worse)
        better += less
        if before.tile == after.tile and (slower := _slower(before.speed, after.speed)):
            yield "speed", "; ".join(slower)
    joined, left = _less(after, before), _less(before, after)
    if joined or left:
        yield "quirks", ", ".join((*(f"+{name}" for name in joined), *(f"-{name}" for name in left)))
    if better:
        yield "won", "; ".join(better)


# Least difference that counts: a few spilled registers come and go, and so does a loop that is nearly all products.
SLOWER = {"instructions_a_megaflop": 32, "spills": 64, "occupancy": 1, "cycles": 1}
SHARE = 5  # per cent of a kernel's cycles in a model, from which on a difference is told


def _slower(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return figures that doubled, of the occupancy that halved, by at least SLOWER; spills may begin at 0."""
    found = []
    for name in dict.fromkeys((*before, *after)):
        fact = name.rpartition(" ")[2]
        was, now = before.get(name, 0), after.get(name, 0)
        if fact != "spills" and not (was and now):  # a kernel or figure that one of the runs did not have
            continue
        more, less = (was, now) if fact == "occupancy" else (now, was)
        if more >= 2 * less and more - less >= SLOWER[fact]:
            found.append(f"{name} {was} → {now}")
    return found


def _figures(before: dict[str, int], after: dict[str, int]) -> tuple[list[str], list[str]]:
    worse: list[str] = []
    better: list[str] = []
    for name in dict.fromkeys((*before, *after)):
        was, now = before.get(name, 0), after.get(name, 0)
        if now != was:
            (worse if now > was else better).append(f"{name} {was} → {now}")
    return worse, better


def _gone(before: SnapshotCell, new: Snapshot) -> tuple[Cause, ...]:
    here = {entry.toolchain for entry in new.entries if entry.target == before.target}
    if new.missing:
        found = ("interrupted", "", f"{new.shown} was interrupted: {new.missing} of its cells are missing")
    elif not here:
        found = ("target", before.target, f"the new run has no target {before.target}")
    elif before.toolchain not in here:
        found = ("toolchain", before.toolchain, f"the new run has no {before.toolchain} for {before.target}")
    else:
        found = ("problem", before.name, f"the new run has no problem of the name {before.name!r}")
    return (Cause(*found),)


def matches(entry: SnapshotCell, cell: str) -> bool:
    names = (entry.name, f"{entry.target} {entry.name}", f"{entry.target} {entry.toolchain} {entry.name}")
    return any(fnmatch.fnmatchcase(name, cell) for name in names)


def history(runs: Sequence[Snapshot], cell: str) -> list[HistoryEntry]:
    """Return the history of matching cells by date, a cell's lines together; toolchains may change, as in `compare`."""
    runs = sorted(runs, key=lambda run: run.date)
    found: dict[tuple[str, str], list[HistoryEntry]] = {}
    last: dict[tuple[str, str], Snapshot] = {}
    for run in runs:
        mine: dict[tuple[str, str], list[SnapshotCell]] = {}
        for entry in run.entries:
            if matches(entry, cell):
                mine.setdefault((entry.target, entry.name), []).append(entry)
        for key, entries in mine.items():
            now = msgspec.structs.replace(run, entries=tuple(entries))
            changes = {c.toolchain: c for c in compare(last[key], now).changes} if key in last else {}
            for entry in entries:
                change = changes.get(entry.toolchain)
                identity = run.identity(entry)
                seen = HistoryEntry(
                    run=run.shown, date=run.date, target=entry.target, toolchain=entry.toolchain, name=entry.name,
                    word=word(entry), path=entry.path, commit=identity.code() if identity else "",
                    host=str(identity.host) if identity else "",
                    changed={k: v for k, v in change.told.items() if k != "new"} if change else {},
                    lost=bool(change and change.lost), causes=tuple(map(str, change.causes)) if change else (),
                )  # fmt: skip
                found.setdefault(key, []).append(seen)
            last[key] = now
    return [seen for lines in found.values() for seen in lines]
