"""decode_split and decode_combine: a few query rows over a long cache.

The rows of one key/value head's whole group are packed into one tile, so that the cache is read once. Where there
are fewer such tiles than cores, the keys are split over programs, and a second kernel merges the partial results
(Dao et al., "Flash-Decoding", 2023).
"""

import triton
import triton.language as tl

from portattn.kernels.tiles import (
    add_values,
    key_scores,
    lowest,
    natural_lse,
    normalised,
    row_source,
    sequence_bounds,
    softmax_scale,
    softmax_step,
)


@triton.jit
def load_packed_rows(base, rows, count, stride_h, stride_s, stride_d,
                     SEQ_Q: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                     NEGATED: tl.constexpr):  # fmt: skip
    """Query tile [BLOCK_M, BLOCK_D] whose row r is query r % SEQ_Q of the group's head r // SEQ_Q."""
    c = tl.arange(0, BLOCK_D)
    offsets = (rows // SEQ_Q).to(tl.int64) * stride_h + (rows % SEQ_Q).to(tl.int64) * stride_s  # [BLOCK_M]
    tile = tl.load(
        base + offsets[:, None] + c[None, :] * stride_d,
        mask=(rows < count)[:, None] & (c < HEAD_DIM)[None, :],
        other=0.0,
    )
    if NEGATED:
        tile = -tile
    return tile


@triton.jit(do_not_specialize=["heads_k", "group", "seq_k", "row_tiles", "splits", "tiles"])
def decode_split(
    q, k, v, out, lse,
    seqlens_k, leftpad_k,
    scale,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    o_stride_p, o_stride_b, o_stride_h, o_stride_s,
    heads_k, group, seq_k, row_tiles, splits, tiles,
    SEQ_Q: tl.constexpr, SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, NEGATED: tl.constexpr,
    LOAD: tl.constexpr, K_TILE: tl.constexpr, BLOCK_ORDER: tl.constexpr, EXP: tl.constexpr,
    MASK_VALUE: tl.constexpr, DOT_PRECISION: tl.constexpr, GRID: tl.constexpr, Q_OPERAND: tl.constexpr,
):  # fmt: skip
    """One program attends one share of the keys for up to BLOCK_M packed rows of one key/value head.

    SPLIT: `out` is (splits, B, Hq, Sq, Dv) float32 and `lse` (splits, B, Hq, Sq) float32, to be merged. Otherwise
    `out` is the result and `lse` may be None.
    """
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    factor = softmax_scale(scale, EXP)
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        split = tile % splits
        row_tile = tile // splits % row_tiles
        kv_head = tile // splits // row_tiles % heads_k
        batch = tile // splits // row_tiles // heads_k
        rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M] packed: (head in group, query)
        count = group * SEQ_Q

        first, end = sequence_bounds(seqlens_k, leftpad_k, batch, seq_k)
        # Whole key tiles a share, so that only the sequence's own end is ragged.
        share = tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), BLOCK_N), splits) * BLOCK_N
        begin = first + split * share
        stop = tl.minimum(begin + share, end)
        if CAUSAL == "bottom_right":
            row_end = tl.minimum(rows % SEQ_Q + (end - SEQ_Q) + 1, stop)  # [BLOCK_M]
            near = tl.minimum(end - SEQ_Q + 1, stop)
        elif CAUSAL == "top_left":
            row_end = tl.minimum(rows % SEQ_Q + first + 1, stop)
            near = tl.minimum(first + 1, stop)
            stop = tl.minimum(stop, first + SEQ_Q)
        else:
            row_end = tl.full([BLOCK_M], 0, tl.int32) + stop
            near = stop
        full_steps = tl.maximum(near - begin, 0) // BLOCK_N
        steps = tl.maximum(stop - begin + BLOCK_N - 1, 0) // BLOCK_N

        q_base = q + batch.to(tl.int64) * q_stride_b + (kv_head * group).to(tl.int64) * q_stride_h
        k_rows = row_source(
            k + batch.to(tl.int64) * k_stride_b + kv_head.to(tl.int64) * k_stride_h,
            end, k_stride_s, HEAD_DIM, BLOCK_N, BLOCK_D, LOAD,
        )  # fmt: skip
        v_rows = row_source(
            v + batch.to(tl.int64) * v_stride_b + kv_head.to(tl.int64) * v_stride_h,
            end, v_stride_s, HEAD_DIM_V, BLOCK_N, BLOCK_DV, LOAD,
        )  # fmt: skip
        q_tile = load_packed_rows(
            q_base, rows, count, q_stride_h, q_stride_s, q_stride_d, SEQ_Q, HEAD_DIM, BLOCK_D, NEGATED
        )
        acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
        row_max = tl.full([BLOCK_M], lowest(MASK_VALUE), tl.float32)
        row_sum = tl.full([BLOCK_M], 0.0, tl.float32)

        for edge in tl.static_range(2):
            if edge == 0:
                at, count_steps = begin, full_steps
            else:
                at, count_steps = begin + full_steps * BLOCK_N, steps - full_steps
            for i in range(count_steps):
                start = at + i * BLOCK_N
                if Q_OPERAND == "reload":
                    q_tile = load_packed_rows(
                        q_base, rows, count, q_stride_h, q_stride_s, q_stride_d, SEQ_Q, HEAD_DIM, BLOCK_D, NEGATED
                    )
                scores = key_scores(q_tile, k_rows, start, end, k_stride_s, k_stride_d, HEAD_DIM, BLOCK_N, BLOCK_D,
                                    edge == 1, LOAD, K_TILE, BLOCK_ORDER, DOT_PRECISION)  # fmt: skip
                p, correction, row_max, row_sum = softmax_step(
                    scores, start, row_end, row_max, row_sum, factor, BLOCK_N, edge == 1, EXP, MASK_VALUE
                )
                acc = add_values(acc, correction, p, v_rows, start, end, v_stride_s, v_stride_d, HEAD_DIM_V, BLOCK_N,
                                 BLOCK_DV, edge == 1, LOAD, DOT_PRECISION)  # fmt: skip

        acc = normalised(acc, row_sum)
        head = kv_head * group + rows // SEQ_Q  # [BLOCK_M]
        columns = tl.arange(0, BLOCK_DV)
        o_offsets = head.to(tl.int64) * o_stride_h + (rows % SEQ_Q).to(tl.int64) * o_stride_s
        o_base = out + batch.to(tl.int64) * o_stride_b
        if SPLIT:
            o_base += split.to(tl.int64) * o_stride_p
        inside = (rows < count)[:, None] & (columns < HEAD_DIM_V)[None, :]
        tl.store(o_base + o_offsets[:, None] + columns[None, :], acc.to(out.dtype.element_ty), mask=inside)
        if lse is not None:
            batches = tiles // (splits * row_tiles * heads_k)
            heads_q = heads_k * group
            lse_rows = ((split * batches + batch).to(tl.int64) * heads_q + head) * SEQ_Q + rows % SEQ_Q
            tl.store(lse + lse_rows, natural_lse(row_max, row_sum, EXP), mask=rows < count)


