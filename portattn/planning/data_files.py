"""Reading a backend's arches and tuning; quirks are read by quirk_files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from portattn.errors import DataError
from portattn.schema import toml_reader
from portattn.schema.target import Arch
from portattn.schema.tuning import Tuning, load_tuning


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
