"""The page of a run of the matrix, and its counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from portattn.cli.output import plural
from portattn.errors import ArgumentError
from portattn.files import write_named

if TYPE_CHECKING:
    from portattn.tools.matrix.cells import Cell, Run

PAGE = "index.html"


def write_page(made: Run, cells: list[Cell], path: Path) -> None:
    """Write the page. Raises ArgumentError where it cannot be written."""
    from portattn.tools.matrix.report import render

    try:
        write_named(path, render(made, cells).encode())
    except OSError as error:
        raise ArgumentError("matrix", "page", str(path), f"cannot be written: {error.strerror}") from None


def counts(cells: Sequence[Cell]) -> str:
    """`12 runs, 3 runs (sm_80 code on sm_90), 5 NOTE`: passing cells by level, the others by status."""
    from portattn.tools.matrix.snapshot import word

    found = Counter(word(cell) for cell in cells)
    return ", ".join(f"{number} {said}" for said, number in found.most_common()) or "none"


def tell_empty(made: Run, cells: Sequence[Cell]) -> None:
    """Print why cells are empty, and the command that fills them."""
    from portattn.tools.matrix.not_run import gaps

    for gap in gaps(made, cells):
        where = f" ({', '.join(gap.targets)})" if gap.targets else ""
        click.echo(f"{plural(gap.cells, 'cell')} {gap.why.word}{where}: {gap.why.short}")
        click.echo(f"  first: {gap.why.needs}; then: {gap.command}" if gap.why.needs else f"  fill: {gap.command}")
