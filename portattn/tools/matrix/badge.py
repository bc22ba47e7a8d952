"""The badge of a run: how many cells of chips are green, amber and red, as SVG and for shields.io."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from portattn.tools.matrix.cells import Cell, Run, cell_id
from portattn.tools.matrix.not_run import places
from portattn.tools.matrix.snapshot import has_chip
from portattn.tools.matrix.table import environment

LABEL = "portattn matrix"
FILL = {"green": "#1f8060", "amber": "#96650a", "red": "#c2352b", "grey": "#5b6662"}
SHIELDS = {"green": "brightgreen", "amber": "yellow", "red": "red", "grey": "lightgrey"}
# Verdana's 11 px, as badges have it: wide enough for any letter that is in one, and room at both sides.
LETTER, ROOM = 7, 10


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the cells of chips. CPU cells count nowhere: their numbers are the reference.

    green  PASS, with a level above `declared`
    amber  without a fault and without evidence: `declared`, NOTE, NOT_RUN, or not made at all
    red    FAIL, ERROR, CRASH, TIMEOUT
    """

    green: int
    amber: int
    red: int

    @property
    def colour(self) -> str:
        """The worst kind present; grey without a cell of a chip."""
        return next((name for name in ("red", "amber", "green") if getattr(self, name)), "grey")


def counts(run: Run, cells: Sequence[Cell]) -> Counts:
    """Count the cells of a run, and the places of its table without one."""
    chips = [cell for cell in cells if has_chip(cell.target)]
    red = sum(cell.red for cell in chips)
    green = sum(cell.status == "PASS" and cell.level != "declared" for cell in chips)
    empty = {cell_id(*place): has_chip(place[1]) for place in places(cells)}
    empty |= {name: empty.get(name, True) for name in set(run.cells) - {cell.id for cell in cells}}
    return Counts(green=green, amber=len(chips) - green - red + sum(empty.values()), red=red)


def endpoint(found: Counts) -> dict[str, Any]:
    """The document of shields.io's endpoint badge."""
    said = [f"{getattr(found, name)} {name}" for name in ("green", "amber", "red") if getattr(found, name)]
    return {
        "schemaVersion": 1,
        "label": LABEL,
        "message": ", ".join(said) or "no cells",
        "color": SHIELDS[found.colour],
        "isError": found.red > 0,
    }


def svg(found: Counts) -> str:
    """The badge as a picture that needs no service."""
    said = [(str(getattr(found, name)), FILL[name]) for name in ("green", "amber", "red") if getattr(found, name)]
    parts, left = [], 0
    for text, fill in [(LABEL, "#333b38"), *(said or [("no cells", FILL["grey"])])]:
        width = len(text) * LETTER + ROOM
        parts.append({"text": text, "fill": fill, "left": left, "width": width, "middle": left + width / 2})
        left += width
    about = f"{LABEL}: {endpoint(found)['message']}"
    return environment().get_template("badge.svg.jinja").render(parts=parts, width=left, about=about)
