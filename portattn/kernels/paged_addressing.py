"""Addresses of a tile's keys, in one tensor or in pages of a cache, and loads from them.

attend_packed16 looks a tile's pages up once, for the words of its keys and values and their scales.
"""

import triton
import triton.language as tl


@triton.jit
def key_places(table, start, end, pages,
               BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_LOOP: tl.constexpr,
               READS: tl.constexpr):  # fmt: skip
    """(page, row in it) of the keys from `start` on, of which those from `end` on are not looked up.

    As tile_place has them, but once for all that is read of a key. Without pages a key's row counts from `start`, and
    the page is of no meaning. Where a tile is whole pages, `start` is a page's first key: only the number of its page
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


@triton.jit
def step_of(i, first_step, full_begin, full_end, EDGE: tl.constexpr, WINDOW: tl.constexpr):
    """Which tile of keys the i-th step of a pass attends: see attend_packed16."""
    if EDGE == 0:
        step = full_begin + i
    elif WINDOW:
        step = first_step + i + tl.where(first_step + i >= full_begin, full_end - full_begin, 0)
    else:
        step = full_end + i
    return step


@triton.jit
def page_from(table, start, end, pages, PART: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The number of the page that holds the key `start + PART * PAGE_SIZE`; of none from `end` on, or past the tile."""
    page = start - start
    if PART * PAGE_SIZE < BLOCK_N:
        page = tl.load(table + start // PAGE_SIZE + PART, mask=start + PART * PAGE_SIZE < end, other=0)
        page = tl.minimum(tl.maximum(page, 0), pages - 1)
    return page


@triton.jit
def pages_from(table, start, end, pages, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The numbers of the up to four pages of the tile whose keys begin at `start`, one by one."""
    first = page_from(table, start, end, pages, 0, BLOCK_N, PAGE_SIZE)
    second = page_from(table, start, end, pages, 1, BLOCK_N, PAGE_SIZE)
    third = page_from(table, start, end, pages, 2, BLOCK_N, PAGE_SIZE)
    fourth = page_from(table, start, end, pages, 3, BLOCK_N, PAGE_SIZE)
    return first, second, third, fourth


@triton.jit
def key_pointers(source, start, page, row, stride_page, stride_row, PAGE_SIZE: tl.constexpr):
    """A pointer [BLOCK_N] for each key, of the places that key_places found."""
    if PAGE_SIZE == 0:
        pointers = source + start.to(tl.int64) * stride_row + row * stride_row
    else:
        pointers = source + page.to(tl.int64) * stride_page + row * stride_row
    return pointers


@triton.jit
def load_words(rows, there, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, BOUNDED: tl.constexpr,
               ALIGNED: tl.constexpr):  # fmt: skip
    """Load a tile [BLOCK_N, BLOCK_COLS] of the 16-bit words of keys' rows; with BOUNDED absent keys give 0.

    rows     a byte pointer for each key [BLOCK_N]
    COLS     words of a row
    ALIGNED  alignment of rows' addresses, in bytes
    """
    c = tl.arange(0, BLOCK_COLS)
    firsts = tl.multiple_of(rows[:, None].to(tl.pointer_type(tl.int16)), [ALIGNED, ALIGNED])
    pointers = firsts + c[None, :]
    if BOUNDED and COLS != BLOCK_COLS:
        words = tl.load(pointers, mask=there[:, None] & (c < COLS)[None, :], other=0)
    elif BOUNDED:
        words = tl.load(pointers, mask=there[:, None], other=0)
    elif COLS != BLOCK_COLS:
        words = tl.load(pointers, mask=(c < COLS)[None, :], other=0)
    else:
        words = tl.load(pointers)
    return words


@triton.jit
def load_scales(pointers, there, BOUNDED: tl.constexpr):
    """A scale for each key [BLOCK_N]; 0 for those that are not there when BOUNDED."""
    if BOUNDED:
        scales = tl.load(pointers, mask=there, other=0.0)
    else:
        scales = tl.load(pointers)
    return scales
