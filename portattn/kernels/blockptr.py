"""Tiles through block pointers. In a module of its own because Triton 3.9 no longer has them."""

import triton
import triton.language as tl


@triton.jit
def load_block_rows(base, rows, stride_row, stride_col,
                    COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
                    BOUNDED: tl.constexpr):  # fmt: skip
    """The first BLOCK_ROWS rows of a (rows, COLS) matrix; what lies outside reads as 0 when BOUNDED."""
    block = tl.make_block_ptr(base, (rows, COLS), (stride_row, stride_col), (0, 0), (BLOCK_ROWS, BLOCK_COLS), (1, 0))
    if BOUNDED and COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(0, 1), padding_option="zero")
    elif BOUNDED:
        tile = tl.load(block, boundary_check=(0,), padding_option="zero")
    elif COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(1,), padding_option="zero")
    else:
        tile = tl.load(block)
    return tile


@triton.jit
def load_block_columns(base, rows, stride_row, stride_col,
                       COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BOUNDED: tl.constexpr,
                       BLOCK_ORDER: tl.constexpr):  # fmt: skip
    """The same tile read as its transpose (BLOCK_COLS, BLOCK_ROWS), in either order of its dimensions."""
    if BLOCK_ORDER == "column":
        block = tl.make_block_ptr(
            base, (COLS, rows), (stride_col, stride_row), (0, 0), (BLOCK_COLS, BLOCK_ROWS), (0, 1)
        )
    else:
        block = tl.make_block_ptr(
            base, (COLS, rows), (stride_col, stride_row), (0, 0), (BLOCK_COLS, BLOCK_ROWS), (1, 0)
        )
    if BOUNDED and COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(0, 1), padding_option="zero")
    elif BOUNDED:
        tile = tl.load(block, boundary_check=(1,), padding_option="zero")
    elif COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(0,), padding_option="zero")
    else:
        tile = tl.load(block)
    return tile
