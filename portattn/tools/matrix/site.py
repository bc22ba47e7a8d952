"""The site of a run: the table with filters, a page for each cell and each quirk, a badge. Files alone, no server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from portattn.errors import ArgumentError
from portattn.planning.registry import Registry
from portattn.tools.matrix import badge, labels
from portattn.tools.matrix.cells import Cell, Run
from portattn.tools.matrix.history import HistoryEntry
from portattn.tools.matrix.table import context, environment
from portattn.tools.quirk_text import fields

OP = "matrix site"
GENERATOR, FORMAT = "portattn matrix site", 1
MARKER = "site.json"  # says that a folder is a site, and which files are the site's
FILTERS = ("target", "toolchain", "op", "status", "path", "quirk")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}")
History = Mapping[tuple[str, str], Sequence[HistoryEntry]]  # (target, problem's name) -> what each run made of it


def pages(run: Run, cells: Sequence[Cell], history: History) -> Iterator[tuple[str, bytes]]:
    """Every file of the site, by its path in it; the marker comes last.

    Raises ArgumentError where a cell's or a quirk's id is no name of a file: results can come from anywhere.
    """
    found = context(run, cells)
    _check([cell.id for cell in cells], "cell")
    _check(found["numbers"], "quirk")
    make = partial(_page, found | {"linked": True, "made": badge.counts(run, cells)})
    written: list[str] = []
    for path, text in _texts(run, cells, history, found["numbers"], make):
        written.append(path)
        yield path, text.encode()
    about = {
        "generator": GENERATOR, "format": FORMAT, "portattn": run.portattn, "date": run.date.isoformat(),
        "cells": len(cells), "files": [*written, MARKER],
    }  # fmt: skip
    yield MARKER, json.dumps(about, indent=1).encode()


def count(cells: Sequence[Cell]) -> int:
    """How many files the site has."""
    return len(cells) + len({note.id for cell in cells for note in cell.footnotes}) + len(_FIXED) + 1


def foreign(folder: Path) -> str:
    """Why a folder must not be written over; empty where it is absent, empty, or a site with nothing else in it."""
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


def _texts(
    run: Run, cells: Sequence[Cell], history: History, numbers: Mapping[str, int], make: Any
) -> Iterator[tuple[str, str]]:
    counted = badge.counts(run, cells)
    options = _options(cells)
    yield "index.html", make("site_index.html.jinja", root="", options=options, quirk_page=_quirk_page("quirks/"))
    yield "style.css", make("style.html.jinja")
    yield "filters.js", (Path(__file__).parent / "filters.js").read_text(encoding="utf-8")
    yield "badge.svg", badge.svg(counted)
    yield "badge.json", json.dumps(badge.endpoint(counted), indent=1)
    identities = {identity.id: identity for identity in run.identities}
    for cell in cells:
        seen = history.get((cell.target, cell.name), ())
        yield f"cells/{cell.id}.html", make(
            "site_cell.html.jinja", root="../", cell=cell, quirk_page=_quirk_page("../quirks/"),
            identity=identities.get(cell.origin), seen=seen if len({one.run for one in seen}) > 1 else (),
        )  # fmt: skip
    registry = Registry.load().quirks
    for name in numbers:
        used = [(cell, note) for cell in cells for note in cell.footnotes if note.id == name]
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
    """What each filter can be set to: (value, how it is shown)."""
    statuses = {labels.kind(cell) for cell in cells}
    plain: dict[str, Any] = {
        "target": (cell.target for cell in cells),
        "toolchain": (cell.toolchain for cell in cells),
        "op": (cell.problem.op for cell in cells),
        "path": (cell.plan.path for cell in cells if cell.plan),
        "quirk": sorted({note.id for cell in cells for note in cell.footnotes}),
    }
    found = {name: [(value, value) for value in dict.fromkeys(values)] for name, values in plain.items()}
    found["status"] = [(kind, labels.kind_label(kind)) for kind in labels.KINDS if kind in statuses]
    return {name: found[name] for name in FILTERS}


def _check(names: Any, what: str) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise ArgumentError(
                OP, "RUN", name, f"is the id of a {what}, and must be letters, digits, '_', '.' and '-'"
            )
