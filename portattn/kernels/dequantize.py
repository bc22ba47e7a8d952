"""Tiles of a cache of narrow numbers: widened to the products' dtype in registers, and their scales.

A format whose rows are no tile of numbers has a function for Q·Kᵀ and one for P·V, which attend.qk and attend.pv call.

float8 numbers are read as bytes and widened by integer operations: each compiler knows some of the formats, on some
chips, and a format that a chip does not have is still read for what it is. Every number of these formats is exact in
float16 and in bfloat16.
"""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import KeyRows, LoopShape, Pages, Query, Rows, Scales
from portattn.kernels.split_bf16 import add_dot, dot, split_product
from portattn.kernels.tiles import is_key, load_rows, read_columns, read_rows, tile_place

ZERO_BITS: tl.constexpr = tl.constexpr(15)  # of a token's scale of int4 numbers, the lowest: which number stands for 0
MIDDLE: tl.constexpr = tl.constexpr(8)  # the int4 number that stands for 0 where a scale is not a token's
DS_GROUP: tl.constexpr = tl.constexpr(128)  # numbers that share a scale in a row of fp8_ds_mla
NV_BLOCK: tl.constexpr = tl.constexpr(16)  # numbers that share a scale in a row of nvfp4


@triton.jit
def dequantize(tile, like, KV_FORMAT: tl.constexpr):
    """Return a tile of stored numbers in the dtype of `like`; unchanged if the cache holds numbers of that dtype.

    e4m3      1 bit sign, 4 exponent (bias 7), 3 fraction; 0x7f and 0xff are NaN, nothing is infinite. Source: OCP
              8-bit Floating Point Specification, revision 1.0
    e5m2      the first byte of a float16. Source: the same
    e4m3fnuz  as e4m3 with bias 8; 0x80 is NaN, and there is no -0. Source: AMD CDNA3 ISA, "Data formats"
    """
    if KV_FORMAT == "as_q":
        wide = tile
    elif KV_FORMAT == "int8":
        wide = tile.to(tl.float32).to(like.dtype)  # the interpreter makes no bfloat16 of an integer
    elif KV_FORMAT == "e5m2":
        bits = tile.to(tl.int16) << 8
        wide = bits.to(tl.float16, bitcast=True).to(like.dtype)
    else:
        code = tile.to(tl.int16)
        # The exponent's four bits become the lowest of a float16's five: too small by the difference of the biases.
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        small = bits.to(tl.float16, bitcast=True).to(tl.float32)
        if KV_FORMAT == "e4m3":
            number = tl.where((code & 0x7F) == 0x7F, float("nan"), small * 256.0)
        else:
            number = tl.where((code & 0xFF) == 0x80, float("nan"), small * 128.0)
        wide = number.to(like.dtype)
    return wide


@triton.jit
def widened_pairs(tile, like, scales):
    """Return a tile [N, W] of bytes of two int4 numbers as [N, 2W] in the dtype of `like`, minus the zero point.

    Of a byte the lower four bits come first. Numbers are 0 to 15. The zero point is 8, or if tokens have scales of
    their own (`scales`, [N], as they are stored) the scale's lowest four bits. Source: vLLM's int4_per_token_head.
    Whole numbers up to 15 are exact in float16 and in bfloat16.
    """
    pairs = tile.to(tl.int32)
    numbers = tl.interleave(pairs & 15, (pairs >> 4) & 15)
    if scales is None:
        numbers = numbers - MIDDLE
    else:
        numbers = numbers - (scales.to(tl.int32, bitcast=True) & ZERO_BITS)[:, None]
    return numbers.to(tl.float32).to(like.dtype)  # the interpreter makes no bfloat16 of an integer


@triton.jit
def without_zero(scales):
    """Return tokens' scales of int4 numbers without the bits of the zero point."""
    return (scales.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)


