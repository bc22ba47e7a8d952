"""Schedules of the Gluon variants, and the compilers that take them: community Triton from 3.6 on (quirk cuda-0016).

Schedules are entries of tuning/sm_90.toml; the first match counts, so an entry for a range stands before general ones.
Releases outside verified.toml are tried: if a compile or a canary fails, the core runs, with an Incident."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portattn.schema.toolchain import Toolchain

if TYPE_CHECKING:
    from portattn.schema.problem import Problem
    from portattn.schema.tuning import Tuning

NEEDS = "Triton 3.6 or newer"
# The compiler of schedules that no entry of tuning/sm_90.toml holds, and the default release of a variant's entries
# (Variant.for_toolchain).
TIMED_WITH = Toolchain.parse("triton==3.6.0")


def described_by(toolchain: Toolchain) -> bool:
    """Return whether a variant's launches can be described and so compiled with this compiler."""
    return toolchain.within("triton", ">=3.6") is True


def foreign(toolchain: Toolchain) -> bool:
    """Return whether this is another compiler than community Triton; its Gluon is unknown."""
    return toolchain.distribution != "triton"


def tuning() -> Tuning:
    """Return the registry's copy of the file: parsing it once more took 7 ms of a process's first call."""
    from portattn.planning.registry import Registry  # which imports the backends

    return Registry.load().tunings["cuda"]["sm_90"]


def find_schedule(variant: str, problem: Problem, toolchain: Toolchain) -> tuple[dict[str, Any], str] | None:
    """Return a variant's first matching flags and the compiler (NAME==VERSION, or "") that they were timed with."""
    entry = tuning().find(variant, problem.features(), toolchain, variant=True)
    return None if entry is None else (dict(entry.flags), tuning().timed_with(entry))
