"""Gradients that belong to query rows.

backward_delta   of each row: the sum of its gradient times its result, less the gradient of its LSE
backward_rows    holds a tile of query rows and goes through the keys that it sees: dQ, and a sum for ALiBi's slopes
backward_block_rows  holds one query row's heads of a group and goes through the blocks of keys that it lists: dQ

gradients.py says what is computed.
"""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import ScoreMods
from portattn.kernels.attend import in_chunk, kv_tile_range, listed_keys, listed_start, listed_tiles
from portattn.kernels.dropout import head_words, kept_tile
from portattn.kernels.gradients import load_row_numbers, score_gradients, score_tile
from portattn.kernels.score_program import with_functions  # noqa: F401 - compilers look it up here
from portattn.kernels.softmax import add_captured_gradients, mod_gradient
from portattn.kernels.split_bf16 import (
    add_dot,
    bfloat16_parts,
    dot,
    held_parts,
    load_parts,
    part_sources,
    parts_where,
    product_of_parts,
)
from portattn.kernels.tiles import (
    heads_in_turn,
    load_query_rows,
    load_rows,
    of_a_sequence,
    packed_bounds,
    packed_tile,
    row_source,
    sequence_bounds,
)


@triton.jit(do_not_specialize=["heads_q", "seq_q", "row_tiles", "tiles"])
def backward_delta(
    forward_out, grad_out, forward_lse, grad_lse, delta,
    o_stride_b, o_stride_h, o_stride_s, o_stride_d,
    do_stride_b, do_stride_h, do_stride_s, do_stride_d,
    heads_q, seq_q, row_tiles, tiles,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Write delta (B, Hq, Sq) float32 of BLOCK_M rows; 0 for rows with nothing to attend: gradients may be NaN."""
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        slot_head = tile // row_tiles
        slot, head = (slot_head // heads_q).to(tl.int64), (slot_head % heads_q).to(tl.int64)
        rows = (tile % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = rows < seq_q
        at = slot_head.to(tl.int64) * seq_q + rows
        lse = tl.load(forward_lse + at, mask=valid, other=float("-inf"))
        some = lse != float("-inf")
        o_rows = forward_out + slot * o_stride_b + head * o_stride_h + rows.to(tl.int64) * o_stride_s
        do_rows = grad_out + slot * do_stride_b + head * do_stride_h + rows.to(tl.int64) * do_stride_s
        # A mask that is only an upper bound: compilers that know no other one would read the whole tile.
        o_tile = load_query_rows(o_rows, valid, o_stride_d, HEAD_DIM_V, BLOCK_DV, False)
        do_tile = load_query_rows(do_rows, valid, do_stride_d, HEAD_DIM_V, BLOCK_DV, False)
        found = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
        if grad_lse is not None:
            found -= tl.load(grad_lse + at, mask=valid, other=0.0)
        tl.store(delta + at, tl.where(some, found, 0.0), mask=valid)


@records.jit(
    do_not_specialize=[
        "heads_q", "group", "seq_q", "seq_k", "row_tiles", "together", "tiles", "batches", "left", "right", "chunk",
        "threshold",
        "size_0", "size_1", "size_2", "size_3", "size_4", "size_5", "size_6", "size_7",
    ]
)  # fmt: skip
def backward_rows(
    q, k, v, grad_out, forward_lse, delta, grad_q, grad_slopes,
    grad_captured_0, grad_captured_1, grad_captured_2, grad_captured_3,
    seqlens_q, seqlens_k, leftpad_q, leftpad_k, cu_seqlens_q, cu_seqlens_k,
    alibi_slopes, bias, mask, block_mask,
    captured_0, captured_1, captured_2, captured_3, dropout_seed,
    scale, softcap, keep_scale,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    do_stride_b, do_stride_h, do_stride_s, do_stride_d,
    dq_stride_b, dq_stride_h, dq_stride_s,
    alibi_stride_b,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
    block_mask_stride_b, block_mask_stride_h, block_mask_stride_q,
    heads_q, group, seq_q, seq_k, row_tiles, together, tiles, batches, left, right, chunk, threshold,
    size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SEARCH: tl.constexpr,
    LOAD: tl.constexpr, EXP: tl.constexpr, DOT_PRECISION: tl.constexpr, GRID: tl.constexpr,
    Q_OPERAND: tl.constexpr, DROPS: tl.constexpr, PARTS: tl.constexpr, LISTED_Q: tl.constexpr, LISTED_K: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, CAPTURED_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Compute dQ of BLOCK_M query rows of one head: one program, which may take several such tiles in turn.

    grad_slopes  (B, Hq, Sq) float32 or None: of each row the sum of -dS·|distance|, which its slope's gradient sums up
    grad_captured_0, …  float32 tensors, to which the captured tensors' gradients are added in any order, or None
    """
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    LIMITS: tl.constexpr = block_mask is not None and (
        (CAUSAL != "none" or WINDOW) or (seqlens_q is not None or seqlens_k is not None)
    )
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        row_tile = tile % row_tiles
        slot_head = tile // row_tiles
        if CAUSAL != "none":
            row_tile, slot_head = heads_in_turn(tile, row_tiles, together, tiles)
            row_tile = row_tiles - 1 - row_tile  # longest rows first: they bound the launch's length
        head = slot_head % heads_q
        if cu_seqlens_q is not None:
            batch, row_tile = packed_tile(cu_seqlens_q, row_tile, batches, seq_q, 1, BLOCK_M, SEARCH)
            slot = batch - batch
            q_first, q_end = packed_bounds(cu_seqlens_q, batch, batches, seq_q)
            k_first, k_end = packed_bounds(cu_seqlens_k, batch, batches, seq_k)
            k_end = tl.where(batch == batches, k_first, k_end)
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
        row_valid = (rows >= q_first) & (rows < q_end)
        if cu_seqlens_q is not None:
            row_valid = row_valid & of_a_sequence(batch, batches, BLOCK_M)

        first = tl.maximum(row_0, q_first)
        last = tl.minimum(row_0 + BLOCK_M, q_end) - 1
        if CAUSAL == "top_left":
            shift = k_first - q_first
        else:
            shift = k_end - q_end
        positions = rows + shift  # [BLOCK_M]
        if CAUSAL != "none":
            row_end = tl.minimum(positions + right + 1, k_end)
            near, far = tl.minimum(first + shift + right + 1, k_end), tl.minimum(last + shift + right + 1, k_end)
        else:
            row_end = tl.full([BLOCK_M], 0, tl.int32) + k_end
            near, far = k_end, k_end
        row_end = tl.where(row_valid, row_end, k_first)
        far = tl.where(last >= first, far, k_first)
        row_start = tl.maximum(positions - left, k_first)
        low_near, low_far = first + shift - left, last + shift - left
        if chunk is not None:
            row_start, row_end = in_chunk(row_start, row_end, positions, k_first, chunk)
            low_near, near = in_chunk(low_near, near, first + shift, k_first, chunk)
            low_far, far = in_chunk(low_far, far, last + shift, k_first, chunk)
        first_step, full_begin, full_end, last_step = kv_tile_range(
            near, far, low_near, low_far, k_first, BLOCK_N, WINDOW
        )

        kv_head = (head // group).to(tl.int64)
        k_base = k + slot.to(tl.int64) * k_stride_b + kv_head * k_stride_h
        v_base = v + slot.to(tl.int64) * v_stride_b + kv_head * v_stride_h
        if DOT_PRECISION == "bf16x6":
            k_apart, v_apart = seq_k.to(tl.int64) * k_stride_s, seq_k.to(tl.int64) * v_stride_s
            k_rows, k_rows_2, k_rows_3 = part_sources(
                k_base, k_apart, far, k_stride_s, HEAD_DIM, BLOCK_N, BLOCK_D, LOAD, PARTS
            )
            v_rows, v_rows_2, v_rows_3 = part_sources(
                v_base, v_apart, far, v_stride_s, HEAD_DIM_V, BLOCK_N, BLOCK_DV, LOAD, PARTS
            )
        else:
            k_rows = row_source(k_base, far, k_stride_s, HEAD_DIM, BLOCK_N, BLOCK_D, LOAD)
            v_rows = row_source(v_base, far, v_stride_s, HEAD_DIM_V, BLOCK_N, BLOCK_DV, LOAD)
        offset = row_0.to(tl.int64)
        q_pointers = (
            q + slot.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h + offset * q_stride_s
            + tl.arange(0, BLOCK_M) * q_stride_s
        )  # fmt: skip
        do_pointers = (
            grad_out + slot.to(tl.int64) * do_stride_b + head.to(tl.int64) * do_stride_h + offset * do_stride_s
            + tl.arange(0, BLOCK_M) * do_stride_s
        )  # fmt: skip
        if DOT_PRECISION == "bf16x6":
            q_apart, do_apart = seq_q.to(tl.int64) * q_stride_s, seq_q.to(tl.int64) * do_stride_s
            q_1, q_2, q_3 = held_parts(q_pointers, row_valid, q_stride_d, q_apart, HEAD_DIM, BLOCK_D, PARTS)
            do_1, do_2, do_3 = held_parts(do_pointers, row_valid, do_stride_d, do_apart, HEAD_DIM_V, BLOCK_DV, PARTS)
        else:
            q_tile = load_query_rows(q_pointers, row_valid, q_stride_d, HEAD_DIM, BLOCK_D, False)
            do_tile = load_query_rows(do_pointers, row_valid, do_stride_d, HEAD_DIM_V, BLOCK_DV, False)
        numbers = (slot * heads_q + head).to(tl.int64) * seq_q
        lse, row_delta = load_row_numbers(forward_lse + numbers, delta + numbers, rows, row_valid)
        slope = None
        if alibi_slopes is not None:
            slope = tl.load(
                alibi_slopes + tl.minimum(batch, batches - 1).to(tl.int64) * alibi_stride_b + head,
                mask=batch < batches, other=0,
            )  # fmt: skip
        if dropout_seed is not None:
            drop_word, drop_turn = head_words(dropout_seed, batch * heads_q + head, DROPS)
        dq = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        by_distance = tl.full([BLOCK_M], 0.0, tl.float32)
        mods = ScoreMods(batch, head, q_first + shift, q_end - q_first, k_first, k_end - k_first,
                         captured_0, captured_1, captured_2, captured_3, size_0, size_1, size_2, size_3,
                         size_4, size_5, size_6, size_7, SCORE_MOD, MASK_MOD)  # fmt: skip
        if block_mask is not None:
            listed = (
                block_mask + batch.to(tl.int64) * block_mask_stride_b + head.to(tl.int64) * block_mask_stride_h
                + (row_0 // LISTED_Q).to(tl.int64) * block_mask_stride_q
            )  # fmt: skip
            first_step, full_begin = k_first, k_first  # 0
            full_end, last_step = listed_tiles(listed, seq_k, LISTED_K, BLOCK_N)
        elif MASK_MOD is not None:
            full_end = full_begin
        for edge in tl.static_range(2):
            if edge == 0:
                count = full_end - full_begin
            else:
                count = full_begin - first_step + last_step - full_end
            for i in range(count):
                if edge == 0:
                    start = k_first + (full_begin + i) * BLOCK_N
                elif WINDOW or MASK_MOD is not None:
                    skipped = tl.where(first_step + i >= full_begin, full_end - full_begin, 0)
                    start = k_first + (first_step + i + skipped) * BLOCK_N
                else:
                    start = k_first + (full_end + i) * BLOCK_N
                if block_mask is not None:
                    start = listed_start(listed + 2, start, far, LISTED_K, edge == 0 and not LIMITS)
                if Q_OPERAND == "reload" and DOT_PRECISION != "bf16x6":
                    q_tile = load_query_rows(q_pointers, row_valid, q_stride_d, HEAD_DIM, BLOCK_D, False)
                    do_tile = load_query_rows(do_pointers, row_valid, do_stride_d, HEAD_DIM_V, BLOCK_DV, False)
                keys = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
                if DOT_PRECISION == "bf16x6":
                    k_1, k_2, k_3 = load_parts(k_rows, k_rows_2, k_rows_3, start, far, k_stride_s, k_stride_d, HEAD_DIM,
                                               BLOCK_N, BLOCK_D, edge == 1 or LIMITS, LOAD, PARTS)  # fmt: skip
                    v_1, v_2, v_3 = load_parts(v_rows, v_rows_2, v_rows_3, start, far, v_stride_s, v_stride_d,
                                               HEAD_DIM_V, BLOCK_N, BLOCK_DV, edge == 1 or LIMITS, LOAD,
                                               PARTS)  # fmt: skip
                else:
                    k_tile = load_rows(k_rows, None, start, far, 0, 0, k_stride_s, k_stride_d, HEAD_DIM, BLOCK_N,
                                       BLOCK_D, edge == 1 or LIMITS, LOAD, 0, "per_page", "masked")  # fmt: skip
                    v_tile = load_rows(v_rows, None, start, far, 0, 0, v_stride_s, v_stride_d, HEAD_DIM_V, BLOCK_N,
                                       BLOCK_DV, edge == 1 or LIMITS, LOAD, 0, "per_page", "masked")  # fmt: skip
                added = None
                shown = None
                there = row_valid[:, None] & (keys < far)[None, :]
                if bias is not None:
                    added = score_tile(bias, batch, head, rows[:, None], keys[None, :], there, float("-inf"),
                                       bias_stride_b, bias_stride_h, bias_stride_q,
                                       bias_stride_k).to(tl.float32)  # fmt: skip
                if mask is not None:
                    shown = score_tile(mask, batch, head, rows[:, None], keys[None, :], there, 0, mask_stride_b,
                                       mask_stride_h, mask_stride_q, mask_stride_k).to(tl.int32) != 0  # fmt: skip
                if DOT_PRECISION == "bf16x6":
                    products = product_of_parts(q_1, q_2, q_3, tl.trans(k_1), tl.trans(k_2), tl.trans(k_3), True)
                    dp = product_of_parts(do_1, do_2, do_3, tl.trans(v_1), tl.trans(v_2), tl.trans(v_3), True)
                else:
                    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=DOT_PRECISION)  # [BLOCK_M, BLOCK_N]
                    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=DOT_PRECISION)
                p, bend, keep = score_gradients(
                    products, lse[:, None], positions[:, None], keys[None, :], row_start[:, None], row_end[:, None],
                    slope, added, shown, scale, softcap, mods._replace(MASK=None if edge == 0 else MASK_MOD),
                    edge == 1 or LIMITS, WINDOW, SOFTCAP, EXP,
                )  # fmt: skip
                if dropout_seed is not None:
                    kept = kept_tile(drop_word, drop_turn, start - drop_key, row_0 - drop_row, threshold, BLOCK_N,
                                     BLOCK_M, False, DROPS)  # fmt: skip
                    dp = tl.where(kept, dp * keep_scale, 0.0)
                ds = p * (dp - row_delta[:, None])
                if (edge == 1 or LIMITS) or (bias is not None or mask is not None):
                    ds = tl.where(keep, ds, 0.0)
                if grad_slopes is not None:
                    distance = tl.abs(positions[:, None] - keys[None, :]).to(tl.float32)
                    by_distance -= tl.sum(ds * distance, 1)
                if SOFTCAP:
                    ds = tl.where(ds == 0.0, 0.0, ds * bend)
                if CAPTURED_GRADIENT is not None:
                    add_captured_gradients(products * scale, positions[:, None], keys[None, :], mods, CAPTURED_GRADIENT,
                                           ds, grad_captured_0, grad_captured_1, grad_captured_2,
                                           grad_captured_3)  # fmt: skip
                if SCORE_MOD is not None:
                    ds = mod_gradient(products * scale, positions[:, None], keys[None, :], mods, SCORE_GRADIENT, ds)
                if (bias is not None or mask is not None) or (
                    (WINDOW and (edge == 1 or LIMITS)) or (MASK_MOD is not None and edge == 1)
                ):
                    # A key that no row of the tile sees may be NaN, and 0·NaN is NaN.
                    if DOT_PRECISION == "bf16x6":
                        k_1, k_2, k_3 = parts_where((tl.max(p, 0) != 0.0)[:, None], k_1, k_2, k_3)
                    else:
                        k_tile = tl.where((tl.max(p, 0) == 0.0)[:, None], 0.0, k_tile).to(k_tile.dtype)
                if DOT_PRECISION == "bf16x6":
                    ds_1, ds_2, ds_3 = bfloat16_parts(ds)
                    dq += product_of_parts(ds_1, ds_2, ds_3, k_1, k_2, k_3, False)
                else:
                    dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=DOT_PRECISION)

        stored = rows < stored_end
        dq = tl.where(row_valid[:, None], dq * scale, 0.0)
        columns = tl.arange(0, BLOCK_D)
        dq_pointers = (
            grad_q + slot.to(tl.int64) * dq_stride_b + head.to(tl.int64) * dq_stride_h + offset * dq_stride_s
            + tl.arange(0, BLOCK_M)[:, None] * dq_stride_s + columns[None, :]
        )  # fmt: skip
        tl.store(dq_pointers, dq.to(grad_q.dtype.element_ty), mask=stored[:, None] & (columns < HEAD_DIM)[None, :])
        if grad_slopes is not None:
            tl.store(grad_slopes + numbers + rows, tl.where(row_valid, by_distance, 0.0), mask=stored)


