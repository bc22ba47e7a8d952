"""Empty cells: why nothing was seen, in a few words, and the command that fills them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import msgspec

from portattn.schema.problem import Problem
from portattn.tools import lab
from portattn.tools.matrix.cells import Cell, Run, cell_id
from portattn.tools.matrix.snapshot import has_chip

SHORT = 60  # characters of an unknown reason
_PREFIX = "not compiled here: "
_RUN = "portattn matrix run"


class Empty(msgspec.Struct, frozen=True, kw_only=True):
    """The reason that cells are empty, and the command that fills them.

    word       the cell's large text
    short      the reason in a few words
    toolchain  of the cells
    needs      a step that must come before and that the command cannot do
    op         the only op to run; empty for all
    full       the cells are of the full set of problems
    resume     the command that resumes the interrupted run
    """

    word: str
    short: str
    toolchain: str = ""
    needs: str = ""
    op: str = ""
    full: bool = False
    resume: str = ""

    def command(self, targets: Sequence[str]) -> str:
        """Return the command that makes such cells of some targets; it makes the toolchain first if the lab can."""
        if self.resume:
            return self.resume
        words = [*_RUN.split(), *(["--full"] if self.full else []), "--targets", ",".join(targets)]
        if any(map(has_chip, targets)):  # nothing compiles for a CPU
            words += ["--toolchain", self.toolchain]
            words += ["--create"] if self.toolchain.partition("==")[0] in lab.distributions() else []
        return shlex.join([*words, *(["--ops", self.op] if self.op else [])])


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Empty cells of one reason, and the one command that fills them."""

    why: Empty
    command: str
    targets: tuple[str, ...]
    cells: int


def of_cell(cell: Cell, run: Run) -> Empty:
    """Why a cell with status NOT_RUN is empty."""
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
    return Empty(word="not run", short=short, toolchain=toolchain, needs=needs, full=_full(run))


def of_place(run: Run, problem: Problem, target: str, toolchain: str) -> Empty:
    """Why a place of the table has no cell: the run was interrupted, or not asked for it."""
    if cell_id(problem, target, toolchain) not in run.cells:
        return Empty(word="not asked", short="not in this run", toolchain=toolchain, op=problem.op, full=_full(run))
    if run.command.startswith(_RUN):
        return _interrupted(run)
    return Empty(word="not made", short="run interrupted", toolchain=toolchain, op=problem.op, full=_full(run))


def gaps(run: Run, cells: Sequence[Cell]) -> list[Gap]:
    """The empty cells of a run by their reasons, each with the command that fills them."""
    found: dict[Empty, list[str]] = {}
    for cell in cells:
        if cell.status == "NOT_RUN":
            found.setdefault(of_cell(cell, run), []).append(cell.target)
    open_places = places(cells)
    for problem, target, toolchain in open_places:
        found.setdefault(of_place(run, problem, target, toolchain), []).append(target)
    known = {cell.id for cell in cells} | {cell_id(*place) for place in open_places}
    if nowhere := len(set(run.cells) - known):  # of rows or columns of which no cell was made
        found.setdefault(_interrupted(run), []).extend([""] * nowhere)
    out = []
    for why, targets in found.items():
        once = tuple(dict.fromkeys(filter(None, targets)))
        out.append(Gap(why=why, command=why.command(once), targets=once, cells=len(targets)))
    return out


def places(cells: Sequence[Cell]) -> list[tuple[Problem, str, str]]:
    """Return the places of the table without a cell. The cells that there are make its rows and columns."""
    columns = dict.fromkeys((cell.target, cell.toolchain) for cell in cells)
    rows: dict[tuple[str, str], Problem] = {}
    for cell in cells:
        rows.setdefault((cell.problem.op, cell.name), cell.problem)
    there = {(cell.problem.op, cell.name, cell.target, cell.toolchain) for cell in cells}
    return [(problem, *column) for row, problem in rows.items() for column in columns if (*row, *column) not in there]


def _interrupted(run: Run) -> Empty:
    """A run that goes on makes them. A merged one has no command: its parts' are in their own folders."""
    command = " ".join(part for part in run.command.split(" ") if part != "--resume")
    if not command.startswith(_RUN):
        return Empty(word="not made", short="run interrupted", needs="finish the interrupted run", resume=command)
    return Empty(word="not made", short="run interrupted", resume=f"{command} --resume")


def _full(run: Run) -> bool:
    return "full" in run.problems.split(", ")
