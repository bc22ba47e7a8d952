"""Changing a quirk's file in place: comments and layout stay, and it is replaced whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomlkit

from portattn.errors import DataError
from portattn.files import write_whole
from portattn.planning.quirk_files import check_text


def edit(path: Path, quirk_id: str, change: Callable[[Any], object]) -> None:
    """Change the parsed file and write it, once it has been read back as a quirk.

    Raises DataError where the file is another quirk's now, would no longer load, or cannot be written.
    """
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    if document.get("id") != quirk_id:
        raise DataError(path, 1, f"key 'id': the file is {document.get('id')!r} now, and not {quirk_id!r}")
    change(document)
    replace(path, tomlkit.dumps(document).rstrip("\n") + "\n")


def replace(path: Path, text: str) -> None:
    """Replace a quirk's file by a text that the loader takes. Every reader of the folder sees the old file or the new.

    Raises DataError where the text would not load, or cannot be written: the old file stays then.
    """
    # Checked as text: a trial file in the folder would be read by others, and stay where this process is killed.
    _, wrong = check_text(text, path)
    if wrong:
        raise DataError(path, wrong[0].line, f"would be broken, so nothing was written: {wrong[0].problem}")
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise DataError(path, None, f"cannot be written: {error.strerror or error}") from error
