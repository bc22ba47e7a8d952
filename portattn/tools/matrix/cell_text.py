"""Words for a cell, its evidence, and an empty cell's reason and remedy: the same on every page.

A CPU's numbers are not a chip's, the interpreter runs the core kernel alone, and steps of other paths do not count."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Sequence
from typing import Literal

import msgspec

from portattn.errors import ArgumentError
from portattn.planning.core_path import seen_to_run
from portattn.planning.data_files import VerifiedRun
from portattn.planning.registry import Registry
from portattn.schema import toml_reader
from portattn.schema.target import Target
from portattn.testing.executor import executors
from portattn.testing.findings import Numerics, broken_gates, figure
from portattn.testing.kernel_cases import Subject
from portattn.tools import lab
from portattn.tools.matrix.cells import Cell, Run, cell_id, entry, has_chip, said_label
from portattn.tools.matrix.problems import SETS

SHORT = 60  # characters of an unknown reason
_PREFIX = "not compiled here: "
_RUN = "portattn matrix run"


class Empty(msgspec.Struct, frozen=True, kw_only=True):
    """The reason that cells are empty, and the command that fills them."""

    word: str  # the cell's large text
    short: str  # the reason in a few words
    toolchain: str = ""  # of the cells
    needs: str = ""  # a step that must come before and that the command cannot do
    op: str = ""  # the only op to run; empty for all
    of: tuple[str, ...] = ()  # the options that name another set of problems than the quick one
    resume: str = ""  # the command that resumes the interrupted run

    def command(self, targets: Sequence[str]) -> str:
        """Return the command that makes such cells of some targets; it makes the toolchain first if the lab can."""
        if self.resume:
            return self.resume
        words = [*_RUN.split(), *self.of, "--targets", ",".join(targets)]
        if any(map(has_chip, targets)):  # nothing compiles for a CPU
            words += ["--toolchain", self.toolchain]
            words += ["--create"] if self.toolchain.partition("==")[0] in lab.distributions() else []
        return shlex.join([*words, *(["--ops", self.op] if self.op else [])])


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    why: Empty
    command: str
    targets: tuple[str, ...]
    cells: int


def of_cell(cell: Cell, run: Run) -> Empty:
    toolchain, needs = cell.toolchain, ""
    if "lab environment is broken" in cell.reason:
        short = f"the lab's {toolchain} is broken"
    elif "lab environment is" in cell.reason:
        short = f"{toolchain} is not in the lab"
    elif "this Python has" in cell.reason:
        short, needs = f"no {toolchain} here", f"install {toolchain}"
    else:
        first = re.split(r"[;:\n]", cell.reason.removeprefix(_PREFIX))[0].strip()
        short = (first if len(first) <= SHORT else f"{first[: SHORT - 1]}…") or "nothing to look with"
        if "this Python's Triton" in cell.reason:
            needs = f"a Python that has {toolchain}"
    return Empty(word="not run", short=short, toolchain=toolchain, needs=needs, of=_set_of(run))


def of_place(run: Run, problem: Subject, target: str, toolchain: str) -> Empty:
    if cell_id(problem, target, toolchain) not in run.cells:
        return Empty(word="not asked", short="not in this run", toolchain=toolchain, op=problem.op, of=_set_of(run))
    if run.command.startswith(_RUN):
        return _interrupted(run)
    return Empty(word="not made", short="run interrupted", toolchain=toolchain, op=problem.op, of=_set_of(run))


def gaps(run: Run, cells: Sequence[Cell]) -> list[Gap]:
    found: dict[Empty, list[str]] = {}
    for cell in cells:
        if cell.status == "NOT_RUN":
            found.setdefault(of_cell(cell, run), []).append(cell.target)
    open_places = places(cells)
    for place in open_places:
        found.setdefault(of_place(run, *place), []).append(place[1])
    known = {cell.id for cell in cells} | {cell_id(*place) for place in open_places}
    if nowhere := len(set(run.cells) - known):  # of rows or columns of which no cell was made
        found.setdefault(_interrupted(run), []).extend([""] * nowhere)
    once = {why: tuple(dict.fromkeys(filter(None, targets))) for why, targets in found.items()}
    return [Gap(why=w, command=w.command(once[w]), targets=once[w], cells=len(found[w])) for w in found]


def places(cells: Sequence[Cell]) -> list[tuple[Subject, str, str]]:
    columns = dict.fromkeys((cell.target, cell.toolchain) for cell in cells)
    rows: dict[tuple[str, str], Subject] = {}
    for cell in cells:
        rows.setdefault((cell.op, cell.name), cell.subject)
    there = {(cell.op, cell.name, cell.target, cell.toolchain) for cell in cells}
    return [(problem, *column) for row, problem in rows.items() for column in columns if (*row, *column) not in there]


def _interrupted(run: Run) -> Empty:
    """Return the reason of an interrupted run; a merged one cannot be resumed here: its parts have their folders."""
    command = " ".join(part for part in run.command.split(" ") if part != "--resume")
    if not command.startswith(_RUN):
        return Empty(word="not made", short="run interrupted", needs="finish the interrupted run", resume=command)
    return Empty(word="not made", short="run interrupted", resume=f"{command} --resume")


def _set_of(run: Run) -> tuple[str, ...]:
    if run.problems not in SETS and ", " not in run.problems:
        words, option = shlex.split(run.command), f"--{run.problems}"
        return (option, words[words.index(option) + 1] if option in words[:-1] else "FILE")
    return ("--full",) if "full" in run.problems.split(", ") else ()


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
    "declared": "any code and any number", REFERENCE: "any chip",
    "compiles": "any number of the compiled code: it did not run", "lowering-checked": "machine code, and the chip",
    "emulated": "the chip, its timing, and races", "runs": "its speed",
    "measured": "other chips, drivers and compilers",
}  # fmt: skip
STATUS_MEANS = {
    "NOTE": "looked at, nothing wrong, but no evidence for a level",
    "FAIL": "wrong numbers, or code that does not suit the chip", "ERROR": "the compiler refused",
    "CRASH": "the compiler's process died", "TIMEOUT": "the compiler did not answer in its time",
    "NOT_RUN": "its compiler is not here: nothing was compiled",
}  # fmt: skip
KINDS = (*LEVEL_MEANS, *STATUS_MEANS)  # in the order of a legend
_WORDS = {REFERENCE: "CPU reference", "NOTE": "note", "NOT_RUN": "not run"}


def kind(cell: Cell) -> str:
    """Return a cell's kind, for its colour: its level if it passed, else its status; a CPU's numbers have their own."""
    if cell.status != "PASS":
        return cell.status
    return REFERENCE if said_label(cell) and not cell.label else cell.level


def kind_label(kind: str) -> str:
    return _WORDS.get(kind, kind)


def word(cell: Cell) -> str:
    return kind_label(kind(cell))


def dot(cell: Cell) -> Numerics | None:
    """Return the interpreter's numbers if the plan takes the core kernel, the only one that it runs."""
    return cell.interpreter if cell.plan is None or cell.plan.core_taken else None


