"""Reading TOML data files strictly: every complaint names the file and, where it can, the line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from portattn.errors import DataError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

_TABLE = re.compile(r"^\s*\[+\s*([^\[\]]+?)\s*\]+")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-\"'.]+)\s*=")


def read(path: Path) -> tuple[dict[str, Any], str]:
    """Parse a TOML file into a dict, beside its text. Raises DataError with the line of a syntax error."""
    text = path.read_text(encoding="utf-8")
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise DataError(path, int(line.group(1)) if line else None, f"not TOML: {error}") from None


def line_of(text: str, *keys: str) -> int | None:
    """Line number of the innermost key that can be found, looking inside [tables] by their dotted name."""
    table, best, depth = "", None, 0
    wanted = ".".join(keys)
    for number, line in enumerate(text.splitlines(), 1):
        header, assignment = _TABLE.match(line), _KEY.match(line)
        if header and not assignment:
            table = header.group(1).replace('"', "")
            name = table
        elif assignment:
            key = assignment.group(1).strip("\"'")
            name = f"{table}.{key}" if table else key
        else:
            continue
        shared = len(name.split(".")) if wanted == name or wanted.startswith(name + ".") else 0
        if shared > depth:
            best, depth = number, shared
            inside = wanted[len(name) + 1 :].split(".")[0] if wanted != name else ""
            if inside and assignment and not re.search(rf"\b{re.escape(inside)}\b", line):
                continue
    return best


_UNKNOWN = re.compile(r"unknown field `([^`]+)`(?: - at `([^`]+)`)?")
_AT = re.compile(r" - at `([^`]+)`")


def convert(data: Any, kind: type[T], path: Path, text: str, *prefix: str) -> T:
    """Convert parsed TOML to a struct. Raises DataError with file, line and key on any departure from its schema."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        at = _AT.search(message)
        keys = [k for k in re.split(r"[.\[\]]+", at.group(1).lstrip("$")) if k and k != "..."] if at else []
        unknown = _UNKNOWN.search(message)
        if unknown:
            keys.append(unknown.group(1))
        shown = _AT.sub("", message).replace("Object", "The table").replace("object", "table")
        where = ".".join([*prefix, *keys])
        problem = f"key {where!r}: {shown}" if where else shown
        raise DataError(path, line_of(text, *prefix, *keys), problem) from None
