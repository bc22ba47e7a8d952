"""Read, write and merge results.jsonl: a run and its cells, whole lines only; a snapshot of any run or baseline.

A baseline: the cells that a run must not lose, as sorted TOML to review: a line a cell."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tomlkit

from portattn.errors import ArgumentError, DataError
from portattn.files import write_named
from portattn.schema import toml_reader
from portattn.schema.ops import ROWS
from portattn.schema.quirk import Level
from portattn.testing.bundle import MANIFEST
from portattn.testing.kernel_cases import KERNELS
from portattn.tools import run_log
from portattn.tools.display_text import plural
from portattn.tools.matrix import provenance
from portattn.tools.matrix.cells import (
    SCHEMA,
    WORSE,
    Cell,
    Identity,
    Moment,
    Run,
    Snapshot,
    SnapshotCell,
    Status,
    Tier,
    columns,
    digests_of,
    entry,
    evidence,
    problem_digest,
    snapshot,
    word,
)
from portattn.tools.run_log import UNREADABLE, RunLog, encode_record, lines

NAME = "results.jsonl"
_decoder = msgspec.json.Decoder(Run | Cell)


class ResumedRun(NamedTuple):
    """A resumed run. copy: the dated copy of the file, if cells of it are stale."""

    run: Run
    cells: list[Cell]
    stale: list[Cell]
    copy: Path | None


class _RunVersion(msgspec.Struct):
    schema: int


class Results(RunLog):
    """The results of one run, in a folder; a context that holds its lock. Raises ArgumentError if it cannot hold it."""

    def __init__(self, folder: Path, op: str = "matrix run") -> None:
        super().__init__(folder / NAME, folder / ".lock", op=op, option="--out", shown=folder)
        self.folder = folder

    def start(self, run: Run) -> Path | None:
        kept = self.rotate()
        write_data(self.path, encode_record(run))
        return kept

    def replace(self, run: Run, cells: list[Cell]) -> Path | None:
        kept = self._copied() if self.path.exists() else None
        self.finish(run, cells)
        return kept

    def _copied(self) -> Path:
        kept = self.dated()
        write_data(kept, self.path.read_bytes())
        return kept

    def resume(self, run: Run, keys: Mapping[str, str] | None = None) -> ResumedRun:
        """Resume the file's run, and split its cells into kept and stale ones; with stale ones it is first copied.

        Stale: another key than in `keys`, or another time limit. Raises ArgumentError if there is no such run."""
        if not self.path.exists():
            raise ArgumentError("matrix run", "--resume", str(self.path), "there is no such file to go on with")
        begun, cells = read(self.path, resumed=True)
        for name in ("portattn", "kernels", "compiler", "cells"):
            if getattr(begun, name) != getattr(run, name):
                limit = f"it was begun with other {name}; run without --resume"
                raise ArgumentError("matrix run", "--resume", str(self.path), limit)
        known, now = begun.known, run.identity
        stale = [cell for cell in cells if keys is not None and _stale(cell, keys, known, now)]
        left_out = {cell.id for cell in stale}
        kept = [cell for cell in cells if cell.id not in left_out]
        copy = self._copied() if stale else None
        used = {cell.origin for cell in kept} - {now.id}
        identities = (known.get(now.id, now), *(known[name] for name in known if name in used))
        if keys is not None and identities != begun.identities:
            begun = msgspec.structs.replace(
                begun, identities=identities, devices=run.devices, environments=run.environments, versions=run.versions
            )
        self.finish(begun, kept)
        return ResumedRun(run=begun, cells=kept, stale=stale, copy=copy)

    def finish(self, run: Run, cells: list[Cell]) -> None:
        records = [run, *sorted(cells, key=lambda c: c.index)]
        write_data(self.path, b"".join(map(encode_record, records)))


def read(path: Path, resumed: bool = False) -> tuple[Run, list[Cell]]:
    """Read the run and its cells in order, whole lines only; `resumed`: see `run_log.lines`. Raises DataError."""
    data = run_log.read(path)
    run: Run | None = None
    listed: frozenset[str] = frozenset()
    cells: dict[str, Cell] = {}
    met: dict[str | tuple[str, str, str], int] = {}  # a cell's id, and its place -> the line
    for number, line in lines(path, data, resumed):
        try:
            version = msgspec.json.decode(line, type=_RunVersion).schema
            if version != SCHEMA:
                raise DataError(path, number, f"schema version {version}; this portattn reads version {SCHEMA}")
            item = _decoder.decode(line)
        except UNREADABLE as error:
            raise DataError(path, number, f"not a line of matrix results: {error}") from None
        if run is None:
            if not isinstance(item, Run):
                break
            run, listed = item, frozenset(item.cells)
        elif isinstance(item, Run):
            raise DataError(path, number, "is the line of a second run: a file has one")
        else:
            # A run writes each of its cells once; --resume writes the file anew without those that it makes again.
            if item.id not in listed:
                raise DataError(path, number, f"is of the cell {item.id}, which the run does not list in line 1")
            earlier = min(met.setdefault(name, number) for name in (item.id, item.place))
            if earlier != number:
                where = "  ".join(item.place)
                raise DataError(path, number, f"is of a cell that the file has already (line {earlier}): {where}")
            if (item.problem is None) == (item.case is None):
                raise DataError(path, number, f"is of the cell {item.id}, which must have a problem or a case")
            if wrong := next(_no_figures(item), ""):
                raise DataError(path, number, wrong)
            cells[item.id] = item
    if run is None:
        raise DataError(path, 1, "the first line, which says where the cells come from, is missing")
    return run, sorted(cells.values(), key=lambda c: c.index)


def _no_figures(cell: Cell) -> Iterator[str]:
    for one in (cell, *cell.others):
        for kernel in one.kernels:
            for fact in WORSE:
                value = kernel.facts.get(fact, 0)
                if not isinstance(value, int) or value < 0:
                    yield f"its {fact} of {kernel.function} are {value!r}, and must be a number of 0 or more"


def write_data(path: Path, data: bytes) -> None:
    try:
        write_named(path, data)
    except OSError as error:
        raise DataError(path, None, f"cannot be written: {error.strerror or error}") from None


def _stale(cell: Cell, keys: Mapping[str, str], known: Mapping[str, Identity], now: Identity) -> bool:
    if cell.key != keys.get(cell.id):
        return True
    made = known.get(cell.origin)
    return cell.status == "TIMEOUT" and made is not None and made.seconds != now.seconds


class Conflict(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    toolchain: str
    name: str
    cell: str
    text: str

    def __str__(self) -> str:
        return f"{self.target}  {self.toolchain}  {self.name}: {self.text}"


class MergedRun(msgspec.Struct, frozen=True, kw_only=True):
    run: Run
    cells: list[Cell]
    conflicts: tuple[Conflict, ...]


def merge(runs: Sequence[tuple[Run, Sequence[Cell]]], shown: Sequence[str], command: str) -> MergedRun:
    """Make one run of several; a merged run counts by its parts. `shown` names the runs in errors.

    Most evidence wins, but a red result before any other: another machine cannot take back a failure. Raises
    ArgumentError if cells of two runs depend on different kernels, code or data, or one name means two problems."""
    _same_code(runs, shown)
    _same_problems(runs, shown)
    identities = {name: identity for run, _ in runs for name, identity in run.known.items()}
    results: dict[str, list[Cell]] = {}
    for _, cells in runs:
        for cell in cells:
            for one in _apart(cell):
                mine = results.setdefault(one.id, [])
                if one not in mine:
                    mine.append(one)
    chosen = [_chosen(found, identities) for found in results.values()]
    wanted = _order(_all(run.cells for run, _ in runs), chosen, runs)
    place = {name: index for index, name in enumerate(wanted)}
    chosen = sorted((msgspec.structs.replace(c, index=place[c.id]) for c in chosen), key=lambda c: c.index)
    made = msgspec.structs.replace(
        runs[0][0],
        **{name: _all(getattr(run, name) for run, _ in runs) for name in ("toolchains", "devices", "targets")},
        **{name: ", ".join(_all([getattr(run, name)] for run, _ in runs)) for name in ("compiler", "machine")},
        problems=", ".join(_all(run.problems.split(", ") for run, _ in runs)), command=command, cells=tuple(wanted),
        environments={name: what for run, _ in runs for name, what in run.environments.items()},
        identities=tuple(identities.values()), date=datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0),
    )  # fmt: skip
    return MergedRun(run=made, cells=chosen, conflicts=conflicts(chosen))


def conflicts(cells: Iterable[Cell]) -> tuple[Conflict, ...]:
    return tuple(
        Conflict(target=cell.target, toolchain=cell.toolchain, name=cell.name, cell=cell.id, text=cell.conflict)
        for cell in cells
        if cell.conflict
    )


def _same_code(runs: Sequence[tuple[Run, Sequence[Cell]]], shown: Sequence[str]) -> None:
    seen: dict[str, tuple[str, str]] = {}  # digest's name -> digest, and the run that has it
    for (run, cells), name in zip(runs, shown, strict=True):
        for backend, origin in dict.fromkeys((cell.backend, cell.origin) for cell in cells):
            if origin not in run.known:
                raise ArgumentError("matrix merge", "RUN", name, "does not say what its cells depend on: make it anew")
            for part, value in digests_of(run.known[origin], backend).items():
                other, owner = seen.setdefault(part, (value, name))
                if other != value:
                    limit = f"its {part} ({value}) are not those of {owner} ({other}): make both with one checkout"
                    raise ArgumentError("matrix merge", "RUN", name, limit)


def _same_problems(runs: Sequence[tuple[Run, Sequence[Cell]]], shown: Sequence[str]) -> None:
    seen: dict[tuple[str, str, str], tuple[str, str]] = {}  # place -> the cell's id, and the run that has it
    for (_, cells), name in zip(runs, shown, strict=True):
        for cell in cells:
            other, owner = seen.setdefault(cell.place, (cell.id, name))
            if other != cell.id:
                limit = f"its {cell.name!r} on {cell.target} is another problem than that of {owner}"
                raise ArgumentError("matrix merge", "RUN", name, limit)


def _apart(cell: Cell) -> Iterator[Cell]:
    for one in (cell, *cell.others):
        yield msgspec.structs.replace(one, others=(), conflict="", index=0)


def _chosen(found: Sequence[Cell], identities: dict[str, Identity]) -> Cell:
    best, *others = sorted(found, key=lambda cell: (not cell.red, -evidence(cell), -cell.date.timestamp()))
    of_key: dict[str, Cell] = {}
    told = []
    for one in (best, *others):
        first = of_key.setdefault(one.key, one)
        if _result(one) != _result(first):
            told.append(f"{_said(first, identities)}, but {_said(one, identities)}, under the same conditions")
    if not others:
        return best
    return msgspec.structs.replace(best, others=tuple(others), conflict="; ".join(told))


def _result(cell: Cell) -> tuple[object, ...]:
    """Return the parts of a cell that must agree under one key: not times, nor the words of an error."""
    seen = entry(cell)
    return seen.status, seen.level, seen.label, seen.path, seen.quirks, seen.rejected, seen.worse, seen.numbers


def _said(cell: Cell, identities: dict[str, Identity]) -> str:
    where = identities.get(cell.origin)
    seen = entry(cell)
    path = f", path {seen.path}" if seen.path else ""
    worse = "".join(f", {name} {value}" for name, value in seen.worse.items())
    numbers = f", interpreted numbers {seen.numbers}" if seen.numbers not in ("", "pass") else ""
    return f"{word(seen)}{path}{worse}{numbers} on {where.host if where else 'an unknown host'}"


def _order(wanted: Sequence[str], cells: Sequence[Cell], runs: Sequence[tuple[Run, Sequence[Cell]]]) -> list[str]:
    """Return ids of all cells, a backend's columns together, problems in the runs' order."""
    by_id = {cell.id: cell for cell in cells}
    backends = _ranks(cell.backend for cell in cells)
    columns = _ranks(cell.place[:2] for cell in cells)
    rows = _ranks((cell.name, problem_digest(cell.subject)) for _, found in runs for cell in found)

    def place(name: str) -> tuple[int, int, int]:
        cell = by_id.get(name)
        if cell is None:  # of an interrupted run: it was never made
            return len(backends), 0, 0
        row = rows[cell.name, problem_digest(cell.subject)]
        return backends[cell.backend], columns[cell.place[:2]], row

    return sorted(wanted, key=place)


def _ranks(values: Iterable[Hashable]) -> dict[Hashable, int]:
    return {value: at for at, value in enumerate(dict.fromkeys(values))}


def _all(lists: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in lists for name in one))


def file_of(path: Path) -> Path:
    """Return a path's file: a folder's is its results.jsonl. Raises DataError on a folder without one."""
    if path.is_dir() and not (path / NAME).exists():
        raise DataError(path, None, f"has no {NAME}, as a folder of `matrix run` or `matrix merge` has")
    return path / NAME if path.is_dir() else path


def read_cells(path: Path) -> tuple[Run, list[Cell]]:
    """Read a run, a file of `portattn report`, or a bundle of `matrix export` with the results of its runner."""
    if (path / MANIFEST).exists():
        return provenance.of_bundle(path)
    return provenance.of_report(path) if path.suffix == ".json" else read(file_of(path))


def read_snapshot(path: Path) -> Snapshot:
    if path.suffix == BASELINE_SUFFIX and not path.is_dir():
        return read_baseline(path)
    return snapshot(*read_cells(path), shown=str(path))


def whole(path: Path, op: str, argument: str) -> Snapshot:
    """Like `read`, for a run that later runs are compared with. Raises ArgumentError if it was interrupted."""
    found = read_snapshot(path)
    if found.missing:
        limit = f"it was interrupted, and lacks {plural(found.missing, 'cell')}: nobody would miss them later"
        raise ArgumentError(op, argument, str(path), limit)
    return found


def earlier(path: Path) -> list[Path]:
    """Return all result files of a path; a folder's earlier results have their dates in their names."""
    if not path.is_dir() or (path / MANIFEST).exists():
        return [path]
    return [*sorted(path.glob(f"{Path(NAME).stem}-*.jsonl")), file_of(path)]


