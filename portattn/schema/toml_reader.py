"""Strict readers of TOML data files: an error names the file and, if possible, the line."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from portattn.errors import DataError
from portattn.files import LARGEST_GIVEN, read_limited

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

_TABLE = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-\"'.]+)\s*=")


def files(folder: Path, pattern: str = "*.toml") -> list[Path]:
    """Return a folder's TOML files in order, without hidden ones, which editors and interrupted writers leave."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def read(path: Path) -> tuple[dict[str, Any], str]:
    """Parse a TOML file; return a dict and the text. Raises DataError with the line of a syntax error, and OSError."""
    data = read_limited(path, LARGEST_GIVEN)
    try:
        text = data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(path, line, f"not UTF-8: {error.reason}") from None
    return parse(text, path), text


def parse(text: str, path: Path) -> dict[str, Any]:
    """Return a TOML text as a dict. Raises DataError with the path and the line of a syntax error."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"line (\d+)", str(error))
        # "at end of document" has no line number: the missing text would follow the last line.
        raise DataError(path, int(where.group(1)) if where else len(text.splitlines()), f"not TOML: {error}") from None
    except RecursionError:
        raise DataError(path, None, "not TOML that can be read: it is nested too deeply") from None
    except ValueError as error:  # an integer of more digits than int() takes
        raise DataError(path, None, f"not TOML: {error}") from None


def line_of(text: str, *keys: str) -> int | None:
    """Return the line number of the innermost of nested keys that is found, or None.

    A number names an element of an array of tables: `line_of(text, "verified", "1", "level")`."""
    wanted = ".".join(keys)
    elements: dict[str, int] = {}
    table, best, depth = "", None, 0
    for number, line in enumerate(text.splitlines(), 1):
        header, assignment = _TABLE.match(line), _KEY.match(line)
        if assignment:
            key = assignment.group(1).replace('"', "").replace("'", "")
            name = f"{table}.{key}" if table else key
        elif header:
            table = header.group(2).replace('"', "").replace("'", "")
            if header.group(1) == "[[":
                elements[table] = elements.get(table, -1) + 1
                table = f"{table}.{elements[table]}"
            elif (first := table.partition("."))[0] in elements:  # a table inside an array's last element
                table = f"{first[0]}.{elements[first[0]]}.{first[2]}"
            name = table
        else:
            continue
        shared = name.count(".") + 1 if f"{wanted}.".startswith(f"{name}.") else 0
        if shared > depth:
            best, depth = number, shared
    return best


_UNKNOWN = re.compile(r"unknown field `([^`]+)`(?: - at `([^`]+)`)?")
_AT = re.compile(r" - at `([^`]+)`")
# msgspec speaks of JSON's objects and of structs' fields; a TOML file has tables and keys.
_WORDING = (
    ("Object contains unknown field", "the table has the unknown key"),
    ("Object missing required field", "the table lacks the key"),
    ("object", "table"),
)


@contextlib.contextmanager
def errors_at(path: Path, text: str, *keys: str) -> Iterator[None]:
    """Turn a ValueError, or the KeyError of an unknown name, into a DataError with file, line and key."""
    try:
        yield
    except (KeyError, ValueError) as error:
        problem = f"unknown name {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(path, line_of(text, *keys), f"key {'.'.join(keys)!r}: {problem}") from None


def convert(data: Any, kind: type[T], path: Path, text: str, *prefix: str) -> T:
    """Convert parsed TOML to a struct. Raises DataError with file, line and key if it departs from the schema."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        at = _AT.search(message)
        keys = [k for k in re.split(r"[.\[\]]+", at.group(1).lstrip("$")) if k and k != "..."] if at else []
        unknown = _UNKNOWN.search(message)
        if unknown:
            keys.append(unknown.group(1))
        shown = _AT.sub("", message)
        for theirs, ours in _WORDING:
            shown = shown.replace(theirs, ours)
        where = ".".join([*prefix, *keys])
        problem = f"key {where!r}: {shown}" if where else shown
        raise DataError(path, line_of(text, *prefix, *keys), problem) from None
