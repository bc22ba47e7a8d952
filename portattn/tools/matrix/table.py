"""The table as data: problems × columns, footnotes, legend. The page and the site's index are made of it."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup, escape

from portattn.planning.registry import Registry
from portattn.schema.ops import ROWS
from portattn.schema.plan import kernel_text
from portattn.schema.problem import Problem
from portattn.schema.quirk import LEVELS
from portattn.testing.numerics import figure
from portattn.tools.matrix import labels, not_run
from portattn.tools.matrix.cells import Cell, Footnote, Run
from portattn.tools.matrix.evidence import steps
from portattn.tools.matrix.snapshot import said_label

BAND = 9  # columns of one table: with the problems' names they fit into 1400 px, so that no cell is out of sight
_LINK = re.compile(r"https?://[^\s,;)]+")
_CODE = re.compile(r"`([^`]*)`")


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


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """Columns that stand side by side. groups: neighbours of one backend, for the upper line of the heading."""

    columns: list[Column]
    groups: list[dict[str, Any]]


def context(run: Run, cells: Sequence[Cell]) -> dict[str, Any]:
    """What templates need of a run: cells in its order, whatever the order in which they were finished."""
    cells = sorted(cells, key=lambda cell: cell.index)
    columns = _columns(cells)
    ops: dict[str, dict[str, dict[tuple[str, str], Cell]]] = {}  # op -> problem's name -> (target, toolchain) -> cell
    for cell in cells:
        rows = ops.setdefault(cell.problem.op, {})
        rows.setdefault(cell.name, {})[cell.target, cell.toolchain] = cell
    numbers = _numbers(cells)
    counts = Counter(labels.kind(cell) for cell in cells)
    means = labels.LEVEL_MEANS | labels.STATUS_MEANS
    return {
        "run": run,
        "cells": cells,
        "columns": columns,
        "bands": _bands(columns),
        "ops": ops,
        "titles": {op: row.title for op, row in ROWS.items()},
        "numbers": numbers,
        "footnotes": [(number, *_used(quirk, cells)) for quirk, number in numbers.items()],
        "legend": [(name, means[name], labels.NOT_SEEN.get(name, ""), counts[name]) for name in labels.KINDS],
        "levels": LEVELS,
        "gaps": not_run.gaps(run, cells),
        "why_empty": lambda cell: not_run.of_cell(cell, run),
        "place": lambda problem, column: not_run.of_place(run, problem, column.target, column.toolchain),
        "hosts": {identity.id: f"{identity.host}, {identity.code()}" for identity in run.identities},
        "total": len(cells),
        "red": [cell for cell in cells if cell.red],
        "targets": len({column.target for column in columns}),
        "compilers": len({c.toolchain for c in columns}) if any(c.version for c in columns) else 1,
        "backends": {c.target: labels.title(c.backend) for c in columns},
    }


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
    """Return the first link in an `upstream` text, or an empty text."""
    found = _LINK.search(text)
    return found.group() if found else ""


def mark_code(text: str) -> Markup:
    """Text with its `names` as code; everything in it is escaped."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


@functools.lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Templates, which escape all that they are given."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {
        "kind": labels.kind, "word": labels.word, "said": labels.kind_label, "brief": labels.brief, "dot": labels.dot,
        "label": said_label, "steps": steps, "figure": figure, "link": link, "sizes": sizes, "coded": mark_code,
        "kernel_text": kernel_text,
    }  # fmt: skip
    return made


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


def _bands(columns: list[Column]) -> list[Band]:
    """Group columns in bands of at most BAND, a backend's columns together if they fit."""
    pieces: list[list[Column]] = []
    for column in columns:
        if column.first or len(pieces[-1]) == BAND:
            pieces.append([])
        pieces[-1].append(column)
    bands: list[list[Column]] = []
    for piece in pieces:
        if not bands or len(bands[-1]) + len(piece) > BAND:
            bands.append([])
        bands[-1] += piece
    found = []
    for band in bands:
        again = [msgspec.structs.replace(band[0], first=True), *band[1:]]
        found.append(Band(columns=again, groups=_groups(again)))
    return found


def _groups(columns: list[Column]) -> list[dict[str, Any]]:
    """Neighbouring columns of one backend, for the upper line of the heading."""
    groups: list[dict[str, Any]] = []
    for column in columns:
        if column.first:
            groups.append({"title": labels.title(column.backend), "span": 0, "toolchains": []})
        groups[-1]["span"] += 1
        if column.toolchain not in groups[-1]["toolchains"]:
            groups[-1]["toolchains"].append(column.toolchain)
    return groups


def _numbers(cells: list[Cell]) -> dict[str, int]:
    """Footnote numbers of quirks, in the order in which a reader of the grid meets them."""
    ids = dict.fromkeys(note.id for cell in cells for note in cell.footnotes)
    return {quirk: number for number, quirk in enumerate(ids, 1)}


def _used(quirk: str, cells: list[Cell]) -> tuple[Footnote, int]:
    """The first footnote of a quirk, and how many cells have one: a cell may have several, of other roles."""
    notes = [[note for note in cell.footnotes if note.id == quirk] for cell in cells]
    found = [own for own in notes if own]
    return found[0][0], len(found)