BASELINE_SCHEMA = 1  # raised when a reader of the version before would misread it
BASELINE_SUFFIX = ".toml"
_HEAD = """\
# A baseline of `portattn matrix`: what a run must not lose. Written by `portattn matrix baseline`; review its changes.
"""
_APART = " with "  # between target and toolchain in a table's name


class _BaselineCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
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


def write_baseline(made: Snapshot) -> str:
    lines = [_HEAD, f"schema = {BASELINE_SCHEMA}", f"set = {_value(made.set)}", f"date = {made.date.isoformat()}"]
    lines.append(f"cells = {len(made.entries)}")
    for identity in _identities(made):
        said = {name: value for name, value in msgspec.to_builtins(identity).items() if value not in ("", {}, 0.0)}
        table = f"identities.{_value(identity.id)}"
        lines += ["", f"[{table}]", *_pairs({k: v for k, v in said.items() if not isinstance(v, dict)})]
        for name, value in said.items():
            if isinstance(value, dict):
                lines += ["", f"[{table}.{name}]", *_pairs(value)]
    lines += ["", "[problems]", *_pairs(dict(sorted(made.problems.items())))]
    named = {f"{target}{_APART}{toolchain}": entries for (target, toolchain), entries in columns(made.entries).items()}
    origins = {name: Counter(entry.origin for entry in entries).most_common(1)[0][0] for name, entries in named.items()}
    lines += ["", "[origins]", *_pairs(dict(sorted(origins.items())))]
    for name, entries in sorted(named.items()):
        lines += ["", f"[columns.{_value(name)}]"]
        lines += _pairs({entry.name: _cell(entry, origins[name]) for entry in sorted(entries, key=lambda e: e.name)})
    return "\n".join(lines) + "\n"


