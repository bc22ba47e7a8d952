"""attend_packed16_swap_ab: attend_packed16 for at most 8 query rows, with keys where matrix products have their rows.

A product on a tensor core has at least 16 rows, and 8 columns. Where 4 queries are its rows, three quarters of each
product, score and accumulator are of no use; where they are its columns, one half. A thread holds half as many
accumulators, so that more programs share a core.
"""

import triton
import triton.language as tl

from portattn.kernels.attend_packed16 import (
    four_places,
    key_places,
    key_pointers,
    load_places,
    load_scales,
    load_words,
    pages_from,
    step_of,
    two_places,
    value_logs,
    zero_numbers,
)
from portattn.kernels.dequantize import MIDDLE, ZERO_BITS, without_zero
from portattn.kernels.tiles import exponential, lowest, softmax_scale


@triton.jit
def load_columns_of_words(rows, there, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, BOUNDED: tl.constexpr,
                          ALIGNED: tl.constexpr):  # fmt: skip
    """As load_words, [BLOCK_COLS, BLOCK_N]. Triton 3.6.0 copies no tile asynchronously that is transposed before it is
    a left operand, but one whose pointers are."""
    c = tl.arange(0, BLOCK_COLS)
    firsts = tl.multiple_of(rows[None, :].to(tl.pointer_type(tl.int16)), [ALIGNED, ALIGNED])
    pointers = firsts + c[:, None]
    if BOUNDED:
        words = tl.load(pointers, mask=there[None, :] & (c < COLS)[:, None], other=0)
    elif COLS != BLOCK_COLS:
        words = tl.load(pointers, mask=(c < COLS)[:, None], other=0)
    else:
        words = tl.load(pointers)
    return words


@triton.jit
def add_columns(acc, high, low, values, TERMS: tl.constexpr):
    """acc [columns of the values, rows] plus values [columns, keys] times probabilities [keys, rows], all of float16;
    with TERMS 2 probabilities are two."""
    if TERMS == 2:
        acc = tl.dot(values, low, acc, input_precision="ieee")
    return tl.dot(values, high, acc, input_precision="ieee")