@records.jit(do_not_specialize=["heads_k", "seq_q", "seq_k", "places", "tiles"])
def backward_block_rows(
    q, k, v, grad_out, forward_lse, delta, grad_q,
    seqlens_k, indices, counts,
    scale,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    do_stride_b, do_stride_h, do_stride_s, do_stride_d,
    dq_stride_b, dq_stride_h, dq_stride_s,
    list_stride_b, list_stride_h, list_stride_s, count_stride_b, count_stride_h, count_stride_s,
    heads_k, seq_q, seq_k, places, tiles,
    GROUP: tl.constexpr, BLOCK_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EXP: tl.constexpr, DOT_PRECISION: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Compute dQ of one query row's heads of a group, at most BLOCK_M; arguments as of decode.py's block_forward."""
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        query = tile % seq_q
        kv_head = tile // seq_q % heads_k
        batch = tile // seq_q // heads_k
        rows = tl.arange(0, BLOCK_M)  # [BLOCK_M] heads of the group
        valid = rows < GROUP
        head = kv_head * GROUP + rows % GROUP
        end, listed, count = listed_keys(
            seqlens_k, indices, counts, list_stride_b, list_stride_h, list_stride_s, count_stride_b, count_stride_h,
            count_stride_s, batch, kv_head, query, seq_q, seq_k, places, CAUSAL,
        )  # fmt: skip
        slot, row, heads = batch.to(tl.int64), query.to(tl.int64), head.to(tl.int64)
        q_tile = load_query_rows(
            q + slot * q_stride_b + heads * q_stride_h + row * q_stride_s, valid, q_stride_d, HEAD_DIM, BLOCK_D, False
        )
        do_tile = load_query_rows(
            grad_out + slot * do_stride_b + heads * do_stride_h + row * do_stride_s, valid, do_stride_d, HEAD_DIM_V,
            BLOCK_DV, False,
        )  # fmt: skip
        numbers = (slot * heads_k * GROUP + heads) * seq_q + row
        lse, row_delta = load_row_numbers(forward_lse, delta, numbers, valid)
        k_base = k + slot * k_stride_b + kv_head.to(tl.int64) * k_stride_h
        v_base = v + slot * v_stride_b + kv_head.to(tl.int64) * v_stride_h
        dq = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        for i in range(count * (BLOCK_KEYS // BLOCK_N)):
            start = listed_start(listed, i * BLOCK_N, end, BLOCK_KEYS, False)
            keys = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            k_tile = load_rows(k_base, None, start, end, 0, 0, k_stride_s, k_stride_d, HEAD_DIM, BLOCK_N, BLOCK_D, True,
                               "pointer", 0, "per_page", "masked")  # fmt: skip
            v_tile = load_rows(v_base, None, start, end, 0, 0, v_stride_s, v_stride_d, HEAD_DIM_V, BLOCK_N, BLOCK_DV,
                               True, "pointer", 0, "per_page", "masked")  # fmt: skip
            products = dot(q_tile, tl.trans(k_tile), DOT_PRECISION)  # [BLOCK_M, BLOCK_N]
            dp = dot(do_tile, tl.trans(v_tile), DOT_PRECISION)
            p, _, keep = score_gradients(products, lse[:, None], 0, keys[None, :], 0, end, None, None, None, scale, 0.0,
                                         ScoreMods(), True, False, False, EXP)  # fmt: skip
            ds = tl.where(keep, p * (dp - row_delta[:, None]), 0.0)
            dq = add_dot(ds.to(k_tile.dtype), k_tile, dq, DOT_PRECISION)
        columns = tl.arange(0, BLOCK_D)
        dq_pointers = grad_q + slot * dq_stride_b + heads * dq_stride_h + row * dq_stride_s
        inside = valid[:, None] & (columns < HEAD_DIM)[None, :]
        tl.store(dq_pointers[:, None] + columns[None, :], (dq * scale).to(grad_q.dtype.element_ty), mask=inside)
