"""What a cell says in a few words: the same in the terminal, on the page and on the site.

Nothing here says more than was seen. Numbers of a CPU are no chip's, and the interpreter's are the core kernel's alone.
"""

from __future__ import annotations

from portattn.planning.registry import Registry
from portattn.testing.findings import Numerics
from portattn.tools.matrix.cells import Cell
from portattn.tools.matrix.snapshot import said_label

REFERENCE = "reference"  # the kind of a cell that ran on a CPU: no level of a chip

LEVEL_MEANS = {
    "declared": "planned; nothing was compiled",
    REFERENCE: "reference numbers on the CPU that made the run: torch's, of no kernel for a chip",
    "compiles": "to machine code that fits the chip and does not spill",
    "lowering-checked": "the compiler's own lowering ran on a CPU and gave the right numbers",
    "emulated": "the machine code ran in a functional model of the chip, right numbers",
    "runs": "right numbers on the chip; where the cell names two, this chip's code ran on the newer one",
    "measured": "right numbers on the chip, and timed",
}
NOT_SEEN = {
    "declared": "any code and any number",
    REFERENCE: "any chip",
    "compiles": "any number of the compiled code: it did not run",
    "lowering-checked": "machine code, and the chip",
    "emulated": "the chip, its timing, and races",
    "runs": "its speed",
    "measured": "other chips, drivers and compilers",
}
STATUS_MEANS = {
    "NOTE": "looked at, nothing wrong, but no evidence for a level",
    "FAIL": "wrong numbers, or code that does not suit the chip",
    "ERROR": "the compiler refused",
    "CRASH": "the compiler's process died",
    "TIMEOUT": "the compiler did not answer in its time",
    "NOT_RUN": "its compiler is not here: nothing was compiled",
}
KINDS = (*LEVEL_MEANS, *STATUS_MEANS)  # in the order of a legend
_WORDS = {REFERENCE: "CPU reference", "NOTE": "note", "NOT_RUN": "not run"}


def kind(cell: Cell) -> str:
    """What colours a cell: its level when it passed, its status otherwise; numbers of a CPU are a kind of their own."""
    if cell.status != "PASS":
        return cell.status
    return REFERENCE if said_label(cell) and not cell.label else cell.level


def kind_label(kind: str) -> str:
    """A kind as a cell and the legend write it."""
    return _WORDS.get(kind, kind)


def word(cell: Cell) -> str:
    """What a cell says in large."""
    return kind_label(kind(cell))


def dot(cell: Cell) -> Numerics | None:
    """Return the interpreter's numbers if the plan takes the core kernel: the interpreter runs the core alone.

    A cell of another path (a variant, a vendor's library) holds the core kernel's numbers beside it.
    """
    return cell.interpreter if cell.plan is None or cell.plan.core_taken else None


def brief(cell: Cell) -> str:
    """What a cell says in small: the path where it is not the kernel's, or the main figures of its largest kernel."""
    if cell.plan is None:
        return ""
    if kind(cell) == REFERENCE:
        return f"{cell.plan.path}, no chip"
    if not cell.plan.core_taken:
        return cell.plan.path
    broken = [gate for gate in cell.gates if not gate.passed and not gate.explained_by]
    if broken:
        return f"{broken[0].value} {broken[0].name}".replace("bytes", "B")
    if cell.red or not cell.kernels:
        return cell.stage
    if cell.label:  # `runs`, and not on this very chip: that must be seen without pressing the cell
        return cell.label
    facts = max(cell.kernels, key=lambda kernel: int(kernel.facts.get("registers", 0))).facts
    parts = []
    if "registers" in facts:
        parts.append(f"{facts['registers']} regs")
    if "scratchpad_bytes" in facts:
        parts.append(f"{int(facts['scratchpad_bytes']) / 1024:.0f} K")
    if "linalg_lines" in facts:
        parts.append("linalg")
    if any("deaths" in kernel.facts for kernel in cell.kernels):
        parts.append("compiler died once")
    return " · ".join(parts)


def title(backend: str) -> str:
    """A backend as people call it, also where its package is not installed here."""
    known = Registry.load().backends.get(backend)
    return (known.title if known else "") or backend
