"""Variants between two compilers: those that carry over, that their canaries try, and that refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from portattn.config import Settings
from portattn.planning import variant_path
from portattn.planning.backend import Variant
from portattn.planning.checks import Refused
from portattn.planning.evidence import seen_to_run
from portattn.schema.outcome import NO_RECORDS
from portattn.schema.problem import Problem
from portattn.tools.matrix.problems import Named
from portattn.tools.upgrade.sides import Pair, Side

# run      its tests are known to have passed on such a chip with such a compiler, for all problems that it takes
# tried    not for all: its canaries run before the first such call, and decide
# refused  it takes none of the problems
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


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """A variant on one target.

    takes    problems that it takes on the new compiler
    refuses  those that it took on the old one and refuses on the new: problem -> why
    unseen   those that it takes on both, and whose tests are known to have passed with the old one alone
    """

    name: str
    target: str
    before: State
    after: State
    takes: tuple[str, ...]
    refuses: dict[str, str]
    unseen: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """What becomes of it, as a clause."""
        text = SAID[self.before, self.after]
        if self.unseen:
            of = "" if self.unseen == self.takes else f" for {', '.join(self.unseen)}"
            text = f"is tried by its canaries{of}: no complete run of its tests is known with the new compiler"
        return f"{text}, and refuses {len(self.refuses)} that it took" if self.refuses and self.takes else text

    @property
    def less_sure(self) -> bool:
        """Whether the tests of something that it takes are known to have passed with the old compiler alone."""
        return bool(self.unseen)


def carried(pairs: Sequence[Pair], problems: Sequence[Named]) -> Iterator[Carried]:
    """What becomes of each variant that takes one of the problems on one of the two compilers."""
    for old, new in pairs:
        for variant in new.registry.backends[new.target.backend].variants:
            asked = [named for named in problems if named.problem.op in variant.ops]
            if new.target.arch.name not in variant.arches or not asked:
                continue
            was = {named.name: _refusal(variant, named.problem, old) for named in asked}
            now = {named.name: _refusal(variant, named.problem, new) for named in asked}
            takes = tuple(name for name, no in now.items() if not no)
            before, after = _state(old, asked, was), _state(new, asked, now)
            if (before, after) != ("refused", "refused"):
                refuses = {name: no for name, no in now.items() if no and not was[name]}
                unseen = tuple(
                    named.name for named in asked
                    if not was[named.name] and not now[named.name]
                    and _has_run(old, named.problem) and not _has_run(new, named.problem)
                )  # fmt: skip
                yield Carried(
                    name=variant.name, target=new.target.name, before=before, after=after, takes=takes,
                    refuses=refuses, unseen=unseen,
                )  # fmt: skip


def _refusal(variant: Variant, problem: Problem, side: Side) -> str:
    """Why a variant refuses a problem; empty where it takes it."""
    try:
        variant_path.choose(variant, problem, side.target, side.registry, NO_RECORDS, Settings())
    except Refused as refused:
        no = refused.rejection
        return f"{no.reason} [{no.quirk}]" if no.quirk else no.reason
    return ""


def _state(side: Side, asked: Sequence[Named], refusals: Mapping[str, str]) -> State:
    taken = [named.problem for named in asked if not refusals[named.name]]
    if not taken:
        return "refused"
    return "run" if all(_has_run(side, problem) for problem in taken) else "tried"


def _has_run(side: Side, problem: Problem) -> bool:
    return seen_to_run(side.target, side.registry, problem) is not None
