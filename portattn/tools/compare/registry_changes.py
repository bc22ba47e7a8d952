"""Everything that a change of compiler keeps, changes and loses on some targets, without starting a compiler."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from portattn.config import Settings
from portattn.errors import PortattnError
from portattn.planning import planner
from portattn.planning.backend import PathRejection
from portattn.planning.core_path import seen_to_run
from portattn.planning.kernel_specs import KERNEL_NAMES
from portattn.schema.compile_record import NO_RECORDS
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.quirk import ASSUMED, LEVELS, Quirk
from portattn.schema.target import Target
from portattn.testing.kernel_cases import NamedKernel, quirks_of
from portattn.tools.compare.sides import Pair, Plans, Side
from portattn.tools.matrix.problems import NamedProblem

# run      its tests are known to have passed on such a chip with such a compiler, for all problems that it takes
# tried    not for all: its canaries run before the first such call, and decide
# refused  it takes none of the problems, or leaves them to the core
State = Literal["run", "tried", "refused"]


class CarryOverEvidence(msgspec.Struct, frozen=True, kw_only=True):
    toolchain: str
    level: str
    what: str

    def __str__(self) -> str:
        return f"{self.level} with {self.toolchain}: {self.what}"


class VariantUpgrade(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    target: str
    before: State
    after: State
    takes: tuple[str, ...]  # problems that it takes on the new compiler and does not leave to the core
    refuses: dict[str, str]  # problems that it took on the old compiler and refuses on the new: problem -> why
    # problems that it took on the old compiler and leaves to the core on the new: problem -> why
    leaves: dict[str, str] = {}
    # problems that it takes on both, and whose tests are known to have passed only with the old compiler
    unseen: tuple[str, ...] = ()
    evidence: CarryOverEvidence | None = None  # of a run of `takes` with the new compiler; None if no run is known

    @property
    def said(self) -> str:
        if self.unseen:
            of = "" if self.unseen == self.takes else f" for {', '.join(self.unseen)}"
            text = f"is tried by its canaries{of}: no complete run of its tests is known with the new compiler"
        elif self.after == "refused":
            text = "leaves all that it took to the core" if self.leaves and not self.refuses else "refuses"
        elif self.before == "refused":
            text = "newly runs" if self.after == "run" else "newly runs, where its canaries pass"
        else:
            text = "is tried by its canaries on both" if self.before == self.after == "tried" else "carries over"
        return f"{text}, and refuses {len(self.refuses)} that it took" if self.refuses and self.takes else text

    @property
    def less_sure(self) -> bool:
        """Return whether tests of a problem that it takes are known to have passed only with the old compiler."""
        return bool(self.unseen)


class _Not(NamedTuple):
    """The reason that a plan does not take a variant for a problem; deferred: the variant leaves it to the core."""

    why: str
    deferred: bool = False


def variant_upgrades(pairs: Sequence[Pair], problems: Sequence[NamedProblem]) -> Iterator[VariantUpgrade]:
    for pair in pairs:
        target = pair.new.target
        for variant in pair.new.registry.backends[target.backend].variants:
            asked = [named for named in problems if named.problem.op in variant.ops]
            if target.arch.name in variant.arches and asked:
                found = _carried(variant.name, pair, asked)
                if (found.before, found.after) != ("refused", "refused"):
                    yield found


def _carried(name: str, pair: Pair, asked: Sequence[NamedProblem]) -> VariantUpgrade:
    was, now = ({one.name: _not(name, one.problem, side) for one in asked} for side in pair)
    no_more = {problem: no for problem, no in now.items() if no and not was[problem]}
    taken = [one for one in asked if not now[one.name]]
    both = [one for one in taken if not was[one.name]]
    unseen = tuple(o.name for o in both if _has_run(pair.old, o.problem) and not _has_run(pair.new, o.problem))
    return VariantUpgrade(
        name=name, target=pair.new.target.name, takes=tuple(one.name for one in taken), unseen=unseen,
        before=_state(pair.old, [one for one in asked if not was[one.name]]), after=_state(pair.new, taken),
        refuses={problem: no.why for problem, no in no_more.items() if not no.deferred},
        leaves={problem: no.why for problem, no in no_more.items() if no.deferred},
        evidence=_evidence(pair.new, [one.problem for one in taken]),
    )  # fmt: skip


def _evidence(side: Side, taken: Sequence[Problem]) -> CarryOverEvidence | None:
    runs = [seen for problem in taken if (seen := seen_to_run(side.target, side.registry, problem))]
    if not runs:
        return None
    least = min(runs, key=lambda seen: LEVELS.index(seen.level))
    return CarryOverEvidence(toolchain=least.toolchain, level=least.level, what=least.what)


def _not(name: str, problem: Problem, side: Side) -> _Not | None:
    """Return why a side's schedules do not take a variant for a problem, or leave it to the core; or None."""
    variant = side.variant(name)
    if variant is None:
        return _Not(f"{side.target.backend} has no such variant")
    try:
        planner.choose_variant(variant, problem, side.target, side.registry, NO_RECORDS, Settings())
    except PathRejection as refused:
        no = refused.rejection
        return _Not(f"{no.reason} [{no.quirk}]" if no.quirk else no.reason)
    left = variant.defers_to_core(problem)
    return _Not(left, deferred=True) if left else None