@triton.jit
def attend_packed16_swap_ab(
    row_max, q_pointers, row_valid, q_stride_d,
    k_rows, v_rows, table, pages, k_stride_p, k_stride_s, v_stride_p, v_stride_s,
    k_scales, k_scale_stride_p, k_scale_stride_s, v_scales, v_scale_stride_p, v_scale_stride_s,
    origin, first_step, full_begin, full_end, last_step, end, row_end, scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, NEGATED: tl.constexpr, PAGE_SIZE: tl.constexpr, EXP: tl.constexpr,
    MASK_VALUE: tl.constexpr, PAGE_LOOP: tl.constexpr, READS: tl.constexpr, KV_FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """As attend_packed16, of any format but nvfp4, with nothing but lengths and the causal mask, BLOCK_M being 8.

    Returns acc [BLOCK_M, BLOCK_DV], row_max and row_sum.
    """
    ZEROS: tl.constexpr = KV_FORMAT == "int4"
    PLACES: tl.constexpr = 4 if ZEROS else 2
    TOKENS: tl.constexpr = k_scales is not None
    COLS: tl.constexpr = HEAD_DIM // PLACES
    COLS_V: tl.constexpr = HEAD_DIM_V // PLACES
    WIDE: tl.constexpr = BLOCK_D // PLACES
    WIDE_V: tl.constexpr = BLOCK_DV // PLACES
    FLOAT16: tl.constexpr = q_pointers.dtype.element_ty == tl.float16
    TERMS: tl.constexpr = 2 if FLOAT16 and KV_FORMAT != "e5m2" else 1
    BITS: tl.constexpr = 1048576.0 if ZEROS and UNPACK == "ptx" else 1.0  # 2^20: see four_places
    ABOVE: tl.constexpr = 16.0 if ZEROS and UNPACK == "ptx" else 1.0
    SCALED: tl.constexpr = ABOVE != 1.0 or not FLOAT16
    q_1, q_2, q_3, q_4, unit, q_sum = load_places(
        q_pointers, row_valid, q_stride_d, COLS, WIDE, BLOCK_M, NEGATED, PLACES, SCALED, ZEROS, ABOVE, BITS
    )
    factor = softmax_scale(scale, EXP, False)
    of_rows = unit * (factor * BITS)
    q_1, q_2 = tl.trans(q_1), tl.trans(q_2)  # [WIDE, BLOCK_M]
    if PLACES == 4:
        q_3, q_4 = tl.trans(q_3), tl.trans(q_4)

    # A row's sum in 8 parts, as products lay keys out: so no step adds over threads. There is none before the loop.
    sums = tl.full([8, BLOCK_M], 0.0, tl.float32)
    acc_1 = tl.full([WIDE_V, BLOCK_M], 0.0, tl.float32)
    acc_2 = tl.full([WIDE_V, BLOCK_M], 0.0, tl.float32)
    if PLACES == 4:
        acc_3 = tl.full([WIDE_V, BLOCK_M], 0.0, tl.float32)
        acc_4 = tl.full([WIDE_V, BLOCK_M], 0.0, tl.float32)
        nothing = tl.full([WIDE_V, BLOCK_M], 0.0, tl.float32)
    # Two passes: key tiles that every row attends whole, then those at the edges, which follow them without a window.
    for edge in tl.static_range(2):
        if edge == 0:
            count = full_end - full_begin
        else:
            count = full_begin - first_step + last_step - full_end
        if PAGE_LOOP == "by_page":
            start = origin + step_of(0, first_step, full_begin, full_end, edge, False) * BLOCK_N
            page_1, page_2, page_3, page_4 = pages_from(table, start, end, pages, BLOCK_N, PAGE_SIZE)
        for i in range(count):
            start = origin + step_of(i, first_step, full_begin, full_end, edge, False) * BLOCK_N
            if PAGE_LOOP == "by_page":
                part = tl.arange(0, BLOCK_N) // PAGE_SIZE
                page = tl.where(part < 2, tl.where(part == 0, page_1, page_2), tl.where(part == 2, page_3, page_4))
                row = tl.arange(0, BLOCK_N) % PAGE_SIZE
                following = origin + step_of(i + 1, first_step, full_begin, full_end, edge, False) * BLOCK_N
                page_1, page_2, page_3, page_4 = pages_from(table, following, end, pages, BLOCK_N, PAGE_SIZE)
            else:
                page, row = key_places(table, start, end, pages, BLOCK_N, edge == 1, PAGE_SIZE, PAGE_LOOP, READS)
            places = start + tl.arange(0, BLOCK_N)
            there = places < end
            at_k = key_pointers(k_rows, start, page, row, k_stride_p, k_stride_s, PAGE_SIZE)
            at_v = key_pointers(v_rows, start, page, row, v_stride_p, v_stride_s, PAGE_SIZE)
            keys = load_words(at_k, there, COLS, WIDE, edge == 1, ALIGNED)
            values = load_columns_of_words(at_v, there, COLS_V, WIDE_V, edge == 1, ALIGNED)
            if TOKENS:
                raw_k = load_scales(
                    key_pointers(k_scales, start, page, row, k_scale_stride_p, k_scale_stride_s, PAGE_SIZE),
                    there, edge == 1,
                )  # fmt: skip
                raw_v = load_scales(
                    key_pointers(v_scales, start, page, row, v_scale_stride_p, v_scale_stride_s, PAGE_SIZE),
                    there, edge == 1,
                )  # fmt: skip
                of_keys, of_values = raw_k, raw_v
                if ZEROS:
                    of_keys, of_values = without_zero(raw_k), without_zero(raw_v)
            if PLACES == 4:
                k_1, k_2, k_3, k_4 = four_places(keys, UNPACK)
                scores = tl.dot(k_1, q_1, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
                scores = tl.dot(k_2, q_2, scores, input_precision="ieee")
                scores = tl.dot(k_3, q_3, scores, input_precision="ieee")
                scores = tl.dot(k_4, q_4, scores, input_precision="ieee")
                if TOKENS:
                    scores -= zero_numbers(raw_k)[:, None] * q_sum[None, :]
                else:
                    scores -= q_sum[None, :] * MIDDLE
            else:
                k_1, k_2 = two_places(keys, KV_FORMAT, UNPACK)
                scores = tl.dot(k_1, q_1, input_precision="ieee")
                scores = tl.dot(k_2, q_2, scores, input_precision="ieee")
            if TOKENS:
                scores *= of_keys[:, None]
            # The online softmax, as softmax_step has it.
            scaled = scores * of_rows[None, :]
            if edge == 1:
                keep = places[:, None] < row_end[None, :]
                scaled = tl.where(keep, scaled, lowest(MASK_VALUE))
            nearest = scaled
            if TOKENS:
                nearest = scaled + value_logs(of_values, EXP, False)[:, None]
                if edge == 1:
                    nearest = tl.where(keep, nearest, scaled)
            new_max = tl.maximum(row_max, tl.max(nearest, 0))
            base = new_max
            if edge == 1 and MASK_VALUE != "finite":
                base = tl.where(new_max > float("-inf"), new_max, 0.0)
            p = exponential(scaled - base[None, :], EXP, False)
            if edge == 1 and MASK_VALUE == "finite":
                p = tl.where(keep, p, 0.0)
            correction = exponential(row_max - base, EXP, False)
            row_max = new_max
            sums = sums * correction[None, :] + tl.sum(tl.reshape(p, [BLOCK_N // 8, 8, BLOCK_M]), 0)
            if TOKENS:
                if edge == 1:
                    p = tl.where(p == 0.0, 0.0, p * of_values[:, None])  # a masked key's scale may be NaN
                else:
                    p = p * of_values[:, None]
            high = p.to(tl.float16)
            low = high
            if TERMS == 2:
                low = (p - high.to(tl.float32)).to(tl.float16)
            if PLACES == 4:
                middle = tl.full([1, BLOCK_N], MIDDLE, tl.int16)
                if TOKENS:
                    middle = (raw_v.to(tl.int32, bitcast=True) & ZERO_BITS).to(tl.int16)[None, :]
                v_1, v_2, v_3, v_4 = four_places(values, UNPACK)
                # The codes for 0, in units of the first numbers, have a product of their own, the same in all rows. It
                # is subtracted before the step's numbers are added: within a step sums cancel, as their terms have
                # both signs. Over all steps they would have lost the result's last bits.
                if UNPACK == "ptx":
                    zeros = middle.to(tl.float16, bitcast=True)
                else:
                    zeros = middle.to(tl.float16)
                below_1 = add_columns(nothing, high, low, tl.broadcast_to(zeros, [WIDE_V, BLOCK_N]), TERMS)
                below_2 = below_1 * ABOVE
                acc_1 = add_columns(acc_1 * correction[None, :] - below_1, high, low, v_1, TERMS)
                acc_2 = add_columns(acc_2 * correction[None, :] - below_2, high, low, v_2, TERMS)
                acc_3 = add_columns(acc_3 * correction[None, :] - below_1, high, low, v_3, TERMS)
                acc_4 = add_columns(acc_4 * correction[None, :] - below_2, high, low, v_4, TERMS)
            else:
                v_1, v_2 = two_places(values, KV_FORMAT, UNPACK)
                acc_1 = add_columns(acc_1 * correction[None, :], high, low, v_1, TERMS)
                acc_2 = add_columns(acc_2 * correction[None, :], high, low, v_2, TERMS)
    if PLACES == 4:
        if UNPACK == "ptx":
            acc_1, acc_3 = acc_1 * (ABOVE * BITS), acc_3 * (ABOVE * BITS)
            acc_2, acc_4 = acc_2 * BITS, acc_4 * BITS
        acc = tl.interleave(
            tl.interleave(tl.trans(acc_1), tl.trans(acc_3)), tl.interleave(tl.trans(acc_2), tl.trans(acc_4))
        )
    else:
        acc = tl.interleave(tl.trans(acc_1), tl.trans(acc_2))
    return acc, row_max, tl.sum(sums, 0)
