"""dense_forward: attention of (B, Hq, Sq, D) queries over (B, Hk, Sk, D) keys, one pass, online softmax.

Algorithm: Dao, "FlashAttention-2" (2023), section 3.1. Scores live in the base that EXP names.
"""

import triton
import triton.language as tl

from portattn.kernels.tiles import (
    add_values,
    key_scores,
    load_rows,
    lowest,
    natural_lse,
    normalised,
    row_source,
    sequence_bounds,
    softmax_scale,
    softmax_step,
)


@triton.jit
def load_query_rows(base, start, rows, stride_row, stride_col,
                    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
                    NEGATED: tl.constexpr):  # fmt: skip
    """Query tile [BLOCK_M, BLOCK_D]; rows past the end are 0. NEGATED carries the sign of a negative scale."""
    tile = load_rows(base, start, rows, stride_row, stride_col, HEAD_DIM, BLOCK_M, BLOCK_D, True, "pointer")
    if NEGATED:
        tile = -tile
    return tile


@triton.jit(do_not_specialize=["heads_q", "group", "seq_q", "seq_k", "row_tiles", "tiles"])
def dense_forward(
    q, k, v, out, lse,
    seqlens_q, seqlens_k, leftpad_q, leftpad_k,
    scale,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    o_stride_b, o_stride_h, o_stride_s,
    heads_q, group, seq_q, seq_k, row_tiles, tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, NEGATED: tl.constexpr,
    LOAD: tl.constexpr, K_TILE: tl.constexpr, BLOCK_ORDER: tl.constexpr, EXP: tl.constexpr,
    MASK_VALUE: tl.constexpr, DOT_PRECISION: tl.constexpr, GRID: tl.constexpr, PIPELINE: tl.constexpr,
    Q_OPERAND: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M query rows of one head, or several such tiles in turn on a persistent grid.

    Optional arguments are None: lse, and the four (B,) int32 tensors of lengths and left padding.
    """
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    factor = softmax_scale(scale, EXP)
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        row_tile = tile % row_tiles
        if CAUSAL != "none":
            row_tile = row_tiles - 1 - row_tile  # longest rows first: they bound the launch's length
        batch = tile // row_tiles // heads_q
        head = tile // row_tiles % heads_q
        row_0 = row_tile * BLOCK_M
        rows = row_0 + tl.arange(0, BLOCK_M)  # [BLOCK_M]

        q_first, q_end = sequence_bounds(seqlens_q, leftpad_q, batch, seq_q)
        k_first, k_end = sequence_bounds(seqlens_k, leftpad_k, batch, seq_k)
        # Row i attends the keys before row_end[i]. Of the tile's valid rows the first has the nearest end, the last
        # the furthest.
        first = tl.maximum(row_0, q_first)
        last = tl.minimum(row_0 + BLOCK_M, q_end) - 1
        if CAUSAL == "bottom_right":
            shift = k_end - q_end
            row_end = tl.minimum(rows + shift + 1, k_end)  # [BLOCK_M]
            near, far = tl.minimum(first + shift + 1, k_end), tl.minimum(last + shift + 1, k_end)
        elif CAUSAL == "top_left":
            shift = k_first - q_first
            row_end = tl.minimum(rows + shift + 1, k_end)
            near, far = tl.minimum(first + shift + 1, k_end), tl.minimum(last + shift + 1, k_end)
        else:
            row_end = tl.full([BLOCK_M], 0, tl.int32) + k_end
            near, far = k_end, k_end
        far = tl.where(last >= first, far, k_first)  # a tile of padding rows attends nothing
        full_steps = tl.maximum(tl.minimum(near, far) - k_first, 0) // BLOCK_N
        steps = tl.maximum(far - k_first + BLOCK_N - 1, 0) // BLOCK_N

        acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
        row_max = tl.full([BLOCK_M], lowest(MASK_VALUE), tl.float32)
        row_sum = tl.full([BLOCK_M], 0.0, tl.float32)
        if SELECT == "branch":
            attends = steps > 0
        else:
            attends: tl.constexpr = True
        if attends:
            q_base = q + batch.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h
            kv_head = (head // group).to(tl.int64)
            k_base = k + batch.to(tl.int64) * k_stride_b + kv_head * k_stride_h
            k_rows = row_source(k_base, k_end, k_stride_s, HEAD_DIM, BLOCK_N, BLOCK_D, LOAD)
            v_base = v + batch.to(tl.int64) * v_stride_b + kv_head * v_stride_h
            v_rows = row_source(v_base, k_end, v_stride_s, HEAD_DIM_V, BLOCK_N, BLOCK_DV, LOAD)
            q_tile = load_query_rows(q_base, row_0, seq_q, q_stride_s, q_stride_d, HEAD_DIM, BLOCK_M, BLOCK_D, NEGATED)

            # Two passes: key tiles that every row attends whole, then the tiles at the edge, masked.
            for edge in tl.static_range(2):
                if edge == 0:
                    begin, count = k_first, full_steps
                else:
                    begin, count = k_first + full_steps * BLOCK_N, steps - full_steps
                if PIPELINE == "rotated" and edge == 0:
                    if count > 0:
                        scores = key_scores(q_tile, k_rows, begin, k_end, k_stride_s, k_stride_d, HEAD_DIM, BLOCK_N,
                                            BLOCK_D, False, LOAD, K_TILE, BLOCK_ORDER, DOT_PRECISION)  # fmt: skip
                        for i in range(count - 1):
                            start = begin + i * BLOCK_N
                            p, correction, row_max, row_sum = softmax_step(
                                scores, start, row_end, row_max, row_sum, factor, BLOCK_N, False, EXP, MASK_VALUE
                            )
                            # Before P·V, so that the next softmax need not wait for it.
                            scores = key_scores(q_tile, k_rows, start + BLOCK_N, k_end, k_stride_s, k_stride_d,
                                                HEAD_DIM, BLOCK_N, BLOCK_D, False, LOAD, K_TILE, BLOCK_ORDER,
                                                DOT_PRECISION)  # fmt: skip
                            acc = add_values(acc, correction, p, v_rows, start, k_end, v_stride_s, v_stride_d,
                                             HEAD_DIM_V, BLOCK_N, BLOCK_DV, False, LOAD, DOT_PRECISION)  # fmt: skip
                        start = begin + (count - 1) * BLOCK_N
                        p, correction, row_max, row_sum = softmax_step(
                            scores, start, row_end, row_max, row_sum, factor, BLOCK_N, False, EXP, MASK_VALUE
                        )
                        acc = add_values(acc, correction, p, v_rows, start, k_end, v_stride_s, v_stride_d, HEAD_DIM_V,
                                         BLOCK_N, BLOCK_DV, False, LOAD, DOT_PRECISION)  # fmt: skip
                else:
                    for i in range(count):
                        start = begin + i * BLOCK_N
                        if Q_OPERAND == "reload":
                            q_tile = load_query_rows(
                                q_base, row_0, seq_q, q_stride_s, q_stride_d, HEAD_DIM, BLOCK_M, BLOCK_D, NEGATED
                            )
                        scores = key_scores(q_tile, k_rows, start, k_end, k_stride_s, k_stride_d, HEAD_DIM, BLOCK_N,
                                            BLOCK_D, edge == 1, LOAD, K_TILE, BLOCK_ORDER, DOT_PRECISION)  # fmt: skip
                        p, correction, row_max, row_sum = softmax_step(
                            scores, start, row_end, row_max, row_sum, factor, BLOCK_N, edge == 1, EXP, MASK_VALUE
                        )
                        acc = add_values(acc, correction, p, v_rows, start, k_end, v_stride_s, v_stride_d, HEAD_DIM_V,
                                         BLOCK_N, BLOCK_DV, edge == 1, LOAD, DOT_PRECISION)  # fmt: skip

        # Padding rows hold whatever their garbage attended: they give 0 and -inf like any row with no key.
        row_sum = tl.where((rows >= q_first) & (rows < q_end), row_sum, 0.0)
        acc = normalised(acc, row_sum)
        columns = tl.arange(0, BLOCK_DV)
        o_pointers = (
            out + batch.to(tl.int64) * o_stride_b + head.to(tl.int64) * o_stride_h + row_0.to(tl.int64) * o_stride_s
            + tl.arange(0, BLOCK_M)[:, None] * o_stride_s + columns[None, :]
        )  # fmt: skip
        inside = (rows < seq_q)[:, None] & (columns < HEAD_DIM_V)[None, :]
        tl.store(o_pointers, acc.to(out.dtype.element_ty), mask=inside)
        if lse is not None:
            lse_rows = lse + (batch * heads_q + head).to(tl.int64) * seq_q + rows
            tl.store(lse_rows, natural_lse(row_max, row_sum, EXP), mask=rows < seq_q)