@triton.jit(do_not_specialize=["heads_q", "seq_q", "rows", "splits"])
def decode_combine(
    partial, partial_lse, out, lse,
    o_stride_b, o_stride_h, o_stride_s,
    heads_q, seq_q, rows, splits,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    GRID: tl.constexpr,
):  # fmt: skip
    """Merge (splits, rows, Dv) float32 partial results by their LSEs; one program a row, rows = B·Hq·Sq."""
    if GRID == "persistent":
        rounds = tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    for turn in range(rounds):
        row = tl.program_id(0) + turn * tl.num_programs(0)
        every = tl.arange(0, BLOCK_SPLITS)
        columns = tl.arange(0, BLOCK_DV)
        lses = tl.load(
            partial_lse + every.to(tl.int64) * rows + row, mask=every < splits, other=float("-inf")
        )  # [BLOCK_SPLITS]
        largest = tl.max(lses, 0)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.sum(tl.exp(lses - base), 0)
        acc = tl.full([BLOCK_DV], 0.0, tl.float32)
        for chunk in range(tl.cdiv(splits, CHUNK)):
            some = chunk * CHUNK + tl.arange(0, CHUNK)
            weight = tl.exp(
                tl.load(partial_lse + some.to(tl.int64) * rows + row, mask=some < splits, other=float("-inf")) - base
            )  # [CHUNK]
            part = tl.load(
                partial + (some.to(tl.int64) * rows + row)[:, None] * HEAD_DIM_V + columns[None, :],
                mask=(some < splits)[:, None] & (columns < HEAD_DIM_V)[None, :],
                other=0.0,
            )  # [CHUNK, BLOCK_DV]
            acc += tl.sum(part * weight[:, None], 0)
        empty = total == 0.0  # a NaN total stays NaN, as in `normalised`
        inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
        batch = row // (heads_q * seq_q)
        head = row // seq_q % heads_q
        o_base = (
            out
            + batch.to(tl.int64) * o_stride_b
            + head.to(tl.int64) * o_stride_h
            + (row % seq_q).to(tl.int64) * o_stride_s
        )
        tl.store(o_base + columns, (acc * inverse).to(out.dtype.element_ty), mask=columns < HEAD_DIM_V)
        if lse is not None:
            natural = tl.where(empty, float("-inf"), base + tl.log(tl.where(empty, 1.0, total)))
            tl.store(lse + row, natural)
