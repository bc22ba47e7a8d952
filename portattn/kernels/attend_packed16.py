"""attend_packed16: attend's loop over a quantised cache whose rows are read as 16-bit words.

A word holds two numbers of a byte, or four of int4 or nvfp4. Each of these places has tiles of its own: a score is the
sum of their products, and each has an accumulator. So tiles of the cache are copied and transposed as 16-bit numbers
are, and numbers are widened by themselves, to float16, in which every number of every format is exact (unpack_int4.py).
"""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import Pages, Query, Rows, ScoreTerms, TileRange
from portattn.kernels.dequantize import MIDDLE, ZERO_BITS, without_zero
from portattn.kernels.paged_addressing import (
    WORD_BYTES,
    key_places,
    key_pointers,
    load_block_scales,
    load_token_scales,
    load_words,
    pages_from,
    places_in_pages,
    tile_start,
)
from portattn.kernels.softmax import LN_2, softmax_step
from portattn.kernels.tiles import load_query_rows
from portattn.kernels.unpack_int4 import (
    NV_RAISED,
    NV_WORDS,
    four_differences,
    four_places,
    four_scaled,
    halves_of_words,
    scales_of_words,
    two_places,
    zero_numbers,
)

SMALLEST_NORMAL: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # float32
EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)  # bits of a float32
LARGEST_EXPONENT: tl.constexpr = tl.constexpr(0x7E800000)  # of a power of two whose reciprocal is normal too
STEP_OF_LOGS: tl.constexpr = tl.constexpr(2.0**-23)  # see value_logs
BIAS_OF_LOGS: tl.constexpr = tl.constexpr(127.0)
LEAST_LOG: tl.constexpr = tl.constexpr(-100.0)


@triton.jit
def largest_finite(tile):
    """Return the largest finite |number| of each row of a tile, float32."""
    size = tl.abs(tile.to(tl.float32))
    return tl.max(tl.where(size < float("inf"), size, 0.0), 1)


