"""attend_listed: attend's loop over those key tiles alone that lie in blocks which a row tile's list names."""

import triton
import triton.language as tl

from portattn.kernels.attend import add_values, drop_out, key_scores
from portattn.kernels.operands import query_tile
from portattn.kernels.tiles import softmax_step


@triton.jit
def attend_listed(
    acc, row_max, row_sum, listed,
    q_pointers, q_tail_pointers, row_valid, q_stride_d,
    k_rows, k_tail_rows, v_rows, k_stride_s, k_stride_d, v_stride_s, v_stride_d,
    origin, first_step, last_step, end,
    row_start, row_end, positions, slopes, bias_rows, bias_stride, mask_rows, mask_stride, scale, softcap,
    dropout_seed, drop_rows, drop_origin, drop_head, threshold,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, MAIN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_DV: tl.constexpr, NEGATED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS_BY_KEY: tl.constexpr, MASK_BY_KEY: tl.constexpr,
    LOAD: tl.constexpr, K_TILE: tl.constexpr, BLOCK_ORDER: tl.constexpr, EXP: tl.constexpr,
    MASK_VALUE: tl.constexpr, DOT_PRECISION: tl.constexpr, MULHI: tl.constexpr, LISTED_K: tl.constexpr,
):  # fmt: skip
    """Attend the tiles of [first_step, last_step) whose block of LISTED_K keys is marked in `listed`, a row of bools.

    Arguments as of attend, of contiguous tensors that are not quantised. A tile lies in one block: BLOCK_N divides
    LISTED_K, and origin is 0. Of the other tiles nothing is read. Returns acc, row_max and row_sum.
    """
    row_end = tl.where(row_valid, row_end, origin)
    q_tile = query_tile(q_pointers, row_valid, q_stride_d, MAIN, BLOCK_D, NEGATED, "as_q", "widened")
    if BLOCK_TAIL != 0:
        q_tail = query_tile(q_tail_pointers, row_valid, q_stride_d, HEAD_DIM - MAIN, BLOCK_TAIL, NEGATED, "as_q",
                            "widened")  # fmt: skip
    else:
        q_tail = None
    for step in range(first_step, last_step):
        start = origin + step * BLOCK_N
        if tl.load(listed + start // LISTED_K).to(tl.int32) != 0:
            scores, k_tile = key_scores(
                q_tile, q_tail, k_rows, k_tail_rows, None, start, end, 0, 0, k_stride_s, k_stride_d, None, 0, 0,
                HEAD_DIM, MAIN, BLOCK_N, BLOCK_D, BLOCK_TAIL, True, False, LOAD, K_TILE, BLOCK_ORDER, DOT_PRECISION,
                0, "per_page", "masked", "as_q", None, NEGATED, "as_q", "widened",
            )  # fmt: skip
            p, correction, row_max, row_sum = softmax_step(
                scores, start, end, row_start, row_end, row_max, row_sum, scale, softcap, slopes, positions, bias_rows,
                bias_stride, mask_rows, mask_stride, row_valid, BLOCK_N, True, WINDOW, SOFTCAP, BIAS_BY_KEY,
                MASK_BY_KEY, EXP, MASK_VALUE, False,
            )  # fmt: skip
            if dropout_seed is not None:
                p = drop_out(p, dropout_seed, drop_rows, start - drop_origin, drop_head, threshold, BLOCK_N, MULHI)
            acc = add_values(
                acc, correction, p, v_rows, k_tile, None, start, end, 0, 0, v_stride_s, v_stride_d, q_tile, None, 0, 0,
                HEAD_DIM_V, BLOCK_N, BLOCK_DV, True, False, True, LOAD, DOT_PRECISION, 0, "per_page", "masked", "as_q",
                "as_q", 1,
            )  # fmt: skip
    return acc, row_max, row_sum
