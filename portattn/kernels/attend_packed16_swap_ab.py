"""attend_packed16_swap_ab: attend_packed16 for at most 8 query rows, with keys where matrix products have their rows.

A product on a tensor core has at least 16 rows, and 8 columns. Where 4 queries are its rows, three quarters of each
product, score and accumulator are of no use; where they are its columns, one half. A thread holds half as many
accumulators, so that more programs share a core.
"""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import Pages, Query, Rows, ScoreTerms, TileRange
from portattn.kernels.attend_packed16 import load_places, value_logs
from portattn.kernels.dequantize import MIDDLE, ZERO_BITS, without_zero
from portattn.kernels.paged_addressing import (
    WORD_BYTES,
    key_places,
    key_pointers,
    load_token_scales,
    load_words,
    pages_from,
    places_in_pages,
    tile_start,
)
from portattn.kernels.softmax import exponential, lowest, softmax_scale
from portattn.kernels.unpack_int4 import four_places, two_places, zero_numbers


@triton.jit
def load_columns_of_words(pointers, valid, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, BOUNDED: tl.constexpr,
                          ALIGNED: tl.constexpr):  # fmt: skip
    """Load the tile of load_words as its transpose [BLOCK_COLS, BLOCK_N].

    Triton 3.6.0 copies no tile asynchronously that is transposed before it is a left operand, but one whose pointers
    are.
    """
    c = tl.arange(0, BLOCK_COLS)
    firsts = tl.multiple_of(pointers[None, :].to(tl.pointer_type(tl.int16)), [ALIGNED, ALIGNED])
    tile = firsts + c[:, None]
    if BOUNDED:
        words = tl.load(tile, mask=valid[None, :] & (c < COLS)[:, None], other=0)
    elif COLS != BLOCK_COLS:
        words = tl.load(tile, mask=(c < COLS)[:, None], other=0)
    else:
        words = tl.load(tile)
    return words


@triton.jit
def words_kq(q_1, q_2, q_3, q_4, q_sum, words, k_stored, FORMAT: tl.constexpr, UNPACK: tl.constexpr):
    """Return products [BLOCK_N, BLOCK_M] of a tile of keys' words with queries, without the scales of tokens.

    q_1, …    as load_places gives them, transposed; q_sum is [BLOCK_M]
    k_stored  each token's scale as it is stored, or None
    """
    if FORMAT == "int4":
        k_1, k_2, k_3, k_4 = four_places(words, UNPACK)
        raw = tl.dot(k_1, q_1, input_precision="ieee")
        raw = tl.dot(k_2, q_2, raw, input_precision="ieee")
        raw = tl.dot(k_3, q_3, raw, input_precision="ieee")
        raw = tl.dot(k_4, q_4, raw, input_precision="ieee")
        if k_stored is not None:
            raw -= zero_numbers(k_stored)[:, None] * q_sum[None, :]
        else:
            raw -= q_sum[None, :] * MIDDLE
    else:
        k_1, k_2 = two_places(words, FORMAT, UNPACK)
        raw = tl.dot(k_1, q_1, input_precision="ieee")
        raw = tl.dot(k_2, q_2, raw, input_precision="ieee")
    return raw


@triton.jit
def add_columns(acc, high, low, values, TERMS: tl.constexpr):
    """Return acc [columns of the values, rows] plus values [columns, keys] times probabilities [keys, rows].

    Values and probabilities are float16; with TERMS 2 a probability is the sum of `high` and `low`.
    """
    if TERMS == 2:
        acc = tl.dot(values, low, acc, input_precision="ieee")
    return tl.dot(values, high, acc, input_precision="ieee")


