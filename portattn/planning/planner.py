"""plan(problem, target, registry, records, settings) -> Plan: which path runs, how, and why. A pure function.

Dispatch, explain, doctor, the matrix, the tests and the docs all call it; it can be asked about any machine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from portattn.config import Settings
from portattn.errors import ArgumentError, PathUnavailable
from portattn.planning import reference_takes, variant_path
from portattn.planning.checks import undeclared
from portattn.planning.core_path import Refused, choose
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema.outcome import NO_RECORDS, CompileRecords
from portattn.schema.plan import Applied, CoreChoice, Plan, Rejection
from portattn.schema.problem import Problem
from portattn.schema.target import Target

__all__ = ["Applied", "CoreChoice", "Plan", "Rejection", "plan"]

REFERENCE = "reference"
GROUPS = ("auto", "vendor", REFERENCE)  # values of `backend` that name no single accelerated path
INTERPRETER = "interpreter"  # the CPU's core path: planned only when it is asked for by name
NOT_INTERPRETED = (
    "not interpreter: Triton's interpreter is for checking the core kernels, and far slower than the reference "
    "(hint: backend='interpreter')"
)


def plan(
    problem: Problem,
    target: Target,
    registry: Registry | None = None,
    records: CompileRecords = NO_RECORDS,
    settings: Settings | None = None,
) -> Plan:
    """Plan one problem on one target.

    Candidates in order: variants for this chip, the core kernel, the vendor's library, the reference. The first that
    nothing rejects is the plan's path; `rejected` says what rejected the others.

    Raises QuirkConflict when two quirks contradict each other, SettingError on an override that names no quirk,
    ArgumentError on an unknown backend, and PathUnavailable when the path that the caller named cannot run this.
    """
    registry = registry or Registry.load()
    settings = settings or Settings()
    registry.overrides(settings.quirks)  # a misspelt id is an error on every path
    backend = registry.backends[target.backend]
    requested = settings.backend
    own = [variant.name for variant in backend.variants]
    names = [p for p in (*own, backend.core_path, *(v.name for v in backend.vendor)) if p]
    if requested not in (*GROUPS, *names, "triton", INTERPRETER):
        known = ", ".join(dict.fromkeys([*GROUPS, *names]))
        raise ArgumentError(problem.op, "backend", requested, f"{target.backend} knows {known}")

    base: dict[str, Any] = {
        "problem": problem,
        "target": target.name,
        "toolchain": str(target.toolchain),
        "requested": requested,
    }
    rejected: list[Rejection] = []
    cause = ""  # the quirk that decided against the core path, if one did
    applied: tuple[Applied, ...] = ()  # every quirk that rejects it
    variants: list[Rejection] = []  # no fall-backs: the core covers everything that a variant does
    left: list[Plan] = []  # what a variant would run, and leaves to the core, which is faster at it
    for variant in backend.variants:
        concerned = problem.op in variant.ops and target.arch.name in variant.arches
        if requested != variant.name and not (requested == "auto" and concerned):
            continue
        try:
            taken = variant_path.choose(variant, problem, target, registry, records, settings)
        except Refused as no:
            variants.append(no.rejection)
            continue
        made = Plan(
            **base,
            path=variant.name,
            schedule=taken.schedule,
            needs=variant.needs,
            quirks=taken.quirks,
            notes=(*map(variant_path.note, variants), *taken.notes),
            key=taken.key,
        )
        why = variant.defers_to_core(problem) if requested == "auto" else ""
        if not why:
            return made
        left.append(made)
        variants.append(Rejection(path=variant.name, reason=f"leaves such problems to the core: {why}"))
    rejected += variants if requested != "auto" else []
    against = [registry.quirks[name] for name in dict.fromkeys(no.quirk for no in variants if no.quirk)]
    base["quirks"] = tuple(Applied(id=q.id, sentence=q.sentence(), sets={"path": q.effect.path}) for q in against)
    passed_over = tuple(map(variant_path.note, variants))
    automatic = requested == "auto" and backend.core_path != INTERPRETER
    if backend.core_path and (requested == backend.core_path or automatic):
        try:
            choice = choose(problem, target, registry, records, settings)
        except Refused as no:
            if left:
                return msgspec.structs.replace(left[0], notes=(*left[0].notes, variant_path.note(no.rejection)))
            rejected.append(no.rejection)
            cause = no.rejection.quirk
            if cause and no.rejection.choice:
                applied = tuple(a for a in no.rejection.choice.quirks if "path" in a.sets)
        else:
            return Plan(
                **base | {"quirks": (*base["quirks"], *choice.quirks)},
                path=backend.core_path,
                kernel=choice.kernel,
                lowering=choice.lowering,
                launch=choice.launch,
                choices=choice.choices,
                env=choice.env,
                notes=(*passed_over, *choice.notes),
                key=choice.key,
            )
    if backend.core_path == INTERPRETER:
        passed_over = (*passed_over, NOT_INTERPRETED)
    against_core = {"quirks": (*base["quirks"], *applied), "notes": passed_over if requested == "auto" else ()}
    for vendor in backend.vendor:
        if requested not in ("auto", "vendor", vendor.name):
            continue
        if any(a.sets["path"] == REFERENCE for a in applied):
            rejected.append(Rejection(path=vendor.name, reason=f"{cause} leads to the reference", quirk=cause))
            continue
        no_vendor = vendor.rejects(problem, target) or undeclared(vendor.name, problem, vendor.ops, vendor.takes)
        if no_vendor is None:
            return Plan(**base | against_core, path=vendor.name, rejected=tuple(rejected))
        rejected.append(no_vendor)
    if requested in ("auto", REFERENCE):
        no_reference = undeclared(REFERENCE, problem, CORES, reference_takes.TAKES)
        if no_reference is None:
            return Plan(**base | against_core, path=REFERENCE, rejected=tuple(rejected))
        rejected.append(no_reference)
    if not rejected:
        core = f"; its core kernels run by backend={backend.core_path!r}" if backend.core_path else ""
        rejected.append(Rejection(path=requested, reason=f"{target.backend} has no such path{core}"))
    raise PathUnavailable(f"{problem.op}: backend={requested!r} cannot run this on {target}", rejected)
