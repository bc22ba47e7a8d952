"""Findings about compiled kernels, also of variants: facts, gates, lints, and numbers compared with the oracle."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Any, Literal

import msgspec

from portattn.compile.ensure_compiled import compile_in
from portattn.launch import Signature, meta_call
from portattn.launch.kernelcall import signatures
from portattn.planning.backend import Variant
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.quirk import Symptom
from portattn.schema.target import Arch, Target
from portattn.schema.tuning import TIMED_SPILLS
from portattn.worker.client import Reply, Worker

Facts = dict[str, int | str | float]
LintName = Literal[
    "scalar-loop", "row-loop", "whole-tile-load", "masked-store", "leftover", "uninitialised-reduction",
    "programs", "unified-buffer",
]  # fmt: skip
# Of these nothing but a quirk that explains it makes a kernel acceptable.
LIMITS: frozenset[str] = frozenset({"masked-store", "leftover", "uninitialised-reduction", "programs"})


class KernelFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One compiled kernel: registers, spills and scratchpad (bytes), matrix instructions by name …"""

    function: str
    facts: Facts


class Gate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure against its limit; red if it fails unexplained."""

    name: str
    function: str
    value: int
    limit: str
    passed: bool
    explained_by: str = ""
    noted: bool = False  # a failure is no fault: the tile, chosen with another compiler, costs time here

    def __str__(self) -> str:
        return f"{self.function}: {self.value} {self.name}, {self.limit}"


class Numerics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run on a small problem, compared with the float64 oracle; errors are the largest absolute ones."""

    outcome: Literal["pass", "fail", "error", "crash", "hang", "not_run"]
    where: str
    problem: Problem | None = None
    error: float | None = None
    budget: float | None = None
    lse_error: float | None = None
    lse_budget: float | None = None
    microseconds: float | None = None  # a call's device time, if it was timed
    cycles: int | None = None  # of another package's kernel in a model of the chip (testing/bound.py)
    reason: str = ""


class Lint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lint that fired on one kernel; `limit` is the chip's, for "programs" and "unified-buffer" alone."""

    name: LintName
    function: str
    value: int
    message: str
    limit: int = 0
    explained_by: str = ""

    def __str__(self) -> str:
        return f"{self.function}: {self.name}: {self.message}"

    @property
    def red(self) -> bool:
        return self.name in LIMITS and not self.explained_by


def numerics(reply: Reply, where: str, problem: Problem) -> Numerics:
    if reply.outcome != "ok":
        cause = next((line.strip() for line in reply.message.splitlines() if line.strip()), "no message")
        return Numerics(
            outcome=reply.outcome, where=where, problem=problem, reason=f"{reply.outcome}: {reply.kind}: {cause}"[:500]
        )
    facts = {name: float(value) for name, value in reply.facts.items()}
    reasons = []
    if facts["wrong"]:
        reasons.append(f"{facts['wrong']:.0f} elements are NaN or infinite where they must not be, or the reverse")
    for name, error, budget in (("out", "error", "budget"), ("LSE", "lse_error", "lse_budget")):
        if facts.get(error, 0.0) > facts.get(budget, math.inf):
            reasons.append(f"{name}'s error {facts[error]:.3g} is over its budget {facts[budget]:.3g}")
    return Numerics(
        outcome="fail" if reasons else "pass",
        where=where,
        problem=problem,
        error=facts["error"],
        budget=facts["budget"],
        lse_error=facts.get("lse_error"),
        lse_budget=facts.get("lse_budget"),
        microseconds=facts.get("microseconds"),
        reason="; ".join(reasons),
    )


def figure(numerics: Numerics) -> str:
    if numerics.outcome == "not_run":
        return f"not run: {numerics.reason}"
    if numerics.error is None or numerics.budget is None:
        return f"FAIL: {numerics.reason}"
    parts = [f"max error {numerics.error:.2e} of {numerics.budget:.2e} allowed"]
    if numerics.lse_error is not None:
        parts.append(f"LSE {numerics.lse_error:.2e} of {numerics.lse_budget:.2e}")
    if numerics.microseconds is not None:
        parts.append(f"{numerics.microseconds:.1f} µs")
    parts += [f"{numerics.cycles} cycles"] if numerics.cycles else []
    return ("" if numerics.outcome == "pass" else "FAIL: ") + ", ".join(parts)


# A multiprocessor's registers are in so many parts, each of which holds whole warps. Source: NVIDIA's occupancy
# calculator, whose number of warps by registers is rounded down to multiples of four (compute capability 5.0 and on).
PARTS = 4


