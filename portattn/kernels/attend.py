"""attend: the loop over key tiles that every core kernel with matrix products shares.

Algorithm: Dao, "FlashAttention-2" (2023), section 3.1. Scores live in the base that EXP names.
"""

import triton
import triton.language as tl

from portattn.kernels.dequantize import (
    NV_BLOCK,
    dequantize,
    token_scales,
    widened_blocks,
    widened_groups,
    widened_pairs,
    without_zero,
)
from portattn.kernels.dropout import head_words, kept_tile
from portattn.kernels.quantized_qk import operand, products, query_tile, split_product
from portattn.kernels.split_bf16 import add_dot, dot
from portattn.kernels.tiles import load_columns, load_rows, softmax_step


@triton.jit
def qk(q_tile, q_tail, k_rows, k_tail_rows, table, start, end, pages, stride_page, stride_row, stride_col,
               scales, scale_stride_page, scale_stride_row,
               HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
               BLOCK_TAIL: tl.constexpr, BOUNDED: tl.constexpr, LATENT: tl.constexpr, LOAD: tl.constexpr,
               K_TILE: tl.constexpr, BLOCK_ORDER: tl.constexpr, DOT_PRECISION: tl.constexpr, PAGE_SIZE: tl.constexpr,
               PAGE_LOOP: tl.constexpr, READS: tl.constexpr, KV_FORMAT: tl.constexpr,
               row_scales, NEGATED: tl.constexpr, Q_FORMAT: tl.constexpr, OPERANDS: tl.constexpr):  # fmt: skip
    """Raw scores [BLOCK_M, BLOCK_N] of the keys from `start` on; and when LATENT the key tile, which holds the values.

    The first MAIN columns are one product; with BLOCK_TAIL the columns from MAIN on are another.

    scales  a cache's scale for each token, or None; of nvfp4 the rows of its blocks' scales
    """
    if LATENT:
        rows = load_rows(k_rows, table, start, end, pages, stride_page, stride_row, stride_col, MAIN, BLOCK_N, BLOCK_D,
                         BOUNDED, LOAD, PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
        if KV_FORMAT == "fp8_ds_mla":
            rows = widened_groups(rows, q_tile, k_rows, table, start, end, pages, stride_page, stride_row, MAIN,
                                  BLOCK_N, BLOCK_D, BOUNDED, PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
        else:
            rows = dequantize(rows, q_tile, KV_FORMAT)
        scores = dot(q_tile, tl.trans(rows), DOT_PRECISION)
    elif KV_FORMAT == "int4":
        raw = None
        if scales is not None:
            raw = token_scales(scales, table, start, end, pages, scale_stride_page, scale_stride_row, BLOCK_N, BOUNDED,
                               PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
        pairs = load_rows(k_rows, table, start, end, pages, stride_page, stride_row, stride_col, MAIN // 2, BLOCK_N,
                          BLOCK_D // 2, BOUNDED, LOAD, PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
        scores = dot(q_tile, tl.trans(widened_pairs(pairs, q_tile, raw)), DOT_PRECISION)
        rows = scores  # never used, as below
    elif KV_FORMAT == "nvfp4":
        pairs = load_rows(k_rows, table, start, end, pages, stride_page, stride_row, stride_col, MAIN // 2, BLOCK_N,
                          BLOCK_D // 2, BOUNDED, LOAD, PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
        wide = widened_blocks(pairs, q_tile, scales, table, start, end, pages, scale_stride_page, scale_stride_row,
                              MAIN, BLOCK_N, BLOCK_D, BOUNDED, PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
        scores = dot(q_tile, tl.trans(wide), DOT_PRECISION)
        rows = scores  # never used, as below
    else:
        k_tile = load_columns(k_rows, table, start, end, pages, stride_page, stride_row, stride_col, MAIN, BLOCK_N,
                              BLOCK_D, BOUNDED, LOAD, K_TILE, BLOCK_ORDER, PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
        if Q_FORMAT == "as_q":
            k_tile = dequantize(k_tile, q_tile, KV_FORMAT)
            scores = dot(q_tile, k_tile, DOT_PRECISION)
        else:
            scores = products(q_tile, operand(k_tile, KV_FORMAT, OPERANDS), row_scales, NEGATED, KV_FORMAT, OPERANDS)
        rows = scores  # never used: a tuple that holds None fails to compile
    if BLOCK_TAIL != 0:
        if KV_FORMAT == "fp8_ds_mla":  # bfloat16 numbers in rows whose strides are in bytes
            k_tail = load_columns(k_tail_rows, table, start, end, pages, stride_page // 2, stride_row // 2, 1,
                                  HEAD_DIM - MAIN, BLOCK_N, BLOCK_TAIL, BOUNDED, LOAD, K_TILE, BLOCK_ORDER,
                                  PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
            scores = add_dot(q_tail, k_tail, scores, DOT_PRECISION)
        elif KV_FORMAT == "int4":
            pairs = load_rows(k_tail_rows, table, start, end, pages, stride_page, stride_row, stride_col,
                              (HEAD_DIM - MAIN) // 2, BLOCK_N, BLOCK_TAIL // 2, BOUNDED, LOAD, PAGE_SIZE, PAGE_LOOP,
                              READS)  # fmt: skip
            tail = tl.trans(widened_pairs(pairs, q_tail, raw))
            scores = add_dot(q_tail, tail, scores, DOT_PRECISION)
        elif KV_FORMAT == "nvfp4":
            pairs = load_rows(k_tail_rows, table, start, end, pages, stride_page, stride_row, stride_col,
                              (HEAD_DIM - MAIN) // 2, BLOCK_N, BLOCK_TAIL // 2, BOUNDED, LOAD, PAGE_SIZE, PAGE_LOOP,
                              READS)  # fmt: skip
            tail = widened_blocks(pairs, q_tail, scales + MAIN // NV_BLOCK, table, start, end, pages,
                                  scale_stride_page, scale_stride_row, HEAD_DIM - MAIN, BLOCK_N, BLOCK_TAIL, BOUNDED,
                                  PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
            scores = add_dot(q_tail, tl.trans(tail), scores, DOT_PRECISION)
        else:
            k_tail = load_columns(k_tail_rows, table, start, end, pages, stride_page, stride_row,
                                  stride_col, HEAD_DIM - MAIN, BLOCK_N, BLOCK_TAIL, BOUNDED, LOAD, K_TILE,
                                  BLOCK_ORDER, PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
            if Q_FORMAT == "as_q":
                k_tail = dequantize(k_tail, q_tail, KV_FORMAT)
                scores = add_dot(q_tail, k_tail, scores, DOT_PRECISION)
            else:
                k_tail = operand(k_tail, KV_FORMAT, OPERANDS)
                scores += products(q_tail, k_tail, row_scales, NEGATED, KV_FORMAT, OPERANDS)
    if scales is not None and KV_FORMAT != "nvfp4":
        if KV_FORMAT == "int4":
            by_key = without_zero(raw)
        else:
            by_key = token_scales(scales, table, start, end, pages, scale_stride_page, scale_stride_row, BLOCK_N,
                                  BOUNDED, PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
        scores = scores * by_key[None, :]
    return scores, rows


@triton.jit
def drop_out(p, key, turn, row, start, threshold, DROPS: tl.constexpr):
    """Zero the dropped probabilities [BLOCK_M, BLOCK_N] of the rows from `row` and the keys from `start` on. Kept ones
    are scaled once, at the end; the row's sum counts all. Other arguments are kept_tile's."""
    return tl.where(kept_tile(key, turn, start, row, threshold, p.shape[1], p.shape[0], False, DROPS), p, 0.0)


@triton.jit
def add_pairs(acc, correction, p, pairs, scales):
    """pv of int4 numbers. They are exact in bfloat16, which has float32's range: so tokens' scales go into the
    probabilities, of which there are fewer than values, and each of these becomes two bfloat16 numbers."""
    v_tile = widened_pairs(pairs, tl.full([1], 0.0, tl.bfloat16), scales)
    if scales is not None:
        # What has no weight may have a scale that is NaN, and no number of it is.
        p = tl.where(p == 0.0, 0.0, p * without_zero(scales)[None, :])
    return split_product(p, v_tile, acc * correction[:, None], 2)


@triton.jit
def pv(acc, correction, p, v_rows, read, table, start, end, pages, stride_page, stride_row, stride_col,
               like, scales, scale_stride_page, scale_stride_row,
               HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr, BOUNDED: tl.constexpr,
               READ: tl.constexpr, UNUSED_ZERO: tl.constexpr, LOAD: tl.constexpr, DOT_PRECISION: tl.constexpr,
               PAGE_SIZE: tl.constexpr, PAGE_LOOP: tl.constexpr, READS: tl.constexpr,
               V_FORMAT: tl.constexpr, Q_FORMAT: tl.constexpr, P_TERMS: tl.constexpr):  # fmt: skip
    """acc [BLOCK_M, BLOCK_DV] rescaled, plus the probabilities times the values from `start` on.

    READ: the values have been read already; they are `read`. Latent rows have been widened too.
    UNUSED_ZERO: values that no row of the tile gives weight to count as 0. They may be NaN, and 0·NaN is NaN. Rows that
    are not real have no part in that (see attend).
    like    a tile of the dtype of the products
    scales  a cache's scale for each token, or None. They go into the values: times a probability, a small scale would
            leave float16's range. Of nvfp4 the rows of its blocks' scales
    """
    PER: tl.constexpr = 2 if V_FORMAT == "int4" or V_FORMAT == "nvfp4" else 1  # numbers of a byte
    if READ:
        v_tile = read
    else:
        v_tile = load_rows(v_rows, table, start, end, pages, stride_page, stride_row, stride_col, HEAD_DIM_V // PER,
                           BLOCK_N, BLOCK_DV // PER, BOUNDED, LOAD, PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
    if V_FORMAT == "int4":
        raw = None
        if scales is not None:
            raw = token_scales(scales, table, start, end, pages, scale_stride_page, scale_stride_row, BLOCK_N, BOUNDED,
                               PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
        acc = add_pairs(acc, correction, p, v_tile, raw)
    elif V_FORMAT == "nvfp4":
        # Exact in bfloat16, as probabilities nearly are that become two numbers of it.
        wide = widened_blocks(v_tile, tl.full([1], 0.0, tl.bfloat16), scales, table, start, end, pages,
                              scale_stride_page, scale_stride_row, HEAD_DIM_V, BLOCK_N, BLOCK_DV, BOUNDED, PAGE_SIZE,
                              PAGE_LOOP, READS)  # fmt: skip
        if UNUSED_ZERO:
            wide = tl.where((tl.max(p, 0) == 0.0)[:, None], 0.0, wide)
        acc = split_product(p, wide, acc * correction[:, None], 2)
    else:
        if Q_FORMAT == "as_q":
            v_tile = dequantize(v_tile, like, V_FORMAT)
        else:
            v_tile = operand(v_tile, V_FORMAT, "widened")
        if scales is not None:
            by_key = token_scales(scales, table, start, end, pages, scale_stride_page, scale_stride_row, BLOCK_N,
                                  BOUNDED, PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
            v_tile = (v_tile.to(tl.float32) * by_key[:, None]).to(like.dtype)
        if UNUSED_ZERO:
            v_tile = tl.where((tl.max(p, 0) == 0.0)[:, None], 0.0, v_tile)
        if Q_FORMAT == "as_q":
            acc = add_dot(p.to(v_tile.dtype), v_tile, acc * correction[:, None], DOT_PRECISION)
        else:
            acc = split_product(p, v_tile, acc * correction[:, None], P_TERMS)
    return acc


@triton.jit
def step_start(step, origin, first_step, full_begin, full, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """First key of a step of `attend`: the `full` tiles from full_begin on, then those before them, then the rest."""
    tile = full_begin + step
    if WINDOW:
        before = first_step + step - full
        tile = tl.where(step < full, tile, tl.where(before < full_begin, before, before + full))
    return origin + tile * BLOCK_N


@triton.jit
def attend(
    acc, row_max, row_sum,
    q_pointers, q_tail_pointers, row_valid, q_stride_d, q_tail_stride_d,
    k_rows, k_tail_rows, v_rows, table, pages,
    k_stride_p, k_stride_s, k_stride_d, v_stride_p, v_stride_s, v_stride_d,
    k_scales, k_scale_stride_p, k_scale_stride_s, v_scales, v_scale_stride_p, v_scale_stride_s,
    origin, first_step, full_begin, full_end, last_step, end,
    row_start, row_end, positions, slopes, bias_rows, bias_stride, mask_rows, mask_stride, scale, softcap,
    dropout_seed, drop_row, drop_origin, drop_head, threshold,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, MAIN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_DV: tl.constexpr, NEGATED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS_BY_KEY: tl.constexpr, MASK_BY_KEY: tl.constexpr,
    LATENT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LOAD: tl.constexpr, K_TILE: tl.constexpr, BLOCK_ORDER: tl.constexpr, EXP: tl.constexpr,
    MASK_VALUE: tl.constexpr, DOT_PRECISION: tl.constexpr, PAGE_LOOP: tl.constexpr, Q_OPERAND: tl.constexpr,
    PIPELINE: tl.constexpr, READS: tl.constexpr, CLAMPED: tl.constexpr, NONE: tl.constexpr,
    DROPS: tl.constexpr, KV_FORMAT: tl.constexpr,
    row_scales, V_FORMAT: tl.constexpr, Q_FORMAT: tl.constexpr, OPERANDS: tl.constexpr, P_TERMS: tl.constexpr,
    tree_low=None, tree_high=None, tree_first=None,
):  # fmt: skip
    """Attend the key tiles [first_step, last_step), tile t being the keys from origin + t·BLOCK_N on.

    Tiles [full_begin, full_end) are attended whole by every row; the others are masked: row i attends the keys
    before row_end[i] and, with WINDOW, from row_start[i] on. No key at or after `end`, which no row attends, is read
    (but by descriptors over pages): it may hold NaN. Absent features are None.

    row_valid: which rows are real. The others fill a tile up, with a query of 0, a bias of -inf and a mask of False.
    They attend no key that no real row attends, where the unused values of a tile are decided over its rows; their
    results may be anything.

    dropout_seed: None, or the seed of kernels/dropout.py. drop_row is the position of the tile's first row in the
    sequence, drop_origin the origin of keys' positions.

    KV_FORMAT: how keys and values are stored (kernels/dequantize.py). k_scales, v_scales: None, or a scale for each
    token, read as keys are, from the key/value head's base pointer on; of nvfp4 a row of scales for each, as long as
    the token's row has blocks.

    Q_FORMAT: the storage format of queries: as_q, or the keys', with V_FORMAT for the values, row_scales for each
    query's scale [BLOCK_M] or None, OPERANDS for the operands of Q·Kᵀ, P_TERMS for the terms of each probability
    (kernels/quantized_qk.py). The values' products are then float16, which holds each number of every format exactly.

    tree_low, tree_high, tree_first: None, or each row's tree mask and the key of its first bit (tiles.py, in_tree). No
    key from there on lies in a tile that is attended whole.

    NONE: there may be no tile at all. With PIPELINE "single" there is at most one, which begins at origin.

    Returns acc, row_max and row_sum.
    """
    MASKS: tl.constexpr = mask_rows is not None or bias_rows is not None
    # In edge tiles: values before a window, those that no row's tree mask shows, and what descriptors read behind a
    # sequence's end in its last page.
    EDGE_UNUSED: tl.constexpr = WINDOW or ((LOAD == "descriptor" and PAGE_SIZE != 0) or tree_low is not None)
    if MASKS or EDGE_UNUSED:
        row_end = tl.where(row_valid, row_end, origin)
    q_tile = query_tile(q_pointers, row_valid, q_stride_d, MAIN, BLOCK_D, NEGATED, Q_FORMAT, OPERANDS)
    if BLOCK_TAIL != 0:
        q_tail = query_tile(q_tail_pointers, row_valid, q_tail_stride_d, HEAD_DIM - MAIN, BLOCK_TAIL, NEGATED,
                            Q_FORMAT, OPERANDS)  # fmt: skip
    else:
        q_tail = None
    if dropout_seed is not None:
        drop_word, drop_turn = head_words(dropout_seed, drop_head, DROPS)
    if PIPELINE == "single":
        # Without a loop there is half as much code, and one step's registers.
        PER: tl.constexpr = 2 if V_FORMAT == "int4" or V_FORMAT == "nvfp4" else 1  # numbers of a byte
        values = load_rows(v_rows, table, origin, end, pages, v_stride_p, v_stride_s, v_stride_d, HEAD_DIM_V // PER,
                           BLOCK_N, BLOCK_DV // PER, True, LOAD, PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
        scores, k_tile = qk(
            q_tile, q_tail, k_rows, k_tail_rows, table, origin, end, pages, k_stride_p, k_stride_s, k_stride_d,
            k_scales, k_scale_stride_p, k_scale_stride_s,
            HEAD_DIM, MAIN, BLOCK_N, BLOCK_D, BLOCK_TAIL, True, False, LOAD, K_TILE, BLOCK_ORDER, DOT_PRECISION,
            PAGE_SIZE, PAGE_LOOP, READS, KV_FORMAT, row_scales, NEGATED, Q_FORMAT, OPERANDS,
        )  # fmt: skip
        p, correction, row_max, row_sum = softmax_step(
            scores, origin, end, row_start, row_end, row_max, row_sum, scale, softcap, slopes, positions, bias_rows,
            bias_stride, mask_rows, mask_stride, row_valid, BLOCK_N, True, WINDOW, SOFTCAP, BIAS_BY_KEY, MASK_BY_KEY,
            EXP, MASK_VALUE, CLAMPED, tree_low, tree_high, tree_first,
        )  # fmt: skip
        if dropout_seed is not None:
            p = drop_out(p, drop_word, drop_turn, drop_row, origin - drop_origin, threshold, DROPS)
        acc = pv(
            acc, correction, p, v_rows, values, table, origin, end, pages, v_stride_p, v_stride_s, v_stride_d,
            q_tile, v_scales, v_scale_stride_p, v_scale_stride_s,
            HEAD_DIM_V, BLOCK_N, BLOCK_DV, True, True, (MASKS or EDGE_UNUSED) or (NONE and LOAD == "descriptor"), LOAD,
            DOT_PRECISION, PAGE_SIZE, PAGE_LOOP, READS, V_FORMAT, Q_FORMAT, P_TERMS,
        )  # fmt: skip
    elif PIPELINE == "rotated":
        # A step's scores are computed in the step before, before its P·V, which is then under way during the softmax.
        # A branch in here, after which accumulators of both its sides come together, makes ptxas wait for each product
        # (C7515): so the last step is taken always, and always masked.
        full, total = full_end - full_begin, last_step - first_step
        nought = full - full  # a 0 that is a tensor: Triton 3.2 compares no constant with one
        start = step_start(nought, origin, first_step, full_begin, full, BLOCK_N, WINDOW)
        scores, k_tile = qk(
            q_tile, q_tail, k_rows, k_tail_rows, table, start, end, pages, k_stride_p, k_stride_s, k_stride_d,
            k_scales, k_scale_stride_p, k_scale_stride_s,
            HEAD_DIM, MAIN, BLOCK_N, BLOCK_D, BLOCK_TAIL, True, False, LOAD, K_TILE, BLOCK_ORDER, DOT_PRECISION,
            PAGE_SIZE, PAGE_LOOP, READS, KV_FORMAT, row_scales, NEGATED, Q_FORMAT, OPERANDS,
        )  # fmt: skip
        for edge in tl.static_range(2):
            if edge == 0:
                begin, stop = nought, tl.minimum(full, total - 1)
            else:
                begin, stop = tl.minimum(full, total - 1), total - 1
            for i in range(begin, stop):
                start = step_start(i, origin, first_step, full_begin, full, BLOCK_N, WINDOW)
                following = step_start(i + 1, origin, first_step, full_begin, full, BLOCK_N, WINDOW)
                p, correction, row_max, row_sum = softmax_step(
                    scores, start, end, row_start, row_end, row_max, row_sum, scale, softcap, slopes, positions,
                    bias_rows, bias_stride, mask_rows, mask_stride, row_valid, BLOCK_N, edge == 1, WINDOW, SOFTCAP,
                    BIAS_BY_KEY, MASK_BY_KEY, EXP, MASK_VALUE, CLAMPED, tree_low, tree_high, tree_first,
                )  # fmt: skip
                if dropout_seed is not None:
                    p = drop_out(p, drop_word, drop_turn, drop_row, start - drop_origin, threshold, DROPS)
                if Q_OPERAND == "reload":
                    q_tile = query_tile(q_pointers, row_valid, q_stride_d, MAIN, BLOCK_D, NEGATED, Q_FORMAT, OPERANDS)
                    if BLOCK_TAIL != 0:
                        q_tail = query_tile(q_tail_pointers, row_valid, q_tail_stride_d, HEAD_DIM - MAIN, BLOCK_TAIL,
                                            NEGATED, Q_FORMAT, OPERANDS)  # fmt: skip
                scores, k_tile = qk(
                    q_tile, q_tail, k_rows, k_tail_rows, table, following, end, pages, k_stride_p, k_stride_s,
                    k_stride_d, k_scales, k_scale_stride_p, k_scale_stride_s, HEAD_DIM, MAIN, BLOCK_N, BLOCK_D,
                    BLOCK_TAIL, True, False, LOAD, K_TILE, BLOCK_ORDER, DOT_PRECISION, PAGE_SIZE, PAGE_LOOP, READS,
                    KV_FORMAT, row_scales, NEGATED, Q_FORMAT, OPERANDS,
                )  # fmt: skip
                acc = pv(
                    acc, correction, p, v_rows, k_tile, table, start, end, pages, v_stride_p, v_stride_s, v_stride_d,
                    q_tile, v_scales, v_scale_stride_p, v_scale_stride_s,
                    HEAD_DIM_V, BLOCK_N, BLOCK_DV, edge == 1, False, MASKS or (EDGE_UNUSED and edge == 1), LOAD,
                    DOT_PRECISION, PAGE_SIZE, PAGE_LOOP, READS, V_FORMAT, Q_FORMAT, P_TERMS,
                )  # fmt: skip
        start = step_start(tl.maximum(total - 1, 0), origin, first_step, full_begin, full, BLOCK_N, WINDOW)
        p, correction, row_max, row_sum = softmax_step(
            scores, start, end, row_start, row_end, row_max, row_sum, scale, softcap, slopes, positions, bias_rows,
            bias_stride, mask_rows, mask_stride, row_valid, BLOCK_N, True, WINDOW, SOFTCAP, BIAS_BY_KEY, MASK_BY_KEY,
            EXP, MASK_VALUE, CLAMPED, tree_low, tree_high, tree_first,
        )  # fmt: skip
        if dropout_seed is not None:
            p = drop_out(p, drop_word, drop_turn, drop_row, start - drop_origin, threshold, DROPS)
        acc = pv(
            acc, correction, p, v_rows, k_tile, table, start, end, pages, v_stride_p, v_stride_s, v_stride_d,
            q_tile, v_scales, v_scale_stride_p, v_scale_stride_s,
            HEAD_DIM_V, BLOCK_N, BLOCK_DV, True, False, MASKS or (EDGE_UNUSED or (NONE and LOAD == "descriptor")),
            LOAD, DOT_PRECISION, PAGE_SIZE, PAGE_LOOP, READS, V_FORMAT, Q_FORMAT, P_TERMS,
        )  # fmt: skip
    else:
        # Two passes: key tiles that every row attends whole, then those at the edges. Or one, as if all were edges.
        ONE_PASS: tl.constexpr = 1 if PIPELINE == "masked" else 0
        for edge in tl.static_range(ONE_PASS, 2):
            if PIPELINE == "masked":
                count = last_step - first_step
            elif edge == 0:
                count = full_end - full_begin
            else:
                count = full_begin - first_step + last_step - full_end
            for i in range(count):
                if PIPELINE == "masked":
                    start = origin + (first_step + i) * BLOCK_N
                elif edge == 0:
                    start = origin + (full_begin + i) * BLOCK_N
                elif WINDOW:
                    # The edge before the full tiles, then the one after them.
                    skipped = tl.where(first_step + i >= full_begin, full_end - full_begin, 0)
                    start = origin + (first_step + i + skipped) * BLOCK_N
                else:
                    start = origin + (full_end + i) * BLOCK_N
                if Q_OPERAND == "reload":
                    q_tile = query_tile(q_pointers, row_valid, q_stride_d, MAIN, BLOCK_D, NEGATED, Q_FORMAT, OPERANDS)
                    if BLOCK_TAIL != 0:
                        q_tail = query_tile(q_tail_pointers, row_valid, q_tail_stride_d, HEAD_DIM - MAIN, BLOCK_TAIL,
                                            NEGATED, Q_FORMAT, OPERANDS)  # fmt: skip
                scores, k_tile = qk(
                    q_tile, q_tail, k_rows, k_tail_rows, table, start, end, pages, k_stride_p, k_stride_s, k_stride_d,
                    k_scales, k_scale_stride_p, k_scale_stride_s,
                    HEAD_DIM, MAIN, BLOCK_N, BLOCK_D, BLOCK_TAIL, edge == 1, LATENT, LOAD, K_TILE, BLOCK_ORDER,
                    DOT_PRECISION, PAGE_SIZE, PAGE_LOOP, READS, KV_FORMAT, row_scales, NEGATED, Q_FORMAT, OPERANDS,
                )  # fmt: skip
                p, correction, row_max, row_sum = softmax_step(
                    scores, start, end, row_start, row_end, row_max, row_sum, scale, softcap, slopes, positions,
                    bias_rows, bias_stride, mask_rows, mask_stride, row_valid, BLOCK_N, edge == 1, WINDOW, SOFTCAP,
                    BIAS_BY_KEY, MASK_BY_KEY, EXP, MASK_VALUE, CLAMPED, tree_low, tree_high, tree_first,
                )  # fmt: skip
                if dropout_seed is not None:
                    p = drop_out(p, drop_word, drop_turn, drop_row, start - drop_origin, threshold, DROPS)
                acc = pv(
                    acc, correction, p, v_rows, k_tile, table, start, end, pages, v_stride_p, v_stride_s, v_stride_d,
                    q_tile, v_scales, v_scale_stride_p, v_scale_stride_s,
                    HEAD_DIM_V, BLOCK_N, BLOCK_DV, edge == 1, LATENT, MASKS or (EDGE_UNUSED and edge == 1), LOAD,
                    DOT_PRECISION, PAGE_SIZE, PAGE_LOOP, READS, "as_q" if LATENT else V_FORMAT, Q_FORMAT, P_TERMS,
                )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def in_chunk(start, end, position, origin, chunk):
    """Intersect keys [start, end) with the chunk of a position. Chunks of `chunk` keys count from `origin`.

    A position before the origin lies in a chunk without keys. Triton's division truncates: it is of numbers from 0 on.
    """
    own = position - origin
    begin = origin + tl.maximum(own, 0) // chunk * chunk
    return tl.maximum(start, begin), tl.minimum(end, tl.where(own < 0, origin, begin + chunk))


@triton.jit
def kv_tile_range(near, far, low_near, low_far, origin, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Return the key tiles that some row attends, [first, last), and every row whole, [full_begin, full_end).

    near, far          least and greatest end of a row's keys
    low_near, low_far  with WINDOW: least and greatest first key of a row's window
    """
    last = tl.maximum(far - origin + BLOCK_N - 1, 0) // BLOCK_N
    full_end = tl.maximum(tl.minimum(near, far) - origin, 0) // BLOCK_N
    if WINDOW:
        first = tl.minimum(tl.maximum(low_near - origin, 0) // BLOCK_N, last)
        full_begin = tl.minimum(tl.maximum(low_far - origin + BLOCK_N - 1, 0) // BLOCK_N, last)
        full_begin = tl.maximum(full_begin, first)
        full_end = tl.minimum(tl.maximum(full_end, full_begin), last)
    else:
        first = last - last
        full_begin = last - last
    return first, full_begin, full_end, last
