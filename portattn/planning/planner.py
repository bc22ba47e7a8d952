"""plan(problem, target, registry, records, settings) -> Plan: which path runs, how, and why. A pure function.

Dispatch, explain, doctor, the matrix, the tests and the docs all call it; it can be asked about any machine.
"""

from __future__ import annotations

import msgspec

from portattn.config import Settings
from portattn.errors import PathUnavailable
from portattn.planning.checks import PathRejected
from portattn.planning.paths import INTERPRETER, REFERENCE, PlanRequest, candidates
from portattn.planning.registry import Registry
from portattn.schema.compile_record import NO_RECORDS, CompileRecords
from portattn.schema.plan import Applied, CoreChoice, Plan, Rejection
from portattn.schema.problem import Problem
from portattn.schema.target import Target

__all__ = ["Applied", "CoreChoice", "Plan", "Rejection", "plan"]

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
    asked = PlanRequest(problem, target, registry, records, settings)
    automatic = settings.backend == "auto"
    core = registry.backends[target.backend].core_path

    rejected: list[Rejection] = []
    # Why paths were passed over that cover nothing that a later one does not.
    notes: list[str] = [NOT_INTERPRETED] if automatic and core == INTERPRETER else []
    quirks: dict[str, Applied] = {}  # those that reject a path before the one that is taken
    deferred: Plan | None = None  # of a path that leaves the problem to a later one, which is faster at it
    barred = ""  # the quirk that leads to the reference
    for path in candidates(asked):
        try:
            if barred and path.name != REFERENCE:
                raise PathRejected(Rejection(path=path.name, reason=f"{barred} leads to the reference", quirk=barred))
            made = path.plan(asked)
        except PathRejected as refused:
            no = refused.rejection
            if deferred is not None and not path.extra:
                return msgspec.structs.replace(deferred, notes=(*deferred.notes, no.note()))
            if path.extra and automatic:
                notes.append(no.note("it"))
            else:
                rejected.append(no)
            found = _against(no, registry, target)
            quirks |= {quirk.id: quirk for quirk in found}
            if not path.extra and any(quirk.sets["path"] == REFERENCE for quirk in found):
                barred = no.quirk
            continue
        why = path.defers(problem) if automatic else ""
        if not why:
            return msgspec.structs.replace(
                made, quirks=(*quirks.values(), *made.quirks), notes=(*notes, *made.notes), rejected=tuple(rejected)
            )
        deferred = deferred or msgspec.structs.replace(made, notes=(*notes, *made.notes))
        notes.append(Rejection(path=path.name, reason=f"leaves such problems to the core: {why}").note("it"))
    if not rejected:
        offered = f"; its core kernels run by backend={core!r}" if core else ""
        rejected.append(Rejection(path=settings.backend, reason=f"{target.backend} has no such path{offered}"))
    raise PathUnavailable(f"{problem.op}: backend={settings.backend!r} cannot run this on {target}", rejected)


def _against(no: Rejection, registry: Registry, target: Target) -> list[Applied]:
    """Every quirk that rejects a path, as a plan has them."""
    if no.choice is not None:
        return [quirk for quirk in no.choice.quirks if "path" in quirk.sets] if no.quirk else []
    if not no.quirk:
        return []
    quirk = registry.quirks[no.quirk]
    sets, doubt = {"path": quirk.effect.path}, quirk.doubt(target.toolchain)
    return [Applied(id=quirk.id, sentence=quirk.sentence(), sets=sets, note=doubt)]
