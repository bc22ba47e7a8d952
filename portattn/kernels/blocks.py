"""attend_listed: attend's loop over those key tiles alone that lie in blocks which a row tile's list names."""

import triton
import triton.language as tl

from portattn.kernels.attend import attend


@triton.jit
def attend_listed(
    acc, row_max, row_sum, listed,
    q_pointers, q_tail_pointers, row_valid, q_stride_d,
    k_rows, k_tail_rows, v_rows, k_stride_s, k_stride_d, v_stride_s, v_stride_d,
    origin, first_step, full_begin, full_end, last_step, end,
    row_start, row_end, positions, slopes, bias_rows, bias_stride, mask_rows, mask_stride, scale, softcap,
    dropout_seed, drop_row, drop_origin, drop_head, threshold,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, MAIN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_DV: tl.constexpr, NEGATED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS_BY_KEY: tl.constexpr, MASK_BY_KEY: tl.constexpr,
    LOAD: tl.constexpr, K_TILE: tl.constexpr, BLOCK_ORDER: tl.constexpr, EXP: tl.constexpr,
    MASK_VALUE: tl.constexpr, DOT_PRECISION: tl.constexpr, Q_OPERAND: tl.constexpr, PIPELINE: tl.constexpr,
    DROPS: tl.constexpr, LISTED_K: tl.constexpr,
):  # fmt: skip
    """Attend the tiles of [first_step, last_step) whose block of LISTED_K keys is marked in `listed`, a row of bools.

    Arguments as of attend, of contiguous tensors that are not quantised. A tile lies in one block: BLOCK_N divides
    LISTED_K, and origin is 0. Of the other tiles nothing is read. Marked blocks that follow each other are one loop of
    attend's, which is pipelined: a branch around each tile would keep its loads from being under way before. Returns
    acc, row_max and row_sum.
    """
    PER_BLOCK: tl.constexpr = LISTED_K // BLOCK_N
    first_block, last_block = first_step // PER_BLOCK, (last_step + PER_BLOCK - 1) // PER_BLOCK
    begin = first_block  # of the marked blocks that end here
    marked = tl.load(listed + first_block, mask=first_block < last_block).to(tl.int32) != 0
    for block in range(first_block, last_block):
        following = tl.load(listed + tl.minimum(block + 1, last_block - 1)).to(tl.int32) != 0
        following = following & (block + 1 < last_block)
        if marked & (following == 0):
            first, last = tl.maximum(begin * PER_BLOCK, first_step), tl.minimum((block + 1) * PER_BLOCK, last_step)
            whole = tl.minimum(tl.maximum(full_begin, first), last)
            acc, row_max, row_sum = attend(
                acc, row_max, row_sum,
                q_pointers, q_tail_pointers, row_valid, q_stride_d, q_stride_d,
                k_rows, k_tail_rows, v_rows, None, 0,
                0, k_stride_s, k_stride_d, 0, v_stride_s, v_stride_d, None, 0, 0, None, 0, 0,
                origin, first, whole, tl.minimum(tl.maximum(full_end, whole), last), last, end,
                row_start, row_end, positions, slopes, bias_rows, bias_stride, mask_rows, mask_stride,
                scale, softcap, dropout_seed, drop_row, drop_origin, drop_head, threshold,
                HEAD_DIM, HEAD_DIM_V, MAIN, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_DV, NEGATED, WINDOW, SOFTCAP,
                BIAS_BY_KEY, MASK_BY_KEY, False, 0, LOAD, K_TILE, BLOCK_ORDER, EXP, MASK_VALUE, DOT_PRECISION,
                "per_page", Q_OPERAND, PIPELINE, "masked", False, False, DROPS, "as_q",
                None, "as_q", "as_q", "widened", 1,
            )  # fmt: skip
        begin = tl.where(marked, begin, block + 1)
        marked = following
    return acc, row_max, row_sum
