"""`portattn quirks upgrade`: what another compiler changes: entries that fall away, stay or newly apply, plans, and
the variants, schedules and figures that carry over.

Everything here is asked of the registry and the planner; no compiler is started. An entry that applies on the new
compiler and was never probed there is unverified: what a plan then does rests on a guess that is on the safe side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from portattn.errors import ArgumentError
from portattn.planning.registry import Registry
from portattn.schema.toolchain import Toolchain
from portattn.tools.matrix.problems import quick
from portattn.tools.upgrade.compare import Upgrade, compare
from portattn.tools.upgrade.compilers import parse_compiler
from portattn.tools.upgrade.toolchain_pair import Pair, Side

OP = "quirks upgrade"


def upgrade(
    before: str,
    after: str,
    registry: Registry,
    targets: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Upgrade:
    """Compare two compilers on targets: all that they compile for when none is named.

    Raises ArgumentError on a malformed toolchain, two compilers that have no target in common, and an unknown target.
    """
    old, new = (parse_compiler(OP, option, text) for option, text in (("--from", before), ("--to", after)))
    names = targets or tuple(_common(registry, old, new))
    if not names:
        raise ArgumentError(OP, "--to", after, f"must compile for a backend that {old} compiles for")
    sides = ((Side(registry.target(name, one), registry) for one in (old, new)) for name in names)
    return compare([Pair(*both) for both in sides], quick(), say)


def _common(registry: Registry, old: Toolchain, new: Toolchain) -> Iterator[str]:
    """Targets that both compile for, as far as portattn knows."""
    for target in registry.targets(old):
        compilers = registry.backends[target.backend].compilers
        if not compilers or {old.distribution, new.distribution} <= set(compilers):
            yield target.name