@triton.jit
def words_vp(acc_1, acc_2, acc_3, acc_4, nothing, correction, p, words, v_stored, ABOVE: tl.constexpr,
             FORMAT: tl.constexpr, UNPACK: tl.constexpr, TERMS: tl.constexpr):  # fmt: skip
    """Return the accumulators of a word's places, rescaled, plus a tile of values' words times the probabilities.

    With two places acc_3 and acc_4 come back as they are.

    acc_1, …, nothing  [words of a row, BLOCK_M]; `nothing` is 0
    p                  [BLOCK_N, BLOCK_M], with the tokens' scales in it
    words              [words of a row, BLOCK_N]
    v_stored           each token's scale as it is stored, or None
    """
    high = p.to(tl.float16)
    low = high
    if TERMS == 2:
        low = (p - high.to(tl.float32)).to(tl.float16)
    if FORMAT == "int4":
        middle = tl.full([1, p.shape[0]], MIDDLE, tl.int16)
        if v_stored is not None:
            middle = (v_stored.to(tl.int32, bitcast=True) & ZERO_BITS).to(tl.int16)[None, :]
        v_1, v_2, v_3, v_4 = four_places(words, UNPACK)
        # The codes for 0, in units of the first numbers, have a product of their own, the same in all rows. It is
        # subtracted before the step's numbers are added: within a step sums cancel, as their terms have both signs.
        # Over all steps they would have lost the result's last bits.
        if UNPACK == "ptx":
            zeros = middle.to(tl.float16, bitcast=True)
        else:
            zeros = middle.to(tl.float16)
        below_1 = add_columns(nothing, high, low, tl.broadcast_to(zeros, [words.shape[0], p.shape[0]]), TERMS)
        below_2 = below_1 * ABOVE
        acc_1 = add_columns(acc_1 * correction[None, :] - below_1, high, low, v_1, TERMS)
        acc_2 = add_columns(acc_2 * correction[None, :] - below_2, high, low, v_2, TERMS)
        acc_3 = add_columns(acc_3 * correction[None, :] - below_1, high, low, v_3, TERMS)
        acc_4 = add_columns(acc_4 * correction[None, :] - below_2, high, low, v_4, TERMS)
    else:
        v_1, v_2 = two_places(words, FORMAT, UNPACK)
        acc_1 = add_columns(acc_1 * correction[None, :], high, low, v_1, TERMS)
        acc_2 = add_columns(acc_2 * correction[None, :], high, low, v_2, TERMS)
    return acc_1, acc_2, acc_3, acc_4


