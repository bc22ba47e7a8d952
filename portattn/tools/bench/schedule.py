"""In which order cells are measured: under a budget, every set gets its share, and a set's cells are spread over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from portattn.tools.bench.cases import Case

Cell = tuple[str, Case]  # a set's name and one of its cases


def plain(chosen: Mapping[str, Sequence[Case]]) -> list[Cell]:
    """Set after set, each in its own order."""
    return [(name, case) for name, cases in chosen.items() for case in cases]


def covering(chosen: Mapping[str, Sequence[Case]]) -> list[Cell]:
    """One cell of every set, then the next of every set; a set's own far apart first. Wherever it is cut off, every set
    has as many cells as any other, or all of its own."""
    columns = [[(name, case) for case in spread(cases)] for name, cases in chosen.items()]
    return [cell for row in zip_longest(*columns) for cell in row if cell is not None]


def spread(cases: Sequence[Case]) -> list[Case]:
    """The same cases in the order of their places' reversed bits: first, middle, quarters, …"""
    bits = max(len(cases) - 1, 1).bit_length()
    places = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [cases[place] for place in places if place < len(cases)]
