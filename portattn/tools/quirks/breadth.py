"""How much a quirk takes away: whether it alone keeps a whole backend from its core kernels, with no end in sight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from packaging.version import Version

from portattn.errors import PathUnavailable
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.problem import Problem
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.tools.quirks import examples

TAKES = ("vendor", "reference")  # where a `path` effect leads that takes the core


def takes_whole(quirk: Quirk, registry: Registry, problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """(backend, newest release) of each backend whose core a quirk with an effect of TAKES takes from every arch and
    problem.

    Asked with the newest known release of the backend's compiler: what ends before it takes nothing from who is up to
    date, whatever its upper bound is, and `<4` is no bound while there is no 4.
    """
    alone = msgspec.structs.replace(registry, quirks={quirk.id: quirk})
    found = []
    for name, backend in registry.backends.items():
        if quirk.when.backend not in (None, name) or not backend.core_path:
            continue
        releases = examples.releases(backend.compiler)
        if not releases:
            continue
        newest = f"{backend.compiler}=={max(releases, key=Version)}"
        arches = [arch for arch in registry.arches[name].values() if not arch.refused]
        targets = [registry.target(f"{name}:{arch.name}", newest) for arch in arches]
        taken = (took for target in targets for took in _taken(quirk, target, alone, problems))
        if next(taken, False) and all(taken):  # nearly every entry leaves the first problem
            found.append((name, newest))
    return found


def _taken(quirk: Quirk, target: Target, alone: Registry, problems: Sequence[Problem]) -> Iterator[bool]:
    """For each problem that the core could run, whether the quirk takes it."""
    core = alone.backends[target.backend].core_path
    for problem in problems:
        try:
            made = plan(problem, target, alone)
        except PathUnavailable:  # gradients that no kernel computes
            continue
        took = any(no.quirk == quirk.id for no in made.rejected)
        if took or made.path == core:
            yield took
