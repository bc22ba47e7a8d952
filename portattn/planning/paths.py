"""The paths that a plan may take on a target, in order: variants, the core kernel, the vendor's library, the reference.

Each is a Path, which the planner asks in turn without knowing what kind it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.planning import core_path, variant_path
from portattn.planning.backend import Backend, Variant, VendorPath
from portattn.planning.checks import PathRejected, undeclared_demand
from portattn.planning.evidence import evidence_cautions
from portattn.planning.gradients import INTERPRETER, backward_problem, own_path
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema.compile_record import CompileRecords
from portattn.schema.ops import ROWS
from portattn.schema.plan import Plan, Rejection
from portattn.schema.problem import Problem
from portattn.schema.target import Target

TAKES = {
    op: kernel.takes
    | (set() if ROWS[op].writes else {"needs_grad"})
    | ({"dropout"} if "dropout_p" in ROWS[op].values else set())
    for op, kernel in CORES.items()
}


REFERENCE = "reference"
GROUPS = ("auto", "vendor", REFERENCE)  # values of `backend` that name no single accelerated path


@dataclass(frozen=True)
class PlanRequest:
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
    plan: Callable[[PlanRequest], Plan]
    extra: bool = False
    defers: Callable[[Problem], str] = lambda problem: ""


def _variant(variant: Variant) -> Path:
    def plan(asked: PlanRequest) -> Plan:
        taken = variant_path.choose(variant, asked.problem, asked.target, asked.registry, asked.records, asked.settings)
        return asked.plan(variant.name, needs=variant.needs, **_trained(variant.name, asked, _fields(taken)))

    return Path(variant.name, plan, extra=True, defers=variant.defers_to_core)


def _core(name: str) -> Path:
    def plan(asked: PlanRequest) -> Plan:
        taken = core_path.choose(asked.problem, asked.target, asked.registry, asked.records, asked.settings)
        return asked.plan(name, **_trained(name, asked, _fields(taken)))

    return Path(name, plan)


def _trained(name: str, asked: PlanRequest, fields: dict[str, Any]) -> dict[str, Any]:
    """A plan's fields, with a note on what computes the gradients where they are asked for. Raises Refused where no
    kernel does: a path that torch differentiates must run then."""
    if not asked.problem.needs_grad:
        return fields
    backend = asked.registry.backends[asked.target.backend]
    requested = own_path(asked.settings.backend, backend.device_type) or "auto"
    settings = msgspec.structs.replace(asked.settings, backend=requested)
    gradients = dataclasses.replace(asked, problem=backward_problem(asked.problem), settings=settings)
    taken: Plan | None = None
    no = Rejection(path=name, reason="no kernel computes its gradients")
    for path in _own(gradients, backend, requested):
        try:
            made = path.plan(gradients)
        except PathRejected as refused:
            no = refused.rejection
            continue
        if requested != "auto" or not path.defers(gradients.problem):
            taken = made
            break
        taken = taken or made
    if taken is None:
        reason = f"gradients are asked for: {no.reason}"
        raise PathRejected(Rejection(path=name, reason=reason, hint=no.hint, quirk=no.quirk, incident=no.incident))
    kernel = taken.kernel or taken.path
    cautions = evidence_cautions(kernel, asked.target, asked.settings, asked.registry, gradients.problem)
    said = () if taken.path == INTERPRETER else cautions
    return {**fields, "notes": (*fields["notes"], *said, _gradients_by(taken.path))}


def _fields(taken: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(taken, name) for name in taken.__struct_fields__}


def _vendor(library: VendorPath, extra: bool) -> Path:
    def plan(asked: PlanRequest) -> Plan:
        no = library.rejects(asked.problem, asked.target)
        return _unless(
            no or undeclared_demand(library.name, asked.problem, library.ops, library.takes), asked, library.name
        )

    return Path(library.name, plan, extra)


def _reference(asked: PlanRequest) -> Plan:
    problem = asked.problem
    instead = ROWS[problem.op].trained_by
    if problem.needs_grad and instead and asked.settings.backend != REFERENCE:
        # Calls are refused before they are planned (validate/checks.py, refuse_gradients): this is of a Problem's plan.
        hint = f"torch.no_grad() for inference; to train, {instead}; or backend='reference'"
        raise PathRejected(Rejection(path=REFERENCE, reason=f"{problem.op} has no gradient", hint=hint))
    takes = TAKES[problem.op]
    return _unless(undeclared_demand(REFERENCE, problem, CORES, takes), asked, REFERENCE)


def _unless(rejection: Rejection | None, asked: PlanRequest, path: str) -> Plan:
    if rejection is not None:
        raise PathRejected(rejection)
    return asked.plan(path, notes=(_gradients_by(path),) if asked.problem.needs_grad else ())


def _gradients_by(path: str) -> str:
    """The note of a training call's plan: torch differentiates what runs on a vendor's path, and on the reference."""
    return f"gradients by {path}"


def candidates(asked: PlanRequest) -> Iterator[Path]:
    """The paths that the caller's `backend` allows, in order. Raises ArgumentError for one that nobody knows."""
    backend, requested = asked.registry.backends[asked.target.backend], asked.settings.backend
    known = _names(backend)
    if requested not in known_names(backend):
        raise ArgumentError(asked.problem.op, "backend", requested, f"{asked.target.backend} knows {', '.join(known)}")
    return _candidates(asked, backend, requested)


def known_names(backend: Backend) -> tuple[str, ...]:
    """What a call's `backend` may be on a backend's devices: its paths, and portattn's own kernels as they may be run
    elsewhere, which a plan refuses with the reason."""
    return tuple(dict.fromkeys([*_names(backend), "triton", INTERPRETER]))


def _names(backend: Backend) -> tuple[str, ...]:
    own = [variant.name for variant in backend.variants]
    named = [name for name in (*own, backend.core_path, *(library.name for library in backend.vendor)) if name]
    return tuple(dict.fromkeys([*GROUPS, *named]))


def _own(asked: PlanRequest, backend: Backend, requested: str) -> Iterator[Path]:
    """Portattn's own kernels: variants for the target's chip, and the core."""
    automatic = requested == "auto"
    for variant in backend.variants:
        concerned = asked.problem.op in variant.ops and asked.target.arch.name in variant.arches
        concerned = concerned and (not variant.formats or asked.problem.q_format in variant.formats)
        if requested == variant.name or (automatic and concerned):
            yield _variant(variant.for_toolchain(asked.target.toolchain))
    if backend.core_path and (requested == backend.core_path or (automatic and backend.core_path != INTERPRETER)):
        yield _core(backend.core_path)


def _candidates(asked: PlanRequest, backend: Backend, requested: str) -> Iterator[Path]:
    automatic = requested == "auto"
    yield from _own(asked, backend, requested)
    for library in backend.vendor:
        if automatic or requested in ("vendor", library.name):
            # Where no core kernel comes before it, the reference is what serves everything.
            yield _vendor(library, extra=backend.core_path == INTERPRETER)
    if automatic or requested == REFERENCE:
        yield Path(REFERENCE, _reference)
