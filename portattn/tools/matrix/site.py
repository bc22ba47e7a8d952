"""The table of a run as data, its page (one file that loads nothing), and the static site with its badge."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup, escape

from portattn.errors import ArgumentError
from portattn.planning.registry import Registry
from portattn.schema.ops import ROWS
from portattn.schema.plan import kernel_text
from portattn.schema.quirk import LEVELS
from portattn.testing.findings import figure
from portattn.testing.kernel_cases import KERNELS, KernelCase, Subject
from portattn.tools.display_text import fields, names_or_count, table
from portattn.tools.matrix import cell_text
from portattn.tools.matrix.cell_text import places, steps
from portattn.tools.matrix.cells import Cell, Footnote, HistoryEntry, Run, cell_id, has_chip, said_label

BAND = 9  # columns of one table: with the problems' names they fit into 1400 px, so that no cell is out of sight
_LINK = re.compile(r"https?://[^\s,;)]+")
_CODE = re.compile(r"`([^`]*)`")


class Column(msgspec.Struct, frozen=True):
    target: str
    toolchain: str
    backend: str
    short: str  # the arch without its backend's name
    title: str
    version: str  # the toolchain's, if the target has several
    first: bool  # a new backend begins here


class Band(msgspec.Struct, frozen=True):
    """Adjacent columns. groups: neighbours of one backend, for the upper line of the heading."""

    columns: list[Column]
    groups: list[dict[str, Any]]


def context(run: Run, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the templates' values; `cells` keep the footnotes of quirks that change or explain something."""
    cells = sorted(map(_without_notes, cells), key=lambda cell: cell.index)
    columns = _columns(cells)
    ops: dict[str, dict[str, dict[tuple[str, str], Cell]]] = {}  # op -> problem's name -> (target, toolchain) -> cell
    for cell in cells:
        rows = ops.setdefault(cell.op, {})
        rows.setdefault(cell.name, {})[cell.target, cell.toolchain] = cell
    notes = _notes(cells)
    numbers = {quirk: number for number, quirk in enumerate(notes, 1)}
    counts = Counter(cell_text.kind(cell) for cell in cells)
    means = cell_text.LEVEL_MEANS | cell_text.STATUS_MEANS
    return {
        "run": run, "cells": cells, "columns": columns, "bands": _bands(columns), "ops": ops,
        "titles": {KERNELS: "Kernels of other packages", **{op: row.title for op, row in ROWS.items()}},
        "numbers": numbers,
        "footnotes": [
            (numbers[quirk], used[0][1], len({cell.id for cell, _ in used})) for quirk, used in notes.items()
        ],
        "legend": [(name, means[name], cell_text.NOT_SEEN.get(name, ""), counts[name]) for name in cell_text.KINDS],
        "levels": LEVELS,
        "on_hardware": sorted({seen.level for cell in cells if (seen := cell_text.on_hardware(cell))}),
        "options": _options(cells), "gaps": cell_text.gaps(run, cells),
        "why_empty": lambda cell: cell_text.of_cell(cell, run),
        "place": lambda problem, column: cell_text.of_place(run, problem, column.target, column.toolchain),
        "hosts": {identity.id: f"{identity.host}, {identity.code()}" for identity in run.identities},
        "total": len(cells), "red": [cell for cell in cells if cell.red],
        "targets": len({column.target for column in columns}),
        "compilers": len({c.toolchain for c in columns}) if any(c.version for c in columns) else 1,
        "backends": {c.target: cell_text.title(c.backend) for c in columns},
    }  # fmt: skip


def _without_notes(cell: Cell) -> Cell:
    notes = tuple(note for note in cell.footnotes if not note.changes_nothing)
    return cell if notes == cell.footnotes else msgspec.structs.replace(cell, footnotes=notes)


def _chip(title: str) -> str:
    """Return the first chip that an arch's title names, for the narrow heading: `sm_90: H100, H200` is `H100`."""
    return title.split(",")[0].split(":")[-1].split("(")[0].strip()


def sizes(problem: Subject) -> list[str]:
    """Return a problem's shapes, a phrase each: (B, H, S, D), packed (T, H, D); of a case each tensor's."""
    if isinstance(problem, KernelCase):
        return [f"{name} {'×'.join(map(str, problem.shape(name)))}" for name in problem.pointers]
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
    found = _LINK.search(text)
    return found.group() if found else ""


def mark_code(text: str) -> Markup:
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


@functools.lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    made.filters |= {
        "kind": cell_text.kind, "word": cell_text.word, "said": cell_text.kind_label, "brief": cell_text.brief,
        "dot": cell_text.dot,
        "label": said_label, "steps": steps, "figure": figure, "link": link, "sizes": sizes, "coded": mark_code,
        "kernel_text": kernel_text, "on_hardware": cell_text.on_hardware, "chip": _chip,
        "names_or_count": names_or_count,
    }  # fmt: skip
    made.globals["witness"] = cell_text.witness
    return made


