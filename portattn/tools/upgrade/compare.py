"""All that a change of compiler keeps, changes and loses on some targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from portattn.tools.matrix.problems import Named
from portattn.tools.upgrade import plans as planning
from portattn.tools.upgrade.entries import Entry, entries
from portattn.tools.upgrade.plans import Moved
from portattn.tools.upgrade.published_results import Figures, figures
from portattn.tools.upgrade.schedules import Timed, timed
from portattn.tools.upgrade.toolchain_pair import Pair, Plans
from portattn.tools.upgrade.variants import Carried, carried


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. plans: how many were compared."""

    before: str
    after: str
    targets: tuple[str, ...]
    entries: tuple[Entry, ...]
    moved: tuple[Moved, ...]
    plans: int
    variants: tuple[Carried, ...]
    schedules: tuple[Timed, ...]
    figures: tuple[Figures, ...]

    @property
    def lost(self) -> bool:
        return any(moved.lost for moved in self.moved)


def compare(pairs: Sequence[Pair], problems: Sequence[Named], say: Callable[[str], None] = lambda _: None) -> Upgrade:
    """Compare the two sides of some targets, all of the same two compilers, by the plans of some problems."""
    plans, moved = Plans(), []
    for named in problems:
        say(f"planning {named.name}")
        moved += [found for pair in pairs if (found := planning.moved(named, pair, plans))]
    return Upgrade(
        before=pairs[0].old.compiler,
        after=pairs[0].new.compiler,
        targets=tuple(pair.new.target.name for pair in pairs),
        entries=tuple(entries(pairs)),
        moved=tuple(planning.together(moved)),
        plans=len(problems) * len(pairs),
        variants=tuple(carried(pairs, problems)),
        schedules=tuple(timed(pairs, problems, plans)),
        figures=tuple(figures(pairs)),
    )
