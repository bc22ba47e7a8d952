"""Changing a quirk's file in place: comments and layout stay, and it is replaced whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomlkit

from portattn.errors import DataError
from portattn.files import write_whole
from portattn.planning.quirk_files import check_file


def edit(path: Path, quirk_id: str, change: Callable[[Any], object]) -> None:
    """Change the parsed file and write it, once it has been read back as a quirk.

    Raises DataError where the file is another quirk's now, or would no longer load; OSError where it cannot be written.
    """
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    if document.get("id") != quirk_id:
        raise DataError(path, 1, f"key 'id': the file is {document.get('id')!r} now, and not {quirk_id!r}")
    change(document)
    made = tomlkit.dumps(document).rstrip("\n") + "\n"
    trial = path.with_name(f".{path.name}")
    trial.write_text(made, encoding="utf-8")
    try:
        _, errors = check_file(trial)
    finally:
        trial.unlink()
    wrong = [error for error in errors if "is not the file's name" not in error.problem]
    if wrong:
        raise DataError(path, wrong[0].line, f"would be broken, so nothing was written: {wrong[0].problem}")
    write_whole(path, made.encode())
