"""Runs of several machines made one: of each cell the result that knows most, and the others beside it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from portattn.errors import ArgumentError
from portattn.tools.matrix.cells import Cell, Run
from portattn.tools.matrix.identity import Identity, digests_of
from portattn.tools.matrix.results import place_of
from portattn.tools.matrix.snapshot import entry, evidence, problem_digest, word


class Conflict(msgspec.Struct, frozen=True, kw_only=True):
    """Two results of one cell that differ though everything that they depend on is the same."""

    target: str
    toolchain: str
    name: str
    cell: str
    text: str

    def __str__(self) -> str:
        return f"{self.target}  {self.toolchain}  {self.name}: {self.text}"


class MergedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run made of several."""

    run: Run
    cells: list[Cell]
    conflicts: tuple[Conflict, ...]


def merge(runs: Sequence[tuple[Run, Sequence[Cell]]], shown: Sequence[str], command: str) -> MergedRun:
    """Make one run of several. A merged run may be merged again: what it is made of counts, and nothing twice.

    shown  what each run is called in errors

    Of several results of a cell the one with most evidence is kept, but a red one before any other: that something
    fails on one machine is not taken back by another. The others stay beside it, in `Cell.others`.

    Raises ArgumentError where two runs were made of different kernels, code or data that cells of both depend on, or
    have different problems of one name.
    """
    _same_code(runs, shown)
    _same_problems(runs, shown)
    identities = {identity.id: identity for run, _ in runs for identity in run.identities}
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
    first = runs[0][0]
    made = msgspec.structs.replace(
        first,
        toolchains=_all(run.toolchains for run, _ in runs),
        compiler=", ".join(dict.fromkeys(run.compiler for run, _ in runs)),
        machine=", ".join(dict.fromkeys(run.machine for run, _ in runs)),
        devices=_all(run.devices for run, _ in runs),
        versions=first.versions,
        command=command,
        problems=", ".join(_all(run.problems.split(", ") for run, _ in runs)),
        targets=_all(run.targets for run, _ in runs),
        cells=tuple(wanted),
        environments={name: what for run, _ in runs for name, what in run.environments.items()},
        identities=tuple(identities.values()),
        date=datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0),
    )
    return MergedRun(run=made, cells=chosen, conflicts=conflicts(chosen))


def conflicts(cells: Iterable[Cell]) -> tuple[Conflict, ...]:
    """The conflicts that the cells of a merged run record."""
    return tuple(
        Conflict(target=cell.target, toolchain=cell.toolchain, name=cell.name, cell=cell.id, text=cell.conflict)
        for cell in cells
        if cell.conflict
    )


def _same_code(runs: Sequence[tuple[Run, Sequence[Cell]]], shown: Sequence[str]) -> None:
    """Raise ArgumentError where cells of two runs depend on things that differ."""
    seen: dict[str, tuple[str, str]] = {}  # digest's name -> digest, and the run that has it
    for (run, cells), name in zip(runs, shown, strict=True):
        known = {identity.id: identity for identity in run.identities}
        for backend, origin in dict.fromkeys((cell.target.partition(":")[0], cell.origin) for cell in cells):
            if origin not in known:
                raise ArgumentError("matrix merge", "RUN", name, "does not say what its cells depend on: make it anew")
            for part, value in digests_of(known[origin], backend).items():
                other, owner = seen.setdefault(part, (value, name))
                if other != value:
                    limit = f"its {part} ({value}) are not those of {owner} ({other}): make both with one checkout"
                    raise ArgumentError("matrix merge", "RUN", name, limit)


def _same_problems(runs: Sequence[tuple[Run, Sequence[Cell]]], shown: Sequence[str]) -> None:
    """Raise ArgumentError where a problem's name means two problems: later runs find cells by their names."""
    seen: dict[tuple[str, str, str], tuple[str, str]] = {}  # place -> the cell's id, and the run that has it
    for (_, cells), name in zip(runs, shown, strict=True):
        for cell in cells:
            other, owner = seen.setdefault(place_of(cell), (cell.id, name))
            if other != cell.id:
                limit = f"its {cell.name!r} on {cell.target} is another problem than that of {owner}"
                raise ArgumentError("matrix merge", "RUN", name, limit)


def _apart(cell: Cell) -> Iterator[Cell]:
    """The results that a cell of a run holds: its own, and what a merge has put beside it."""
    for one in (cell, *cell.others):
        yield msgspec.structs.replace(one, others=(), conflict="", index=0)


def _chosen(found: Sequence[Cell], identities: dict[str, Identity]) -> Cell:
    """The result that stands for a cell, with the others beside it.

    Results of every key are compared with each other, also of one that the best result has not.
    """
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
    """What of a cell must be the same where its key is: not its times, nor the words of an error."""
    seen = entry(cell)
    return seen.status, seen.level, seen.label, seen.path, seen.quirks, seen.rejected, seen.worse, seen.numbers


def _said(cell: Cell, identities: dict[str, Identity]) -> str:
    where = identities.get(cell.origin)
    seen = entry(cell)
    path = f", path {seen.path}" if seen.path else ""
    worse = "".join(f", {name} {value}" for name, value in seen.worse.items())
    numbers = f", interpreted numbers {seen.numbers}" if seen.numbers not in ("", "pass") else ""
    return f"{word(seen)}{path}{worse}{numbers} on {where.host if where else 'an unknown host'}"


def _order(
    wanted: Sequence[str], cells: Sequence[Cell], runs: Sequence[tuple[Run, Sequence[Cell]]]
) -> list[str]:  # fmt: skip
    """Ids of all cells, a backend's columns together, and problems in the order in which the runs have them."""
    by_id = {cell.id: cell for cell in cells}
    backends = {name: n for n, name in enumerate(dict.fromkeys(c.target.partition(":")[0] for c in cells))}
    columns = {name: n for n, name in enumerate(dict.fromkeys((c.target, c.toolchain) for c in cells))}
    names = dict.fromkeys((cell.name, problem_digest(cell.problem)) for _, found in runs for cell in found)
    rows = {name: n for n, name in enumerate(names)}

    def place(name: str) -> tuple[int, int, int]:
        cell = by_id.get(name)
        if cell is None:  # of an interrupted run: it was never made
            return len(backends), 0, 0
        column = columns[cell.target, cell.toolchain]
        return backends[cell.target.partition(":")[0]], column, rows[cell.name, problem_digest(cell.problem)]

    return sorted(wanted, key=place)


def _all(lists: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Each text once, in order."""
    return tuple(dict.fromkeys(name for one in lists for name in one))
