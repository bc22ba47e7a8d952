"""attend_packed16: attend's loop over a quantised cache whose rows are read as 16-bit words.

A word holds two numbers of a byte, or four of int4 or nvfp4. Each of these places has tiles of its own: a score is the
sum of their products, and each has an accumulator. So tiles of the cache are copied and transposed as 16-bit numbers
are, and numbers are widened by themselves, to float16, in which every number of every format is exact (unpack_int4.py).
"""

import triton
import triton.language as tl

from portattn.kernels.dequantize import MIDDLE, ZERO_BITS, without_zero
from portattn.kernels.paged_addressing import key_places, key_pointers, load_scales, load_words, pages_from, step_of
from portattn.kernels.tiles import LN_2, load_query_rows, softmax_step
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
    """The largest finite |number| of each row of a tile, float32."""
    size = tl.abs(tile.to(tl.float32))
    return tl.max(tl.where(size < float("inf"), size, 0.0), 1)


@triton.jit
def load_places(q_pointers, row_valid, q_stride_d, COLS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
                NEGATED: tl.constexpr, PLACES: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr,
                ABOVE: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """Load queries [BLOCK_M, WIDE] for each of a word's PLACES; with two places the two are returned twice.

    SCALED: queries become float16, divided by their row's `unit`, a power of two; the first and the third place are
    multiplied by ABOVE. BITS: factor on a product with keys' bits.

    Returns the four, unit [BLOCK_M], and with ZEROS a row's sum, divided by BITS; else unit again.
    """
    q_1 = load_query_rows(q_pointers, row_valid, PLACES * q_stride_d, COLS, WIDE, NEGATED)
    q_2 = load_query_rows(q_pointers + q_stride_d, row_valid, PLACES * q_stride_d, COLS, WIDE, NEGATED)
    q_3, q_4 = q_1, q_2
    if PLACES == 4:
        q_3 = load_query_rows(q_pointers + 2 * q_stride_d, row_valid, PLACES * q_stride_d, COLS, WIDE, NEGATED)
        q_4 = load_query_rows(q_pointers + 3 * q_stride_d, row_valid, PLACES * q_stride_d, COLS, WIDE, NEGATED)
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
    raised: probabilities, which are divided by its power, must stay finite. A scale that is not positive, as masked
    keys may have, gives some number.
    """
    logs = tl.maximum(scales.to(tl.int32, bitcast=True).to(tl.float32) * STEP_OF_LOGS - BIAS_OF_LOGS, LEAST_LOG)
    if EXP != "exp2" or NATURAL:
        logs = logs * LN_2
    return logs


@triton.jit
def add_product(acc, correction, high, low, values, TERMS: tl.constexpr):
    """acc times the correction, plus probabilities times values, all of float16; with TERMS 2 probabilities are two."""
    acc = acc * correction[:, None]
    if TERMS == 2:
        acc = tl.dot(low, values, acc, input_precision="ieee")
    return tl.dot(high, values, acc, input_precision="ieee")


@triton.jit
def attend_packed16(
    row_max, row_sum, q_pointers, row_valid, q_stride_d,
    k_rows, v_rows, table, pages, k_stride_p, k_stride_s, v_stride_p, v_stride_s,
    k_scales, k_scale_stride_p, k_scale_stride_s, v_scales, v_scale_stride_p, v_scale_stride_s,
    origin, first_step, full_begin, full_end, last_step, end,
    row_start, row_end, positions, slopes, bias_rows, bias_stride, mask_rows, mask_stride, scale, softcap,
    tree_low, tree_high, tree_first,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, NEGATED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS_BY_KEY: tl.constexpr, MASK_BY_KEY: tl.constexpr, PAGE_SIZE: tl.constexpr, EXP: tl.constexpr,
    MASK_VALUE: tl.constexpr, PAGE_LOOP: tl.constexpr, READS: tl.constexpr, CLAMPED: tl.constexpr,
    KV_FORMAT: tl.constexpr, ALIGNED: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """As `attend`, of a quantised cache with rows of whole words; k_rows, v_rows and their strides are in bytes.

    Queries of bfloat16 are divided by a power of two for each row, so that float16 holds them: exactly, but for what is
    2^14 times smaller than the row's largest.

    A scale for each token of the values goes into the probabilities, of which there are fewer. The maximum of a row is
    then that of score plus logarithm of the scale (value_logs): a probability times its scale is below 2, so that
    float16 holds it, and rounds none of the largest shares of a result away. A softmax may be taken against any number
    that is near the largest score; this one stands for the maximum in all that follows.

    Scales of nvfp4's blocks go into the numbers, in front of both products: they differ along a row. Probabilities are
    times 2^14 then, so that a float16 of one is not small where a block's scale is.

    BLOCK_D, BLOCK_DV  columns of tiles before they are parted
    k_scales, v_scales  a scale for each token, or of nvfp4 the bytes of its blocks' scales, a row for each token

    Returns acc [BLOCK_M, BLOCK_DV], row_max and row_sum.
    """
    ZEROS: tl.constexpr = KV_FORMAT == "int4"  # a number that stands for 0
    BLOCKS: tl.constexpr = KV_FORMAT == "nvfp4"  # scales of blocks
    PLACES: tl.constexpr = 4 if ZEROS or BLOCKS else 2  # numbers of a word
    TOKENS: tl.constexpr = k_scales is not None and not BLOCKS  # scales of tokens
    NATURAL: tl.constexpr = slopes is not None or bias_rows is not None
    MASKS: tl.constexpr = mask_rows is not None or bias_rows is not None
    EDGE_UNUSED: tl.constexpr = WINDOW or tree_low is not None  # see attend
    if MASKS or EDGE_UNUSED:
        row_end = tl.where(row_valid, row_end, origin)
    COLS: tl.constexpr = HEAD_DIM // PLACES
    COLS_V: tl.constexpr = HEAD_DIM_V // PLACES
    WIDE: tl.constexpr = BLOCK_D // PLACES
    WIDE_V: tl.constexpr = BLOCK_DV // PLACES
    # Of a probability: float16 results are rounded less. A second one that is 0 would make NaN of e5m2's infinity.
    # By itself: no constexpr yet where Triton 3.2 combines it.
    FLOAT16: tl.constexpr = q_pointers.dtype.element_ty == tl.float16
    TERMS: tl.constexpr = 2 if FLOAT16 and KV_FORMAT != "e5m2" else 1
    # int4 and nvfp4: what a product of queries with keys' bits is to be multiplied by.
    BITS_ZEROS: tl.constexpr = 1048576.0 if UNPACK == "ptx" else 1.0  # 2^20
    BITS_BLOCKS: tl.constexpr = NV_RAISED if UNPACK == "ptx" else 1.0
    BITS: tl.constexpr = BITS_ZEROS if ZEROS else (BITS_BLOCKS if BLOCKS else 1.0)
    ABOVE: tl.constexpr = 16.0 if ZEROS and UNPACK == "ptx" else 1.0  # of the first and third place beside it
    SCALED: tl.constexpr = ABOVE != 1.0 or not FLOAT16
    q_1, q_2, q_3, q_4, unit, q_sum = load_places(
        q_pointers, row_valid, q_stride_d, COLS, WIDE, BLOCK_M, NEGATED, PLACES, SCALED, ZEROS, ABOVE, BITS
    )
    if PLACES == 4:
        scale = scale * BITS

    acc_1 = tl.full([BLOCK_M, WIDE_V], 0.0, tl.float32)
    acc_2 = tl.full([BLOCK_M, WIDE_V], 0.0, tl.float32)
    if PLACES == 4:
        acc_3 = tl.full([BLOCK_M, WIDE_V], 0.0, tl.float32)
        acc_4 = tl.full([BLOCK_M, WIDE_V], 0.0, tl.float32)
    if BLOCKS:
        k_halves = halves_of_words(k_scales, WIDE // NV_WORDS, UNPACK)
        v_halves = halves_of_words(v_scales, WIDE_V // NV_WORDS, UNPACK)
    # Two passes: key tiles that every row attends whole, then those at the edges.
    for edge in tl.static_range(2):
        if edge == 0:
            count = full_end - full_begin
        else:
            count = full_begin - first_step + last_step - full_end
        if PAGE_LOOP == "by_page":
            # Pages are looked up a step ahead: a lookup in the step that reads its page takes a stage of the
            # compiler's pipeline of loads, and of few stages that are half of the tiles under way.
            start = origin + step_of(0, first_step, full_begin, full_end, edge, WINDOW) * BLOCK_N
            page_1, page_2, page_3, page_4 = pages_from(table, start, end, pages, BLOCK_N, PAGE_SIZE)
        for i in range(count):
            if edge == 0:
                start = origin + (full_begin + i) * BLOCK_N
            elif WINDOW:
                # The edge before the full tiles, then the one after them.
                skipped = tl.where(first_step + i >= full_begin, full_end - full_begin, 0)
                start = origin + (first_step + i + skipped) * BLOCK_N
            else:
                start = origin + (full_end + i) * BLOCK_N
            if PAGE_LOOP == "by_page":
                part = tl.arange(0, BLOCK_N) // PAGE_SIZE
                page = tl.where(part < 2, tl.where(part == 0, page_1, page_2), tl.where(part == 2, page_3, page_4))
                row = tl.arange(0, BLOCK_N) % PAGE_SIZE
                following = origin + step_of(i + 1, first_step, full_begin, full_end, edge, WINDOW) * BLOCK_N
                page_1, page_2, page_3, page_4 = pages_from(table, following, end, pages, BLOCK_N, PAGE_SIZE)
            else:
                page, row = key_places(table, start, end, pages, BLOCK_N, edge == 1, PAGE_SIZE, PAGE_LOOP, READS)
            there = start + tl.arange(0, BLOCK_N) < end
            at_k = key_pointers(k_rows, start, page, row, k_stride_p, k_stride_s, PAGE_SIZE)
            at_v = key_pointers(v_rows, start, page, row, v_stride_p, v_stride_s, PAGE_SIZE)
            keys = load_words(at_k, there, COLS, WIDE, edge == 1, ALIGNED)
            values = load_words(at_v, there, COLS_V, WIDE_V, edge == 1, ALIGNED)
            logs = None
            if BLOCKS:
                k_blocks = load_words(
                    key_pointers(k_scales, start, page, row, k_scale_stride_p, k_scale_stride_s, PAGE_SIZE),
                    there, COLS // NV_WORDS, WIDE // NV_WORDS, edge == 1, 4 if COLS // NV_WORDS % 2 == 0 else 2,
                )  # fmt: skip
                v_blocks = load_words(
                    key_pointers(v_scales, start, page, row, v_scale_stride_p, v_scale_stride_s, PAGE_SIZE),
                    there, COLS_V // NV_WORDS, WIDE_V // NV_WORDS, edge == 1, 4 if COLS_V // NV_WORDS % 2 == 0 else 2,
                )  # fmt: skip
            if TOKENS:
                of_keys = load_scales(
                    key_pointers(k_scales, start, page, row, k_scale_stride_p, k_scale_stride_s, PAGE_SIZE),
                    there, edge == 1,
                )  # fmt: skip
                of_values = load_scales(
                    key_pointers(v_scales, start, page, row, v_scale_stride_p, v_scale_stride_s, PAGE_SIZE),
                    there, edge == 1,
                )  # fmt: skip
                if ZEROS:
                    raw_k, raw_v = of_keys, of_values
                    of_keys, of_values = without_zero(raw_k), without_zero(raw_v)
                logs = value_logs(of_values, EXP, NATURAL)
            if PLACES == 4:
                if BLOCKS:
                    k_factors = scales_of_words(k_blocks, k_halves, BLOCK_N, WIDE // NV_WORDS, UNPACK)
                    k_1, k_2, k_3, k_4 = four_scaled(keys, k_factors, UNPACK)
                else:
                    k_1, k_2, k_3, k_4 = four_places(keys, UNPACK)
                scores = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
                scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee")
                scores = tl.dot(q_3, tl.trans(k_3), scores, input_precision="ieee")
                scores = tl.dot(q_4, tl.trans(k_4), scores, input_precision="ieee")
                if ZEROS and k_scales is None:
                    scores -= q_sum[:, None] * MIDDLE
                elif ZEROS:
                    scores -= q_sum[:, None] * zero_numbers(raw_k)[None, :]
            else:
                k_1, k_2 = two_places(keys, KV_FORMAT, UNPACK)
                scores = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
                scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee")
            if SCALED:
                scores *= unit[:, None]
            if TOKENS:
                scores *= of_keys[None, :]
            p, correction, row_max, row_sum = softmax_step(
                scores, start, end, row_start, row_end, row_max, row_sum, scale, softcap, slopes, positions,
                bias_rows, bias_stride, mask_rows, mask_stride, row_valid, BLOCK_N, edge == 1, WINDOW, SOFTCAP,
                BIAS_BY_KEY, MASK_BY_KEY, EXP, MASK_VALUE, CLAMPED, tree_low, tree_high, tree_first, logs,
            )  # fmt: skip
            if BLOCKS:
                if MASKS or (EDGE_UNUSED and edge == 1):  # nothing but a scale is NaN
                    v_blocks = tl.where((tl.max(p, 0) == 0.0)[:, None], 0, v_blocks).to(tl.int16)
                p = p * NV_RAISED
            elif MASKS or (EDGE_UNUSED and edge == 1):
                values = tl.where((tl.max(p, 0) == 0.0)[:, None], 0, values).to(tl.int16)
            if TOKENS:
                if MASKS or edge == 1:
                    p = tl.where(p == 0.0, 0.0, p * of_values[None, :])  # a masked key's scale may be NaN
                else:
                    p = p * of_values[None, :]
            high = p.to(tl.float16)
            low = high
            if TERMS == 2:
                low = (p - high.to(tl.float32)).to(tl.float16)
            if ZEROS:
                # Values have both signs, and their sums cancel: what stands for 0 is subtracted before, not after.
                middle = tl.full([1, 1], MIDDLE, tl.int16)
                if v_scales is not None:
                    middle = (raw_v.to(tl.int32, bitcast=True) & ZERO_BITS).to(tl.int16)[:, None]
                v_1, v_2, v_3, v_4 = four_differences(values, middle, UNPACK)
            if BLOCKS:
                v_factors = scales_of_words(v_blocks, v_halves, BLOCK_N, WIDE_V // NV_WORDS, UNPACK)
                v_1, v_2, v_3, v_4 = four_scaled(values, v_factors, UNPACK)
            if PLACES == 4:
                acc_1 = add_product(acc_1, correction, high, low, v_1, TERMS)
                acc_2 = add_product(acc_2, correction, high, low, v_2, TERMS)
                acc_3 = add_product(acc_3, correction, high, low, v_3, TERMS)
                acc_4 = add_product(acc_4, correction, high, low, v_4, TERMS)
            else:
                v_1, v_2 = two_places(values, KV_FORMAT, UNPACK)
                acc_1 = add_product(acc_1, correction, high, low, v_1, TERMS)
                acc_2 = add_product(acc_2, correction, high, low, v_2, TERMS)
    if PLACES == 4:
        acc = tl.interleave(tl.interleave(acc_1, acc_3), tl.interleave(acc_2, acc_4))
        if BLOCKS and UNPACK != "ptx":
            acc = acc * (1.0 / NV_RAISED)
    else:
        acc = tl.interleave(acc_1, acc_2)
    return acc, row_max, row_sum
