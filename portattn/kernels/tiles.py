"""Named tile primitives. What backends disagree on is decided here, by Lowering choices passed as constexprs.

No helper returns early (triton-ascend 3.2.0 cannot legalise that in a loop), and globals are constexprs (from
Triton 3.3 on a kernel cannot read a plain Python global).
"""

import triton
import triton.language as tl

from portattn.kernels.blockptr import load_block_columns, load_block_rows
from portattn.kernels.descriptor import describe_rows

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
# A masked score where -inf is not wanted: low enough to lose against any real score, and finite under subtraction.
FINITE_MASK: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def exponential(x, EXP: tl.constexpr):
    """2**x or e**x: the base in which scores are held (see softmax_scale)."""
    if EXP == "exp2":
        y = tl.exp2(x)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def softmax_scale(scale, EXP: tl.constexpr):
    """The factor on raw scores that puts them in the base of `exponential`."""
    if EXP == "exp2":
        factor = scale * LOG2_E
    else:
        factor = scale
    return factor


@triton.jit
def natural_lse(row_max, row_sum, EXP: tl.constexpr):
    """Natural log of the row's sum of exponentials; -inf for a row with nothing to attend (row_sum 0)."""
    if EXP == "exp2":
        largest = row_max * LN_2
    else:
        largest = row_max
    empty = row_sum == 0.0  # and not "is no positive number": a NaN that was attended must stay one
    return tl.where(empty, float("-inf"), largest + tl.log(tl.where(empty, 1.0, row_sum)))


@triton.jit
def normalised(acc, row_sum):
    """acc [BLOCK_M, BLOCK_DV] over its rows' sums; 0 for a row with nothing to attend. NaN sums stay NaN."""
    empty = row_sum == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, row_sum)
    return tl.where(empty[:, None], 0.0, acc * inverse[:, None])


@triton.jit
def row_source(base, rows, stride_row, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
               LOAD: tl.constexpr):  # fmt: skip
    """What tiles of a (rows, COLS) matrix are read through: a descriptor, or simply its base pointer."""
    if LOAD == "descriptor":
        source = describe_rows(base, rows, stride_row, COLS, BLOCK_ROWS, BLOCK_COLS)
    else:
        source = base
    return source