def programs_a_core(facts: Facts, arch: Arch) -> int | None:
    """Return how many programs of this code one compute unit has room for; None if unknown."""
    warps = int(facts.get("num_warps", 4))
    if not arch.core_threads or "registers" not in facts:
        return None
    unit, reserved = arch.register_unit, arch.reserved_memory
    a_warp = -(-int(facts["registers"]) * arch.warp_size // unit) * unit
    by_registers = PARTS * (arch.core_registers // PARTS // a_warp) // warps if a_warp else arch.core_registers
    by_memory = (arch.scratchpad_bytes + reserved) // (int(facts.get("scratchpad_bytes", 0)) + reserved)
    by_threads = arch.core_threads // (warps * arch.warp_size)
    return min(by_registers, by_memory, by_threads)


MATRIX_FACTS = ("wgmma", "tcgen05", "mma", "mfma", "wmma")  # keys of the worker's facts, see worker/compilers.py


def check_gates(plan: Plan, target: Target, kernels: tuple[KernelFacts, ...], registry: Registry) -> tuple[Gate, ...]:
    tuning = registry.tuning(target)
    entry = tuning.find(plan.kernel, plan.problem.features(), target.toolchain) if tuning else None
    most_spilled = tuning.most_spilled(entry, target.toolchain) if tuning else 0
    source = tuning.source(entry) if tuning and entry else None
    chosen = source.toolchain if source else str(target.toolchain)
    other = "" if chosen == str(target.toolchain) else chosen
    gates = [gate for kernel in kernels for gate in resource_gates(kernel, target.arch, most_spilled, other)]
    for kernel in (k for k in kernels if k.function in CORES[plan.problem.op].functions):
        if wants_matrix(plan, target.arch):
            limit = f"{target.arch.name} has {', '.join(target.arch.matrix)}"
            count = matrix_count(kernel.facts, target.arch)
            gates.append(gate_of("matrix instructions", kernel, count, limit, count > 0))
    return tuple(gate if gate.passed else _explained(gate, plan, target, registry) for gate in gates)


def resource_gates(kernel: KernelFacts, arch: Arch, most_spilled: int, other: str) -> list[Gate]:
    """Return the gates of local memory, registers and spills, of which a tile timed on the chip may have some."""
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
    """Return whether the plan has products and the chip a matrix instruction for them; few have one for exact fp32."""
    if "dot_precision" not in CORES[plan.problem.op].choices:
        return False
    exact = plan.problem.dtype == "fp32" and plan.lowering is not None and plan.lowering.dot_precision == "ieee"
    return bool(arch.matrix) and not exact


def matrix_count(facts: Facts, arch: Arch) -> int:
    """Count matrix instructions of the arch's kinds: `v_mfma_` is the fact `mfma`, `wgmma.mma_async` is `wgmma`."""
    kinds = [key for key in MATRIX_FACTS if any(key in re.split(r"[._]", name) for name in arch.matrix)]
    return sum(int(facts.get(key, 0)) for key in kinds)


def _explained(gate: Gate, plan: Plan, target: Target, registry: Registry) -> Gate:
    cause = _cause(str(gate), ("slow", "resource-limit"), plan, target, registry)
    return msgspec.structs.replace(gate, explained_by=cause)


def explain_lints(lints: Iterable[Lint], plan: Plan, target: Target, registry: Registry) -> tuple[Lint, ...]:
    symptoms: tuple[Symptom, ...] = ("slow", "resource-limit", "wrong-result")
    return tuple(
        msgspec.structs.replace(lint, explained_by=_cause(str(lint), symptoms, plan, target, registry))
        for lint in lints
    )


def _cause(text: str, symptoms: Collection[Symptom], plan: Plan, target: Target, registry: Registry) -> str:
    """Return the id of the quirk that applies here and whose signature matches a finding, or an empty text."""
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


# Compile a variant's kernels on a machine without the chip, and check them by gates like the core's.


class LaunchDescriptionError(Exception):
    """This Python's Triton cannot describe the launches of a variant; the text says why."""


def variant_launches(variant: Variant, problem: Problem) -> list[Signature]:
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
    for launch in variant_launches(variant, made.problem):
        reply = compile_in(worker, launch, made, target, seconds, "full")
        if reply.outcome != "ok":
            return tuple(found), reply, launch.function
        found.append(KernelFacts(function=launch.function, facts=dict(reply.facts)))
    return tuple(found), None, ""


def check_variant(
    variant: Variant, problem: Problem, target: Target, kernels: tuple[KernelFacts, ...]
) -> tuple[Gate, ...]:
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


def broken_gates(gates: tuple[Gate, ...]) -> list[str]:
    return [str(gate) for gate in gates if not gate.passed and not gate.explained_by and not gate.noted]


def gate_fields(kernels: tuple[KernelFacts, ...], gates: tuple[Gate, ...]) -> dict[str, Any]:
    seen = {"kernels": kernels, "gates": gates}
    if found := broken_gates(gates):
        return {"status": "FAIL", "level": "declared", "reason": "; ".join(found), **seen}
    # It compiles and fits; `compiles` also promises no spills.
    if noted := [str(gate) for gate in gates if not gate.passed and not gate.explained_by]:
        return {"status": "NOTE", "level": "declared", "reason": "; ".join(noted), **seen}
    return {"status": "PASS", "level": "compiles", "reason": "", **seen}
