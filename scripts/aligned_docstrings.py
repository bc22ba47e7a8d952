"""A griffe extension for the API reference: the library's aligned lists of parameters become definition lists.

A docstring here describes parameters and fields as rows of two columns, which read well in a terminal:

    q           (B, Hq, Sq, D); float16, bfloat16 or float32
    scale       factor on the scores; None for 1/√D. Negative and
                zero are legal

Markdown would join these lines to one paragraph. mkdocs.yml names this file.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import griffe

_ROW = re.compile(r"(\S.*?) {2,}(\S.*)")
_CODE = re.compile(r"(`[^`]*`)")


class AlignedLists(griffe.Extension):
    """Rewrites every docstring that griffe has read, before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Empty a stub: merged, its overloads would replace names that griffe has not resolved yet, docstrings too."""
        if isinstance(mod.filepath, Path) and mod.filepath.suffix == ".pyi":
            mod.members.clear()
            mod.imports.clear()
            mod.exports = None


def markdown(docstring: str) -> str:
    """The docstring as Markdown: lists of rows as definition lists, examples of a Python prompt as code."""
    paragraphs = re.split(r"\n(?:[ \t]*\n)+", inspect.cleandoc(docstring))
    return "\n\n".join(_paragraph(text) for text in paragraphs)


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if lines[0].startswith(">>>"):
        return "\n".join(("```pycon", *lines, "```"))
    first = _ROW.match(lines[0])
    if first is None or any(line[0] == " " and not line.startswith("  ") for line in lines):
        return _escape(text)
    rows: list[tuple[str, list[str]]] = []
    for line in lines:
        if line[0] == " ":
            rows[-1][1].append(line.strip())
        elif (split := _split(line, first.start(2))) is None:  # a sentence: no list
            return _escape(text)
        else:
            rows.append((split[0], [split[1]]))
    return "\n\n".join(f"{_names(names)}\n:   {_escape(' '.join(words))}" for names, words in rows)


def _split(line: str, column: int) -> tuple[str, str] | None:
    """Names and description: apart by two spaces, or by one where a long name reaches the list's second column."""
    if line[column - 1 : column] == " " and line[column : column + 1].strip():
        return line[:column].rstrip(), line[column:]
    row = _ROW.match(line)
    return (row[1], row[2]) if row else None


def _names(names: str) -> str:
    return ", ".join(name if name.startswith("`") else f"`{name}`" for name in names.split(", "))


def _escape(text: str) -> str:
    """Without what HTML would take for a tag (<id>.toml), outside of code."""
    parts = _CODE.split(text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)
