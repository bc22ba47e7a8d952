"""The static page: problems × targets, each cell with its level, path and footnoted quirks; one file."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from portattn.planning.registry import Registry
from portattn.schema.ops import ROWS
from portattn.schema.problem import Problem
from portattn.schema.quirk import LEVELS
from portattn.testing.numerics import figure
from portattn.tools.matrix.cells import Cell, Footnote, Run

LEVEL_MEANS = {
    "declared": "planned; nothing was compiled",
    "compiles": "to machine code that fits the chip and does not spill",
    "lowering-checked": "the compiler's own lowering ran on a CPU and gave the right numbers",
    "emulated": "the machine code ran in a functional model of the chip, right numbers",
    "runs": "right numbers on the chip; where the cell names two, this chip's code ran on the newer one",
    "measured": "right numbers on the chip, and timed",
}
STATUS_MEANS = {
    "NOTE": "looked at, nothing wrong, but no evidence for a level",
    "FAIL": "wrong numbers, or code that does not suit the chip",
    "ERROR": "the compiler refused",
    "CRASH": "the compiler's process died",
    "TIMEOUT": "the compiler did not answer in its time",
    "NOT_RUN": "what is needed to look is not here",
}
STATUS_WORDS = {"NOTE": "note", "NOT_RUN": "not run"}
_LINK = re.compile(r"https?://[^\s,;)]+")


def _title(backend: str) -> str:
    known = Registry.load().backends.get(backend)
    return (known.title if known else "") or backend


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """A target with a toolchain.

    short    the arch without its backend's name
    version  the toolchain's, where the target has several
    first    a new backend begins here
    """

    target: str
    toolchain: str
    backend: str
    arch: str
    short: str
    title: str
    version: str
    first: bool


def render(run: Run, cells: list[Cell]) -> str:
    """The page as HTML text: cells in the order of the run, whatever the order in which they were finished."""
    cells = sorted(cells, key=lambda cell: cell.index)
    columns = _columns(cells)
    ops: dict[str, dict[str, dict[tuple[str, str], Cell]]] = {}  # op -> problem's name -> (target, toolchain) -> cell
    for cell in cells:
        rows = ops.setdefault(cell.problem.op, {})
        rows.setdefault(cell.name, {})[cell.target, cell.toolchain] = cell
    numbers = _numbers(cells)
    counts = Counter(kind(cell) for cell in cells)
    order = [*LEVELS, *STATUS_MEANS]
    return _environment().get_template("report.html.jinja").render(
        run=run,
        cells=cells,
        columns=columns,
        groups=_groups(columns),
        ops=ops,
        titles={op: row.title for op, row in ROWS.items()},
        numbers=numbers,
        footnotes=[(number, *_used(quirk, cells)) for quirk, number in numbers.items()],
        legend=[(name, LEVEL_MEANS.get(name) or STATUS_MEANS[name], counts[name]) for name in order],
        levels=LEVELS,
        words=STATUS_WORDS,
        hosts={identity.id: f"{identity.host}, {identity.code()}" for identity in run.identities},
        total=len(cells),
        red=[cell for cell in cells if cell.red],
        targets=len({column.target for column in columns}),
        compilers=len({column.toolchain for column in columns}) if any(column.version for column in columns) else 1,
        backends={c.target: _title(c.backend) for c in columns},
    )  # fmt: skip


def kind(cell: Cell) -> str:
    """What colours a cell: its level when it passed, its status otherwise."""
    return cell.level if cell.status == "PASS" else cell.status


def word(cell: Cell) -> str:
    """What a cell says in large."""
    return cell.level if cell.status == "PASS" else STATUS_WORDS.get(cell.status, cell.status)


def brief(cell: Cell) -> str:
    """What a cell says in small: the path where it is not the kernel's, or the kernel's main figures."""
    if cell.plan is None:
        return ""
    if not cell.plan.core_taken:
        return cell.plan.path
    broken = [gate for gate in cell.gates if not gate.passed and not gate.explained_by]
    if broken:
        return f"{broken[0].value} {broken[0].name}".replace("bytes", "B")
    if cell.red or not cell.kernels:
        return cell.stage
    if cell.label:  # `runs`, and not on this very chip: that must be seen without pressing the cell
        return cell.label
    facts = cell.kernels[0].facts
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


def sizes(problem: Problem) -> list[str]:
    """A problem's shapes, a phrase each: (B, H, S, D), of packed rows (T, H, D)."""
    p = problem

    def shape(what: str, total: int | None, heads: int, seq: int, width: int) -> str:
        lengths = (p.batch, heads, seq, width) if total is None else (total, heads, width)
        return f"{what} " + "×".join(map(str, lengths))

    queries = shape("q", p.total_q, p.heads_q, p.seq_q, p.head_dim)
    # Of latent rows the values are a part: one width says both. Elsewhere it is that of the values.
    width = p.head_dim if p.op == "mla_attention" else p.head_dim_v
    found = [queries, shape("kv", p.total_k, p.heads_k, p.seq_k, width)]
    if p.packed:
        found.append(f"{p.batch} sequences")
    if p.page_size:
        found.append(f"pages of {p.page_size}")
    if p.tokens:
        found.append(f"{p.tokens} tokens a head")
    return found


def link(text: str) -> str:
    """The first link in an `upstream` text; empty where there is none."""
    found = _LINK.search(text)
    return found.group() if found else ""


def _columns(cells: list[Cell]) -> list[Column]:
    titles = {f"{b}:{a}": arch.title for b, arches in Registry.load().arches.items() for a, arch in arches.items()}
    pairs = dict.fromkeys((cell.target, cell.toolchain) for cell in cells)
    compilers = Counter(target for target, _ in pairs)
    columns: list[Column] = []
    for target, toolchain in pairs:
        backend, _, arch = target.partition(":")
        columns.append(
            Column(
                target=target,
                toolchain=toolchain,
                backend=backend,
                arch=arch,
                short=arch.removeprefix(backend),
                title=titles.get(target, ""),
                version=toolchain.rpartition("==")[2] if compilers[target] > 1 else "",
                first=not columns or columns[-1].backend != backend,
            )
        )
    return columns


def _groups(columns: list[Column]) -> list[dict[str, Any]]:
    """Neighbouring columns of one backend, for the upper line of the heading."""
    groups: list[dict[str, Any]] = []
    for column in columns:
        if column.first:
            groups.append({"title": _title(column.backend), "span": 0, "toolchains": []})
        groups[-1]["span"] += 1
        if column.toolchain not in groups[-1]["toolchains"]:
            groups[-1]["toolchains"].append(column.toolchain)
    return groups


def _numbers(cells: list[Cell]) -> dict[str, int]:
    """Footnote numbers of quirks, in the order in which a reader of the grid meets them."""
    ids = dict.fromkeys(note.id for cell in cells for note in cell.footnotes)
    return {quirk: number for number, quirk in enumerate(ids, 1)}


def _used(quirk: str, cells: list[Cell]) -> tuple[Footnote, int]:
    notes = [note for cell in cells for note in cell.footnotes if note.id == quirk]
    return notes[0], len(notes)


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"kind": kind, "word": word, "brief": brief, "figure": figure, "link": link, "sizes": sizes}
    return environment
