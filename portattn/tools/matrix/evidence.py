"""The evidence of a cell, step by step: seen or not; a step of another path than the cell's is not seen."""

from __future__ import annotations

from typing import Literal

import msgspec

from portattn.testing.findings import Numerics
from portattn.testing.numerics import figure
from portattn.tools.matrix.cells import Cell
from portattn.tools.matrix.labels import REFERENCE, kind
from portattn.tools.matrix.snapshot import entry

Outcome = Literal["seen", "wrong", "not seen"]


class EvidenceStep(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of evidence. where: what ran or compiled it. said: the figures, or why it was not seen."""

    name: str
    outcome: Outcome
    where: str = ""
    said: str = ""


def steps(cell: Cell) -> tuple[EvidenceStep, ...]:
    """Every kind of evidence that a cell can have, the weakest first."""
    on_cpu = kind(cell) == REFERENCE
    found = [_compiled(cell), _numbers("interpreter", cell.interpreter, cell, "the kernel's Python as numpy, on a CPU")]
    found.append(_numbers("lowering", cell.lowered, cell, "the compiler's own lowering, on a CPU"))
    found.append(_numbers("emulated", cell.emulated, cell, "the machine code, in a model of the chip"))
    if cell.older is not None:
        found.append(_numbers("on a newer chip", cell.older, cell, ""))
    if on_cpu:
        found.append(_step("on a CPU", cell.native, "reference numbers: no chip, and no kernel for one"))
    found.append(_step("on the chip", None if on_cpu else cell.native, "this path's numbers, on the device itself"))
    timed = cell.status == "PASS" and cell.level == "measured"
    found.append(EvidenceStep(name="timed on the chip", outcome="seen" if timed else "not seen"))
    return tuple(found)


def _compiled(cell: Cell) -> EvidenceStep:
    if not cell.kernels:
        return EvidenceStep(
            name="compiled", outcome="wrong" if cell.red and cell.stage else "not seen", said=cell.reason
        )
    functions = ", ".join(dict.fromkeys(kernel.function for kernel in cell.kernels))
    if cell.plan is not None and entry(cell).tier in ("vendor", "reference"):
        said = f"not of the path {cell.plan.path}; the core kernel beside it: {functions}"
        return EvidenceStep(name="compiled", outcome="not seen", said=said)
    broken = [str(gate) for gate in cell.gates if not gate.passed and not gate.explained_by and not gate.noted]
    wrong = broken or [str(lint) for lint in cell.lints if lint.red]
    if cell.red and cell.stage:
        wrong = [cell.reason]
    said = f"{functions}; {'; '.join(wrong)}" if wrong else functions
    return EvidenceStep(name="compiled", outcome="wrong" if wrong else "seen", where=cell.toolchain, said=said)


def _numbers(name: str, numbers: Numerics | None, cell: Cell, what: str) -> EvidenceStep:
    """Numbers of the core kernel, which are evidence only where that is the path."""
    if cell.plan is None or cell.plan.core_taken or numbers is None:
        return _step(name, numbers, what)
    core = f"the core kernel beside it: {figure(numbers)} ({numbers.where})"
    return EvidenceStep(name=name, outcome="not seen", said=f"not of the path {cell.plan.path}; {core}")


def _step(name: str, numbers: Numerics | None, what: str) -> EvidenceStep:
    if numbers is None:
        return EvidenceStep(name=name, outcome="not seen")
    if numbers.outcome == "not_run":
        return EvidenceStep(name=name, outcome="not seen", where=numbers.where, said=numbers.reason)
    said = "; ".join(filter(None, (figure(numbers), what)))
    return EvidenceStep(
        name=name, outcome="seen" if numbers.outcome == "pass" else "wrong", where=numbers.where, said=said
    )
