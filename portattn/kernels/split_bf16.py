"""Products of float32 tiles, as DOT_PRECISION has them; `bf16x6` is made here of products of bfloat16 tiles.

Each number is the sum of three bfloat16 numbers, which hold its 24 bits. Of the nine products of two numbers' parts six
count: the other three together are less than 2^-20 of the product, and 2^-23 of it on average. bfloat16 has float32's
exponents: no number is too large for it, and parts of those over 2^-110 are not too small.
"""

import triton
import triton.language as tl

from portattn.kernels.tiles import load_query_rows, load_rows, row_source

# The bits of a float32 that bfloat16 has too.
UPPER: tl.constexpr = tl.constexpr(-65536)


@triton.jit
def bfloat16_parts(x):
    """Split float32 x into three bfloat16 tiles whose sum is x: its significands' first, next and last 8 bits.

    They are cut off, not rounded: that takes two instructions for each number, and a conversion for two.
    """
    first = (x.to(tl.int32, bitcast=True) & UPPER).to(tl.float32, bitcast=True)
    rest = x - first
    second = (rest.to(tl.int32, bitcast=True) & UPPER).to(tl.float32, bitcast=True)
    third = rest - second
    return first.to(tl.bfloat16), second.to(tl.bfloat16), third.to(tl.bfloat16)


@triton.jit
def product_of_parts(a_first, a_second, a_third, b_first, b_second, b_third, GUARD: tl.constexpr):
    """Return A·B of tiles given by their parts, float32, summed from the smallest products on.

    GUARD: a product with an infinite number is what float32 makes of it; without, it is NaN
    """
    found = tl.dot(a_third, b_first)
    found = tl.dot(a_first, b_third, found)
    found = tl.dot(a_second, b_second, found)
    found = tl.dot(a_second, b_first, found)
    found = tl.dot(a_first, b_second, found)
    if GUARD:  # the second and the third part of an infinite number are NaN
        found = tl.where(found == found, found, 0.0)
    return tl.dot(a_first, b_first, found)


@triton.jit
def dot(a, b, DOT_PRECISION: tl.constexpr):
    """Return A·B, float32; operands of 16 bits have one precision."""
    if DOT_PRECISION == "bf16x6" and a.dtype == tl.float32:
        a_1, a_2, a_3 = bfloat16_parts(a)
        b_1, b_2, b_3 = bfloat16_parts(b)
        found = product_of_parts(a_1, a_2, a_3, b_1, b_2, b_3, True)
    elif DOT_PRECISION == "bf16x6":
        found = tl.dot(a, b)
    else:
        found = tl.dot(a, b, input_precision=DOT_PRECISION)
    return found


@triton.jit
def add_dot(a, b, acc, DOT_PRECISION: tl.constexpr):
    """Return acc + A·B; parts' products are summed first: an accumulator of many steps would cut off more."""
    if DOT_PRECISION == "bf16x6" and a.dtype == tl.float32:
        a_1, a_2, a_3 = bfloat16_parts(a)
        b_1, b_2, b_3 = bfloat16_parts(b)
        acc += product_of_parts(a_1, a_2, a_3, b_1, b_2, b_3, False)
    elif DOT_PRECISION == "bf16x6":
        acc = tl.dot(a, b, acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=DOT_PRECISION)
    return acc