def brief(cell: Cell) -> str:
    """Return a cell's small text: another path than the core's, or the main figures of its largest kernel."""
    if cell.plan is None and cell.case is None:
        return ""
    if cell.plan is not None and kind(cell) == REFERENCE:
        return f"{cell.plan.path}, no chip"
    if cell.plan is not None and not cell.plan.core_taken:
        return cell.plan.path
    for gate in cell.gates:
        if not gate.passed and not gate.explained_by:
            return f"{gate.value} {gate.name}".replace("bytes", "B")
    if cell.red or not cell.kernels:
        return cell.stage
    if cell.label:  # `runs`, and not on this very chip: that must be seen without pressing the cell
        return cell.label
    facts = max(cell.kernels, key=lambda kernel: int(kernel.facts.get("registers", 0))).facts
    parts = (
        f"{facts['registers']} regs" if "registers" in facts else "",
        f"{int(facts['scratchpad_bytes']) / 1024:.0f} K" if "scratchpad_bytes" in facts else "",
        "linalg" if "linalg_lines" in facts else "",
        "compiler died once" if any("deaths" in kernel.facts for kernel in cell.kernels) else "",
    )
    return " · ".join(filter(None, parts))


def title(backend: str) -> str:
    known = Registry.load().backends.get(backend)
    return (known.title if known else "") or backend


def on_hardware(cell: Cell) -> VerifiedRun | None:
    """Return the hardware run (verified.toml) of portattn's own kernels; None for a red cell or another path."""
    target = None if cell.red or entry(cell).tier not in ("variant", "core") else _target(cell.target, cell.toolchain)
    return seen_to_run(target, problem=cell.problem) if target is not None and cell.problem is not None else None


class RecordedEvidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of a backend's evidence.toml: what tests without the chip show of a path. needs_grad: None is both."""

    path: str
    ops: tuple[str, ...]
    evidence: str
    needs_grad: bool | None = None


@functools.lru_cache(maxsize=16)
def recorded_evidence(backend: str) -> tuple[RecordedEvidence, ...]:
    known = Registry.load().backends.get(backend)
    path = known.folder / "evidence.toml" if known else None
    if path is None or not path.exists():
        return ()
    data, text = toml_reader.read(path)
    return toml_reader.convert(data["row"], tuple[RecordedEvidence, ...], path, text, "row")


