"""A baseline: the cells that a run must not lose, as sorted TOML to review: a line a cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomlkit

from portattn.errors import DataError
from portattn.schema import toml_reader
from portattn.schema.ops import ROWS
from portattn.schema.quirk import Level
from portattn.tools import run_log
from portattn.tools.matrix.cells import Identity, Moment, Snapshot, SnapshotCell, Status, Tier, columns, digests_of

SCHEMA = 1  # raised when a reader of the version before would misread it
SUFFIX = ".toml"
HEAD = """\
# A baseline of `portattn matrix`: what a run must not lose. Written by `portattn matrix baseline`; review its changes.
"""
APART = " with "  # between target and toolchain in a table's name


class _Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A cell's line: a SnapshotCell without long fields and without the fields of its table and key."""

    op: str
    status: Status = "PASS"
    level: Level
    label: str = ""
    tier: Tier = "core"
    path: str
    quirks: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    worse: dict[str, int] = {}
    speed: dict[str, int] = {}
    tile: str = ""
    looked: bool = True
    numbers: str = "pass"
    origin: str = ""


class _BaselineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    set: str
    date: Moment
    cells: int
    identities: dict[str, Identity] = {}
    problems: dict[str, str] = {}
    origins: dict[str, str] = {}
    columns: dict[str, dict[str, dict[str, Any]]] = {}


def write(made: Snapshot) -> str:
    lines = [HEAD, f"schema = {SCHEMA}", f"set = {_value(made.set)}", f"date = {made.date.isoformat()}"]
    lines.append(f"cells = {len(made.entries)}")
    for identity in _identities(made):
        said = {name: value for name, value in msgspec.to_builtins(identity).items() if value not in ("", {}, 0.0)}
        table = f"identities.{_value(identity.id)}"
        lines += ["", f"[{table}]", *_pairs({k: v for k, v in said.items() if not isinstance(v, dict)})]
        for name, value in said.items():
            if isinstance(value, dict):
                lines += ["", f"[{table}.{name}]", *_pairs(value)]
    lines += ["", "[problems]", *_pairs(dict(sorted(made.problems.items())))]
    named = {f"{target}{APART}{toolchain}": entries for (target, toolchain), entries in columns(made.entries).items()}
    origins = {name: Counter(entry.origin for entry in entries).most_common(1)[0][0] for name, entries in named.items()}
    lines += ["", "[origins]", *_pairs(dict(sorted(origins.items())))]
    for name, entries in sorted(named.items()):
        lines += ["", f"[columns.{_value(name)}]"]
        lines += _pairs({entry.name: _cell(entry, origins[name]) for entry in sorted(entries, key=lambda e: e.name)})
    return "\n".join(lines) + "\n"


def read(path: Path) -> Snapshot:
    """Read a baseline. Raises DataError (file, line) on any departure from its schema, such as a merge conflict."""
    data, text = run_log.read_toml(path)
    version = data.get("schema")
    if version != SCHEMA:
        found = f"schema version {version}" if isinstance(version, int) else "no baseline: it has no `schema`"
        raise DataError(path, toml_reader.line_of(text, "schema"), f"{found}; this portattn reads version {SCHEMA}")
    file = toml_reader.convert(data, _BaselineFile, path, text)
    entries = [
        entry
        for name, cells in file.columns.items()
        for entry in _entries(path, text, name, cells, file.origins.get(name, ""))
    ]
    if len(entries) != file.cells:
        where = toml_reader.line_of(text, "cells")
        raise DataError(path, where, f"has {len(entries)} cells, and says {file.cells}: write it anew, or count again")
    return Snapshot(
        shown=str(path),
        set=file.set,
        date=file.date,
        problems=file.problems,
        identities=file.identities,
        entries=tuple(entries),
    )


def _identities(made: Snapshot) -> Iterable[Identity]:
    used: dict[str, set[str]] = {}
    for entry in made.entries:
        used.setdefault(entry.origin, set()).add(entry.target.partition(":")[0])
    for name in sorted(used.keys() & made.identities.keys()):
        identity = made.identities[name]
        needed = {key for backend in used[name] for key in digests_of(identity, backend)}
        kept = {key: value for key, value in identity.digests.items() if key in needed}
        yield msgspec.structs.replace(identity, digests=kept)


def _entries(path: Path, text: str, column: str, cells: Mapping[str, Any], origin: str) -> Iterable[SnapshotCell]:
    target, apart, toolchain = column.partition(APART)
    if not apart:
        raise DataError(path, _line(text, column), f"key {column!r}: is not `target{APART}toolchain`")
    for name, fields in cells.items():
        try:
            cell = toml_reader.convert(fields, _Cell, path, text, name)
        except DataError as error:
            raise DataError(path, _line(text, column, name), error.problem) from None
        if cell.op not in ROWS:
            raise DataError(path, _line(text, column, name), f"key {name!r}: no operation is called {cell.op!r}")
        values = msgspec.structs.asdict(cell) | {"origin": cell.origin or origin}
        yield SnapshotCell(name=name, target=target, toolchain=toolchain, **values)


def _line(text: str, column: str, name: str = "") -> int | None:
    """Return the line of a column's table, or of a cell in it, as `write` writes them; None if it was rewritten."""
    lines = text.splitlines()
    table = f"[columns.{_value(column)}]"
    if table not in lines:
        return None
    begin = lines.index(table)
    cells = (number for number in range(begin, len(lines)) if lines[number].startswith(f"{_value(name)} ="))
    return 1 + (next(cells, begin) if name else begin)


def _cell(entry: SnapshotCell, origin: str) -> dict[str, Any]:
    fields = {name: getattr(entry, name) for name in _Cell.__struct_fields__}
    found: dict[str, Any] = msgspec.to_builtins(_Cell(**fields | ({"origin": ""} if entry.origin == origin else {})))
    return found


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{tomlkit.key(name).as_string()} = {_value(value)}" for name, value in values.items()]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(_pairs(value))} }}" if value else "{}"
    return tomlkit.item(value).as_string()
