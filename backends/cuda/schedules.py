"""Schedules of the Gluon variants: entries of tuning/sm_90.toml, each for all releases of Triton or a range of them.

The first entry that holds is taken. One for a range, `toolchain = { triton = ">=3.8" }`, stands in front of those for
all, and says in a provenance of its own which release it was timed with. Where the release that a plan is for is
another one, the plan says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portattn.schema.problem import Problem
    from portattn.schema.toolchain import Toolchain
    from portattn.schema.tuning import Tuning


def tuning() -> Tuning:
    """The file as portattn's registry has read it: to parse it once more took 7 ms of a process's first call."""
    from portattn.planning.registry import Registry  # which imports the backends

    return Registry.load().tunings["cuda"]["sm_90"]


def find_schedule(variant: str, problem: Problem, toolchain: Toolchain) -> tuple[dict[str, Any], str] | None:
    """The flags of the first entry of a variant that holds, and the compiler, NAME==VERSION, that they were timed with
    (empty where nobody has); None where no entry holds."""
    entry = tuning().find(variant, problem.features(), toolchain, variant=True)
    return None if entry is None else (dict(entry.flags), tuning().timed_with(entry))
