"""backward_keys: dK and dV. A program holds a tile of keys and goes through the query rows that see it, of all heads
of the group. backward_block_keys: of a part of a block of keys, and a chunk of the query rows whose lists name
it. backward_block_sum: the sums of a block's chunks.

gradients.py says what is computed.
"""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import ScoreMods
from portattn.kernels.attend import in_chunk, kv_tile_range, listed_start, listed_tiles, seen_end
from portattn.kernels.dropout import head_words, kept_tile
from portattn.kernels.gradients import (
    load_attending,
    load_numbers,
    load_row_numbers,
    number_source,
    score_gradients,
    score_tile,
)
from portattn.kernels.score_program import with_functions  # noqa: F401 - compilers look it up here
from portattn.kernels.softmax import mod_gradient
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
    packed_bounds,
    packed_tile,
    row_source,
    sequence_bounds,
)


@records.jit(
    do_not_specialize=[
        "heads_q", "heads_k", "group", "seq_q", "seq_k", "key_tiles", "together", "tiles", "batches", "left", "right",
        "chunk", "threshold",
        "size_0", "size_1", "size_2", "size_3", "size_4", "size_5", "size_6", "size_7",
    ]
)  # fmt: skip
def backward_keys(
    q, k, v, grad_out, forward_lse, delta, grad_k, grad_v,
    seqlens_q, seqlens_k, leftpad_q, leftpad_k, cu_seqlens_q, cu_seqlens_k,
    alibi_slopes, bias, mask, block_queries,
    captured_0, captured_1, captured_2, captured_3, dropout_seed,
    scale, softcap, keep_scale,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    do_stride_b, do_stride_h, do_stride_s, do_stride_d,
    dk_stride_b, dk_stride_h, dk_stride_s,
    dv_stride_b, dv_stride_h, dv_stride_s,
    alibi_stride_b,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
    block_queries_stride_b, block_queries_stride_h, block_queries_stride_k,
    heads_q, heads_k, group, seq_q, seq_k, key_tiles, together, tiles, batches, left, right, chunk, threshold,
    size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SEARCH: tl.constexpr,
    LOAD: tl.constexpr, EXP: tl.constexpr, DOT_PRECISION: tl.constexpr, GRID: tl.constexpr,
    Q_OPERAND: tl.constexpr, DROPS: tl.constexpr, PARTS: tl.constexpr, LISTED_Q: tl.constexpr, LISTED_K: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, SINKS: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_M keys of one key/value head: one program, which may take several tiles in turn.

    Optional arguments are None, as in dense_forward. It goes through the query rows BLOCK_N at a time.

    chunk    None, or keys of a chunk, as in dense_forward
    block_queries  None, or for each block of LISTED_K keys a list of blocks of LISTED_Q queries
    NUMBERS  how a full tile's LSE and delta are read: `pointer`, or `descriptor`, where they are aligned
    """
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    LIMITS: tl.constexpr = block_queries is not None and (
        (CAUSAL != "none" or WINDOW) or (seqlens_q is not None or seqlens_k is not None)
    )
    HIDES: tl.constexpr = MASK_MOD is not None or block_queries is not None
    # Rows that are hidden from all keys are known by an LSE of -inf, unless they attend a sink.
    BY_LSE: tl.constexpr = (HIDES and not (SINKS or DOT_PRECISION == "bf16x6")) and (bias is None and mask is None)
    LIMITED: tl.constexpr = CAUSAL != "none" or chunk is not None  # some rows before a key do not see it
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        key_tile = tile % key_tiles
        slot_head = tile // key_tiles
        if CAUSAL != "none":  # the first keys are seen by the most rows: they come first as they are
            key_tile, slot_head = heads_in_turn(tile, key_tiles, together, tiles)
        kv_head = slot_head % heads_k
        if cu_seqlens_k is not None:
            batch, key_tile = packed_tile(cu_seqlens_k, key_tile, batches, seq_k, 1, BLOCK_M, SEARCH)
            slot = batch - batch  # packed tensors are one slot, which all sequences share
            q_first, q_end = packed_bounds(cu_seqlens_q, batch, batches, seq_q)
            k_first, k_end = packed_bounds(cu_seqlens_k, batch, batches, seq_k)
            q_end = tl.where(batch == batches, q_first, q_end)  # keys after the last sequence have no rows
            key_0 = k_first + key_tile * BLOCK_M
            stored_end = k_end
            drop_row, drop_key = q_first, k_first
        else:
            batch = slot_head // heads_k
            slot = batch
            q_first, q_end = sequence_bounds(seqlens_q, leftpad_q, batch, seq_q)
            k_first, k_end = sequence_bounds(seqlens_k, leftpad_k, batch, seq_k)
            key_0 = key_tile * BLOCK_M
            stored_end = seq_k
            drop_row, drop_key = seq_q - seq_q, seq_q - seq_q
        keys = key_0 + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        inside = (keys >= k_first) & (keys < k_end)

        # Key j is seen by the rows from j - shift - right on, up to j - shift + left.
        first = tl.maximum(key_0, k_first)
        last = tl.minimum(key_0 + BLOCK_M, k_end) - 1
        if CAUSAL == "top_left":
            shift = k_first - q_first
        else:
            shift = k_end - q_end
        if WINDOW:
            near, far = tl.minimum(first - shift + left + 1, q_end), tl.minimum(last - shift + left + 1, q_end)
        else:
            near, far = q_end, q_end
        far = tl.where(last >= first, far, q_first)  # a tile of padding keys is seen by no row
        low_near, low_far = first - shift - right, last - shift - right
        row_first = q_first
        if CAUSAL != "none":  # rows before the first that sees a key may hold NaN, and 0·NaN is NaN
            q_first = tl.minimum(tl.maximum(q_first, k_first - shift - right), q_end)
        if chunk is not None:
            # The rows that see a key are those whose positions lie in its chunk.
            if CAUSAL == "none":
                low_near, low_far = q_first, q_first
            low_near, near = in_chunk(low_near + shift, near + shift, first, k_first, chunk)
            low_far, far = in_chunk(low_far + shift, far + shift, last, k_first, chunk)
            low_near, near, low_far, far = low_near - shift, near - shift, low_far - shift, far - shift
            q_first = tl.minimum(tl.maximum(q_first, k_first - shift), q_end)
        first_step, full_begin, full_end, last_step = kv_tile_range(
            near, far, low_near, low_far, q_first, BLOCK_N, LIMITED
        )
        if block_queries is not None:
            q_first, first_step, full_begin = row_first, row_first, row_first  # 0
        elif MASK_MOD is not None:
            full_end = full_begin

        k_pointers = (
            k + slot.to(tl.int64) * k_stride_b + kv_head.to(tl.int64) * k_stride_h + key_0.to(tl.int64) * k_stride_s
            + tl.arange(0, BLOCK_M) * k_stride_s
        )  # fmt: skip
        v_pointers = (
            v + slot.to(tl.int64) * v_stride_b + kv_head.to(tl.int64) * v_stride_h + key_0.to(tl.int64) * v_stride_s
            + tl.arange(0, BLOCK_M) * v_stride_s
        )  # fmt: skip
        if DOT_PRECISION == "bf16x6":
            q_apart, k_apart = seq_q.to(tl.int64) * q_stride_s, seq_k.to(tl.int64) * k_stride_s
            do_apart, v_apart = seq_q.to(tl.int64) * do_stride_s, seq_k.to(tl.int64) * v_stride_s
            k_1, k_2, k_3 = held_parts(k_pointers, inside, k_stride_d, k_apart, HEAD_DIM, BLOCK_D, PARTS)
            v_1, v_2, v_3 = held_parts(v_pointers, inside, v_stride_d, v_apart, HEAD_DIM_V, BLOCK_DV, PARTS)
        else:
            k_tile = load_query_rows(k_pointers, inside, k_stride_d, HEAD_DIM, BLOCK_D, False)
            v_tile = load_query_rows(v_pointers, inside, v_stride_d, HEAD_DIM_V, BLOCK_DV, False)
        dk = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        dv = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
        for member in range(group):
            head = kv_head * group + member
            q_base = q + slot.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h
            do_base = grad_out + slot.to(tl.int64) * do_stride_b + head.to(tl.int64) * do_stride_h
            if DOT_PRECISION == "bf16x6":
                q_rows, q_rows_2, q_rows_3 = part_sources(
                    q_base, q_apart, far, q_stride_s, HEAD_DIM, BLOCK_N, BLOCK_D, LOAD, PARTS
                )
                do_rows, do_rows_2, do_rows_3 = part_sources(
                    do_base, do_apart, far, do_stride_s, HEAD_DIM_V, BLOCK_N, BLOCK_DV, LOAD, PARTS
                )
            else:
                q_rows = row_source(q_base, far, q_stride_s, HEAD_DIM, BLOCK_N, BLOCK_D, LOAD)
                do_rows = row_source(do_base, far, do_stride_s, HEAD_DIM_V, BLOCK_N, BLOCK_DV, LOAD)
            numbers = (slot * heads_q + head).to(tl.int64) * seq_q
            lse_source = number_source(forward_lse, numbers, far, BLOCK_N, NUMBERS)
            delta_source = number_source(delta, numbers, far, BLOCK_N, NUMBERS)
            slope = None
            if alibi_slopes is not None:
                slope = tl.load(
                    alibi_slopes + tl.minimum(batch, batches - 1).to(tl.int64) * alibi_stride_b + head,
                    mask=batch < batches, other=0,
                )  # fmt: skip
            if dropout_seed is not None:
                drop_word, drop_turn = head_words(dropout_seed, batch * heads_q + head, DROPS)
            mods = ScoreMods(batch, head, row_first + shift, q_end - row_first, k_first, k_end - k_first,
                             captured_0, captured_1, captured_2, captured_3, size_0, size_1, size_2, size_3,
                             size_4, size_5, size_6, size_7, SCORE_MOD, MASK_MOD)  # fmt: skip
            if block_queries is not None:
                listed = (
                    block_queries + batch.to(tl.int64) * block_queries_stride_b
                    + head.to(tl.int64) * block_queries_stride_h
                    + (key_0 // LISTED_K).to(tl.int64) * block_queries_stride_k
                )  # fmt: skip
                full_end, last_step = listed_tiles(listed, seq_q, LISTED_Q, BLOCK_N)
            for edge in tl.static_range(2):
                if edge == 0:
                    count = full_end - full_begin
                else:
                    count = full_begin - first_step + last_step - full_end
                for i in range(count):
                    if edge == 0:
                        start = q_first + (full_begin + i) * BLOCK_N
                    elif LIMITED or MASK_MOD is not None:
                        # The edge before the full tiles, then the one after them.
                        skipped = tl.where(first_step + i >= full_begin, full_end - full_begin, 0)
                        start = q_first + (first_step + i + skipped) * BLOCK_N
                    else:
                        start = q_first + (full_end + i) * BLOCK_N
                    if block_queries is not None:
                        start = listed_start(listed + 2, start, far, LISTED_Q, edge == 0 and not LIMITS)
                    if Q_OPERAND == "reload" and DOT_PRECISION != "bf16x6":
                        k_tile = load_query_rows(k_pointers, inside, k_stride_d, HEAD_DIM, BLOCK_D, False)
                        v_tile = load_query_rows(v_pointers, inside, v_stride_d, HEAD_DIM_V, BLOCK_DV, False)
                    rows = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
                    row_valid = rows < far
                    if DOT_PRECISION == "bf16x6":
                        q_1, q_2, q_3 = load_parts(q_rows, q_rows_2, q_rows_3, start, far, q_stride_s, q_stride_d,
                                                   HEAD_DIM, BLOCK_N, BLOCK_D, edge == 1 or LIMITS, LOAD,
                                                   PARTS)  # fmt: skip
                        do_1, do_2, do_3 = load_parts(do_rows, do_rows_2, do_rows_3, start, far, do_stride_s,
                                                      do_stride_d, HEAD_DIM_V, BLOCK_N, BLOCK_DV, edge == 1 or LIMITS,
                                                      LOAD, PARTS)  # fmt: skip
                    elif BY_LSE and (edge == 1 or LIMITS):
                        # Rows that attend nothing may hold NaN: 0·NaN is NaN. Zeros in the place of loaded rows would
                        # keep products from taking them out of shared memory.
                        q_tile, do_tile = load_attending(
                            forward_lse + numbers, q_base, do_base, start, row_valid, q_stride_s, q_stride_d,
                            do_stride_s, do_stride_d, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_N,
                        )  # fmt: skip
                    else:
                        q_tile = load_rows(q_rows, None, start, far, 0, 0, q_stride_s, q_stride_d, HEAD_DIM, BLOCK_N,
                                           BLOCK_D, edge == 1 or LIMITS, LOAD, 0, "per_page", "masked")  # fmt: skip
                        do_tile = load_rows(do_rows, None, start, far, 0, 0, do_stride_s, do_stride_d, HEAD_DIM_V,
                                            BLOCK_N, BLOCK_DV, edge == 1 or LIMITS, LOAD, 0, "per_page",
                                            "masked")  # fmt: skip
                    if (edge == 1 or LIMITS) or (bias is not None or mask is not None):
                        lse, row_delta = load_row_numbers(forward_lse + numbers, delta + numbers, rows, row_valid)
                    else:
                        # The rows of a full tile are real and see its keys. With masks, which hinder their copies
                        # ahead, the loop took 1.07 to 1.5 times as long on an H200; by pointers 1.01 to 1.14 times.
                        lse = load_numbers(lse_source, start, BLOCK_N, NUMBERS)
                        row_delta = load_numbers(delta_source, start, BLOCK_N, NUMBERS)
                        if SCORE_MOD is not None:  # which may give -inf for a whole row
                            lse = tl.where(lse == float("-inf"), float("inf"), lse)
                    positions = rows + shift
                    row_start = tl.maximum(positions - left, k_first)
                    if CAUSAL != "none":
                        row_end = tl.minimum(positions + right + 1, k_end)
                    else:
                        row_end = tl.full([BLOCK_N], 0, tl.int32) + k_end
                    if chunk is not None:
                        row_start, row_end = in_chunk(row_start, row_end, positions, k_first, chunk)
                    row_end = tl.where(row_valid, row_end, k_first)
                    added = None  # one by one: not every Triton has tuples that hold None
                    shown = None
                    there = row_valid[None, :] & inside[:, None]
                    if bias is not None:
                        added = score_tile(bias, batch, head, rows[None, :], keys[:, None], there, float("-inf"),
                                           bias_stride_b, bias_stride_h, bias_stride_q,
                                           bias_stride_k).to(tl.float32)  # fmt: skip
                    if mask is not None:
                        shown = score_tile(mask, batch, head, rows[None, :], keys[:, None], there, 0, mask_stride_b,
                                           mask_stride_h, mask_stride_q, mask_stride_k).to(tl.int32) != 0  # fmt: skip
                    # Both products first: a compiler that starts them asynchronously computes the
                    # probabilities during the second.
                    if DOT_PRECISION == "bf16x6":
                        products = product_of_parts(k_1, k_2, k_3, tl.trans(q_1), tl.trans(q_2), tl.trans(q_3), True)
                        dp = product_of_parts(v_1, v_2, v_3, tl.trans(do_1), tl.trans(do_2), tl.trans(do_3), True)
                    else:
                        products = tl.dot(k_tile, tl.trans(q_tile), input_precision=DOT_PRECISION)  # [BLOCK_M, BLOCK_N]
                        dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=DOT_PRECISION)
                    p, bend, keep = score_gradients(
                        products, lse[None, :], positions[None, :], keys[:, None],
                        row_start[None, :], row_end[None, :], slope, added, shown, scale, softcap,
                        mods._replace(MASK=None if edge == 0 else MASK_MOD), edge == 1 or LIMITS, WINDOW, SOFTCAP,
                        EXP,
                    )  # fmt: skip
                    if (bias is not None or mask is not None) or ((edge == 1 or LIMITS) and (HIDES and not BY_LSE)):
                        # A row that sees no key of the tile may be hidden from all, and hold NaN: 0·NaN is NaN. Its LSE
                        # does not tell: with a sink it is finite.
                        seen = (tl.max(p, 0) != 0.0)[:, None]
                        if DOT_PRECISION == "bf16x6":
                            q_1, q_2, q_3 = parts_where(seen, q_1, q_2, q_3)
                            do_1, do_2, do_3 = parts_where(seen, do_1, do_2, do_3)
                        else:
                            q_tile = tl.where(seen, q_tile, 0.0).to(q_tile.dtype)
                            do_tile = tl.where(seen, do_tile, 0.0).to(do_tile.dtype)
                    p_kept = p
                    if dropout_seed is not None:
                        kept = kept_tile(drop_word, drop_turn, key_0 - drop_key, start - drop_row, threshold, BLOCK_M,
                                         BLOCK_N, True, DROPS)  # fmt: skip
                        p_kept = tl.where(kept, p * keep_scale, 0.0)
                    if DOT_PRECISION == "bf16x6":
                        p_1, p_2, p_3 = bfloat16_parts(p_kept)
                        dv += product_of_parts(p_1, p_2, p_3, do_1, do_2, do_3, False)
                    else:
                        dv = tl.dot(p_kept.to(do_tile.dtype), do_tile, dv, input_precision=DOT_PRECISION)
                    if dropout_seed is not None:
                        dp = tl.where(kept, dp * keep_scale, 0.0)
                    ds = p * (dp - row_delta[None, :])
                    if SOFTCAP:
                        ds = ds * bend
                    if SCORE_MOD is not None:
                        ds = mod_gradient(products * scale, positions[None, :], keys[:, None], mods, SCORE_GRADIENT, ds)
                    if (edge == 1 or LIMITS) or (bias is not None or mask is not None):
                        # A NaN in a key that this row does not see comes by dP.
                        ds = tl.where(keep, ds, 0.0)
                    if DOT_PRECISION == "bf16x6":
                        ds_1, ds_2, ds_3 = bfloat16_parts(ds)
                        dk += product_of_parts(ds_1, ds_2, ds_3, q_1, q_2, q_3, False)
                    else:
                        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=DOT_PRECISION)

        stored = keys < stored_end
        dk = tl.where(inside[:, None], dk * scale, 0.0)
        dv = tl.where(inside[:, None], dv, 0.0)
        columns, columns_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        offset = key_0.to(tl.int64)
        dk_pointers = (
            grad_k + slot.to(tl.int64) * dk_stride_b + kv_head.to(tl.int64) * dk_stride_h + offset * dk_stride_s
            + tl.arange(0, BLOCK_M)[:, None] * dk_stride_s + columns[None, :]
        )  # fmt: skip
        dv_pointers = (
            grad_v + slot.to(tl.int64) * dv_stride_b + kv_head.to(tl.int64) * dv_stride_h + offset * dv_stride_s
            + tl.arange(0, BLOCK_M)[:, None] * dv_stride_s + columns_v[None, :]
        )  # fmt: skip
        tl.store(dk_pointers, dk.to(grad_k.dtype.element_ty), mask=stored[:, None] & (columns < HEAD_DIM)[None, :])
        tl.store(dv_pointers, dv.to(grad_v.dtype.element_ty), mask=stored[:, None] & (columns_v < HEAD_DIM_V)[None, :])


@records.jit(do_not_specialize=["heads_k", "seq_q", "seq_k", "blocks", "entries", "chunks", "chunk_rows", "tiles"])
def backward_block_keys(
    q, k, v, grad_out, forward_lse, delta, grad_parts,
    seqlens_k, block_rows, block_starts, block_chunks,
    scale,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    do_stride_b, do_stride_h, do_stride_s, do_stride_d,
    heads_k, seq_q, seq_k, blocks, entries, chunks, chunk_rows, tiles,
    GROUP: tl.constexpr, BLOCK_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EXP: tl.constexpr, DOT_PRECISION: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_M keys of a block, a part of it, by one chunk of its query rows: one program.

    grad_parts    (B, Hk, chunks, BLOCK_KEYS, D + Dv) float32: dK / scale and dV of each chunk
    block_rows    (B, Hk, entries) int32: the query rows whose lists name each block, in order
    block_starts  (B, Hk, blocks + 1) int32: the place of each block's first row in block_rows
    block_chunks  (B, Hk, blocks + 1 + chunks) int32: each block's first chunk, of chunk_rows rows, then each chunk's
                  block; `blocks` for chunks that are not needed
    A step takes whole groups: BLOCK_N // GROUP query rows, with all their heads.
    """
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    TOGETHER: tl.constexpr = BLOCK_N // GROUP
    PARTS: tl.constexpr = BLOCK_KEYS // BLOCK_M
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        chunk = tile // PARTS % chunks
        kv_head = tile // PARTS // chunks % heads_k
        batch = tile // PARTS // chunks // heads_k
        of_head = batch.to(tl.int64) * heads_k + kv_head
        owners = block_chunks + of_head * (blocks + 1 + chunks)
        owner = tl.load(owners + blocks + 1 + chunk)
        block = tl.minimum(owner, blocks - 1)
        key_0 = block * BLOCK_KEYS + tile % PARTS * BLOCK_M
        keys = key_0 + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        origin, k_end = sequence_bounds(seqlens_k, None, batch, seq_k)
        inside = (keys >= origin) & (keys < k_end)
        slot, kv_slot = batch.to(tl.int64), kv_head.to(tl.int64)
        k_pointers = k + slot * k_stride_b + kv_slot * k_stride_h + keys.to(tl.int64) * k_stride_s
        v_pointers = v + slot * v_stride_b + kv_slot * v_stride_h + keys.to(tl.int64) * v_stride_s
        k_tile = load_query_rows(k_pointers, inside, k_stride_d, HEAD_DIM, BLOCK_D, False)
        v_tile = load_query_rows(v_pointers, inside, v_stride_d, HEAD_DIM_V, BLOCK_DV, False)
        starts = block_starts + of_head * (blocks + 1) + block
        listing = block_rows + of_head * entries
        first = tl.load(starts) + (chunk - tl.load(owners + block)) * chunk_rows
        stop = tl.minimum(first + chunk_rows, tl.load(starts + 1))
        stop = tl.where(owner < blocks, stop, first)
        places = tl.arange(0, BLOCK_N)  # [BLOCK_N]
        heads = (kv_head * GROUP + places % GROUP).to(tl.int64)
        q_base = q + slot * q_stride_b + heads * q_stride_h
        do_base = grad_out + slot * do_stride_b + heads * do_stride_h
        dk = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        dv = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
        for i in range(tl.cdiv(stop - first, TOGETHER)):
            entry = first + i * TOGETHER + places // GROUP
            real = (entry < stop) & (places < TOGETHER * GROUP)
            rows = tl.load(listing + entry, mask=real, other=0)
            row_end = seen_end(rows, seq_q, k_end, CAUSAL)
            # A row that sees no key of the tile may be hidden from all, and hold NaN: 0·NaN is NaN.
            real = real & (row_end > key_0)
            row_end = tl.where(real, row_end, 0)
            at = rows.to(tl.int64)
            q_tile = load_query_rows(q_base + at * q_stride_s, real, q_stride_d, HEAD_DIM, BLOCK_D, False)
            do_tile = load_query_rows(do_base + at * do_stride_s, real, do_stride_d, HEAD_DIM_V, BLOCK_DV, False)
            numbers = (slot * heads_k * GROUP + heads) * seq_q + at
            lse, row_delta = load_row_numbers(forward_lse, delta, numbers, real)
            products = dot(k_tile, tl.trans(q_tile), DOT_PRECISION)  # [BLOCK_M, BLOCK_N]
            dp = dot(v_tile, tl.trans(do_tile), DOT_PRECISION)
            p, _, keep = score_gradients(products, lse[None, :], 0, keys[:, None], 0, row_end[None, :], None, None,
                                         None, scale, 0.0, ScoreMods(), True, False, False, EXP)  # fmt: skip
            ds = tl.where(keep, p * (dp - row_delta[None, :]), 0.0)
            dv = add_dot(p.to(do_tile.dtype), do_tile, dv, DOT_PRECISION)
            dk = add_dot(ds.to(q_tile.dtype), q_tile, dk, DOT_PRECISION)
        columns, columns_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        needed = tl.full([BLOCK_M], owner, tl.int32) < blocks
        rows = (of_head * chunks + chunk) * BLOCK_KEYS + tile % PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
        to = grad_parts + rows[:, None] * (HEAD_DIM + HEAD_DIM_V)
        tl.store(to + columns[None, :], dk, mask=needed[:, None] & (columns < HEAD_DIM)[None, :])
        tl.store(to + HEAD_DIM + columns_v[None, :], dv, mask=needed[:, None] & (columns_v < HEAD_DIM_V)[None, :])


@triton.jit(do_not_specialize=["heads_k", "seq_k", "blocks", "chunks", "tiles"])
def backward_block_sum(
    grad_parts, grad_k, grad_v, block_chunks,
    scale,
    dk_stride_b, dk_stride_h, dk_stride_s,
    dv_stride_b, dv_stride_h, dv_stride_s,
    heads_k, seq_k, blocks, chunks, tiles,
    BLOCK_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Sum up the parts of dK and dV of BLOCK_M keys in the order of their chunks, and write them."""
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    PARTS: tl.constexpr = BLOCK_KEYS // BLOCK_M
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        block = tile // PARTS % blocks
        kv_head = tile // PARTS // blocks % heads_k
        batch = tile // PARTS // blocks // heads_k
        of_head = batch.to(tl.int64) * heads_k + kv_head
        owners = block_chunks + of_head * (blocks + 1 + chunks) + block
        first, stop = tl.load(owners), tl.load(owners + 1)
        columns, columns_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        there, there_v = (columns < HEAD_DIM)[None, :], (columns_v < HEAD_DIM_V)[None, :]
        rows = tile % PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
        dk = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        dv = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
        for chunk in range(first, stop):
            at = ((of_head * chunks + chunk) * BLOCK_KEYS + rows)[:, None] * (HEAD_DIM + HEAD_DIM_V)
            dk += tl.load(grad_parts + at + columns[None, :], mask=there, other=0.0)
            dv += tl.load(grad_parts + at + HEAD_DIM + columns_v[None, :], mask=there_v, other=0.0)
        keys = block * BLOCK_KEYS + rows
        stored = (keys < seq_k)[:, None]
        slot, kv_slot, keys = batch.to(tl.int64), kv_head.to(tl.int64), keys.to(tl.int64)
        dk_rows = grad_k + slot * dk_stride_b + kv_slot * dk_stride_h + keys * dk_stride_s
        dv_rows = grad_v + slot * dv_stride_b + kv_slot * dv_stride_h + keys * dv_stride_s
        tl.store(dk_rows[:, None] + columns[None, :], (dk * scale).to(grad_k.dtype.element_ty), mask=stored & there)
        tl.store(dv_rows[:, None] + columns_v[None, :], dv.to(grad_v.dtype.element_ty), mask=stored & there_v)
