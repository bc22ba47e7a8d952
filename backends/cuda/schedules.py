"""Schedules of the Gluon variants: entries of tuning/sm_90.toml, each for all releases of Triton or a range of them.

The first entry that holds is taken. An entry for a range, `toolchain = { triton = ">=3.8" }`, stands in front of the
entries for all releases, and its own provenance names the release that it was timed with. A plan for another release
says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portattn.schema.problem import Problem
    from portattn.schema.toolchain import Toolchain
    from portattn.schema.tuning import Tuning


def tuning() -> Tuning:
    """Return the registry's copy of the file: parsing it once more took 7 ms of a process's first call."""
    from portattn.planning.registry import Registry  # which imports the backends

    return Registry.load().tunings["cuda"]["sm_90"]


def find_schedule(variant: str, problem: Problem, toolchain: Toolchain) -> tuple[dict[str, Any], str] | None:
    """The flags of the first entry of a variant that holds, and the compiler, NAME==VERSION, that they were timed with
    (empty where nobody has); None where no entry holds."""
    entry = tuning().find(variant, problem.features(), toolchain, variant=True)
    return None if entry is None else (dict(entry.flags), tuning().timed_with(entry))
