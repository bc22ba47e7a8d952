"""Rows as int8 with a scale for each block of them: what SAGE makes of queries and keys (api/quantize.py)."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(127.0)
SMALLEST = tl.constexpr(1.1754943508222875e-38)  # float32's smallest normal number
# Added to a float32 below 2^22 and taken away again it rounds to whole numbers, ties to even.
ROUNDING = tl.constexpr(12582912.0)


# Strides and widths are specialised: where they are multiples of 16, rows are read 16 bytes at a time.
@triton.jit(do_not_specialize=["heads", "share", "rows"])
def quantise_rows(
    x, numbers, scales, mean, shift, heads, share, rows, columns,
    x_b, x_h, x_s, numbers_b, numbers_h, numbers_s, scales_b, scales_h, scales_s,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, SUBTRACT: tl.constexpr,
):  # fmt: skip
    """A block of BLOCK rows of one head.

    x        (B, H, S, D) by its strides, its columns side by side
    numbers  int8, of that shape, by its strides
    scales   float32 (B, H, S) by its strides
    mean     float32 (B, H / share, D), contiguous, or None: with SUBTRACT taken off the rows
    shift    float32 (B, H, S), contiguous, or None: each row times the mean
    """
    blocks = tl.cdiv(rows, BLOCK)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    slot, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    given = tl.load(
        x + slot * x_b + head * x_h + row[:, None].to(tl.int64) * x_s + column[None, :], mask=there, other=0.0
    ).to(tl.float32)
    if mean is not None:
        middle = tl.load(
            mean + (slot * (heads // share) + head // share) * columns + column, mask=column < columns, other=0.0
        )
        if shift is not None:
            tl.store(shift + pair.to(tl.int64) * rows + row, tl.sum(given * middle[None, :], 1), mask=row < rows)
        if SUBTRACT:
            given = tl.where(there, given - middle[None, :], 0.0)
    largest = tl.max(tl.max(tl.abs(given), 1), 0)
    scale = tl.where(largest > 0, tl.maximum(largest / LARGEST, SMALLEST), 1.0)
    found = given / scale
    found = tl.minimum(tl.maximum((found + ROUNDING) - ROUNDING, -LARGEST), LARGEST)
    tl.store(
        numbers + slot * numbers_b + head * numbers_h + row[:, None].to(tl.int64) * numbers_s + column[None, :],
        found.to(tl.int8), mask=there,
    )  # fmt: skip
    tl.store(
        scales + slot * scales_b + head * scales_h + row.to(tl.int64) * scales_s, tl.zeros([BLOCK], tl.float32) + scale,
        mask=row < rows,
    )  # fmt: skip
