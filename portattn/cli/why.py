"""Which quirks apply on a target and what they change, over a few representative problems; and why others do not."""

from __future__ import annotations

from typing import Any

import msgspec

from portattn.cli.output import setting
from portattn.config import current
from portattn.errors import QuirkConflict
from portattn.planning.kernel_specs import KERNEL_NAMES
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.plan import Applied, Plan
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.tools.matrix.problems import quick


class Use(msgspec.Struct, kw_only=True):
    """A quirk at work: on which kernels, variants and problems, and what it sets there."""

    id: str
    sentence: str
    sets: dict[str, Any]
    cost: str
    upstream: str
    note: str = ""
    kernels: list[str] = []
    problems: list[str] = []


class Other(msgspec.Struct, kw_only=True):
    """A quirk that concerns the target and is not at work, and why."""

    id: str
    reason: str


class Because(msgspec.Struct, kw_only=True):
    """The answer for one target."""

    target: str
    toolchain: str
    applied: list[Use]
    others: list[Other]
    conflicts: list[str]


def because(target: Target) -> Because:
    """Plan the quick set's problems on the target, and collect what quirks did."""
    registry = Registry.load()
    uses: dict[str, Use] = {}
    conflicts: list[str] = []
    for named in quick():
        try:
            made = plan(named.problem, target, registry, settings=current())
        except QuirkConflict as conflict:
            conflicts.append(f"{named.name}: {conflict}")
            continue
        for kernel, applied in _applied(made):
            quirk = registry.quirks[applied.id]
            use = uses.setdefault(
                applied.id,
                Use(
                    id=quirk.id,
                    sentence=applied.sentence,
                    sets=applied.sets,
                    cost=quirk.effect.cost,
                    upstream=quirk.evidence.upstream,
                    note=applied.note,
                ),
            )
            use.kernels += [kernel] if kernel and kernel not in use.kernels else []
            use.problems += [named.name] if named.name not in use.problems else []
    others = [
        Other(id=quirk.id, reason=_why_not(quirk, target))
        for quirk in registry.quirks.values()
        if quirk.id not in uses and any(quirk.concerns(kernel, target) for kernel in KERNEL_NAMES)
    ]
    return Because(
        target=target.name,
        toolchain=str(target.toolchain),
        applied=list(uses.values()),
        others=others,
        conflicts=conflicts,
    )


def _applied(made: Plan) -> list[tuple[str, Applied]]:
    """Return the (kernel or variant, quirk) pairs of a plan, also of a core kernel that it passes over."""
    found = [(made.kernel or made.path, applied) for applied in made.quirks]
    for no in made.rejected:
        if no.choice is not None:
            found += [(no.choice.kernel, applied) for applied in no.choice.quirks]
    return found


def _why_not(quirk: Quirk, target: Target) -> str:
    """Why a quirk that concerns the target is not at work."""
    for name, wanted in quirk.when.toolchain.items():
        if target.toolchain.within(name, wanted) is False:
            version = target.toolchain.component(name)
            return f"{name} {wanted}, and this is {version or target.toolchain}"
    if not quirk.in_range(target.toolchain):
        return f"a slow quirk, last seen on {quirk.evidence.last_seen or 'a toolchain of unknown version'}"
    conditions = [*quirk.when.features]
    for values in (quirk.when.lowering, quirk.when.launch):
        conditions += [setting(name, value) for name, value in values.items()]
    return f"when {', '.join(conditions)}" if conditions else "switched off, or of no effect on these kernels"
