"""Compile a variant's kernels on a machine without the chip, and check them by gates like the core's."""

from __future__ import annotations

from typing import Any

from portattn.compile.ensure_compiled import compile_in
from portattn.launch import Signature, meta_call
from portattn.launch.kernelcall import signatures
from portattn.planning.backend import Variant
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.schema.tuning import TIMED_SPILLS
from portattn.testing.findings import Gate, KernelFacts, gate_of, matrix_count, resource_gates
from portattn.worker.client import Reply, Worker


class LaunchDescriptionError(Exception):
    """This Python's Triton cannot describe the launches of a variant; the text says why."""


def launches(variant: Variant, problem: Problem) -> list[Signature]:
    try:
        return signatures(variant, meta_call(problem))
    except (ImportError, AttributeError, TypeError) as error:
        text = f"this Python's Triton has not what {variant.name} is described by: {error}"
        raise LaunchDescriptionError(text) from None


def compile_variant(
    variant: Variant, made: Plan, target: Target, worker: Worker, seconds: float
) -> tuple[tuple[KernelFacts, ...], Reply | None, str]:
    """Compile a variant's launches; return facts, the first failure or None, its function. LaunchDescriptionError."""
    found: list[KernelFacts] = []
    variant = variant.for_toolchain(target.toolchain)
    for launch in launches(variant, made.problem):
        reply = compile_in(worker, launch, made, target, seconds, "full")
        if reply.outcome != "ok":
            return tuple(found), reply, launch.function
        found.append(KernelFacts(function=launch.function, facts=dict(reply.facts)))
    return tuple(found), None, ""


def check(variant: Variant, problem: Problem, target: Target, kernels: tuple[KernelFacts, ...]) -> tuple[Gate, ...]:
    """Return a variant's gates: a matrix instruction in one kernel, asynchronous products, spills as timed."""
    timed_with = variant.for_toolchain(target.toolchain).timed_with(problem)
    timed = timed_with == str(target.toolchain)
    most_spilled = _most_spilled(variant, problem, target, Registry.load()) if timed else 0
    other = "" if timed else timed_with
    gates = [gate for kernel in kernels for gate in resource_gates(kernel, target.arch, most_spilled, other)]
    for kernel in kernels:
        serialised = int(kernel.facts.get("serialized_wgmma", 0))
        gates.append(gate_of("products made to wait by ptxas", kernel, serialised, "none allowed", serialised == 0))
    if kernels and (instructions := target.arch.matrix):
        counts = [matrix_count(kernel.facts, target.arch) for kernel in kernels]
        most, limit = max(counts), f"{target.arch.name} has {', '.join(instructions)}"
        gates.append(gate_of("matrix instructions", kernels[counts.index(most)], most, limit, most > 0))
    return tuple(gates)


def _most_spilled(variant: Variant, problem: Problem, target: Target, registry: Registry) -> int:
    tuning = registry.tuning(target)
    entry = tuning.find(variant.name, problem.features(), target.toolchain, variant=True) if tuning else None
    return max(TIMED_SPILLS, tuning.most_spilled(entry, target.toolchain) if tuning else 0)


def broken(gates: tuple[Gate, ...]) -> list[str]:
    return [str(gate) for gate in gates if not gate.passed and not gate.explained_by and not gate.noted]


def fields(kernels: tuple[KernelFacts, ...], gates: tuple[Gate, ...]) -> dict[str, Any]:
    seen = {"kernels": kernels, "gates": gates}
    if found := broken(gates):
        return {"status": "FAIL", "level": "declared", "reason": "; ".join(found), **seen}
    # It compiles and fits; `compiles` also promises no spills.
    if noted := [str(gate) for gate in gates if not gate.passed and not gate.explained_by]:
        return {"status": "NOTE", "level": "declared", "reason": "; ".join(noted), **seen}
    return {"status": "PASS", "level": "compiles", "reason": "", **seen}
