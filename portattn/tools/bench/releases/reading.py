"""releases.json, read back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from portattn.errors import DataError
from portattn.tools import run_log
from portattn.tools.bench.releases.compared import SCHEMA, Comparison
from portattn.tools.run_log import UNREADABLE

NAME = "releases.json"
_SET = re.compile(r"[\w.-]+")  # a set's name is part of a file's


class _Kind(msgspec.Struct):
    """What tells a comparison from a run's results, whatever its file is called."""

    releases: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    runs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _ComparisonVersion(msgspec.Struct):
    schema: int


def place(path: Path) -> Path | None:
    """The comparison that a path names: the releases.json of a folder, or the file itself. None where it is no such
    file, or cannot be read to tell."""
    if path.is_dir():
        return path / NAME if (path / NAME).exists() else None
    if path.name.endswith(NAME):
        return path  # whoever reads it says what is wrong with it
    if path.suffix == ".jsonl" or not path.is_file():
        return None
    try:
        kind = msgspec.json.decode(run_log.read(path), type=_Kind)
    except (DataError, *UNREADABLE):  # whoever reads it as a run's results says so
        return None
    return path if kind.releases is not msgspec.UNSET and kind.runs is msgspec.UNSET else None


def read(path: Path) -> Comparison:
    """The comparison in a releases.json.

    Raises DataError (file) when it is none, or of another schema version.
    """
    data = run_log.read(path)
    try:
        version = msgspec.json.decode(data, type=_ComparisonVersion).schema
        if version != SCHEMA:
            raise DataError(path, None, f"schema version {version}; this portattn reads version {SCHEMA}")
        whole = msgspec.json.decode(data, type=Comparison)
    except UNREADABLE as error:
        raise DataError(path, None, f"no comparison of releases by portattn bench: {error}") from None
    for problem in _problems(whole):
        raise DataError(path, None, problem)
    return whole


def _problems(whole: Comparison) -> Iterator[str]:
    """What tables and plots would leave out without a word, or could not name."""
    names = [run.release for run in whole.releases]
    yield from (f"`releases` lists {name} twice" for name in names if names.count(name) > 1)
    known = set(whole.started)
    named = [
        *((f"`cases`, {c.set}, {c.case}, {c.contender}", {*c.releases, *filter(None, (c.best,))}) for c in whole.cases),
        *((f"`sets`, {s.set}, {s.contender}, {s.release}", {s.release}) for s in whole.sets),
        *((f"`first_calls`, {c.case}", set(c.releases)) for c in whole.first_calls),
        *((f"`goals`, {g.goal}", set(g.releases)) for g in whole.goals),
    ]
    for where, there in named:
        for name in sorted(there - known):
            yield f"{where}: {name} is no release that `releases` lists as started"
    for case in whole.cases:
        if not _SET.fullmatch(case.set):
            yield f"`cases`, {case.case}: {case.set!r} is no name of a set"
