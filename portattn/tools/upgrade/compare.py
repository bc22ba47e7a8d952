"""All that a change of compiler keeps, changes and loses on some targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from portattn.tools.matrix.problems import NamedProblem
from portattn.tools.upgrade import plans as planning
from portattn.tools.upgrade.entries import QuirkChange, entries
from portattn.tools.upgrade.plans import PlanChange
from portattn.tools.upgrade.published_results import TargetFigures, figures
from portattn.tools.upgrade.schedules import ScheduleTiming, schedule_timings
from portattn.tools.upgrade.toolchain_pair import Pair, Plans
from portattn.tools.upgrade.variants import VariantUpgrade, variant_upgrades


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. plans: how many were compared."""

    before: str
    after: str
    targets: tuple[str, ...]
    entries: tuple[QuirkChange, ...]
    moved: tuple[PlanChange, ...]
    plans: int
    variants: tuple[VariantUpgrade, ...]
    schedules: tuple[ScheduleTiming, ...]
    figures: tuple[TargetFigures, ...]

    @property
    def lost(self) -> bool:
        return any(moved.lost for moved in self.moved)


def compare(
    pairs: Sequence[Pair], problems: Sequence[NamedProblem], say: Callable[[str], None] = lambda _: None
) -> Upgrade:
    """Compare the two sides of some targets, all of the same two compilers, by the plans of some problems."""
    plans, moved = Plans(), []
    for named in problems:
        say(f"planning {named.name}")
        moved += [found for pair in pairs if (found := planning.plan_change(named, pair, plans))]
    return Upgrade(
        before=pairs[0].old.compiler,
        after=pairs[0].new.compiler,
        targets=tuple(pair.new.target.name for pair in pairs),
        entries=tuple(entries(pairs)),
        moved=tuple(planning.together(moved)),
        plans=len(problems) * len(pairs),
        variants=tuple(variant_upgrades(pairs, problems)),
        schedules=tuple(schedule_timings(pairs, problems, plans)),
        figures=tuple(figures(pairs)),
    )
