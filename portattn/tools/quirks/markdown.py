"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "".join("| " + " | ".join(_cell(text) for text in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """A pipe would end the cell; inside backticks only a backslash before it keeps it."""
    return " ".join(text.split()).replace("|", "\\|")
