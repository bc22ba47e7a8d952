"""Launches of the core and schedules of variants, by the compiler that they were timed with on the chip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from portattn.errors import PortattnError
from portattn.schema.plan import Plan
from portattn.tools.matrix.problems import NamedProblem
from portattn.tools.upgrade.toolchain_pair import Pair, Plans, Side


class ScheduleTiming(msgspec.Struct, frozen=True, kw_only=True):
    """What plans with the new compiler take of one kernel on one target.

    kernel      the core kernel's or the variant's name
    timed_with  the compiler, NAME==VERSION; empty if it was not timed on the chip
    carries     whether that is the new compiler
    lost        whether plans with the old compiler took one that was timed with that compiler
    """

    target: str
    kernel: str
    timed_with: str
    problems: tuple[str, ...]
    carries: bool
    lost: bool


def schedule_timings(pairs: Sequence[Pair], problems: Sequence[NamedProblem], plans: Plans) -> Iterator[ScheduleTiming]:
    """The launches and schedules of the plans with the new compiler, one for each kernel and state."""
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
                target=pair.new.target.name,
                kernel=kernel,
                timed_with=with_,
                problems=tuple(names),
                carries=with_ == pair.new.compiler,
                lost=lost,
            )


def _timed_with(made: Plan | PortattnError, side: Side) -> tuple[str, str]:
    """Return a plan's kernel and the compiler that its launch or schedule was timed with, or ("", "") without one."""
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
