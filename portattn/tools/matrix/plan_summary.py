"""What a cell keeps of its plan, and the quirks that have to do with it."""

from __future__ import annotations

import msgspec

from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.tools.matrix.cells import Footnote, PlanSummary, footnote


def summary(made: Plan, core: Plan | None) -> PlanSummary:
    """What a cell keeps of its plan."""
    rejected = tuple(msgspec.structs.replace(no, choice=None) for no in made.rejected)
    if core is None:
        return PlanSummary(
            path=made.path, core_taken=False, rejected=rejected, notes=made.notes, schedule=made.schedule
        )
    lowering, chosen = core.specialised
    launch = msgspec.structs.asdict(chosen)
    options = dict(launch.pop("options"))
    return PlanSummary(
        path=made.path,
        core_taken=core is made,
        kernel=core.kernel,
        form=core.form,
        lowering={name: getattr(lowering, name) for name in CORES[made.problem.op].choices},
        launch=launch | options,
        env=core.env,
        rejected=rejected,
        notes=core.notes,
        schedule=made.schedule,
    )


def footnotes(made: Plan, registry: Registry) -> tuple[Footnote, ...]:
    """The quirks that changed the plan or caution about it, and those that ruled a path out."""
    out = dict.fromkeys(no.quirk for no in made.rejected if no.quirk in registry.quirks)
    applied = {quirk.id: quirk for quirk in made.quirks}
    applied |= {quirk.id: quirk for no in made.rejected if no.choice for quirk in no.choice.quirks}
    changes = (
        footnote(quirk.id, "applied", registry, sentence=quirk.sentence, sets=quirk.sets, note=quirk.note)
        for quirk in applied.values()
        if quirk.id not in out
    )
    return (*changes, *(footnote(quirk, "rejected", registry) for quirk in out))
