"""Tuning: block sizes and choices per arch and kernel, as data. Nothing is searched for at run time."""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from portattn import conditions, tomlfile
from portattn.errors import DataError
from portattn.lowering import CHOICES, OptionValue, check_launch_values


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the choices come from. `measured` is True only when they were timed on the chip."""

    chip: str
    toolchain: str
    date: datetime.date
    measured: bool
    note: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choices for kernels whose names match a glob, where all conditions of `when` hold; the first that holds is taken.

    timed     False for a choice that was only compiled, in a file whose others were timed
    resident  programs that one core runs at a time, as far as the split over keys is concerned (decode)
    """

    kernel: str
    when: tuple[str, ...] = ()
    launch: dict[str, OptionValue] = {}
    lowering: dict[str, str] = {}
    resident: int = 1
    timed: bool = True
    note: str = ""


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tuning file."""

    provenance: Provenance
    entry: tuple[Entry, ...]

    def find(self, kernel: str, features: Mapping[str, Any]) -> Entry | None:
        for entry in self.entry:
            if not fnmatch.fnmatchcase(kernel, entry.kernel):
                continue
            if conditions.all_hold(map(conditions.parse, entry.when), features):
                return entry
        return None


def load_tuning(path: Path, backend: str) -> Tuning:
    """Read one tuning file of a backend. Raises DataError (file, line, key) on anything outside its schema."""
    data, text = tomlfile.read(path)
    tuning = tomlfile.convert(data, Tuning, path, text)
    for entry in tuning.entry:
        try:
            for condition in entry.when:
                if conditions.parse(condition).name == "programs":
                    raise ValueError(f"condition {condition!r}: the number of programs follows from the entry's launch")
            if "splits" in entry.launch:
                raise ValueError("launch splits is computed from the sizes of a problem; `resident` steers it")
            check_launch_values(dict(entry.launch), backend)
            for name, value in entry.lowering.items():
                if value not in CHOICES.get(name, ()):
                    raise ValueError(f"lowering {name} = {value!r} is outside {CHOICES.get(name, 'the known choices')}")
        except ValueError as error:
            line = next((n for n, s in enumerate(text.splitlines(), 1) if _mentions(s, str(error))), None)
            raise DataError(path, line, f"entry for {entry.kernel} when {list(entry.when)}: {error}") from None
    return tuning


def _mentions(line: str, message: str) -> bool:
    """Whether a line of the file holds the name that an error message quotes first."""
    quoted = message.split("'")[1] if "'" in message else message.split(" ")[1]
    return not line.lstrip().startswith("#") and quoted in line
