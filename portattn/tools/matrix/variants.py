"""What a variant's kernels are on a machine without the chip: compiled, and held to gates as the core's are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portattn.compile.compile_check import compile_in
from portattn.launch import Signature, meta_call
from portattn.launch.described import signatures
from portattn.planning.backend import Variant
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Arch, Target
from portattn.schema.tuning import TIMED_SPILLS
from portattn.testing.findings import Facts, Gate, KernelFacts
from portattn.testing.gates import gate_of, limits, matrix_count
from portattn.worker.client import Reply, Worker


class LaunchDescriptionError(Exception):
    """This Python's Triton cannot say what the launches of a variant are; the text says why."""


def launches(variant: Variant, problem: Problem) -> list[Signature]:
    """What a compiler sees of the variant's launches for a problem. Raises LaunchDescriptionError."""
    try:
        return signatures(variant, meta_call(problem))
    except (ImportError, AttributeError, TypeError) as error:
        raise LaunchDescriptionError(
            f"this Python's Triton has not what {variant.name} is described by: {error}"
        ) from None


def compile_variant(
    variant: Variant, made: Plan, target: Target, worker: Worker, seconds: float
) -> tuple[tuple[KernelFacts, ...], Reply | None, str]:
    """Compile a variant's launches: (facts of each, the first answer that is a failure or None, its function).

    Raises LaunchDescriptionError.
    """
    found: list[KernelFacts] = []
    variant = variant.for_toolchain(target.toolchain)
    for launch in launches(variant, made.problem):
        reply = compile_in(worker, launch, made, target, seconds, "full")
        if reply.outcome != "ok":
            return tuple(found), reply, launch.function
        found.append(KernelFacts(function=launch.function, facts=dict(reply.facts)))
    return tuple(found), None, ""


def check(
    variant: Variant,
    problem: Problem,
    target: Target,
    kernels: tuple[KernelFacts, ...],
    registry: Registry | None = None,
) -> tuple[Gate, ...]:
    """Return every gate of a variant's compiled kernels, passed or not.

    One of its kernels must have the chip's matrix instruction (another may prepare its operands), and ptxas must have
    left them as asynchronous as their source: their purpose. A timed schedule may have some spills, which are in its
    time; with another compiler than it was timed with they are noted.
    """
    timed_with = variant.for_toolchain(target.toolchain).timed_with(problem)
    timed = timed_with == str(target.toolchain)
    most_spilled = _most_spilled(variant, problem, target, registry or Registry.load()) if timed else 0
    other = "" if timed else timed_with
    gates = [gate for kernel in kernels for gate in limits(kernel, target.arch, most_spilled, other)]
    for kernel in kernels:
        serialised = int(kernel.facts.get("serialized_wgmma", 0))
        gates.append(gate_of("products made to wait by ptxas", kernel, serialised, "none allowed", serialised == 0))
    if kernels and target.arch.matrix:
        most = max(kernels, key=lambda kernel: matrix_count(kernel.facts, target.arch))
        gates.append(_matrix(most, most.facts, target.arch))
    return tuple(gates)


def _most_spilled(variant: Variant, problem: Problem, target: Target, registry: Registry) -> int:
    """Bytes a thread that a schedule that was timed with the target's compiler may spill."""
    tuning = registry.tuning(target)
    entry = tuning.find(variant.name, problem.features(), target.toolchain, variant=True) if tuning else None
    return max(TIMED_SPILLS, tuning.most_spilled(entry, target.toolchain) if tuning else 0)


def broken(gates: tuple[Gate, ...]) -> list[str]:
    """The gates that do not hold, but for what is only noted."""
    return [str(gate) for gate in gates if not gate.passed and not gate.noted]


def _matrix(kernel: KernelFacts, facts: Facts, arch: Arch) -> Gate:
    count = matrix_count(facts, arch)
    return gate_of("matrix instructions", kernel, count, f"{arch.name} has {', '.join(arch.matrix)}", count > 0)


def fields(kernels: tuple[KernelFacts, ...], gates: tuple[Gate, ...]) -> Mapping[str, Any]:
    """Status and level of a cell by what compiled."""
    seen = {"kernels": kernels, "gates": gates}
    if found := broken(gates):
        return {"status": "FAIL", "level": "declared", "reason": "; ".join(found), **seen}
    if noted := [str(gate) for gate in gates if not gate.passed]:  # `compiles` also promises no spills
        return {"status": "NOTE", "level": "declared", "reason": "; ".join(noted), **seen}
    return {"status": "PASS", "level": "compiles", "reason": "", **seen}
