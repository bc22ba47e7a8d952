"""The paths that a plan may take on a target, in order: variants, the core kernel, the vendor's library, the reference.

Each is a Path, which the planner asks in turn without knowing what kind it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.planning import core_path, reference_takes, variant_path
from portattn.planning.backend import Backend, Variant, VendorPath
from portattn.planning.checks import Refused, undeclared
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema.outcome import CompileRecords
from portattn.schema.plan import Plan, Rejection
from portattn.schema.problem import Problem
from portattn.schema.target import Target

REFERENCE = "reference"
GROUPS = ("auto", "vendor", REFERENCE)  # values of `backend` that name no single accelerated path
INTERPRETER = "interpreter"  # the CPU's core path: planned only when it is asked for by name


@dataclass(frozen=True)
class Asked:
    """What is planned for, and with what knowledge: the arguments of planner.plan."""

    problem: Problem
    target: Target
    registry: Registry
    records: CompileRecords
    settings: Settings

    def plan(self, path: str, **fields: Any) -> Plan:
        """The plan that takes a path."""
        return Plan(
            problem=self.problem,
            target=self.target.name,
            toolchain=str(self.target.toolchain),
            requested=self.settings.backend,
            path=path,
            **fields,
        )


@dataclass(frozen=True)
class Path:
    """One way to run a problem.

    name    in plans, warnings and `backend=`
    plan    gives the plan that takes this path, or raises Refused with the reason
    extra   a later path covers everything that this one does: passing it over is no fall-back
    defers  says why a later path is better for a problem that this one can run; else empty
    """

    name: str
    plan: Callable[[Asked], Plan]
    extra: bool = False
    defers: Callable[[Problem], str] = lambda problem: ""


def _variant(variant: Variant) -> Path:
    def plan(asked: Asked) -> Plan:
        taken = variant_path.choose(variant, asked.problem, asked.target, asked.registry, asked.records, asked.settings)
        return asked.plan(variant.name, needs=variant.needs, **_fields(taken))

    return Path(variant.name, plan, extra=True, defers=variant.defers_to_core)


def _core(name: str) -> Path:
    def plan(asked: Asked) -> Plan:
        taken = core_path.choose(asked.problem, asked.target, asked.registry, asked.records, asked.settings)
        return asked.plan(name, **_fields(taken))

    return Path(name, plan)


def _fields(taken: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(taken, name) for name in taken.__struct_fields__}


def _vendor(library: VendorPath, extra: bool) -> Path:
    def plan(asked: Asked) -> Plan:
        no = library.rejects(asked.problem, asked.target)
        return _unless(no or undeclared(library.name, asked.problem, library.ops, library.takes), asked, library.name)

    return Path(library.name, plan, extra)


def _reference(asked: Asked) -> Plan:
    takes = reference_takes.TAKES[asked.problem.op]
    return _unless(undeclared(REFERENCE, asked.problem, CORES, takes), asked, REFERENCE)


def _unless(rejection: Rejection | None, asked: Asked, path: str) -> Plan:
    if rejection is not None:
        raise Refused(rejection)
    return asked.plan(path)


def candidates(asked: Asked) -> Iterator[Path]:
    """The paths that the caller's `backend` allows, in order. Raises ArgumentError for one that nobody knows."""
    backend, requested = asked.registry.backends[asked.target.backend], asked.settings.backend
    known = _names(backend)
    if requested not in (*known, "triton", INTERPRETER):
        raise ArgumentError(asked.problem.op, "backend", requested, f"{asked.target.backend} knows {', '.join(known)}")
    return _candidates(asked, backend, requested)


def _names(backend: Backend) -> tuple[str, ...]:
    own = [variant.name for variant in backend.variants]
    named = [name for name in (*own, backend.core_path, *(library.name for library in backend.vendor)) if name]
    return tuple(dict.fromkeys([*GROUPS, *named]))


def _candidates(asked: Asked, backend: Backend, requested: str) -> Iterator[Path]:
    automatic = requested == "auto"
    for variant in backend.variants:
        concerned = asked.problem.op in variant.ops and asked.target.arch.name in variant.arches
        if requested == variant.name or (automatic and concerned):
            yield _variant(variant)
    if backend.core_path and (requested == backend.core_path or (automatic and backend.core_path != INTERPRETER)):
        yield _core(backend.core_path)
    for library in backend.vendor:
        if automatic or requested in ("vendor", library.name):
            # Where no core kernel comes before it, the reference is what serves everything.
            yield _vendor(library, extra=backend.core_path == INTERPRETER)
    if automatic or requested == REFERENCE:
        yield Path(REFERENCE, _reference)
