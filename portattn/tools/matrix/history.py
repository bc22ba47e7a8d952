"""A cell's history: what each of several runs made of it, and what changed between them."""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Sequence

import msgspec

from portattn.tools.matrix.diff import compare
from portattn.tools.matrix.snapshot import Snapshot, SnapshotCell, word


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What one run made of a cell.

    changed  kinds of changes since the run before, with a clause about each; empty for the first
    """

    run: str
    date: datetime.datetime
    target: str
    toolchain: str
    name: str
    word: str
    path: str
    commit: str
    host: str
    changed: dict[str, str] = {}
    lost: bool = False
    causes: tuple[str, ...] = ()


def matches(entry: SnapshotCell, cell: str) -> bool:
    """Whether a text means a cell: its problem's name, its target and name, or all three, as globs."""
    names = (entry.name, f"{entry.target} {entry.name}", f"{entry.target} {entry.toolchain} {entry.name}")
    return any(fnmatch.fnmatchcase(name, cell) for name in names)


def history(runs: Sequence[Snapshot], cell: str) -> list[HistoryEntry]:
    """What became of the cells that a text means, over runs in the order of their dates; a cell's lines together.

    A target's toolchain may change from run to run, as in `diff`.
    """
    runs = sorted(runs, key=lambda run: run.date)
    found: dict[tuple[str, str], list[HistoryEntry]] = {}
    last: dict[tuple[str, str], Snapshot] = {}
    for run in runs:
        mine: dict[tuple[str, str], list[SnapshotCell]] = {}
        for entry in run.entries:
            if matches(entry, cell):
                mine.setdefault((entry.target, entry.name), []).append(entry)
        for key, entries in mine.items():
            now = msgspec.structs.replace(run, entries=tuple(entries))
            changes = {c.toolchain: c for c in compare(last[key], now).changes} if key in last else {}
            for entry in entries:
                change = changes.get(entry.toolchain)
                identity = run.identity(entry)
                found.setdefault(key, []).append(
                    HistoryEntry(
                        run=run.shown,
                        date=run.date,
                        target=entry.target,
                        toolchain=entry.toolchain,
                        name=entry.name,
                        word=word(entry),
                        path=entry.path,
                        commit=identity.code() if identity else "",
                        host=str(identity.host) if identity else "",
                        changed={k: v for k, v in change.told.items() if k != "new"} if change else {},
                        lost=bool(change and change.lost),
                        causes=tuple(map(str, change.causes)) if change else (),
                    )
                )
            last[key] = now
    return [seen for lines in found.values() for seen in lines]