def witness(cell: Cell, run: Run) -> str:
    """Return the source of a cell's evidence: an author and the date, a machine, an executor, or recorded tests."""
    made = run.known.get(cell.origin)
    if made is not None and made.author:
        return f"{made.author.partition(' <')[0]}, {made.date:%Y-%m-%d}"
    empty = cell.plan is None and cell.case is None
    if empty or cell.red or cell.status == "NOT_RUN" or not has_chip(cell.target):
        return ""
    if cell.status == "PASS" and cell.level in ("runs", "measured"):
        return cell.label or (cell.native.where if cell.native else "")
    own = executors(cell.backend).values() if cell.backend in Registry.load().backends else ()
    found = [one.evidence for one in own if one.level == cell.level and getattr(cell, one.name) is not None]
    if cell.plan is not None and cell.problem is not None:
        rows = (row for row in recorded_evidence(cell.backend) if row.path == cell.plan.path)
        trains = (None, cell.problem.needs_grad)
        found += [row.evidence for row in rows if cell.op in row.ops and row.needs_grad in trains]
    return ", ".join(filter(None, found))


@functools.lru_cache(maxsize=256)
def _target(name: str, toolchain: str) -> Target | None:
    try:
        return Registry.load().target(name, toolchain)
    except ArgumentError:  # results may be another portattn's, with chips and compilers that this one does not know
        return None


Outcome = Literal["seen", "wrong", "not seen"]


class EvidenceStep(msgspec.Struct, frozen=True):
    """One kind of evidence. where: its executor or compiler; said: the figures, or why there are none."""

    name: str
    outcome: Outcome = "not seen"
    where: str = ""
    said: str = ""


def steps(cell: Cell) -> tuple[EvidenceStep, ...]:
    on_cpu = kind(cell) == REFERENCE
    found = [
        _compiled(cell),
        _numbers("interpreter", cell.interpreter, cell, "the kernel's Python as numpy, on a CPU"),
        _numbers("lowering", cell.lowered, cell, "the compiler's own lowering, on a CPU"),
        _numbers("emulated", cell.emulated, cell, "the machine code, in a model of the chip"),
    ]
    if cell.older is not None:
        found.append(_numbers("on a newer chip", cell.older, cell, ""))
    if on_cpu:
        found.append(_step("on a CPU", cell.native, "reference numbers: no chip, and no kernel for one"))
    found.append(_step("on the chip", None if on_cpu else cell.native, "this path's numbers, on the device itself"))
    timed = cell.status == "PASS" and cell.level == "measured"
    found.append(EvidenceStep("timed on the chip", "seen" if timed else "not seen"))
    if recorded := on_hardware(cell):
        said = f"{recorded.level}, {recorded.date}: {recorded.what}"
        found.append(EvidenceStep("recorded on hardware", "seen", recorded.toolchain, said))
    return tuple(found)


def _compiled(cell: Cell) -> EvidenceStep:
    failed = cell.red and bool(cell.stage)
    if not cell.kernels:
        return EvidenceStep("compiled", "wrong" if failed else "not seen", said=cell.reason)
    functions = ", ".join(dict.fromkeys(kernel.function for kernel in cell.kernels))
    if cell.plan is not None and entry(cell).tier in ("vendor", "reference"):
        said = f"not of the path {cell.plan.path}; the core kernel beside it: {functions}"
        return EvidenceStep("compiled", said=said)
    wrong = [cell.reason] if failed else broken_gates(cell.gates) or [str(lint) for lint in cell.lints if lint.red]
    said = f"{functions}; {'; '.join(wrong)}" if wrong else functions
    return EvidenceStep("compiled", "wrong" if wrong else "seen", cell.toolchain, said)


def _numbers(name: str, numbers: Numerics | None, cell: Cell, what: str) -> EvidenceStep:
    """Return the core kernel's numbers, which are evidence only if the path is the core."""
    if cell.plan is None or cell.plan.core_taken or numbers is None:
        return _step(name, numbers, what)
    core = f"the core kernel beside it: {figure(numbers)} ({numbers.where})"
    return EvidenceStep(name, said=f"not of the path {cell.plan.path}; {core}")


def _step(name: str, numbers: Numerics | None, what: str) -> EvidenceStep:
    if numbers is None:
        return EvidenceStep(name)
    if numbers.outcome == "not_run":
        return EvidenceStep(name, where=numbers.where, said=numbers.reason)
    said = "; ".join(filter(None, (figure(numbers), what)))
    return EvidenceStep(name, "seen" if numbers.outcome == "pass" else "wrong", numbers.where, said)
