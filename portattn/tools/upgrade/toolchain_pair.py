"""The two sides of an upgrade: a target under each compiler, with the registry that holds there, and its plans."""

from __future__ import annotations

from typing import NamedTuple

from portattn.config import Settings
from portattn.errors import PortattnError
from portattn.planning.backend import Variant
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.target import Target
from portattn.tools.matrix.problems import NamedProblem


class Side(NamedTuple):
    """A target with one of the compilers, and the registry that its plans are made by."""

    target: Target
    registry: Registry

    @property
    def compiler(self) -> str:
        return str(self.target.toolchain)

    def variant(self, path: str) -> Variant | None:
        """The variant whose path this is; None where it is another kind of path."""
        found = (one for one in self.registry.backends[self.target.backend].variants if one.name == path)
        variant = next(found, None)
        return None if variant is None else variant.for_toolchain(self.target.toolchain)


class Pair(NamedTuple):
    """One target on both sides."""

    old: Side
    new: Side


class Plans:
    """The plans of an upgrade, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str, str, str], Plan | PortattnError] = {}

    def of(self, named: NamedProblem, side: Side) -> Plan | PortattnError:
        """The plan of a problem on a side, or why there is none."""
        key = (id(side.registry), side.target.name, side.compiler, named.name)
        if key not in self._made:
            try:
                self._made[key] = plan(named.problem, side.target, side.registry, settings=Settings())
            except PortattnError as error:
                self._made[key] = error
        return self._made[key]
