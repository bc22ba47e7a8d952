"""What a variant's kernels are on a machine without the chip: compiled, and held to gates as the core's are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portattn.compile.ensure import compile_in
from portattn.launch import Signature, meta_call
from portattn.launch.described import signatures
from portattn.planning.backend import Variant
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Arch, Target
from portattn.testing.findings import Facts, Gate, KernelFacts
from portattn.testing.gates import gate_of, limits, matrix_count
from portattn.worker.client import Reply, Worker


class Undescribed(Exception):
    """This Python's Triton cannot say what the launches of a variant are; the text says why."""


def launches(variant: Variant, problem: Problem) -> list[Signature]:
    """What a compiler sees of the variant's launches for a problem. Raises Undescribed."""
    try:
        return signatures(variant, meta_call(problem))
    except (ImportError, AttributeError, TypeError) as error:
        raise Undescribed(f"this Python's Triton has not what {variant.name} is described by: {error}") from None


def compiled(
    variant: Variant, made: Plan, target: Target, worker: Worker, seconds: float
) -> tuple[tuple[KernelFacts, ...], Reply | None, str]:
    """Compile a variant's launches: (facts of each, the first answer that is a failure or None, its function).

    Raises Undescribed.
    """
    found: list[KernelFacts] = []
    for launch in launches(variant, made.problem):
        reply = compile_in(worker, launch, made, target, seconds, "full")
        if reply.outcome != "ok":
            return tuple(found), reply, launch.function
        found.append(KernelFacts(function=launch.function, facts=dict(reply.facts)))
    return tuple(found), None, ""


def check(variant: Variant, problem: Problem, target: Target, kernels: tuple[KernelFacts, ...]) -> tuple[Gate, ...]:
    """Every gate of a variant's compiled kernels, those that hold included.

    Its first kernel must have the chip's matrix instruction, and ptxas must have left it as asynchronous as it is
    written: that is what it is for.
    """
    timed = variant.timed(problem)
    gates = [gate for kernel in kernels for gate in limits(kernel, target.arch, timed, "")]
    for kernel in kernels:
        serialised = int(kernel.facts.get("serialized_wgmma", 0))
        gates.append(gate_of("products made to wait by ptxas", kernel, serialised, "none allowed", serialised == 0))
    if kernels and target.arch.matrix:
        gates.append(_matrix(kernels[0], kernels[0].facts, target.arch))
    return tuple(gates)


def _matrix(kernel: KernelFacts, facts: Facts, arch: Arch) -> Gate:
    count = matrix_count(facts, arch)
    return gate_of("matrix instructions", kernel, count, f"{arch.name} has {', '.join(arch.matrix)}", count > 0)


def fields(kernels: tuple[KernelFacts, ...], gates: tuple[Gate, ...]) -> Mapping[str, Any]:
    """Status and level of a cell by what compiled."""
    broken = "; ".join(str(gate) for gate in gates if not gate.passed)
    seen = {"kernels": kernels, "gates": gates}
    if broken:
        return {"status": "FAIL", "level": "declared", "reason": broken, **seen}
    return {"status": "PASS", "level": "compiles", "reason": "", **seen}
