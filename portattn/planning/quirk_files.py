"""Reading quirk files: the schema's shape, and then what its types alone do not catch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from portattn.errors import DataError
from portattn.planning import quirk_checks
from portattn.schema import toml_reader
from portattn.schema.quirk import Quirk


def load_quirk(path: Path, backends: Collection[str] = ()) -> Quirk:
    """Read one quirk file. `backends` are the names that `when.backend` may have; any name when none are given.

    Raises DataError (file, line, key) on the first thing that is outside the schema or its vocabularies.
    """
    quirk, problems = check_file(path, backends)
    if problems:
        raise problems[0]
    assert quirk is not None  # check_file gives one or the other
    return quirk


def load_quirks(folders: list[Path], backends: tuple[str, ...], outer: Path | None = None) -> dict[str, Quirk]:
    """Read every quirk file of the folders, tombstones too. Hidden files are none.

    outer  one of the folders, which the others are in

    Raises DataError on a broken file, an unknown backend, an id used twice.
    """
    quirks: dict[str, Quirk] = {}
    for folder in folders:
        for nested in toml_reader.files(folder, "*/*.toml") if folder != outer else ():
            raise DataError(nested, None, f"quirk files lie in {folder} itself: this one would never be read")
        for path in toml_reader.files(folder):
            quirk = load_quirk(path, backends)
            if quirk.id in quirks:
                raise DataError(path, None, f"id {quirk.id!r} is already taken by {quirks[quirk.id].file}")
            quirks[quirk.id] = quirk
    return quirks


def check_file(path: Path, backends: Collection[str] = ()) -> tuple[Quirk | None, list[DataError]]:
    """Read one quirk file and collect what is wrong with it: (quirk, every DataError that load_quirk could raise).

    The quirk is None when the file is not TOML or has not the schema's shape; later checks need that shape, so such a
    file gives one error, the first.
    """
    try:
        data, text = toml_reader.read(path)
    except DataError as error:
        return None, [error]
    return _checked(data, text, path, backends)


def check_text(text: str, path: Path, backends: Collection[str] = ()) -> tuple[Quirk | None, list[DataError]]:
    """As check_file, of the text that a file at this path would have; the file need not be there."""
    try:
        data = toml_reader.parse(text, path)
    except DataError as error:
        return None, [error]
    return _checked(data, text, path, backends)


def _checked(
    data: dict[str, Any], text: str, path: Path, backends: Collection[str]
) -> tuple[Quirk | None, list[DataError]]:
    try:
        if "file" in data:  # a field of Quirk that is filled in here, and no key of the format
            raise DataError(path, toml_reader.line_of(text, "file"), "key 'file': the table has the unknown key `file`")
        quirk = toml_reader.convert(data, Quirk, path, text)
    except DataError as error:
        return None, [error]
    errors = [
        DataError(path, toml_reader.line_of(text, *keys), f"key {'.'.join(keys)!r}: {problem}")
        for keys, problem in quirk_checks.problems(quirk, backends, path)
    ]
    if quirk.id != path.stem:
        errors.append(
            DataError(path, toml_reader.line_of(text, "id"), f"key 'id': {quirk.id!r} is not the file's name")
        )
    return msgspec.structs.replace(quirk, file=str(path)), errors