def read_baseline(path: Path) -> Snapshot:
    """Read a baseline. Raises DataError (file, line) on any departure from its schema, such as a merge conflict."""
    data, text = run_log.read_toml(path)
    version = data.get("schema")
    if version != BASELINE_SCHEMA:
        found = f"schema version {version}" if isinstance(version, int) else "no baseline: it has no `schema`"
        where = toml_reader.line_of(text, "schema")
        raise DataError(path, where, f"{found}; this portattn reads version {BASELINE_SCHEMA}")
    file = toml_reader.convert(data, _BaselineFile, path, text)
    entries = [
        entry
        for name, cells in file.columns.items()
        for entry in _entries(path, text, name, cells, file.origins.get(name, ""))
    ]
    if len(entries) != file.cells:
        where = toml_reader.line_of(text, "cells")
        raise DataError(path, where, f"has {len(entries)} cells, and says {file.cells}: write it anew, or count again")
    same = {name: getattr(file, name) for name in ("set", "date", "problems", "identities")}
    return Snapshot(shown=str(path), entries=tuple(entries), **same)


def _identities(made: Snapshot) -> Iterable[Identity]:
    used: dict[str, set[str]] = {}
    for seen in made.entries:
        used.setdefault(seen.origin, set()).add(seen.target.partition(":")[0])
    for name in sorted(used.keys() & made.identities.keys()):
        identity = made.identities[name]
        needed = {key for backend in used[name] for key in digests_of(identity, backend)}
        kept = {key: value for key, value in identity.digests.items() if key in needed}
        yield msgspec.structs.replace(identity, digests=kept)


def _entries(path: Path, text: str, column: str, cells: Mapping[str, Any], origin: str) -> Iterable[SnapshotCell]:
    target, apart, toolchain = column.partition(_APART)
    if not apart:
        raise DataError(path, _line(text, column), f"key {column!r}: is not `target{_APART}toolchain`")
    for name, fields in cells.items():
        try:
            cell = toml_reader.convert(fields, _BaselineCell, path, text, name)
        except DataError as error:
            raise DataError(path, _line(text, column, name), error.problem) from None
        if cell.op not in (*ROWS, KERNELS):
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


def _cell(seen: SnapshotCell, origin: str) -> dict[str, Any]:
    fields = {name: getattr(seen, name) for name in _BaselineCell.__struct_fields__}
    if seen.origin == origin:
        fields["origin"] = ""
    found: dict[str, Any] = msgspec.to_builtins(_BaselineCell(**fields))
    return found


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{tomlkit.key(name).as_string()} = {_value(value)}" for name, value in values.items()]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(_pairs(value))} }}" if value else "{}"
    return tomlkit.item(value).as_string()