@triton.jit
def split_product(p, v_tile, acc, TERMS: tl.constexpr):
    """Return acc plus probabilities times values of 16 bits; with TERMS 2 also what p's rounding loses."""
    high = p.to(v_tile.dtype)
    if TERMS == 2:
        acc = tl.dot((p - high.to(tl.float32)).to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return tl.dot(high, v_tile, acc, input_precision="ieee")


@triton.jit
def held_parts(pointers, valid, stride_col, apart, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr,
               PARTS: tl.constexpr):  # fmt: skip
    """Return the parts of a tile [BLOCK_M, BLOCK_COLS] that a program holds; rows are load_query_rows'.

    PARTS  `memory`: `pointers` are the first parts' rows, the second and third parts' lie `apart` and twice as far on;
           `registers`: they are rows of float32
    """
    if PARTS == "memory":
        first = load_query_rows(pointers, valid, stride_col, COLS, BLOCK_COLS, False)
        second = load_query_rows(pointers + apart, valid, stride_col, COLS, BLOCK_COLS, False)
        third = load_query_rows(pointers + 2 * apart, valid, stride_col, COLS, BLOCK_COLS, False)
    else:
        first, second, third = bfloat16_parts(load_query_rows(pointers, valid, stride_col, COLS, BLOCK_COLS, False))
    return first, second, third


@triton.jit
def part_sources(base, apart, rows, stride_row, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
                 LOAD: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Return the sources of parts' tiles: row_source of each, or that of float32 rows three times."""
    first = row_source(base, rows, stride_row, COLS, BLOCK_ROWS, BLOCK_COLS, LOAD)
    second, third = first, first
    if PARTS == "memory":
        second = row_source(base + apart, rows, stride_row, COLS, BLOCK_ROWS, BLOCK_COLS, LOAD)
        third = row_source(base + 2 * apart, rows, stride_row, COLS, BLOCK_ROWS, BLOCK_COLS, LOAD)
    return first, second, third


@triton.jit
def load_parts(first, second, third, start, end, stride_row, stride_col, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
               BLOCK_COLS: tl.constexpr, BOUNDED: tl.constexpr, LOAD: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Load parts of a tile [BLOCK_ROWS, BLOCK_COLS], by part_sources; rows and columns as in load_rows."""
    tile = load_rows(first, None, start, end, 0, 0, stride_row, stride_col, COLS, BLOCK_ROWS, BLOCK_COLS, BOUNDED, LOAD,
                     0, "per_page", "masked")  # fmt: skip
    if PARTS == "memory":
        a = tile
        b = load_rows(second, None, start, end, 0, 0, stride_row, stride_col, COLS, BLOCK_ROWS, BLOCK_COLS, BOUNDED,
                      LOAD, 0, "per_page", "masked")  # fmt: skip
        c = load_rows(third, None, start, end, 0, 0, stride_row, stride_col, COLS, BLOCK_ROWS, BLOCK_COLS, BOUNDED,
                      LOAD, 0, "per_page", "masked")  # fmt: skip
    else:
        a, b, c = bfloat16_parts(tile)
    return a, b, c


@triton.jit
def parts_where(seen, first, second, third):
    """Return the parts where `seen` holds, and 0 elsewhere."""
    return (
        tl.where(seen, first, 0.0).to(first.dtype),
        tl.where(seen, second, 0.0).to(second.dtype),
        tl.where(seen, third, 0.0).to(third.dtype),
    )


@triton.jit(do_not_specialize=["heads", "rows", "row_tiles", "tiles"])
def store_parts(
    q, k, v, grad_out, parts,
    stride_b, stride_h, stride_s, stride_d,
    heads, rows, row_tiles, tiles,
    COLS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_M: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Store the parts (B, H, 3, S, WIDTH) of a float32 tensor (B, H, S, COLS), BLOCK_M rows at a time.

    It is the one of q, k, v and grad_out that is not None: a launch's tensors are known by their names.
    """
    if q is not None:
        source = q
    elif k is not None:
        source = k
    elif v is not None:
        source = v
    else:
        source = grad_out
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        slot_head = (tile // row_tiles).to(tl.int64)
        slot, head = slot_head // heads, slot_head % heads
        row = (tile % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = row < rows
        from_rows = source + slot * stride_b + head * stride_h + row.to(tl.int64) * stride_s
        first, second, third = bfloat16_parts(load_query_rows(from_rows, valid, stride_d, COLS, BLOCK_COLS, False))
        columns = tl.arange(0, BLOCK_COLS)
        there = valid[:, None] & (columns < WIDTH)[None, :]
        apart = rows.to(tl.int64) * WIDTH
        to = parts + slot_head * 3 * apart + row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        tl.store(to, first, mask=there)
        tl.store(to + apart, second, mask=there)
        tl.store(to + 2 * apart, third, mask=there)
