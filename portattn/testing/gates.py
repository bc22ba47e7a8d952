"""Compiled code against the chip: what it may use, and the matrix instruction that it should have."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import msgspec

from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.quirk import Symptom
from portattn.schema.target import Arch, Target
from portattn.testing.findings import Facts, Gate, KernelFacts, Lint

MATRIX_FACTS = ("wgmma", "tcgen05", "mma", "mfma", "wmma")  # keys of the worker's facts, see worker/resources.py


def check(plan: Plan, target: Target, kernels: tuple[KernelFacts, ...], registry: Registry) -> tuple[Gate, ...]:
    """Every gate of a core plan's compiled kernels, those that hold included."""
    tuning = registry.tuning(target)
    entry = tuning.find(plan.kernel, plan.problem.features(), target.toolchain) if tuning else None
    most_spilled = tuning.most_spilled(entry, target.toolchain) if tuning else 0
    source = tuning.source(entry) if tuning and entry else None
    chosen = source.toolchain if source else str(target.toolchain)
    other = "" if chosen == str(target.toolchain) else chosen
    gates = [gate for kernel in kernels for gate in limits(kernel, target.arch, most_spilled, other)]
    for kernel in (k for k in kernels if k.function in CORES[plan.problem.op].functions):
        if wants_matrix(plan, target.arch):
            limit = f"{target.arch.name} has {', '.join(target.arch.matrix)}"
            count = matrix_count(kernel.facts, target.arch)
            gates.append(gate_of("matrix instructions", kernel, count, limit, count > 0))
    return tuple(gate if gate.passed else _explained(gate, plan, target, registry) for gate in gates)


def limits(kernel: KernelFacts, arch: Arch, most_spilled: int, other: str) -> list[Gate]:
    """Local memory, registers and spills. Spills stand for time: a tile that was timed on the chip may have some.

    most_spilled  bytes a thread; 0 where the tile was not timed with this compiler
    other  the compiler that the tile was chosen with, where it is another one: what spills with this one is noted
    """
    facts, gates = kernel.facts, []
    used = int(facts.get("scratchpad_bytes", 0))
    limit = f"{arch.name} has {arch.scratchpad_bytes}"
    gates.append(gate_of(f"bytes of {arch.scratchpad_kind}", kernel, used, limit, used <= arch.scratchpad_bytes))
    if arch.registers and "registers" in facts:
        used = int(facts["registers"])
        gates.append(gate_of("registers", kernel, used, f"{arch.name} has {arch.registers}", used <= arch.registers))
    if "spills" in facts:
        used = int(facts["spills"])
        limit = f"{most_spilled} allowed by the tuning entry" if most_spilled and used else "none allowed"
        limit += f"; the tile was chosen with {other}" if other and used and not most_spilled else ""
        gate = gate_of("bytes spilled", kernel, used, limit, used <= most_spilled)
        gates.append(msgspec.structs.replace(gate, noted=bool(other) and not gate.passed))
    return gates


def gate_of(name: str, kernel: KernelFacts, value: int, limit: str, passed: bool) -> Gate:
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
    """The gate with the quirk that explains it, if one does."""
    cause = _cause(str(gate), ("slow", "resource-limit"), plan, target, registry)
    return msgspec.structs.replace(gate, explained_by=cause)


def explain_lints(lints: Iterable[Lint], plan: Plan, target: Target, registry: Registry) -> tuple[Lint, ...]:
    """Lints with the quirks that explain them."""
    symptoms: tuple[Symptom, ...] = ("slow", "resource-limit", "wrong-result")
    return tuple(
        msgspec.structs.replace(lint, explained_by=_cause(str(lint), symptoms, plan, target, registry))
        for lint in lints
    )


def _cause(text: str, symptoms: Collection[Symptom], plan: Plan, target: Target, registry: Registry) -> str:
    """Id of the quirk that explains a finding: it applies here, and its signature matches. Empty where none does."""
    kernel = CORES[plan.problem.op]
    lowering, launch = plan.specialised
    programs = kernel.tiles(plan.problem, launch)
    applied = {quirk.id for quirk in plan.quirks}
    for quirk in registry.quirks.values():
        signature = quirk.evidence.signature
        if not signature or quirk.symptom not in symptoms or not re.search(signature, text):
            continue
        if quirk.id in applied or quirk.applies(kernel.name, plan.problem, target, lowering, launch, programs):
            return quirk.id
    return ""