@records.jit
def widened_blocks(tile, like, scales: Scales, pages: Pages, start, end, COLS: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr):  # fmt: skip
    """Return a tile [BLOCK_N, BLOCK_D / 2] of bytes of two nvfp4 numbers as [BLOCK_N, BLOCK_D], times the scales of
    their blocks, in the dtype of `like`.

    A number is e2m1: 1 bit sign, 2 exponent (bias 1), 1 fraction; nothing is infinite or NaN. Of a byte the lower four
    bits come first. `scales` are rows of e4m3 numbers, one for each 16 of the COLS numbers. Sources: OCP Microscaling
    Formats, revision 1.0 (e2m1); FlashInfer, nvfp4_kv_quantize (the scales, and their places).

    A product of the two has 6 bits, from 2⁻¹⁰ to 2688: exact in float16 and in bfloat16.
    """
    codes = tile.to(tl.int32)
    codes = tl.interleave(codes & 15, (codes >> 4) & 15)
    # The exponent's two bits become the lowest of a float16's five: too small by the difference of the biases, 14.
    bits = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.int16)
    numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    blocks = load_rows(scales.source, pages.table, start, end, pages.total, scales.stride_page, scales.stride_row, 1,
                       COLS // NV_BLOCK, BLOCK_N, BLOCK_D // NV_BLOCK, BOUNDED, "pointer", pages.SIZE, pages.LOOP,
                       pages.READS)  # fmt: skip
    factors = dequantize(blocks, numbers, "e4m3")
    factors = tl.broadcast_to(factors[:, :, None], [BLOCK_N, BLOCK_D // NV_BLOCK, NV_BLOCK])
    return (numbers * tl.reshape(factors, [BLOCK_N, BLOCK_D])).to(like.dtype)


@records.jit
def widened_groups(tile, like, rows: Rows, pages: Pages, start, end,
                   BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr):  # fmt: skip
    """Return the e4m3 numbers [BLOCK_N, BLOCK_COLS] of fp8_ds_mla rows times their scales, in the dtype of `like`.

    A row is COLS numbers, then a float32 scale for each 128 of them, then bfloat16 numbers. Source: vLLM,
    flashmla_sparse.py. The source is a byte pointer, as the strides are distances in bytes.
    """
    # Offsets follow the cast: triton-ascend 3.2.0 counts one before it in elements of the type after it.
    scales = rows.source.to(tl.pointer_type(tl.float32)) + rows.COLS // 4
    base, offsets = tile_place(scales, pages.table, start, end, pages.total, rows.stride_page // 4,
                               rows.stride_row // 4, BLOCK_N, pages.SIZE, pages.LOOP, pages.READS)  # fmt: skip
    there = is_key(pages.table, start + tl.arange(0, BLOCK_N), end, pages.LOOP, pages.READS)
    columns = tl.arange(0, rows.BLOCK_COLS)
    factors = tl.full([BLOCK_N, rows.BLOCK_COLS], 0.0, tl.float32)
    for group in tl.static_range(rows.COLS // DS_GROUP):
        if BOUNDED:
            scale = tl.load(base + offsets + group, mask=there, other=0.0)
        else:
            scale = tl.load(base + offsets + group)
        factors = tl.where((columns // DS_GROUP == group)[None, :], scale[:, None], factors)
    return (dequantize(tile, like, "e4m3").to(tl.float32) * factors).to(like.dtype)


@triton.jit
def head_scale(scales, sequence, head, stride_b, stride_h, there):
    """Return the scale of a sequence's key/value head; 1 unless `there`."""
    return tl.load(scales + sequence.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h, mask=there, other=1.0)


@records.jit
def token_scales(scales: Scales, pages: Pages, start, end, BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr):
    """Return the scales [BLOCK_N] of the keys from `start` on; those from `end` on read as 0 when BOUNDED."""
    base, offsets = tile_place(scales.source, pages.table, start, end, pages.total, scales.stride_page,
                               scales.stride_row, BLOCK_N, pages.SIZE, pages.LOOP, pages.READS)  # fmt: skip
    if BOUNDED:
        there = is_key(pages.table, start + tl.arange(0, BLOCK_N), end, pages.LOOP, pages.READS)
        found = tl.load(base + offsets, mask=there, other=0.0)
    else:
        found = tl.load(base + offsets)
    return found


@records.jit
def packed_qk(q_tile, q_tail, q: Query, keys: KeyRows, pages: Pages, start, end, C: LoopShape, BOUNDED: tl.constexpr):
    """Return the raw scores of keys of several numbers a byte: see attend.qk."""
    stored = None
    if keys.main.scales.source is not None:
        stored = token_scales(keys.main.scales, pages, start, end, C.BLOCK_N, BOUNDED)
    pairs = read_rows(keys.main, pages, start, end, C.BLOCK_N, BOUNDED)
    scores = dot(q_tile, tl.trans(widened_pairs(pairs, q_tile, stored)), C.DOT_PRECISION)
    if q.BLOCK_TAIL != 0:
        pairs = read_rows(keys.tail, pages, start, end, C.BLOCK_N, BOUNDED)
        scores = add_dot(q_tail, tl.trans(widened_pairs(pairs, q_tail, stored)), scores, C.DOT_PRECISION)
    if stored is not None:
        scores = scores * without_zero(stored)[None, :]
    return scores


@records.jit
def packed_pv(acc, correction, p, pairs, values: Rows, pages: Pages, start, end, C: LoopShape, BOUNDED: tl.constexpr):
    """Return acc rescaled, plus the probabilities times a tile of values of several numbers a byte.

    The numbers are exact in bfloat16, which has float32's range: so tokens' scales go into the probabilities, of which
    there are fewer than values, and a probability becomes two bfloat16 numbers.
    """
    stored = None
    if values.scales.source is not None:
        stored = token_scales(values.scales, pages, start, end, C.BLOCK_N, BOUNDED)
    v_tile = widened_pairs(pairs, tl.full([1], 0.0, tl.bfloat16), stored)
    if stored is not None:
        # A key without weight may have a scale that is NaN, and no number of it is.
        p = tl.where(p == 0.0, 0.0, p * without_zero(stored)[None, :])
    return split_product(p, v_tile, acc * correction[:, None], 2)


@records.jit
def nvfp4_qk(q_tile, q_tail, q: Query, keys: KeyRows, pages: Pages, start, end, C: LoopShape, BOUNDED: tl.constexpr):
    """Return the raw scores of nvfp4 keys: see attend.qk."""
    pairs = read_rows(keys.main, pages, start, end, C.BLOCK_N, BOUNDED)
    k_tile = widened_blocks(pairs, q_tile, keys.main.scales, pages, start, end, q.COLS, C.BLOCK_N, q.BLOCK_COLS,
                            BOUNDED)  # fmt: skip
    scores = dot(q_tile, tl.trans(k_tile), C.DOT_PRECISION)
    if q.BLOCK_TAIL != 0:
        pairs = read_rows(keys.tail, pages, start, end, C.BLOCK_N, BOUNDED)
        further = keys.main.scales._replace(source=keys.main.scales.source + q.COLS // NV_BLOCK)
        k_tail = widened_blocks(pairs, q_tail, further, pages, start, end, q.TAIL_COLS, C.BLOCK_N, q.BLOCK_TAIL,
                                BOUNDED)  # fmt: skip
        scores = add_dot(q_tail, tl.trans(k_tail), scores, C.DOT_PRECISION)
    return scores


@records.jit
def nvfp4_pv(acc, correction, p, pairs, values: Rows, pages: Pages, start, end, C: LoopShape, BOUNDED: tl.constexpr,
             UNUSED_ZERO: tl.constexpr):  # fmt: skip
    """Return acc rescaled, plus the probabilities times a tile of pairs of nvfp4 values; UNUSED_ZERO: see attend.pv.

    Scaled values are exact in bfloat16, as a probability nearly is that becomes two numbers of it.
    """
    v_tile = widened_blocks(pairs, tl.full([1], 0.0, tl.bfloat16), values.scales, pages, start, end,
                            values.COLS * 2, C.BLOCK_N, values.BLOCK_COLS * 2, BOUNDED)  # fmt: skip
    if UNUSED_ZERO:
        v_tile = tl.where((tl.max(p, 0) == 0.0)[:, None], 0.0, v_tile)
    return split_product(p, v_tile, acc * correction[:, None], 2)


@records.jit
def ds_mla_qk(q_tile, q_tail, q: Query, keys: KeyRows, pages: Pages, start, end, C: LoopShape, BOUNDED: tl.constexpr):
    """Return the raw scores of fp8_ds_mla rows, and the tile of widened rows: see attend.qk."""
    rows = read_rows(keys.main, pages, start, end, C.BLOCK_N, BOUNDED)
    rows = widened_groups(rows, q_tile, keys.main, pages, start, end, C.BLOCK_N, BOUNDED)
    scores = dot(q_tile, tl.trans(rows), C.DOT_PRECISION)
    if q.BLOCK_TAIL != 0:
        # The tail's numbers are bfloat16, in rows whose strides are in bytes.
        k_tail = read_columns(
            keys.tail._replace(
                stride_page=keys.tail.stride_page // 2, stride_row=keys.tail.stride_row // 2, stride_col=1
            ),
            pages, start, end, C, BOUNDED,
        )  # fmt: skip
        scores = add_dot(q_tail, k_tail, scores, C.DOT_PRECISION)
    return scores, rows
