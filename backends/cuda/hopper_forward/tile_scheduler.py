"""How the Hopper forward divides a problem: widths, tiles of rows, heads that share them, and loads of pages."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

from portattn.backends.cuda.sizes import GROUP_ROWS
from portattn.planning.kernel_specs import ceil_div

if TYPE_CHECKING:
    from portattn.schema.problem import Problem

WIDTHS = (64, 128, 256)  # head dimensions that the kernel has; others are padded by what TMA reads as zeros
PAGE_STEP = 16  # tokens of a page: a multiple of so many
SWIZZLED = 64  # 16-bit columns of one swizzled block of shared memory: 128 bytes


def width(head_dim: int) -> int:
    """The kernel's width for a head."""
    return next((w for w in WIDTHS if w >= head_dim), head_dim)


def heads_of(p: Problem) -> int:
    """Query heads whose rows share tiles: over pages all of a key head's where they are a power of two up to 64, and
    otherwise the largest power of two that divides them.

    A sequence of one new token then has as many tiles as key heads, not as query heads.
    """
    if not p.page_size:
        return 1
    return math.gcd(operator.index(p.group), GROUP_ROWS)


def pieces(p: Problem, most: int) -> tuple[int, int]:
    """Keys and columns that one load brings of a tile of `most` keys, which are a power of two.

    Without pages, and where tiles lie in pages whole, that is a tile. Otherwise a load never crosses a page's end, and
    brings one block of columns, since each is an array of its own in shared memory.
    """
    keys = math.gcd(operator.index(p.page_size), most)
    return keys, width(p.head_dim) if keys == most else SWIZZLED


def row_tiles(p: Problem, rows: int) -> int:
    """Tiles of so many rows of a head; of packed rows the numbers that work.py looks sequences up by."""
    rows //= heads_of(p)
    return ceil_div(p.seq_q, rows) if p.total_q is None else p.total_q // rows + p.batch + 1


def tiles_of(p: Problem, rows: int) -> int:
    """Tiles of so many rows of all heads, and of all sequences."""
    return row_tiles(p, rows) * (p.heads_q // heads_of(p)) * (1 if p.packed else p.batch)
