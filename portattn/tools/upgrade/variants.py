"""Variants between two compilers: those that carry over, that their canaries try, and that refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from portattn.config import Settings
from portattn.planning import variant_path
from portattn.planning.checks import PathRejected
from portattn.planning.evidence import seen_to_run
from portattn.schema.compile_record import NO_RECORDS
from portattn.schema.problem import Problem
from portattn.schema.quirk import LEVELS
from portattn.tools.matrix.problems import NamedProblem
from portattn.tools.upgrade.toolchain_pair import Pair, Side

# run      its tests are known to have passed on such a chip with such a compiler, for all problems that it takes
# tried    not for all: its canaries run before the first such call, and decide
# refused  it takes none of the problems, or leaves them to the core
State = Literal["run", "tried", "refused"]
SAID = {
    ("run", "run"): "carries over",
    ("tried", "run"): "carries over",
    ("run", "tried"): "carries over",  # what it took before; `unseen` says otherwise
    ("tried", "tried"): "is tried by its canaries on both",
    ("run", "refused"): "refuses",
    ("tried", "refused"): "refuses",
    ("refused", "run"): "newly runs",
    ("refused", "tried"): "newly runs, where its canaries pass",
}
LEFT = "leaves all that it took to the core"


class CarryOverEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a variant that carries over rests on: a run of its tests on such a chip (`verified.toml`)."""

    toolchain: str
    level: str
    what: str

    def __str__(self) -> str:
        return f"{self.level} with {self.toolchain}: {self.what}"


class VariantUpgrade(msgspec.Struct, frozen=True, kw_only=True):
    """A variant on one target.

    takes    problems that it takes on the new compiler and does not leave to the core
    refuses  problems that it took on the old compiler and refuses on the new: problem -> why
    leaves   problems that it took on the old compiler and leaves to the core on the new: problem -> why
    unseen   problems that it takes on both, and whose tests are known to have passed only with the old compiler
    evidence of a run of `takes` with the new compiler; None if no run is known
    """

    name: str
    target: str
    before: State
    after: State
    takes: tuple[str, ...]
    refuses: dict[str, str]
    leaves: dict[str, str] = {}
    unseen: tuple[str, ...] = ()
    evidence: CarryOverEvidence | None = None

    @property
    def said(self) -> str:
        """Its fate, as a clause."""
        text = LEFT if self.leaves and not self.takes and not self.refuses else SAID[self.before, self.after]
        if self.unseen:
            of = "" if self.unseen == self.takes else f" for {', '.join(self.unseen)}"
            text = f"is tried by its canaries{of}: no complete run of its tests is known with the new compiler"
        return f"{text}, and refuses {len(self.refuses)} that it took" if self.refuses and self.takes else text

    @property
    def less_sure(self) -> bool:
        """Whether tests of a problem that it takes are known to have passed only with the old compiler."""
        return bool(self.unseen)


class _Not(NamedTuple):
    """The reason that a plan does not take a variant for a problem. deferred: the variant leaves it to the core."""

    why: str
    deferred: bool = False


def variant_upgrades(pairs: Sequence[Pair], problems: Sequence[NamedProblem]) -> Iterator[VariantUpgrade]:
    """What becomes of each variant that takes one of the problems on one of the two compilers."""
    for pair in pairs:
        target = pair.new.target
        for variant in pair.new.registry.backends[target.backend].variants:
            asked = [named for named in problems if named.problem.op in variant.ops]
            if target.arch.name in variant.arches and asked:
                found = _carried(variant.name, pair, asked)
                if (found.before, found.after) != ("refused", "refused"):
                    yield found


def _carried(name: str, pair: Pair, asked: Sequence[NamedProblem]) -> VariantUpgrade:
    """What becomes of one variant, by the problems of its operations."""
    was, now = ({named.name: _not(name, named.problem, side) for named in asked} for side in pair)
    no_more = {problem: no for problem, no in now.items() if no and not was[problem]}
    unseen = tuple(
        named.name for named in asked
        if not was[named.name] and not now[named.name]
        and _has_run(pair.old, named.problem) and not _has_run(pair.new, named.problem)
    )  # fmt: skip
    return VariantUpgrade(
        name=name,
        target=pair.new.target.name,
        before=_state(pair.old, asked, was),
        after=_state(pair.new, asked, now),
        takes=tuple(problem for problem, no in now.items() if not no),
        refuses={problem: no.why for problem, no in no_more.items() if not no.deferred},
        leaves={problem: no.why for problem, no in no_more.items() if no.deferred},
        unseen=unseen,
        evidence=_evidence(pair.new, [named.problem for named in asked if not now[named.name]]),
    )


def _evidence(side: Side, taken: Sequence[Problem]) -> CarryOverEvidence | None:
    """The run that the problems rest on; of several runs the one that says least."""
    runs = [seen for problem in taken if (seen := seen_to_run(side.target, side.registry, problem))]
    if not runs:
        return None
    least = min(runs, key=lambda seen: LEVELS.index(seen.level))
    return CarryOverEvidence(toolchain=least.toolchain, level=least.level, what=least.what)


def _not(name: str, problem: Problem, side: Side) -> _Not | None:
    """Why plans of a side do not take a variant for a problem; None where they do.

    The side's own schedules decide, and what the variant leaves to the core although it could run it: a plan takes
    the core there.
    """
    variant = side.variant(name)
    if variant is None:
        return _Not(f"{side.target.backend} has no such variant")
    try:
        variant_path.choose(variant, problem, side.target, side.registry, NO_RECORDS, Settings())
    except PathRejected as refused:
        no = refused.rejection
        return _Not(f"{no.reason} [{no.quirk}]" if no.quirk else no.reason)
    left = variant.defers_to_core(problem)
    return _Not(left, deferred=True) if left else None


def _state(side: Side, asked: Sequence[NamedProblem], found: Mapping[str, _Not | None]) -> State:
    taken = [named.problem for named in asked if not found[named.name]]
    if not taken:
        return "refused"
    return "run" if all(_has_run(side, problem) for problem in taken) else "tried"


def _has_run(side: Side, problem: Problem) -> bool:
    return seen_to_run(side.target, side.registry, problem) is not None
