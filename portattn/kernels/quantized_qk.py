"""Quantised queries and keys as operands of Q·Kᵀ: widened to float16, or as they are stored."""

import triton
import triton.language as tl

from portattn.kernels.dequantize import dequantize
from portattn.kernels.tiles import load_query_rows

# Depth of the float8 products whose sum a chip may keep in fewer bits than float32's; longer ones are added in float32.
# Source: NVIDIA's warpgroup products of 8-bit operands are this deep, and Triton adds those in full between them.
IMPRECISE_DEPTH = tl.constexpr(32)


@triton.jit
def operand(tile, FORMAT: tl.constexpr, OPERANDS: tl.constexpr):
    """Stored numbers as an operand. Each number of every format is exact in float16."""
    if OPERANDS == "widened":
        found = dequantize(tile, tl.full([1], 0.0, tl.float16), FORMAT)
    elif FORMAT == "e4m3":
        found = tile.to(tl.float8e4nv, bitcast=True)
    elif FORMAT == "e5m2":
        found = tile.to(tl.float8e5, bitcast=True)
    elif FORMAT == "e4m3fnuz":
        found = tile.to(tl.float8e4b8, bitcast=True)
    else:
        found = tile  # int8
    return found


@triton.jit
def query_tile(pointers, valid, stride_col, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, NEGATED: tl.constexpr,
               Q_FORMAT: tl.constexpr, OPERANDS: tl.constexpr):  # fmt: skip
    """load_query_rows, of any format. Of quantised queries the scores carry the sign (products)."""
    if Q_FORMAT == "as_q":
        tile = load_query_rows(pointers, valid, stride_col, COLS, BLOCK_COLS, NEGATED)
    else:
        tile = operand(load_query_rows(pointers, valid, stride_col, COLS, BLOCK_COLS, False), Q_FORMAT, OPERANDS)
    return tile


@triton.jit
def products(q_tile, k_tile, row_scales, NEGATED: tl.constexpr, FORMAT: tl.constexpr, OPERANDS: tl.constexpr):
    """Q·Kᵀ [BLOCK_M, BLOCK_N] of quantised operands, float32.

    row_scales  a scale for each query [BLOCK_M], or None
    """
    if OPERANDS == "widened":
        scores = tl.dot(q_tile, k_tile, input_precision="ieee")
    elif FORMAT == "int8":
        scores = tl.dot(q_tile, k_tile, out_dtype=tl.int32).to(tl.float32)
    else:
        scores = tl.dot(q_tile, k_tile, max_num_imprecise_acc=IMPRECISE_DEPTH)
    if NEGATED:
        scores = -scores
    if row_scales is not None:
        scores = scores * row_scales[:, None]
    return scores


@triton.jit
def split_product(p, v_tile, acc, TERMS: tl.constexpr):
    """acc plus the probabilities times values of 16 bits; with TERMS 2 what p's rounding loses is added too."""
    high = p.to(v_tile.dtype)
    if TERMS == 2:
        acc = tl.dot((p - high.to(tl.float32)).to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return tl.dot(high, v_tile, acc, input_precision="ieee")
