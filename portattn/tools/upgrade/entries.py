"""Quirks between two compilers: those that fall away, stay or newly apply, and what probes saw on the new one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from portattn.planning.kernel_specs import KERNEL_NAMES
from portattn.schema.quirk import ASSUMED, Quirk
from portattn.schema.target import Target
from portattn.tools.upgrade.toolchain_pair import Pair, Side

Change = Literal["falls away", "stays", "newly applies"]


class QuirkChange(msgspec.Struct, frozen=True, kw_only=True):
    """One quirk that holds on one of the two compilers or on both.

    targets   those that it concerns
    verified  targets on which a probe looked on the new compiler, with what it saw: "cuda:sm_90: pass"
    verified_before  the same of the old compiler
    unprobed  targets on which it applies with the new compiler, and no probe has looked
    note      why the new compiler is in doubt; empty where it is not
    """

    id: str
    title: str
    symptom: str
    change: Change
    targets: tuple[str, ...]
    verified: tuple[str, ...]
    verified_before: tuple[str, ...] = ()
    unprobed: tuple[str, ...] = ()
    note: str = ""

    @property
    def unverified(self) -> bool:
        """Whether it applies on the new compiler, or stops to, and no probe has looked there."""
        return not self.verified

    @property
    def less_sure(self) -> bool:
        """Whether less is known of it with the new compiler than with the old one.

        One that stays is as sure as it was where no probe has looked with either compiler. One that falls away is not:
        what its work-around kept right now rests on its range alone.
        """
        return self.unverified and (self.change != "stays" or bool(self.verified_before))


def entries(pairs: Sequence[Pair]) -> Iterator[QuirkChange]:
    """The quirks of both sides that concern the targets, in the registry's order."""
    known = {name: quirk for pair in pairs for side in pair for name, quirk in side.registry.quirks.items()}
    for quirk in known.values():
        changes: dict[Change, list[Pair]] = {}
        for pair in pairs:
            change = _change(_holds(quirk, pair.old), _holds(quirk, pair.new))
            if change:
                changes.setdefault(change, []).append(pair)
        for change, concerned in changes.items():
            where = [pair.new.target for pair in concerned]
            seen = dict(_verified(quirk, where))
            before = _verified(quirk, [pair.old.target for pair in concerned])
            names = tuple(target.name for target in where)
            yield QuirkChange(
                id=quirk.id,
                title=quirk.title,
                symptom=quirk.symptom,
                change=change,
                targets=names,
                verified=tuple(f"{name}: {outcome}" for name, outcome in seen.items()),
                verified_before=tuple(f"{name}: {outcome}" for name, outcome in before),
                unprobed=() if change == "falls away" else tuple(name for name in names if name not in seen),
                note=_note(quirk, change, where[0]),
            )


def _holds(quirk: Quirk, side: Side) -> bool:
    """Whether a side has the quirk, and its compiler is in the quirk's range."""
    if quirk.id not in side.registry.quirks:
        return False
    variants = side.registry.backends[side.target.backend].variants
    names = (*KERNEL_NAMES, *(variant.name for variant in variants if side.target.arch.name in variant.arches))
    concerned = any(quirk.concerns(name, side.target) for name in names)
    return concerned and quirk.in_range(side.target.toolchain)


def _change(before: bool, after: bool) -> Change | None:
    if before and after:
        return "stays"
    return "falls away" if before else "newly applies" if after else None


def _verified(quirk: Quirk, where: list[Target]) -> Iterator[tuple[str, str]]:
    """Targets on which a probe looked with their compiler, and what it saw without the work-around."""
    names = {target.name for target in where}
    compiler = str(where[0].toolchain)
    for seen in quirk.verified:
        if seen.toolchain == compiler and seen.target in names:
            yield seen.target, seen.off


def _note(quirk: Quirk, change: Change, target: Target) -> str:
    if quirk.assumed(target.toolchain):
        return ASSUMED
    if quirk.newer_than_seen(target.toolchain):
        kept = "is left out" if change == "falls away" else "applies to be safe"
        return f"last seen on {quirk.evidence.last_seen}; {kept}"
    return ""