@triton.jit
def load_rows(source, start, rows, stride_row, stride_col,
              COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BOUNDED: tl.constexpr,
              LOAD: tl.constexpr):  # fmt: skip
    """Tile [BLOCK_ROWS, BLOCK_COLS] from row `start`. Rows from `rows` on read as 0 when BOUNDED; columns always do."""
    if LOAD == "descriptor":
        tile = source.load([start, 0])
    elif LOAD == "block_ptr":
        tile = load_block_rows(source, start, rows, stride_row, stride_col, COLS, BLOCK_ROWS, BLOCK_COLS, BOUNDED)
    else:
        r = tl.arange(0, BLOCK_ROWS)
        c = tl.arange(0, BLOCK_COLS)
        # The distance to the tile can pass 2^31 elements, the distances inside it do not: one 64-bit scalar.
        pointers = source + start.to(tl.int64) * stride_row + r[:, None] * stride_row + c[None, :] * stride_col
        if BOUNDED and COLS != BLOCK_COLS:
            tile = tl.load(pointers, mask=(start + r < rows)[:, None] & (c < COLS)[None, :], other=0.0)
        elif BOUNDED:
            tile = tl.load(pointers, mask=(start + r < rows)[:, None], other=0.0)
        elif COLS != BLOCK_COLS:
            tile = tl.load(pointers, mask=(c < COLS)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def load_columns(source, start, rows, stride_row, stride_col,
                 COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BOUNDED: tl.constexpr,
                 LOAD: tl.constexpr, K_TILE: tl.constexpr, BLOCK_ORDER: tl.constexpr):  # fmt: skip
    """The tile of load_rows as its transpose [BLOCK_COLS, BLOCK_ROWS]: what Q·Kᵀ takes on the right."""
    if K_TILE == "row" or LOAD == "descriptor":
        tile = tl.trans(
            load_rows(source, start, rows, stride_row, stride_col, COLS, BLOCK_ROWS, BLOCK_COLS, BOUNDED, LOAD)
        )
    elif LOAD == "block_ptr":
        tile = load_block_columns(
            source, start, rows, stride_row, stride_col, COLS, BLOCK_ROWS, BLOCK_COLS, BOUNDED, BLOCK_ORDER
        )
    else:
        r = tl.arange(0, BLOCK_ROWS)
        c = tl.arange(0, BLOCK_COLS)
        pointers = source + start.to(tl.int64) * stride_row + c[:, None] * stride_col + r[None, :] * stride_row
        if BOUNDED and COLS != BLOCK_COLS:
            tile = tl.load(pointers, mask=(c < COLS)[:, None] & (start + r < rows)[None, :], other=0.0)
        elif BOUNDED:
            tile = tl.load(pointers, mask=(start + r < rows)[None, :], other=0.0)
        elif COLS != BLOCK_COLS:
            tile = tl.load(pointers, mask=(c < COLS)[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def lowest(MASK_VALUE: tl.constexpr):
    """What a masked score becomes, and what a row's maximum starts from."""
    if MASK_VALUE == "finite":
        value = FINITE_MASK
    else:
        value = float("-inf")
    return value


@triton.jit
def softmax_step(scores, start, row_end, row_max, row_sum, scale,
                 BLOCK_N: tl.constexpr, MASKED: tl.constexpr, EXP: tl.constexpr, MASK_VALUE: tl.constexpr):  # fmt: skip
    """One step of the online softmax over raw scores [BLOCK_M, BLOCK_N] of the keys from `start` on.

    When MASKED, row i attends the keys before row_end[i]. Returns the probabilities against the new maximum, the
    factor for everything summed before, the new maximum, and the new sum.
    """
    if MASKED:
        keep = (start + tl.arange(0, BLOCK_N))[None, :] < row_end[:, None]
        # Scaled before it is masked: a finite mask value must stay what it is, for row_max - base to be exactly 0.
        scaled = tl.where(keep, scores * scale, lowest(MASK_VALUE))
        new_max = tl.maximum(row_max, tl.max(scaled, 1))
        if MASK_VALUE == "finite":
            base = new_max
            p = tl.where(keep, exponential(scaled - base[:, None], EXP), 0.0)
        else:
            # A row that has seen no key yet: -inf minus -inf would be NaN.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = exponential(scaled - base[:, None], EXP)
    else:
        # No score is masked, so the scale can go after the maximum and into the exponential's subtraction. The
        # launcher makes it non-negative.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        base = new_max
        p = exponential(scores * scale - base[:, None], EXP)
    correction = exponential(row_max - base, EXP)
    return p, correction, new_max, row_sum * correction + tl.sum(p, 1)


@triton.jit
def key_scores(q_tile, k_rows, start, end, stride_row, stride_col,
               HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr,
               LOAD: tl.constexpr, K_TILE: tl.constexpr, BLOCK_ORDER: tl.constexpr,
               DOT_PRECISION: tl.constexpr):  # fmt: skip
    """Raw scores [BLOCK_M, BLOCK_N] of the keys from `start` on."""
    k_tile = load_columns(
        k_rows, start, end, stride_row, stride_col, HEAD_DIM, BLOCK_N, BLOCK_D, BOUNDED, LOAD, K_TILE, BLOCK_ORDER
    )
    return tl.dot(q_tile, k_tile, input_precision=DOT_PRECISION)


@triton.jit
def add_values(acc, correction, p, v_rows, start, end, stride_row, stride_col,
               HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr, BOUNDED: tl.constexpr,
               LOAD: tl.constexpr, DOT_PRECISION: tl.constexpr):  # fmt: skip
    """acc [BLOCK_M, BLOCK_DV] rescaled, plus the probabilities times the values from `start` on."""
    v_tile = load_rows(v_rows, start, end, stride_row, stride_col, HEAD_DIM_V, BLOCK_N, BLOCK_DV, BOUNDED, LOAD)
    return tl.dot(p.to(v_tile.dtype), v_tile, acc * correction[:, None], input_precision=DOT_PRECISION)


@triton.jit
def sequence_bounds(length, leftpad, batch, capacity):
    """First row and end row of one sequence inside its (capacity)-row slot; both optional (None), both clamped.

    Clamping keeps every access inside the storage even for lengths that were never validated.
    """
    # capacity - capacity is a zero that is a tensor under the interpreter too, where a literal 0 would be an int.
    first = capacity - capacity
    if leftpad is not None:
        first = tl.minimum(tl.maximum(tl.load(leftpad + batch), 0), capacity)
    end = capacity
    if length is not None:
        # Clamped before it is added: a wild length must not wrap around.
        end = first + tl.minimum(tl.maximum(tl.load(length + batch), 0), capacity - first)
    return first, end
