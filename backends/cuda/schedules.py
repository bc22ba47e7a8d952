"""Schedules of the Gluon variants: entries of tuning/sm_90.toml, each for all releases of Triton or a range of them.

The first entry that holds is taken. One for a range, `toolchain = { triton = ">=3.8" }`, stands in front of those for
all, and says in a provenance of its own which release it was timed with. Where the release that a plan is for is
another one, the plan says so.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portattn.planning.data_files import load_tuning
from portattn.schema.tuning import Tuning

if TYPE_CHECKING:
    from portattn.schema.problem import Problem
    from portattn.schema.toolchain import Toolchain

FILE = Path(__file__).parent / "tuning" / "sm_90.toml"


@functools.cache
def tuning() -> Tuning:
    """The file. Raises DataError (file, line) where it is damaged."""
    return load_tuning(FILE, "cuda")


def scheduled(variant: str, problem: Problem, toolchain: Toolchain) -> tuple[dict[str, Any], str] | None:
    """The flags of the first entry of a variant that holds, and the compiler, NAME==VERSION, that they were timed with
    (empty where nobody has); None where no entry holds."""
    entry = tuning().find(variant, problem.features(), toolchain, variant=True)
    return None if entry is None else (dict(entry.flags), tuning().timed_with(entry))