def markdown(run: Run, cells: Sequence[Cell]) -> str:
    rows = ((*cell.place, cell_text.word(cell), cell_text.witness(cell, run)) for cell in cells)
    return table(("target", "toolchain", "problem", "level", "evidence"), rows)


def _chips() -> dict[str, str]:
    return {f"{b}:{a}": arch.title for b, arches in Registry.load().arches.items() for a, arch in arches.items()}


def _columns(cells: list[Cell]) -> list[Column]:
    titles = _chips()
    pairs = dict.fromkeys((cell.target, cell.toolchain) for cell in cells)
    compilers = Counter(target for target, _ in pairs)
    columns: list[Column] = []
    for target, toolchain in pairs:
        backend, _, arch = target.partition(":")
        version = toolchain.rpartition("==")[2] if compilers[target] > 1 else ""
        first = not columns or columns[-1].backend != backend
        short = arch.removeprefix(backend)
        columns.append(Column(target, toolchain, backend, short, titles.get(target, ""), version, first))
    return columns


def _bands(columns: list[Column]) -> list[Band]:
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
    again = ([msgspec.structs.replace(band[0], first=True), *band[1:]] for band in bands)
    return [Band(band, _groups(band)) for band in again]


def _groups(columns: list[Column]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for column in columns:
        if column.first:
            groups.append({"title": cell_text.title(column.backend), "span": 0, "toolchains": []})
        groups[-1]["span"] += 1
        if column.toolchain not in groups[-1]["toolchains"]:
            groups[-1]["toolchains"].append(column.toolchain)
    return groups


def _notes(cells: Sequence[Cell]) -> dict[str, list[tuple[Cell, Footnote]]]:
    """Return the cells of each quirk with its footnote; a cell may have several roles."""
    found: dict[str, list[tuple[Cell, Footnote]]] = {}
    for cell in cells:
        for note in cell.footnotes:
            found.setdefault(note.id, []).append((cell, note))
    return found


LABEL = "portattn matrix"
FILL = {"green": "#1f8060", "amber": "#96650a", "red": "#c2352b", "grey": "#5b6662"}
SHIELDS = {"green": "brightgreen", "amber": "yellow", "red": "red", "grey": "lightgrey"}
# Verdana's 11 px, as badges have it: wide enough for any letter that is in one, and room at both sides.
LETTER, ROOM = 7, 10


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the cells of chips; CPU cells do not count, as their numbers are the reference."""

    green: int  # PASS, with a level above `declared`
    amber: int  # no fault and no evidence: `declared`, NOTE, NOT_RUN, or not made
    red: int  # FAIL, ERROR, CRASH, TIMEOUT

    @property
    def colour(self) -> str:
        return next((name for name in ("red", "amber", "green") if getattr(self, name)), "grey")


def counts(run: Run, cells: Sequence[Cell]) -> Counts:
    chips = [cell for cell in cells if has_chip(cell.target)]
    red = sum(cell.red for cell in chips)
    green = sum(cell.status == "PASS" and cell.level != "declared" for cell in chips)
    empty = {cell_id(*place): has_chip(place[1]) for place in places(cells)}
    empty |= {name: empty.get(name, True) for name in set(run.cells) - {cell.id for cell in cells}}
    return Counts(green=green, amber=len(chips) - green - red + sum(empty.values()), red=red)


def endpoint(found: Counts) -> dict[str, Any]:
    said = [f"{getattr(found, name)} {name}" for name in ("green", "amber", "red") if getattr(found, name)]
    return {
        "schemaVersion": 1, "label": LABEL, "message": ", ".join(said) or "no cells", "color": SHIELDS[found.colour],
        "isError": found.red > 0,
    }  # fmt: skip


def svg(found: Counts) -> str:
    said = [(str(getattr(found, name)), FILL[name]) for name in ("green", "amber", "red") if getattr(found, name)]
    parts, left = [], 0
    for text, fill in [(LABEL, "#333b38"), *(said or [("no cells", FILL["grey"])])]:
        width = len(text) * LETTER + ROOM
        parts.append({"text": text, "fill": fill, "left": left, "width": width, "middle": left + width / 2})
        left += width
    about = f"{LABEL}: {endpoint(found)['message']}"
    return environment().get_template("badge.svg.jinja").render(parts=parts, width=left, about=about)


OP = "matrix site"
GENERATOR, FORMAT = "portattn matrix site", 1
MARKER = "site.json"  # says that a folder is a site, and which files are the site's
FILTERS = ("target", "toolchain", "op", "status", "path", "quirk")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}")
History = Mapping[tuple[str, str], Sequence[HistoryEntry]]  # (target, problem's name) -> what each run made of it


def pages(run: Run, cells: Sequence[Cell], history: History) -> Iterator[tuple[str, bytes]]:
    """Yield (path, bytes) of every file of the site, the marker last. Raises ArgumentError if an id is no file name."""
    found = context(run, cells)
    cells = found["cells"]
    _check([cell.id for cell in cells], "cell")
    _check(found["numbers"], "quirk")
    make = partial(_page, found | {"linked": True, "made": counts(run, cells)})
    written: list[str] = []
    for path, text in _texts(run, cells, history, make):
        written.append(path)
        yield path, text.encode()
    about = {
        "generator": GENERATOR, "format": FORMAT, "portattn": run.portattn, "date": run.date.isoformat(),
        "cells": len(cells), "files": [*written, MARKER],
    }  # fmt: skip
    yield MARKER, json.dumps(about, indent=1).encode()


def count(cells: Sequence[Cell]) -> int:
    quirks = {note.id for cell in cells for note in cell.footnotes if not note.changes_nothing}
    return len(cells) + len(quirks) + len(_FIXED) + 1


def foreign(folder: Path) -> str:
    """Return why a folder must not be overwritten; "" if it is absent, empty, or only a site."""
    try:
        if not folder.exists():
            return ""
        if not folder.is_dir():
            return "it is not a folder"
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
        if not there:
            return "" if not any(folder.iterdir()) else "it is not empty, and no site of this command"
        about = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if about["generator"] != GENERATOR:
            return f"its {MARKER} is not of this command"
        if others := sorted(there - set(about["files"])):
            return f"it holds {others[0]}, which is not of the site"
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            return "it is not empty, and no site of this command"
        return f"it cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError):  # damaged, or somebody else's
        return f"its {MARKER} is not of this command"
    return ""


_FIXED = ("index.html", "style.css", "filters.js", "badge.svg", "badge.json")


def _texts(run: Run, cells: Sequence[Cell], history: History, make: Any) -> Iterator[tuple[str, str]]:
    counted = counts(run, cells)
    yield "index.html", make("site_index.html.jinja", root="", quirk_page=_quirk_page("quirks/"))
    yield "style.css", make("style.html.jinja")
    yield "filters.js", (Path(__file__).parent / "filters.js").read_text(encoding="utf-8")
    yield "badge.svg", svg(counted)
    yield "badge.json", json.dumps(endpoint(counted), indent=1)
    for cell in cells:
        seen = history.get((cell.target, cell.name), ())
        yield f"cells/{cell.id}.html", make(
            "site_cell.html.jinja", root="../", cell=cell, quirk_page=_quirk_page("../quirks/"),
            identity=run.known.get(cell.origin), seen=seen if len({one.run for one in seen}) > 1 else (),
        )  # fmt: skip
    registry = Registry.load().quirks
    for name, used in _notes(cells).items():
        known = registry.get(name)
        yield f"quirks/{name}.html", make(
            "site_quirk.html.jinja", root="../", name=name, quirk=known, said=fields(known) if known else {},
            used=used, note=used[0][1], quirk_page=_quirk_page("../quirks/"),
        )  # fmt: skip


def _page(found: Mapping[str, Any], template: str, **more: Any) -> str:
    return environment().get_template(template).render(**{**found, **more})


def _quirk_page(folder: str) -> Any:
    return lambda quirk: f"{folder}{quirk}.html"


def _options(cells: Sequence[Cell]) -> dict[str, list[tuple[str, str]]]:
    statuses = {cell_text.kind(cell) for cell in cells}
    plain: dict[str, Any] = {
        "target": (cell.target for cell in cells), "toolchain": (cell.toolchain for cell in cells),
        "op": (cell.op for cell in cells), "path": (cell.plan.path for cell in cells if cell.plan),
        "quirk": sorted({note.id for cell in cells for note in cell.footnotes}),
    }  # fmt: skip
    found = {name: [(value, value) for value in dict.fromkeys(values)] for name, values in plain.items()}
    chips = _chips()
    found["target"] = [
        (name, " · ".join(filter(None, (name, _chip(chips.get(name, "")))))) for name, _ in found["target"]
    ]
    found["status"] = [(kind, cell_text.kind_label(kind)) for kind in cell_text.KINDS if kind in statuses]
    return {name: found[name] for name in FILTERS}


def _check(names: Any, what: str) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            limit = f"is the id of a {what}, and must be letters, digits, '_', '.' and '-'"
            raise ArgumentError(OP, "RUN", name, limit)


def render(run: Run, cells: Sequence[Cell]) -> str:
    found = context(run, cells)
    return _page(found, "report.html.jinja", linked=False, quirk_page=lambda quirk: f"#fn{found['numbers'][quirk]}")
