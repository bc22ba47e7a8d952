"""Why a cell changed: the quirk that joined or left its plan, or else what differs between the two runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from portattn.tools.matrix.identity import Identity, digests_of
from portattn.tools.matrix.snapshot import Snapshot, SnapshotCell

# What a digest's name means to people.
DATA = {"quirks": "quirks of {}", "arches": "arches of {}", "tuning": "tuning of {}", "backends": "code of {}"}
# The words of QuirkConflict, which a cell's reason keeps.
_CONFLICT = re.compile(r"quirks (\S+) and (\S+) both apply and set ")


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What changed a cell.

    kind  `conflict`, of two quirks that leave no plan; `quirk`; `plan`, where no quirk says why a path is not taken;
          else the part of the identities that differs: toolchain, compiler, digest, commit, executor, device, variable,
          version, seconds, problem; `nothing` where no part does, and `unknown` where an identity is not recorded
    name  the quirk's id, both of a conflict with a blank between; the toolchain, the digest's name, …
    """

    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        return self.text


def causes(old: Snapshot, before: SnapshotCell, new: Snapshot, after: SnapshotCell) -> tuple[Cause, ...]:
    """What can have changed a cell, the nearest first.

    A quirk that joined the plan explains a change, and so does one that left it; what else differs is then the reason
    why it did. Without, it is all that there is.
    """
    found = [*_contradicting(after), *_joined(before, after)]
    if old.problems.get(before.name) != new.problems.get(after.name):
        found.append(Cause(kind="problem", name=after.name, text="the problem of this name is another one"))
    if before.toolchain != after.toolchain:
        text = f"toolchain {before.toolchain} → {after.toolchain}"
        found.append(Cause(kind="toolchain", name=after.toolchain, text=text))
    found += _left(before, after)
    was, now = old.identity(before), new.identity(after)
    if was is None or now is None:
        text = "one of the runs does not say what its cells depend on"
        return (*found, Cause(kind="unknown", name="", text=text))
    found += _differing(was, now, before, after)
    if not found:
        text = "nothing that is recorded differs: the same code, data and compilers gave another result"
        return (Cause(kind="nothing", name="", text=text),)
    return tuple(found)


def _contradicting(after: SnapshotCell) -> Iterator[Cause]:
    """The two quirks that leave a cell without a plan."""
    found = _CONFLICT.search(after.reason) if not after.path else None
    if found:
        text = f"quirks {found[1]} and {found[2]} contradict each other: there is no plan"
        yield Cause(kind="conflict", name=f"{found[1]} {found[2]}", text=text)


def _joined(before: SnapshotCell, after: SnapshotCell) -> Iterator[Cause]:
    """Quirks that are new in the plan; those that rule out the path of before come first."""
    joined = [name for name in (*after.rejected, *after.quirks) if name not in (*before.rejected, *before.quirks)]
    why_not = after.why_not.get(before.path) if before.path != after.path else None
    ruling = [name for name in joined if why_not is not None and (name in after.rejected or name in why_not)]
    for name in ruling:
        yield Cause(kind="quirk", name=name, text=f"quirk {name} rules out the path {before.path}")
    for name in joined:
        if name not in ruling:
            yield Cause(kind="quirk", name=name, text=f"quirk {name} changes the plan")
    if why_not is not None and not ruling:
        yield Cause(kind="plan", name=before.path, text=f"the path {before.path} is not taken: {why_not}")


def _left(before: SnapshotCell, after: SnapshotCell) -> Iterator[Cause]:
    """Quirks that are not in the plan any more."""
    for name in (*before.rejected, *before.quirks):
        if name not in (*after.rejected, *after.quirks):
            yield Cause(kind="quirk", name=name, text=f"quirk {name} is no more in the plan")


def _differing(was: Identity, now: Identity, before: SnapshotCell, after: SnapshotCell) -> Iterator[Cause]:
    """What of two identities differs, as far as the cell depends on it."""
    backend = after.target.partition(":")[0]
    differ = list(_changed(digests_of(was, backend), digests_of(now, backend)))
    for name in differ:
        part, slash, whose = name.partition("/")
        shown = DATA[part].format("every backend" if whose == "any" else whose) if slash else f"digest of the {name}"
        text = f"{shown} ({was.digests.get(name, 'none')} → {now.digests.get(name, 'none')})"
        yield Cause(kind="digest", name=name, text=text)
    if differ and was.code() != now.code():
        yield Cause(kind="commit", name=now.commit, text=f"commit {was.code()} → {now.code()}")
    if was.portattn != now.portattn:
        yield Cause(kind="version", name="portattn", text=f"portattn {was.portattn} → {now.portattn}")
    old, new = was.toolchains.get(before.toolchain, ""), now.toolchains.get(after.toolchain, "")
    if old != new and before.toolchain == after.toolchain:
        yield Cause(
            kind="compiler", name=after.toolchain,
            text=f"{after.toolchain} is compiled with by {old or 'nothing'} → {new or 'nothing'}",
        )  # fmt: skip
    for name in _changed(was.versions, now.versions):
        text = f"{name} {was.versions.get(name, 'none')} → {now.versions.get(name, 'none')}"
        yield Cause(kind="version", name=name, text=text)
    for name in _changed(was.variables, now.variables):
        text = f"variable {name} {was.variables.get(name, 'unset')!r} → {now.variables.get(name, 'unset')!r}"
        yield Cause(kind="variable", name=name, text=text)
    for name in _changed(was.executors, now.executors):
        if name.split()[0] in (after.target, "any"):
            text = f"{name.split()[1]}: {_runs(was.executors, name)} → {_runs(now.executors, name)}"
            yield Cause(kind="executor", name=name.split()[1], text=text)
    devices = [
        ", ".join(str(d) for d in one.host.devices if d.target.partition(":")[0] == backend) or "none"
        for one in (was, now)
    ]
    if devices[0] != devices[1]:
        yield Cause(kind="device", name=backend, text=f"devices of {backend}: {devices[0]} → {devices[1]}")
    if "TIMEOUT" in (before.status, after.status) and was.seconds != now.seconds:
        yield Cause(kind="seconds", name="seconds", text=f"time limit {was.seconds:g} s → {now.seconds:g} s")


def _runs(executors: Mapping[str, str], name: str) -> str:
    return (executors[name] or "runs") if name in executors else "not there"


def _changed(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*was, *now)):
        if was.get(name) != now.get(name):
            yield name
