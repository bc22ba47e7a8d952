"""Reading a backend's arches, tuning and evidence; quirks are read by quirk_files."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Literal

import msgspec

from portattn.errors import DataError
from portattn.schema import toml_reader
from portattn.schema.target import Arch
from portattn.schema.tuning import Tuning, load_tuning


class Seen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evidence that comes with a backend: on these arches and this toolchain the tests passed on the chip."""

    arch: tuple[str, ...]
    toolchain: str
    level: Literal["runs", "measured"]
    date: datetime.date
    what: str


class _Verified(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seen: tuple[Seen, ...]


def load_verified(folder: Path) -> tuple[Seen, ...]:
    """Read a backend folder's verified.toml; nothing where it has none. Raises DataError (file, line, key)."""
    path = folder / "verified.toml"
    if not path.exists():
        return ()
    data, text = toml_reader.read(path)
    return toml_reader.convert(data, _Verified, path, text).seen


def load_arches(path: Path) -> dict[str, Arch]:
    """Read an arches.toml: one table per arch. Raises DataError (file, line, key)."""
    data, text = toml_reader.read(path)
    arches = {}
    for name, table in data.items():
        if not isinstance(table, dict):
            raise DataError(path, toml_reader.line_of(text, name), f"key {name!r}: every arch is a table")
        arches[name] = msgspec.structs.replace(toml_reader.convert(table, Arch, path, text, name), name=name)
    return arches


def load_tunings(folder: Path, backend: str) -> dict[str, Tuning]:
    """Read every tuning file of a backend's folder, by arch. Raises DataError (file, line, key)."""
    return {path.stem: load_tuning(path, backend) for path in sorted(folder.glob("*.toml"))}
