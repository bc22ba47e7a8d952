"""The page of a run: the table, with a card for each cell; one file that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence

from portattn.tools.matrix.cells import Cell, Run
from portattn.tools.matrix.table import context, environment


def render(run: Run, cells: Sequence[Cell]) -> str:
    """The page as HTML text."""
    found = context(run, cells)
    numbers = found["numbers"]
    template = environment().get_template("report.html.jinja")
    return template.render(**found, linked=False, quirk_page=lambda quirk: f"#fn{numbers[quirk]}")
