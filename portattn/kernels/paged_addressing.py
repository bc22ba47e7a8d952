"""Addresses of a tile's keys, in one tensor or in pages of a cache, and loads from them.

attend_packed16 looks a tile's pages up once, for the words of its keys and values and their scales.
"""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import Rows, Scales, TileRange
from portattn.kernels.unpack_int4 import NV_WORDS

WORD_BYTES: tl.constexpr = tl.constexpr(2)


@triton.jit
def key_places(table, start, end, pages,
               BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_LOOP: tl.constexpr,
               READS: tl.constexpr):  # fmt: skip
    """Return (page, row in it) of each key from `start` on, for all reads of a key.

    Keys from `end` on are not looked up. The places are tile_place's. Without pages a key's row counts from `start`,
    and the page has no meaning. If a tile is whole pages, `start` is a page's first key: only the number of its page
    changes from step to step.
    """
    r = tl.arange(0, BLOCK_N)
    if PAGE_SIZE == 0:
        page, row = start, r
    elif PAGE_LOOP == "per_page":
        page = tl.minimum(tl.maximum(tl.load(table + start // PAGE_SIZE), 0), pages - 1)
        row = start % PAGE_SIZE + r
    else:
        if READS == "inside":
            page = tl.load(table + tl.minimum(start + r, end - 1) // PAGE_SIZE)
            row = (start + r) % PAGE_SIZE
        elif BLOCK_N % PAGE_SIZE == 0:
            numbers = table + start // PAGE_SIZE + r // PAGE_SIZE
            if BOUNDED:
                page = tl.load(numbers, mask=start + r < end, other=0)
            else:
                page = tl.load(numbers)
            row = r % PAGE_SIZE
        else:
            page = tl.load(table + (start + r) // PAGE_SIZE, mask=start + r < end, other=0)
            row = (start + r) % PAGE_SIZE
        page = tl.minimum(tl.maximum(page, 0), pages - 1)
    return page, row


@records.jit
def tile_start(steps: TileRange, i, EDGE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first key of a pass's step i: EDGE 0 is the pass over full tiles, EDGE 1 that over the others."""
    if EDGE == 0:
        tile = steps.full_begin + i
    elif WINDOW:
        # The edge before the full tiles, then the one after them.
        tile = steps.first + i + tl.where(steps.first + i >= steps.full_begin, steps.full_end - steps.full_begin, 0)
    else:
        tile = steps.full_end + i
    return steps.origin + tile * BLOCK_N


@triton.jit
def page_from(table, start, end, pages, PART: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Return the page that holds the key `start + PART * PAGE_SIZE`; any page if the key is past `end` or the tile."""
    page = start - start
    if PART * PAGE_SIZE < BLOCK_N:
        page = tl.load(table + start // PAGE_SIZE + PART, mask=start + PART * PAGE_SIZE < end, other=0)
        page = tl.minimum(tl.maximum(page, 0), pages - 1)
    return page


@triton.jit
def pages_from(table, start, end, pages, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Return the pages of a tile of up to four pages whose keys begin at `start`."""
    first = page_from(table, start, end, pages, 0, BLOCK_N, PAGE_SIZE)
    second = page_from(table, start, end, pages, 1, BLOCK_N, PAGE_SIZE)
    third = page_from(table, start, end, pages, 2, BLOCK_N, PAGE_SIZE)
    fourth = page_from(table, start, end, pages, 3, BLOCK_N, PAGE_SIZE)
    return first, second, third, fourth


@triton.jit
def places_in_pages(first, second, third, fourth, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Return (page, row in it) of each key [BLOCK_N] of a tile that is two or four whole pages."""
    part = tl.arange(0, BLOCK_N) // PAGE_SIZE
    page = tl.where(part < 2, tl.where(part == 0, first, second), tl.where(part == 2, third, fourth))
    return page, tl.arange(0, BLOCK_N) % PAGE_SIZE


@triton.jit
def key_pointers(source, start, page, row, stride_page, stride_row, PAGE_SIZE: tl.constexpr):
    """Return a pointer for each key [BLOCK_N], from its page and row (key_places)."""
    if PAGE_SIZE == 0:
        pointers = source + start.to(tl.int64) * stride_row + row * stride_row
    else:
        pointers = source + page.to(tl.int64) * stride_page + row * stride_row
    return pointers


@triton.jit
def load_words(pointers, valid, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, BOUNDED: tl.constexpr,
               ALIGNED: tl.constexpr):  # fmt: skip
    """Load a tile [BLOCK_N, BLOCK_COLS] of the 16-bit words of keys' rows; with BOUNDED invalid keys give 0.

    pointers  a byte pointer for each key [BLOCK_N]
    COLS      words of a row
    ALIGNED   alignment of rows' addresses, in bytes
    """
    c = tl.arange(0, BLOCK_COLS)
    firsts = tl.multiple_of(pointers[:, None].to(tl.pointer_type(tl.int16)), [ALIGNED, ALIGNED])
    tile = firsts + c[None, :]
    if BOUNDED and COLS != BLOCK_COLS:
        words = tl.load(tile, mask=valid[:, None] & (c < COLS)[None, :], other=0)
    elif BOUNDED:
        words = tl.load(tile, mask=valid[:, None], other=0)
    elif COLS != BLOCK_COLS:
        words = tl.load(tile, mask=(c < COLS)[None, :], other=0)
    else:
        words = tl.load(tile)
    return words


@records.jit
def load_token_scales(scales: Scales, start, page, row, valid, PAGE_SIZE: tl.constexpr, BOUNDED: tl.constexpr):
    """Load each key's scale [BLOCK_N]; with BOUNDED invalid keys give 0."""
    pointers = key_pointers(scales.source, start, page, row, scales.stride_page, scales.stride_row, PAGE_SIZE)
    if BOUNDED:
        found = tl.load(pointers, mask=valid, other=0.0)
    else:
        found = tl.load(pointers)
    return found


@records.jit
def load_block_scales(rows: Rows, start, page, row, valid, PAGE_SIZE: tl.constexpr, BOUNDED: tl.constexpr):
    """Load the scales of each key's nvfp4 blocks as 16-bit words of two, [BLOCK_N, a row's]; with BOUNDED invalid keys
    give 0."""
    COLS: tl.constexpr = rows.COLS // WORD_BYTES // NV_WORDS
    BLOCK_COLS: tl.constexpr = rows.BLOCK_COLS // WORD_BYTES // NV_WORDS
    return load_words(
        key_pointers(rows.scales.source, start, page, row, rows.scales.stride_page, rows.scales.stride_row, PAGE_SIZE),
        valid, COLS, BLOCK_COLS, BOUNDED, 4 if COLS % 2 == 0 else 2,
    )  # fmt: skip
