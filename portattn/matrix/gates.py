"""Compiled code against the chip: what it may use, and the matrix instruction that it should have."""

from __future__ import annotations

import re

from portattn.core import CORES
from portattn.matrix.cells import Facts, Gate, KernelFacts
from portattn.planner import Plan
from portattn.registry import Registry
from portattn.target import Arch, Target

MATRIX_FACTS = ("wgmma", "tcgen05", "mma", "mfma", "wmma")  # keys of the worker's facts, see worker/resources.py


def check(plan: Plan, target: Target, kernels: tuple[KernelFacts, ...], registry: Registry) -> tuple[Gate, ...]:
    """Every gate of a core plan's compiled kernels, those that hold included."""
    tuning = registry.tuning(target)
    entry = tuning.find(plan.kernel, plan.problem.features()) if tuning else None
    timed = (
        tuning is not None
        and entry is not None
        and (tuning.provenance.measured and entry.timed)
        and tuning.provenance.toolchain == str(target.toolchain)
    )
    gates = [gate for kernel in kernels for gate in _limits(kernel, target.arch, timed)]
    main = next((k for k in kernels if k.function == CORES[plan.problem.op].function), None)
    if main is not None and wants_matrix(plan, target.arch):
        names = ", ".join(target.arch.matrix)
        gates.append(
            Gate(
                name="matrix instructions",
                function=main.function,
                value=matrix_count(main.facts, target.arch),
                limit=f"{target.arch.name} has {names}",
                passed=matrix_count(main.facts, target.arch) > 0,
            )
        )
    return tuple(gate if gate.passed else _explained(gate, plan, target, registry) for gate in gates)


def _limits(kernel: KernelFacts, arch: Arch, timed: bool) -> list[Gate]:
    """Local memory, registers and spills. Spills stand for time: a tile that was timed on the chip may have some."""
    facts, gates = kernel.facts, []
    used = int(facts.get("local_memory", 0))
    limit = f"{arch.name} has {arch.local_memory}"
    gates.append(_gate(f"bytes of {arch.local_memory_kind}", kernel, used, limit, used <= arch.local_memory))
    if arch.registers and "registers" in facts:
        used = int(facts["registers"])
        gates.append(_gate("registers", kernel, used, f"{arch.name} has {arch.registers}", used <= arch.registers))
    if "spills" in facts:
        used = int(facts["spills"])
        limit = "allowed: the tile was timed" if timed and used else "none allowed"
        gates.append(_gate("bytes spilled", kernel, used, limit, timed or used == 0))
    return gates


def _gate(name: str, kernel: KernelFacts, value: int, limit: str, passed: bool) -> Gate:
    return Gate(name=name, function=kernel.function, value=value, limit=limit, passed=passed)


def wants_matrix(plan: Plan, arch: Arch) -> bool:
    """Whether there are products, and a matrix instruction for them: exact fp32 ones have none on most chips."""
    if "dot_precision" not in CORES[plan.problem.op].choices:
        return False
    exact = plan.problem.dtype == "fp32" and plan.lowering is not None and plan.lowering.dot_precision == "ieee"
    return bool(arch.matrix) and not exact


def matrix_count(facts: Facts, arch: Arch) -> int:
    """Matrix instructions of the kinds that the arch names: `v_mfma_` is the fact `mfma`, `wgmma.mma_async` `wgmma`."""
    kinds = [key for key in MATRIX_FACTS if any(key in re.split(r"[._]", name) for name in arch.matrix)]
    return sum(int(facts.get(key, 0)) for key in kinds)


def _explained(gate: Gate, plan: Plan, target: Target, registry: Registry) -> Gate:
    """The gate with the quirk that explains it, if one does: it applies here, and its signature matches."""
    kernel = CORES[plan.problem.op]
    lowering, launch = plan.specialised
    programs = kernel.tiles(plan.problem, launch)
    applied = {quirk.id for quirk in plan.quirks}
    for quirk in registry.quirks.values():
        signature = quirk.evidence.signature
        if not signature or quirk.symptom not in ("slow", "resource-limit") or not re.search(signature, str(gate)):
            continue
        if quirk.id in applied or quirk.applies(kernel.name, plan.problem, target, lowering, launch, programs):
            return Gate(
                name=gate.name, function=gate.function, value=gate.value, limit=gate.limit, passed=False,
                explained_by=quirk.id,
            )  # fmt: skip
    return gate
