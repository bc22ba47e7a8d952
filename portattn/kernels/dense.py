"""dense_forward: many query rows of one head a program, one pass over the keys, online softmax.

Serves (B, Hq, Sq, D) queries over (B, Hk, Sk, D) keys, and packed ones: (Tq, Hq, D) over (Tk, Hk, D), where a
sequence is a range of rows.
"""

import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import (
    Dropout,
    KeyRows,
    LoopShape,
    Pages,
    Query,
    Rows,
    Scales,
    ScoreMods,
    ScoreTerms,
    TileRange,
)
from portattn.kernels.attend import attend, in_chunk, kv_tile_range, listed_tiles
from portattn.kernels.dequantize import head_scale
from portattn.kernels.score_program import with_functions  # noqa: F401 - compilers look it up here
from portattn.kernels.softmax import finalize, init_softmax, natural_lse
from portattn.kernels.tiles import (
    heads_in_turn,
    of_a_sequence,
    packed_bounds,
    packed_tile,
    row_source,
    sequence_bounds,
)


@records.jit(
    do_not_specialize=[
        "heads_q", "group", "seq_q", "seq_k", "row_tiles", "together", "tiles", "batches", "left", "right",
        "chunk", "threshold",
        "size_0", "size_1", "size_2", "size_3", "size_4", "size_5", "size_6", "size_7",
    ]
)  # fmt: skip
def dense_forward(
    q, k, v, q_scale, k_scale, v_scale, out, lse,
    seqlens_q, seqlens_k, leftpad_q, leftpad_k, cu_seqlens_q, cu_seqlens_k,
    alibi_slopes, sinks, bias, mask, block_mask,
    captured_0, captured_1, captured_2, captured_3, dropout_seed,
    scale, softcap, keep_scale,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    q_scale_stride_b, q_scale_stride_h, q_scale_stride_s, k_scale_stride_b, k_scale_stride_h, k_scale_stride_s,
    v_scale_stride_b, v_scale_stride_h, v_scale_stride_s,
    o_stride_b, o_stride_h, o_stride_s,
    alibi_stride_b,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
    block_mask_stride_b, block_mask_stride_h, block_mask_stride_q,
    heads_q, group, seq_q, seq_k, row_tiles, together, tiles, batches, left, right, chunk, threshold,
    size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, MAIN: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS_BY_KEY: tl.constexpr,
    MASK_BY_KEY: tl.constexpr, NEGATED: tl.constexpr, SEARCH: tl.constexpr,
    LOAD: tl.constexpr, K_TILE: tl.constexpr, BLOCK_ORDER: tl.constexpr, EXP: tl.constexpr,
    MASK_VALUE: tl.constexpr, DOT_PRECISION: tl.constexpr, GRID: tl.constexpr, PIPELINE: tl.constexpr,
    Q_OPERAND: tl.constexpr, SELECT: tl.constexpr, DROPS: tl.constexpr, OPERANDS: tl.constexpr,
    KV_FORMAT: tl.constexpr, KV_SCALES: tl.constexpr, Q_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    P_TERMS: tl.constexpr, LISTED_Q: tl.constexpr, LISTED_K: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
):  # fmt: skip
    """Attend BLOCK_M query rows of one head: one program, which takes several such tiles in turn on a persistent grid.

    Optional arguments are None: lse, the (B,) int32 lengths and left paddings, the (B + 1,) int32 beginnings of packed
    sequences (seq_q and seq_k are then the rows of the packed tensors), and the features. CAUSAL names the alignment
    of a right limit: keys up to `right` after the query's own position; WINDOW: keys from `left` before it on.
    chunk: None, or keys of a chunk, of which a row attends its own position's (in_chunk); WINDOW is then True.
    Formats and KV_SCALES are the Problem's; the scales' strides are None where there are no scales.
    block_mask: None, or for each block of LISTED_Q queries a list of blocks of LISTED_K keys (FeatureTensors), whose
    last axis is contiguous. A tile lies in one block. The strides are None where it is.
    captured_0, …, size_0, …: the tensors that SCORE_MOD and MASK_MOD read, and their sizes (score_program.py); None
    together: heads whose row tiles are worked on side by side, where tiles differ in length.
    """
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    NATURAL: tl.constexpr = alibi_slopes is not None or (bias is not None or SCORE_MOD is not None)
    # Beside these a block that is listed as whole is attended in part.
    LIMITS: tl.constexpr = block_mask is not None and (
        (CAUSAL != "none" or WINDOW) or (seqlens_q is not None or seqlens_k is not None)
    )
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        row_tile = tile % row_tiles
        slot_head = tile // row_tiles  # of all sequences' heads, of packed sequences' common ones
        if CAUSAL != "none":
            row_tile, slot_head = heads_in_turn(tile, row_tiles, together, tiles)
            row_tile = row_tiles - 1 - row_tile  # longest rows first: they bound the launch's length
        head = slot_head % heads_q
        if cu_seqlens_q is not None:
            batch, row_tile = packed_tile(cu_seqlens_q, row_tile, batches, seq_q, 1, BLOCK_M, SEARCH)
            slot = batch - batch  # packed tensors are one slot, which all sequences share
            q_first, q_end = packed_bounds(cu_seqlens_q, batch, batches, seq_q)
            k_first, k_end = packed_bounds(cu_seqlens_k, batch, batches, seq_k)
            k_end = tl.where(batch == batches, k_first, k_end)  # rows after the last sequence have no keys
            row_0 = q_first + row_tile * BLOCK_M
            stored_end = q_end
            drop_row, drop_key = q_first, k_first
        else:
            batch = slot_head // heads_q
            slot = batch
            q_first, q_end = sequence_bounds(seqlens_q, leftpad_q, batch, seq_q)
            k_first, k_end = sequence_bounds(seqlens_k, leftpad_k, batch, seq_k)
            row_0 = row_tile * BLOCK_M
            stored_end = seq_q
            drop_row, drop_key = seq_q - seq_q, seq_q - seq_q
        rows = row_0 + tl.arange(0, BLOCK_M)  # [BLOCK_M]

        # Of the tile's valid rows the first sees least far, the last furthest.
        first = tl.maximum(row_0, q_first)
        last = tl.minimum(row_0 + BLOCK_M, q_end) - 1
        if CAUSAL == "top_left":
            shift = k_first - q_first
        else:
            shift = k_end - q_end
        positions = rows + shift  # [BLOCK_M]
        if CAUSAL != "none":
            row_end = tl.minimum(positions + right + 1, k_end)  # [BLOCK_M]
            near, far = tl.minimum(first + shift + right + 1, k_end), tl.minimum(last + shift + right + 1, k_end)
        else:
            row_end = tl.full([BLOCK_M], 0, tl.int32) + k_end
            near, far = k_end, k_end
        far = tl.where(last >= first, far, k_first)  # a tile of padding rows attends nothing
        row_start = tl.maximum(positions - left, k_first)
        low_near, low_far = first + shift - left, last + shift - left
        if chunk is not None:
            row_start, row_end = in_chunk(row_start, row_end, positions, k_first, chunk)
            low_near, near = in_chunk(low_near, near, first + shift, k_first, chunk)
            low_far, far = in_chunk(low_far, far, last + shift, k_first, chunk)
        first_step, full_begin, full_end, last_step = kv_tile_range(
            near, far, low_near, low_far, k_first, BLOCK_N, WINDOW
        )
        listed = None
        if block_mask is not None:
            listed = (
                block_mask + batch.to(tl.int64) * block_mask_stride_b + head.to(tl.int64) * block_mask_stride_h
                + (row_0 // LISTED_Q).to(tl.int64) * block_mask_stride_q
            )  # fmt: skip
            first_step, full_begin = k_first, k_first  # 0
            full_end, last_step = listed_tiles(listed, seq_k, LISTED_K, BLOCK_N)
            listed += 2
        elif MASK_MOD is not None:
            full_end = full_begin  # a mask function may hide something of every tile

        acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
        row_max, row_sum = init_softmax(sinks, head, True, BLOCK_M, EXP, NATURAL, MASK_VALUE)
        if SELECT == "branch":
            attends = last_step > first_step
        else:
            attends: tl.constexpr = True
        if attends:
            kv_head = (head // group).to(tl.int64)
            k_base = k + slot.to(tl.int64) * k_stride_b + kv_head * k_stride_h
            v_base = v + slot.to(tl.int64) * v_stride_b + kv_head * v_stride_h
            k_rows = row_source(k_base, far, k_stride_s, MAIN, BLOCK_N, BLOCK_D, LOAD)
            k_tail_rows = k_rows
            if BLOCK_TAIL != 0:
                k_tail_rows = row_source(
                    k_base + MAIN * k_stride_d, far, k_stride_s, HEAD_DIM - MAIN, BLOCK_N, BLOCK_TAIL, LOAD
                )
            v_rows = row_source(v_base, far, v_stride_s, HEAD_DIM_V, BLOCK_N, BLOCK_DV, LOAD)
            q_pointers = (
                q + slot.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h + row_0.to(tl.int64) * q_stride_s
                + tl.arange(0, BLOCK_M) * q_stride_s
            )  # fmt: skip
            row_valid = rows < stored_end
            if seqlens_q is not None or leftpad_q is not None:
                row_valid = (rows >= q_first) & (rows < q_end)
            slopes = None  # one by one: Triton 3.3.1 assigns no tuple of None
            bias_rows = None
            mask_rows = None
            if alibi_slopes is not None:
                slope = tl.load(
                    alibi_slopes + tl.minimum(batch, batches - 1).to(tl.int64) * alibi_stride_b + head,
                    mask=batch < batches, other=0,
                )  # fmt: skip
                slopes = tl.full([BLOCK_M], 0.0, tl.float32) + slope
            if bias is not None:
                bias_rows = bias + batch.to(tl.int64) * bias_stride_b
                if not BIAS_BY_KEY:
                    bias_rows += head.to(tl.int64) * bias_stride_h + rows.to(tl.int64) * bias_stride_q
            score_scale = scale
            row_scales = None
            k_scales = None
            if KV_SCALES == "head":
                owner = tl.minimum(batch, batches - 1)
                score_scale = scale * head_scale(
                    q_scale, owner, kv_head, q_scale_stride_b, q_scale_stride_h, batch < batches
                )
                score_scale *= head_scale(k_scale, owner, kv_head, k_scale_stride_b, k_scale_stride_h, batch < batches)
            if KV_SCALES == "token":
                row_scales = tl.load(
                    q_scale + slot.to(tl.int64) * q_scale_stride_b + head.to(tl.int64) * q_scale_stride_h
                    + rows.to(tl.int64) * q_scale_stride_s,
                    mask=row_valid, other=1.0,
                )  # fmt: skip
                k_scales = k_scale + slot.to(tl.int64) * k_scale_stride_b + kv_head * k_scale_stride_h
            if mask is not None:
                mask_rows = mask + batch.to(tl.int64) * mask_stride_b
                if not MASK_BY_KEY:
                    mask_rows += head.to(tl.int64) * mask_stride_h + rows.to(tl.int64) * mask_stride_q
            query = Query(
                q_pointers, q_pointers + MAIN * q_stride_d, q_stride_d, q_stride_d, row_scales,
                MAIN, BLOCK_D, HEAD_DIM - MAIN, BLOCK_TAIL, NEGATED, Q_FORMAT, OPERANDS,
            )  # fmt: skip
            keys = KeyRows(
                Rows(k_rows, 0, k_stride_s, k_stride_d, MAIN, BLOCK_D, LOAD, KV_FORMAT,
                     Scales(k_scales, 0, k_scale_stride_s)),
                Rows(k_tail_rows, 0, k_stride_s, k_stride_d, HEAD_DIM - MAIN, BLOCK_TAIL, LOAD, KV_FORMAT),
            )  # fmt: skip
            values = Rows(v_rows, 0, v_stride_s, v_stride_d, HEAD_DIM_V, BLOCK_DV, LOAD, V_FORMAT)
            steps = TileRange(
                k_first, first_step, full_begin, full_end, last_step, far, listed, LISTED_K, LIMITS
            )  # fmt: skip
            scores = ScoreTerms(
                row_valid, row_start, row_end, positions, slopes, bias_rows, bias_stride_k, mask_rows, mask_stride_k,
                score_scale, softcap, None, None, None,
                WINDOW, SOFTCAP, BIAS_BY_KEY, MASK_BY_KEY, EXP, MASK_VALUE, False, None, "masked",
                ScoreMods(batch, head, q_first + shift, q_end - q_first, k_first, k_end - k_first,
                          captured_0, captured_1, captured_2, captured_3, size_0, size_1, size_2, size_3,
                          size_4, size_5, size_6, size_7, SCORE_MOD, MASK_MOD),
            )  # fmt: skip
            dropout = Dropout(
                dropout_seed, batch * heads_q + head, row_0 - drop_row, drop_key, threshold, None, None, DROPS
            )
            acc, row_max, row_sum = attend(
                acc, row_max, row_sum, query, keys, values, Pages(), steps, scores, dropout,
                LoopShape(BLOCK_N, K_TILE, BLOCK_ORDER, DOT_PRECISION, PIPELINE, Q_OPERAND, NONE=SELECT != "branch",
                          P_TERMS=P_TERMS),
            )  # fmt: skip

        # Padding rows hold whatever their garbage attended: they give 0 and -inf like any row with no key.
        inside = (rows >= q_first) & (rows < q_end)
        if cu_seqlens_q is not None:
            inside = inside & of_a_sequence(batch, batches, BLOCK_M)
        row_sum = tl.where(inside, row_sum, 0.0)
        acc = finalize(acc, row_sum)
        if KV_SCALES == "head" and V_FORMAT != "as_q":
            owner = tl.minimum(batch, batches - 1)
            kv_head = head // group
            acc = acc * head_scale(v_scale, owner, kv_head, v_scale_stride_b, v_scale_stride_h, batch < batches)
        if dropout_seed is not None:
            acc = acc * keep_scale
        columns = tl.arange(0, BLOCK_DV)
        o_pointers = (
            out + slot.to(tl.int64) * o_stride_b + head.to(tl.int64) * o_stride_h + row_0.to(tl.int64) * o_stride_s
            + tl.arange(0, BLOCK_M)[:, None] * o_stride_s + columns[None, :]
        )  # fmt: skip
        stored = rows < stored_end
        tl.store(o_pointers, acc.to(out.dtype.element_ty), mask=stored[:, None] & (columns < HEAD_DIM_V)[None, :])
        if lse is not None:
            lse_rows = lse + (slot * heads_q + head).to(tl.int64) * seq_q + rows
            tl.store(lse_rows, natural_lse(row_max, row_sum, sinks, head, EXP, NATURAL), mask=stored)