@records.jit
def load_places(q: Query, row_valid, BLOCK_M: tl.constexpr, PLACES: tl.constexpr, SCALED: tl.constexpr,
                ZEROS: tl.constexpr, ABOVE: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """Load queries [BLOCK_M, words of a row] for each of a word's PLACES; with two places the two are returned twice.

    SCALED  queries become float16, divided by their row's `unit`, a power of two; the first and the third place are
            multiplied by ABOVE
    BITS    factor on a product with keys' bits

    Returns the four, unit [BLOCK_M], and with ZEROS a row's sum, divided by BITS; else unit again.
    """
    COLS: tl.constexpr = q.COLS // PLACES
    WIDE: tl.constexpr = q.BLOCK_COLS // PLACES
    q_1 = load_query_rows(q.pointers, row_valid, PLACES * q.stride_col, COLS, WIDE, q.NEGATED)
    q_2 = load_query_rows(q.pointers + q.stride_col, row_valid, PLACES * q.stride_col, COLS, WIDE, q.NEGATED)
    q_3, q_4 = q_1, q_2
    if PLACES == 4:
        q_3 = load_query_rows(q.pointers + 2 * q.stride_col, row_valid, PLACES * q.stride_col, COLS, WIDE, q.NEGATED)
        q_4 = load_query_rows(q.pointers + 3 * q.stride_col, row_valid, PLACES * q.stride_col, COLS, WIDE, q.NEGATED)
    unit = tl.full([BLOCK_M], 1.0, tl.float32)
    if SCALED:
        size = tl.maximum(largest_finite(q_1), largest_finite(q_2))
        if PLACES == 4:
            size = tl.maximum(size, tl.maximum(largest_finite(q_3), largest_finite(q_4)))
        # The power of two below the largest, where that and its reciprocal are normal numbers.
        size = tl.maximum(size, SMALLEST_NORMAL * ABOVE)  # times ABOVE, its reciprocal is finite
        unit = (tl.minimum(size.to(tl.int32, bitcast=True), LARGEST_EXPONENT) & EXPONENT).to(tl.float32, bitcast=True)
        inverse = (1.0 / unit)[:, None]
        q_1 = (q_1.to(tl.float32) * (inverse * ABOVE)).to(tl.float16)
        q_2 = (q_2.to(tl.float32) * inverse).to(tl.float16)
        if PLACES == 4:
            q_3 = (q_3.to(tl.float32) * (inverse * ABOVE)).to(tl.float16)
            q_4 = (q_4.to(tl.float32) * inverse).to(tl.float16)
    q_sum = unit
    if ZEROS:
        q_sum = (tl.sum(q_1.to(tl.float32), 1) + tl.sum(q_3.to(tl.float32), 1)) * (1.0 / ABOVE)
        q_sum = (q_sum + tl.sum(q_2.to(tl.float32), 1) + tl.sum(q_4.to(tl.float32), 1)) * (1.0 / BITS)
    return q_1, q_2, q_3, q_4, unit, q_sum


@triton.jit
def value_logs(scales, EXP: tl.constexpr, NATURAL: tl.constexpr):
    """Return logarithms of values' scales, up to 0.09 too low in base 2, in the base of `exponential`.

    The bits of a float32 are its logarithm, with a straight line between powers of two. A tiny scale's logarithm is
    raised: probabilities, which are divided by its power, must stay finite. A masked key's scale, which need not be
    positive, gives some number.
    """
    logs = tl.maximum(scales.to(tl.int32, bitcast=True).to(tl.float32) * STEP_OF_LOGS - BIAS_OF_LOGS, LEAST_LOG)
    if EXP != "exp2" or NATURAL:
        logs = logs * LN_2
    return logs


@triton.jit
def add_product(acc, correction, high, low, values, TERMS: tl.constexpr):
    """Return acc times the correction, plus probabilities times values, all of float16.

    With TERMS 2 a probability is the sum of `high` and `low`.
    """
    acc = acc * correction[:, None]
    if TERMS == 2:
        acc = tl.dot(low, values, acc, input_precision="ieee")
    return tl.dot(high, values, acc, input_precision="ieee")


@records.jit
def words_qk(q_1, q_2, q_3, q_4, q_sum, words, k_stored, halves, keys: Rows, BLOCK_N: tl.constexpr,
             UNPACK: tl.constexpr):  # fmt: skip
    """Return products [BLOCK_M, BLOCK_N] of queries with a tile of keys' words, without the scales of tokens.

    q_1, …, q_sum  as load_places gives them
    k_stored       the keys' scales as they are stored: of nvfp4 words of blocks' scales; else each token's, or None
    halves         of nvfp4: see halves_of_words
    """
    if keys.FORMAT == "int4" or keys.FORMAT == "nvfp4":
        if keys.FORMAT == "nvfp4":
            SCALE_WORDS: tl.constexpr = keys.BLOCK_COLS // WORD_BYTES // NV_WORDS
            factors = scales_of_words(k_stored, halves, BLOCK_N, SCALE_WORDS, UNPACK)
            k_1, k_2, k_3, k_4 = four_scaled(words, factors, UNPACK)
        else:
            k_1, k_2, k_3, k_4 = four_places(words, UNPACK)
        raw = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
        raw = tl.dot(q_2, tl.trans(k_2), raw, input_precision="ieee")
        raw = tl.dot(q_3, tl.trans(k_3), raw, input_precision="ieee")
        raw = tl.dot(q_4, tl.trans(k_4), raw, input_precision="ieee")
        if keys.FORMAT == "int4" and k_stored is None:
            raw -= q_sum[:, None] * MIDDLE
        elif keys.FORMAT == "int4":
            raw -= q_sum[:, None] * zero_numbers(k_stored)[None, :]
    else:
        k_1, k_2 = two_places(words, keys.FORMAT, UNPACK)
        raw = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
        raw = tl.dot(q_2, tl.trans(k_2), raw, input_precision="ieee")
    return raw


@records.jit
def words_pv(
    acc_1, acc_2, acc_3, acc_4, correction, p, words, v_scale, v_stored, halves, values: Rows,
    BLOCK_N: tl.constexpr, UNPACK: tl.constexpr, TERMS: tl.constexpr, MASKED: tl.constexpr, UNUSED_ZERO: tl.constexpr,
):  # fmt: skip
    """Return the accumulators of a word's places, rescaled, plus the probabilities times a tile of values' words.

    With two places acc_3 and acc_4 come back as they are.

    v_scale      the scale of each token, or None
    v_stored     the values' scales as they are stored: see words_qk
    TERMS        float16 numbers that a probability becomes
    MASKED       whether a probability may be 0 because its key is masked
    UNUSED_ZERO  whether values that no row gives weight to count as 0: they may be NaN
    """
    if values.FORMAT == "nvfp4":
        if UNUSED_ZERO:  # nothing but a scale is NaN
            v_stored = tl.where((tl.max(p, 0) == 0.0)[:, None], 0, v_stored).to(tl.int16)
        p = p * NV_RAISED
    elif UNUSED_ZERO:
        words = tl.where((tl.max(p, 0) == 0.0)[:, None], 0, words).to(tl.int16)
    if v_scale is not None:
        if MASKED:
            p = tl.where(p == 0.0, 0.0, p * v_scale[None, :])  # a masked key's scale may be NaN
        else:
            p = p * v_scale[None, :]
    high = p.to(tl.float16)
    low = high
    if TERMS == 2:
        low = (p - high.to(tl.float32)).to(tl.float16)
    if values.FORMAT == "int4" or values.FORMAT == "nvfp4":
        if values.FORMAT == "int4":
            # Values have both signs, and their sums cancel: what stands for 0 is subtracted before, not after.
            middle = tl.full([1, 1], MIDDLE, tl.int16)
            if v_stored is not None:
                middle = (v_stored.to(tl.int32, bitcast=True) & ZERO_BITS).to(tl.int16)[:, None]
            v_1, v_2, v_3, v_4 = four_differences(words, middle, UNPACK)
        else:
            SCALE_WORDS: tl.constexpr = values.BLOCK_COLS // WORD_BYTES // NV_WORDS
            factors = scales_of_words(v_stored, halves, BLOCK_N, SCALE_WORDS, UNPACK)
            v_1, v_2, v_3, v_4 = four_scaled(words, factors, UNPACK)
        acc_1 = add_product(acc_1, correction, high, low, v_1, TERMS)
        acc_2 = add_product(acc_2, correction, high, low, v_2, TERMS)
        acc_3 = add_product(acc_3, correction, high, low, v_3, TERMS)
        acc_4 = add_product(acc_4, correction, high, low, v_4, TERMS)
    else:
        v_1, v_2 = two_places(words, values.FORMAT, UNPACK)
        acc_1 = add_product(acc_1, correction, high, low, v_1, TERMS)
        acc_2 = add_product(acc_2, correction, high, low, v_2, TERMS)
    return acc_1, acc_2, acc_3, acc_4


@records.jit
def attend_packed16(
    row_max, row_sum, q: Query, keys: Rows, values: Rows, pages: Pages, steps: TileRange, scores: ScoreTerms,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """Attend a quantised cache with rows of whole words, which begin at multiples of ALIGNED bytes.

    Queries of bfloat16 are divided by a power of two for each row, so that float16 holds them: exactly, but for
    numbers 2^14 times smaller than the row's largest.

    A scale for each token of the values goes into the probabilities, of which there are fewer. The maximum of a row is
    then that of score plus logarithm of the scale (value_logs): a probability times its scale is below 2, so that
    float16 holds it, and rounds none of the largest shares of a result away. A softmax may be taken against any number
    that is near the largest score; this one stands for the maximum in all that follows.

    Scales of nvfp4's blocks go into the numbers, in front of both products: they differ along a row. Probabilities are
    times 2^14 then, so that a float16 of one is not small where a block's scale is.

    keys, values  byte pointers; COLS and strides are in bytes

    Returns acc [BLOCK_M, columns of the values], row_max and row_sum.
    """
    ZEROS: tl.constexpr = keys.FORMAT == "int4"  # a number that stands for 0
    BLOCKS: tl.constexpr = keys.FORMAT == "nvfp4"  # scales of blocks
    PLACES: tl.constexpr = 4 if ZEROS or BLOCKS else 2  # numbers of a word
    TOKENS: tl.constexpr = keys.scales.source is not None and not BLOCKS  # scales of tokens
    NATURAL: tl.constexpr = scores.slopes is not None or scores.bias is not None
    MASKS: tl.constexpr = scores.mask is not None or scores.bias is not None
    EDGE_UNUSED: tl.constexpr = scores.WINDOW or scores.tree_low is not None  # see attend
    row_end = scores.row_end
    if MASKS or EDGE_UNUSED:
        row_end = tl.where(scores.row_valid, row_end, steps.origin)
    COLS: tl.constexpr = keys.COLS // WORD_BYTES
    COLS_V: tl.constexpr = values.COLS // WORD_BYTES
    WIDE: tl.constexpr = keys.BLOCK_COLS // WORD_BYTES
    WIDE_V: tl.constexpr = values.BLOCK_COLS // WORD_BYTES
    # Of a probability: float16 results are rounded less. A second one that is 0 would make NaN of e5m2's infinity.
    # By itself: no constexpr yet where Triton 3.2 combines it.
    FLOAT16: tl.constexpr = q.pointers.dtype.element_ty == tl.float16
    TERMS: tl.constexpr = 2 if FLOAT16 and keys.FORMAT != "e5m2" else 1
    # int4 and nvfp4: what a product of queries with keys' bits is to be multiplied by.
    BITS_ZEROS: tl.constexpr = 1048576.0 if UNPACK == "ptx" else 1.0  # 2^20
    BITS_BLOCKS: tl.constexpr = NV_RAISED if UNPACK == "ptx" else 1.0
    BITS: tl.constexpr = BITS_ZEROS if ZEROS else (BITS_BLOCKS if BLOCKS else 1.0)
    ABOVE: tl.constexpr = 16.0 if ZEROS and UNPACK == "ptx" else 1.0  # of the first and third place beside it
    SCALED: tl.constexpr = ABOVE != 1.0 or not FLOAT16
    q_1, q_2, q_3, q_4, unit, q_sum = load_places(q, scores.row_valid, BLOCK_M, PLACES, SCALED, ZEROS, ABOVE, BITS)
    scale = scores.scale
    if PLACES == 4:
        scale = scale * BITS
    limited = scores._replace(row_end=row_end, scale=scale)

    acc_1 = tl.full([BLOCK_M, WIDE_V], 0.0, tl.float32)
    acc_2 = tl.full([BLOCK_M, WIDE_V], 0.0, tl.float32)
    acc_3, acc_4 = acc_1, acc_2  # never used with two places
    if PLACES == 4:
        acc_3 = tl.full([BLOCK_M, WIDE_V], 0.0, tl.float32)
        acc_4 = tl.full([BLOCK_M, WIDE_V], 0.0, tl.float32)
    k_halves = None
    v_halves = None
    if BLOCKS:
        k_halves = halves_of_words(keys.scales.source, WIDE // NV_WORDS, UNPACK)
        v_halves = halves_of_words(values.scales.source, WIDE_V // NV_WORDS, UNPACK)
    # Two passes: key tiles that every row attends whole, then those at the edges.
    for edge in tl.static_range(2):
        if edge == 0:
            count = steps.full_end - steps.full_begin
        else:
            count = steps.full_begin - steps.first + steps.last - steps.full_end
        if pages.LOOP == "by_page":
            # Pages are looked up a step ahead: a lookup in the step that reads its page takes a stage of the
            # compiler's pipeline of loads, and of few stages that are half of the tiles under way.
            start = tile_start(steps, 0, edge, scores.WINDOW, BLOCK_N)
            page_1, page_2, page_3, page_4 = pages_from(pages.table, start, steps.end, pages.total, BLOCK_N, pages.SIZE)
        for i in range(count):
            start = tile_start(steps, i, edge, scores.WINDOW, BLOCK_N)
            if pages.LOOP == "by_page":
                page, row = places_in_pages(page_1, page_2, page_3, page_4, BLOCK_N, pages.SIZE)
                following = tile_start(steps, i + 1, edge, scores.WINDOW, BLOCK_N)
                page_1, page_2, page_3, page_4 = pages_from(
                    pages.table, following, steps.end, pages.total, BLOCK_N, pages.SIZE
                )
            else:
                page, row = key_places(pages.table, start, steps.end, pages.total, BLOCK_N, edge == 1, pages.SIZE,
                                       pages.LOOP, pages.READS)  # fmt: skip
            valid = start + tl.arange(0, BLOCK_N) < steps.end
            k_pointers = key_pointers(keys.source, start, page, row, keys.stride_page, keys.stride_row, pages.SIZE)
            v_pointers = key_pointers(
                values.source, start, page, row, values.stride_page, values.stride_row, pages.SIZE
            )
            k_words = load_words(k_pointers, valid, COLS, WIDE, edge == 1, ALIGNED)
            v_words = load_words(v_pointers, valid, COLS_V, WIDE_V, edge == 1, ALIGNED)
            k_stored = None  # scales as they are stored
            v_stored = None
            k_scale = None
            v_scale = None
            v_logs = None
            if BLOCKS:
                k_stored = load_block_scales(keys, start, page, row, valid, pages.SIZE, edge == 1)
                v_stored = load_block_scales(values, start, page, row, valid, pages.SIZE, edge == 1)
            if TOKENS:
                k_stored = load_token_scales(keys.scales, start, page, row, valid, pages.SIZE, edge == 1)
                v_stored = load_token_scales(values.scales, start, page, row, valid, pages.SIZE, edge == 1)
                k_scale, v_scale = k_stored, v_stored
                if ZEROS:
                    k_scale, v_scale = without_zero(k_stored), without_zero(v_stored)
                v_logs = value_logs(v_scale, scores.EXP, NATURAL)
            raw = words_qk(q_1, q_2, q_3, q_4, q_sum, k_words, k_stored, k_halves, keys, BLOCK_N, UNPACK)
            if SCALED:
                raw *= unit[:, None]
            if TOKENS:
                raw *= k_scale[None, :]
            p, correction, row_max, row_sum = softmax_step(
                raw, start, steps.end, row_max, row_sum, limited, BLOCK_N, edge == 1, v_logs
            )
            acc_1, acc_2, acc_3, acc_4 = words_pv(
                acc_1, acc_2, acc_3, acc_4, correction, p, v_words, v_scale, v_stored, v_halves, values,
                BLOCK_N, UNPACK, TERMS, MASKS or edge == 1, MASKS or (EDGE_UNUSED and edge == 1),
            )  # fmt: skip
    if PLACES == 4:
        acc = tl.interleave(tl.interleave(acc_1, acc_3), tl.interleave(acc_2, acc_4))
        if BLOCKS and UNPACK != "ptx":
            acc = acc * (1.0 / NV_RAISED)
    else:
        acc = tl.interleave(acc_1, acc_2)
    return acc, row_max, row_sum
