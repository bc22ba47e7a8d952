"""`portattn quirks upgrade`: what another compiler changes: entries that fall away, stay or newly apply, and plans.

Everything here is asked of the registry and the planner; no compiler is started. An entry that applies on the new
compiler and was never probed there is unverified: what a plan then does rests on a guess that is on the safe side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from portattn.config import Settings
from portattn.errors import ArgumentError, PortattnError
from portattn.planning.kernel_specs import KERNEL_NAMES
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain
from portattn.tools.matrix.problems import Named, quick

OP = "quirks upgrade"
Change = Literal["falls away", "stays", "newly applies"]
NO_PLAN = "no plan"
_OF_PATHS = ("path", "kernel", "why")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One quirk that holds on one of the two compilers or on both.

    targets   those that it concerns
    verified  targets on which a probe looked on the new compiler, with what it saw: "cuda:sm_90: pass"
    note      why the new compiler is in doubt; empty where it is not
    """

    id: str
    title: str
    symptom: str
    change: Change
    targets: tuple[str, ...]
    verified: tuple[str, ...]
    note: str = ""

    @property
    def unverified(self) -> bool:
        """Whether it applies on the new compiler, or stops to, and no probe has looked there."""
        return not self.verified


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that is not the same. lost: it leaves the core kernel, or there is none any more."""

    problem: str
    targets: tuple[str, ...]
    before: str
    after: str
    differs: tuple[str, ...]
    lost: bool


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. plans: how many were compared."""

    before: str
    after: str
    targets: tuple[str, ...]
    entries: tuple[Entry, ...]
    moved: tuple[Moved, ...]
    plans: int

    @property
    def lost(self) -> bool:
        return any(moved.lost for moved in self.moved)


def upgrade(
    before: str,
    after: str,
    registry: Registry,
    targets: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Upgrade:
    """Compare two compilers on targets: all that they compile for when none is named.

    Raises ArgumentError on a malformed toolchain, two compilers that have no target in common, and an unknown target.
    """
    old, new = (_parsed(option, text) for option, text in (("--from", before), ("--to", after)))
    names = targets or tuple(_common(registry, old, new))
    if not names:
        raise ArgumentError(OP, "--to", after, f"must compile for a backend that {old} compiles for")
    pairs = [(registry.target(name, old), registry.target(name, new)) for name in names]
    moved = []
    for named in quick():
        say(f"planning {named.name}")
        moved += [found for pair in pairs if (found := _moved(named, *pair, registry))]
    return Upgrade(
        before=str(old),
        after=str(new),
        targets=names,
        entries=tuple(_entries(registry, pairs)),
        moved=tuple(_together(moved)),
        plans=len(quick()) * len(pairs),
    )


def _parsed(option: str, text: str) -> Toolchain:
    try:
        found = Toolchain.parse(text)
    except ValueError as error:
        raise ArgumentError(OP, option, text, str(error).partition(": ")[2]) from None
    if not found:
        raise ArgumentError(OP, option, text, "must be a compiler, as in triton==3.6.0")
    return found


def _common(registry: Registry, old: Toolchain, new: Toolchain) -> Iterator[str]:
    """Targets that both compile for, as far as portattn knows."""
    for target in registry.targets(old):
        compilers = registry.backends[target.backend].compilers
        if not compilers or {old.distribution, new.distribution} <= set(compilers):
            yield target.name


def _entries(registry: Registry, pairs: list[tuple[Target, Target]]) -> Iterator[Entry]:
    for quirk in registry.quirks.values():
        changes: dict[Change, list[Target]] = {}
        for old, new in pairs:
            if not any(quirk.concerns(kernel, old) for kernel in KERNEL_NAMES):
                continue
            change = _change(quirk.in_range(old.toolchain), quirk.in_range(new.toolchain))
            if change:
                changes.setdefault(change, []).append(new)
        for change, where in changes.items():
            yield Entry(
                id=quirk.id,
                title=quirk.title,
                symptom=quirk.symptom,
                change=change,
                targets=tuple(target.name for target in where),
                verified=tuple(_verified(quirk, where)),
                note=_note(quirk, change, where[0]),
            )


def _change(before: bool, after: bool) -> Change | None:
    if before and after:
        return "stays"
    return "falls away" if before else "newly applies" if after else None


def _verified(quirk: Quirk, where: list[Target]) -> Iterator[str]:
    names = {target.name for target in where}
    compiler = str(where[0].toolchain)
    for seen in quirk.verified:
        if seen.toolchain == compiler and seen.target in names:
            yield f"{seen.target}: {seen.off}"


def _note(quirk: Quirk, change: Change, target: Target) -> str:
    if quirk.assumed(target.toolchain):
        return "assumed: a version that its range asks about is not known"
    if quirk.newer_than_seen(target.toolchain):
        kept = "is left out" if change == "falls away" else "applies to be safe"
        return f"last seen on {quirk.evidence.last_seen}; {kept}"
    return ""


def _moved(named: Named, old: Target, new: Target, registry: Registry) -> Moved | None:
    """How the plan of a problem changes; None where it does not."""
    before, after = _planned(named, old, registry), _planned(named, new, registry)
    was, is_ = _told(before), _told(after)
    if was["path"] != is_["path"]:  # another kernel's choices and launch are no differences of one
        was, is_ = ({name: told[name] for name in _OF_PATHS if name in told} for told in (was, is_))
    differs = tuple(
        f"{name}: {was.get(name)} -> {is_.get(name)}" for name in {**was, **is_} if was.get(name) != is_.get(name)
    )
    if not differs:
        return None
    cores = {backend.core_path for backend in registry.backends.values() if backend.core_path}
    return Moved(
        problem=named.name,
        targets=(old.name,),
        before=str(was["path"]),
        after=str(is_["path"]),
        differs=differs,
        lost=(was["path"] in cores and is_["path"] not in cores) or (is_["path"] == NO_PLAN != was["path"]),
    )


def _planned(named: Named, target: Target, registry: Registry) -> Plan | PortattnError:
    try:
        return plan(named.problem, target, registry, settings=Settings())
    except PortattnError as error:
        return error


def _told(made: Plan | PortattnError) -> dict[str, Any]:
    """What of a plan is compared: path, kernel, choices, launch, environment."""
    if isinstance(made, PortattnError):
        return {"path": NO_PLAN, "why": str(made)}
    told: dict[str, Any] = {"path": made.path, "kernel": made.kernel or "none"}
    if made.lowering is not None and made.launch is not None:
        told |= msgspec.structs.asdict(made.lowering) | made.launch.values()
    elif made.rejected:
        told["why"] = made.rejected[0].reason
    return told | made.env


def _together(moved: list[Moved]) -> Iterator[Moved]:
    """Targets on which a problem's plan changes in the same way, in one line."""
    groups: dict[tuple[str, tuple[str, ...]], list[Moved]] = {}
    for one in moved:
        groups.setdefault((one.problem, one.differs), []).append(one)
    for same in groups.values():
        yield msgspec.structs.replace(same[0], targets=tuple(t for one in same for t in one.targets))