@records.jit
def attend_packed16_swap_ab(
    row_max, q: Query, keys: Rows, values: Rows, pages: Pages, steps: TileRange, scores: ScoreTerms,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """Attend like attend_packed16 a cache of any format but nvfp4; BLOCK_M is 8.

    Of `scores` nothing but the lengths and the causal mask may be there.

    Returns acc [BLOCK_M, columns of the values], row_max and row_sum.
    """
    ZEROS: tl.constexpr = keys.FORMAT == "int4"
    PLACES: tl.constexpr = 4 if ZEROS else 2
    TOKENS: tl.constexpr = keys.scales.source is not None
    COLS: tl.constexpr = keys.COLS // WORD_BYTES
    COLS_V: tl.constexpr = values.COLS // WORD_BYTES
    WIDE: tl.constexpr = keys.BLOCK_COLS // WORD_BYTES
    WIDE_V: tl.constexpr = values.BLOCK_COLS // WORD_BYTES
    FLOAT16: tl.constexpr = q.pointers.dtype.element_ty == tl.float16
    TERMS: tl.constexpr = 2 if FLOAT16 and keys.FORMAT != "e5m2" else 1
    BITS: tl.constexpr = 1048576.0 if ZEROS and UNPACK == "ptx" else 1.0  # 2^20: see four_places
    ABOVE: tl.constexpr = 16.0 if ZEROS and UNPACK == "ptx" else 1.0
    SCALED: tl.constexpr = ABOVE != 1.0 or not FLOAT16
    q_1, q_2, q_3, q_4, unit, q_sum = load_places(q, scores.row_valid, BLOCK_M, PLACES, SCALED, ZEROS, ABOVE, BITS)
    factor = softmax_scale(scores.scale, scores.EXP, False)
    row_scales = unit * (factor * BITS)
    q_1, q_2 = tl.trans(q_1), tl.trans(q_2)  # [WIDE, BLOCK_M]
    if PLACES == 4:
        q_3, q_4 = tl.trans(q_3), tl.trans(q_4)

    # A row's sum in 8 parts, as products lay keys out: so no step adds over threads. There is none before the loop.
    sums = tl.full([8, BLOCK_M], 0.0, tl.float32)
    acc_1 = tl.full([WIDE_V, BLOCK_M], 0.0, tl.float32)
    acc_2 = tl.full([WIDE_V, BLOCK_M], 0.0, tl.float32)
    acc_3, acc_4, nothing = acc_1, acc_2, acc_1  # never used with two places
    if PLACES == 4:
        acc_3 = tl.full([WIDE_V, BLOCK_M], 0.0, tl.float32)
        acc_4 = tl.full([WIDE_V, BLOCK_M], 0.0, tl.float32)
        nothing = tl.full([WIDE_V, BLOCK_M], 0.0, tl.float32)
    # Two passes: key tiles that every row attends whole, then those at the edges, which follow them without a window.
    for edge in tl.static_range(2):
        if edge == 0:
            count = steps.full_end - steps.full_begin
        else:
            count = steps.full_begin - steps.first + steps.last - steps.full_end
        if pages.LOOP == "by_page":
            start = tile_start(steps, 0, edge, False, BLOCK_N)
            page_1, page_2, page_3, page_4 = pages_from(pages.table, start, steps.end, pages.total, BLOCK_N, pages.SIZE)
        for i in range(count):
            start = tile_start(steps, i, edge, False, BLOCK_N)
            if pages.LOOP == "by_page":
                page, row = places_in_pages(page_1, page_2, page_3, page_4, BLOCK_N, pages.SIZE)
                following = tile_start(steps, i + 1, edge, False, BLOCK_N)
                page_1, page_2, page_3, page_4 = pages_from(
                    pages.table, following, steps.end, pages.total, BLOCK_N, pages.SIZE
                )
            else:
                page, row = key_places(pages.table, start, steps.end, pages.total, BLOCK_N, edge == 1, pages.SIZE,
                                       pages.LOOP, pages.READS)  # fmt: skip
            positions = start + tl.arange(0, BLOCK_N)
            valid = positions < steps.end
            k_pointers = key_pointers(keys.source, start, page, row, keys.stride_page, keys.stride_row, pages.SIZE)
            v_pointers = key_pointers(
                values.source, start, page, row, values.stride_page, values.stride_row, pages.SIZE
            )
            k_words = load_words(k_pointers, valid, COLS, WIDE, edge == 1, ALIGNED)
            v_words = load_columns_of_words(v_pointers, valid, COLS_V, WIDE_V, edge == 1, ALIGNED)
            k_stored = None  # scales as they are stored
            v_stored = None
            if TOKENS:
                k_stored = load_token_scales(keys.scales, start, page, row, valid, pages.SIZE, edge == 1)
                v_stored = load_token_scales(values.scales, start, page, row, valid, pages.SIZE, edge == 1)
                k_scale, v_scale = k_stored, v_stored
                if ZEROS:
                    k_scale, v_scale = without_zero(k_stored), without_zero(v_stored)
            raw = words_kq(q_1, q_2, q_3, q_4, q_sum, k_words, k_stored, keys.FORMAT, UNPACK)
            if TOKENS:
                raw *= k_scale[:, None]
            # The online softmax, as softmax_step has it.
            scaled = raw * row_scales[None, :]
            if edge == 1:
                keep = positions[:, None] < scores.row_end[None, :]
                scaled = tl.where(keep, scaled, lowest(scores.MASK_VALUE))
            nearest = scaled
            if TOKENS:
                nearest = scaled + value_logs(v_scale, scores.EXP, False)[:, None]
                if edge == 1:
                    nearest = tl.where(keep, nearest, scaled)
            new_max = tl.maximum(row_max, tl.max(nearest, 0))
            base = new_max
            if edge == 1 and scores.MASK_VALUE != "finite":
                base = tl.where(new_max > float("-inf"), new_max, 0.0)
            p = exponential(scaled - base[None, :], scores.EXP, False)
            if edge == 1 and scores.MASK_VALUE == "finite":
                p = tl.where(keep, p, 0.0)
            correction = exponential(row_max - base, scores.EXP, False)
            row_max = new_max
            sums = sums * correction[None, :] + tl.sum(tl.reshape(p, [BLOCK_N // 8, 8, BLOCK_M]), 0)
            if TOKENS:
                if edge == 1:
                    p = tl.where(p == 0.0, 0.0, p * v_scale[:, None])  # a masked key's scale may be NaN
                else:
                    p = p * v_scale[:, None]
            acc_1, acc_2, acc_3, acc_4 = words_vp(
                acc_1, acc_2, acc_3, acc_4, nothing, correction, p, v_words, v_stored, ABOVE, values.FORMAT, UNPACK,
                TERMS,
            )  # fmt: skip
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
