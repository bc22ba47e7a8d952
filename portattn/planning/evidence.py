"""Whether the kernels are known to be right on a chip with a toolchain: what the backends' verified.toml say."""

from __future__ import annotations

import functools

from portattn.config import Settings
from portattn.planning.data_files import VerifiedRun, load_verified
from portattn.planning.registry import Registry
from portattn.schema.problem import Problem
from portattn.schema.target import Target

_seen = functools.lru_cache(maxsize=16)(load_verified)


def seen_to_run(target: Target, registry: Registry | None = None, problem: Problem | None = None) -> VerifiedRun | None:
    """The evidence that the kernels are right on this arch with this toolchain, of a problem if one is given; None
    where there is none."""
    backend = (registry or Registry.load()).backends[target.backend]
    toolchain = str(target.toolchain)
    found = (seen for seen in _seen(backend.folder) if target.arch.name in seen.arch and toolchain == seen.toolchain)
    return next((seen for seen in found if problem is None or seen.covers(problem)), None)


def canaries_wanted(
    target: Target, settings: Settings, registry: Registry | None = None, problem: Problem | None = None
) -> bool:
    """Whether a kernel family must have passed its canaries before it runs here, a problem if one is given."""
    return settings.canary == "always" or (settings.canary == "auto" and seen_to_run(target, registry, problem) is None)


def evidence_cautions(
    kernel: str, target: Target, settings: Settings, registry: Registry | None = None, problem: Problem | None = None
) -> tuple[str, ...]:
    """A caution for a plan, where the suite is not known to have passed with a kernel on such a chip with such a
    compiler, for such problems if one is given; and that canaries run although it has, where they were asked for."""
    if seen_to_run(target, registry, problem) is not None:
        return (f"canary='always': the canaries of {kernel} run before its first call",) * (settings.canary == "always")
    decides = "its canaries run before its first call, and decide whether it runs at all"
    if settings.canary == "never":
        decides = "canary='never', so that it runs without the canaries that would decide whether it may"
    of = "" if seen_to_run(target, registry) is None else ", for such problems"
    where = f"{target.arch.name} with {target.toolchain}"
    return (f"no complete run of its tests is known of {kernel} on {where}{of}: {decides}",)