def _state(side: Side, taken: Sequence[NamedProblem]) -> State:
    if not taken:
        return "refused"
    return "run" if all(_has_run(side, one.problem) for one in taken) else "tried"


def _has_run(side: Side, problem: Problem) -> bool:
    return seen_to_run(side.target, side.registry, problem) is not None


Change = Literal["falls away", "stays", "newly applies"]
# Whether a quirk held on the old compiler, and holds on the new one.
CHANGES: dict[tuple[bool, bool], Change] = {
    (True, False): "falls away", (True, True): "stays", (False, True): "newly applies",
}  # fmt: skip


class QuirkChange(msgspec.Struct, frozen=True, kw_only=True):
    """One quirk that holds on one of the two compilers or on both."""

    id: str
    title: str
    symptom: str
    change: Change
    targets: tuple[str, ...]  # the targets that it concerns
    verified: tuple[str, ...]  # targets probed with the new compiler, with the outcome: "cuda:sm_90: pass"
    verified_before: tuple[str, ...] = ()  # the same for the old compiler
    unprobed: tuple[str, ...] = ()  # unprobed targets on which it applies with the new compiler
    note: str = ""  # why the new compiler is in doubt, or ""


def entries(pairs: Sequence[Pair], kernels: Sequence[NamedKernel] = ()) -> Iterator[QuirkChange]:
    """Yield the changes of quirks of portattn's kernels, or of the given ones of other packages."""
    known = {name: quirk for pair in pairs for side in pair for name, quirk in side.registry.quirks.items()}
    for quirk in known.values():
        changes: dict[Change, list[Pair]] = {}
        for pair in pairs:
            held, holds = (_holds(quirk, side, kernels) for side in pair)
            if held or holds:
                changes.setdefault(CHANGES[held, holds], []).append(pair)
        for change, concerned in changes.items():
            before, seen = (_verified(quirk, [side.target for side in sides]) for sides in zip(*concerned, strict=True))
            names = tuple(pair.new.target.name for pair in concerned)
            yield QuirkChange(
                id=quirk.id, title=quirk.title, symptom=quirk.symptom, change=change, targets=names,
                verified=tuple(map(": ".join, seen.items())), verified_before=tuple(map(": ".join, before.items())),
                unprobed=() if change == "falls away" else tuple(name for name in names if name not in seen),
                note=_note(quirk, change, concerned[0].new.target),
            )  # fmt: skip


def _holds(quirk: Quirk, side: Side, kernels: Sequence[NamedKernel]) -> bool:
    if quirk.id not in side.registry.quirks:
        return False
    if kernels:
        return any(quirk in quirks_of(one.problem, side.target, side.registry) for one in kernels)
    variants = side.registry.backends[side.target.backend].variants
    names = (*KERNEL_NAMES, *(variant.name for variant in variants if side.target.arch.name in variant.arches))
    concerned = any(quirk.concerns(name, side.target) for name in names)
    return concerned and quirk.in_range(side.target.toolchain)


def _verified(quirk: Quirk, where: list[Target]) -> dict[str, str]:
    """Return targets that were probed with their compiler, and the outcome without the work-around."""
    names, compiler = {target.name for target in where}, str(where[0].toolchain)
    return {s.target: s.off for s in quirk.verified if s.toolchain == compiler and s.target in names}


def _note(quirk: Quirk, change: Change, target: Target) -> str:
    if quirk.assumed(target.toolchain):
        return ASSUMED
    if quirk.newer_than_seen(target.toolchain):
        kept = "is left out" if change == "falls away" else "applies to be safe"
        return f"last seen on {quirk.evidence.last_seen}; {kept}"
    return ""


class ScheduleTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The launch or schedule that plans with the new compiler take, for one kernel on one target."""

    target: str
    kernel: str  # the core kernel's or the variant's name
    timed_with: str  # the compiler, NAME==VERSION; empty if it was not timed on the chip
    problems: tuple[str, ...]
    carries: bool  # that is the new compiler
    lost: bool  # plans with the old compiler took one that was timed with the old compiler


def schedule_timings(pairs: Sequence[Pair], problems: Sequence[NamedProblem], plans: Plans) -> Iterator[ScheduleTiming]:
    for pair in pairs:
        found: dict[tuple[str, str, bool], list[str]] = {}
        for named in problems:
            kernel, with_ = _timed_with(plans.of(named, pair.new), pair.new)
            if not kernel:
                continue
            before = _timed_with(plans.of(named, pair.old), pair.old)[1]
            lost = before == pair.old.compiler and with_ != pair.new.compiler
            found.setdefault((kernel, with_, lost), []).append(named.name)
        for (kernel, with_, lost), names in found.items():
            yield ScheduleTiming(
                target=pair.new.target.name, kernel=kernel, timed_with=with_, problems=tuple(names),
                carries=with_ == pair.new.compiler, lost=lost,
            )  # fmt: skip


def _timed_with(made: Plan | PortattnError, side: Side) -> tuple[str, str]:
    if isinstance(made, PortattnError):
        return "", ""
    variant = side.variant(made.path)
    if variant is not None:
        return (variant.name, variant.timed_with(made.problem)) if made.schedule else ("", "")
    if not made.kernel:
        return "", ""
    tuning = side.registry.tuning(side.target)
    entry = tuning.find(made.kernel, made.problem.features(), side.target.toolchain) if tuning else None
    return made.kernel, tuning.timed_with(entry) if tuning and entry else ""


def _grouped(found: Iterable[Any], *fields: str) -> dict[tuple[Any, ...], list[Any]]:
    """Group values by some of their fields, in the order of their first members."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for one in found:
        groups.setdefault(tuple(getattr(one, field) for field in fields), []).append(one)
    return groups


NO_PLAN = "no plan"
_OF_PATHS = ("path", "kernel", "why")


class PlanChange(msgspec.Struct, frozen=True, kw_only=True):
    problem: str
    targets: tuple[str, ...]
    before: str
    after: str
    differs: tuple[str, ...]


def plan_change(named: NamedProblem, pair: Pair, plans: Plans) -> PlanChange | None:
    was, is_ = (_told(plans.of(named, side)) for side in pair)
    if was["path"] != is_["path"]:  # another kernel's choices and launch are no differences of one
        was, is_ = ({name: told[name] for name in told if name in _OF_PATHS} for told in (was, is_))
    differs = tuple(
        f"{name}: {was.get(name)} -> {is_.get(name)}" for name in {**was, **is_} if was.get(name) != is_.get(name)
    )
    if not differs:
        return None
    before, after, where = str(was["path"]), str(is_["path"]), (pair.new.target.name,)
    return PlanChange(problem=named.name, targets=where, before=before, after=after, differs=differs)


def together(found: Iterable[PlanChange]) -> Iterator[PlanChange]:
    """Yield one change for all targets on which a problem's plan changes in the same way."""
    for same in _grouped(found, "problem", "differs").values():
        yield msgspec.structs.replace(same[0], targets=tuple(t for one in same for t in one.targets))


def _told(made: Plan | PortattnError) -> dict[str, Any]:
    if isinstance(made, PortattnError):
        return {"path": NO_PLAN, "why": str(made)}
    told: dict[str, Any] = {"path": made.path, "kernel": made.kernel or "none"}
    if made.lowering is not None and made.launch is not None:
        told |= msgspec.structs.asdict(made.lowering) | made.launch.values()
    elif made.rejected:
        told["why"] = made.rejected[0].reason
    return told | made.schedule | made.env


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """The result. plans: how many were compared."""

    before: str
    after: str
    targets: tuple[str, ...]
    entries: tuple[QuirkChange, ...]
    moved: tuple[PlanChange, ...]
    plans: int
    variants: tuple[VariantUpgrade, ...]
    schedules: tuple[ScheduleTiming, ...]


def compare(
    pairs: Sequence[Pair], subjects: Sequence[NamedProblem | NamedKernel], say: Callable[[str], None] = lambda _: None
) -> Upgrade:
    """Compare registries and plans."""
    plans, moved = Plans(), []
    problems = [one for one in subjects if isinstance(one, NamedProblem)]
    kernels = [one for one in subjects if isinstance(one, NamedKernel)]
    for named in problems:
        say(f"planning {named.name}")
        moved += [found for pair in pairs if (found := plan_change(named, pair, plans))]
    return Upgrade(
        before=pairs[0].old.compiler, after=pairs[0].new.compiler,
        targets=tuple(pair.new.target.name for pair in pairs), entries=tuple(entries(pairs, kernels)),
        moved=tuple(together(moved)), plans=len(problems) * len(pairs),
        variants=tuple(variant_upgrades(pairs, problems)), schedules=tuple(schedule_timings(pairs, problems, plans)),
    )  # fmt: skip
