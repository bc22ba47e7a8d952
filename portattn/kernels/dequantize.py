"""Tiles of a cache of narrow numbers: widened to the products' dtype in registers, and their scales.

float8 numbers are read as bytes and widened by integer operations: each compiler knows some of the formats, on some
chips, and a format that a chip does not have is still read for what it is. Every number of these formats is exact in
float16 and in bfloat16.
"""

import triton
import triton.language as tl

from portattn.kernels.tiles import load_rows, tile_place

ZERO_BITS: tl.constexpr = tl.constexpr(15)  # of a token's scale of int4 numbers, the lowest: which number stands for 0
MIDDLE: tl.constexpr = tl.constexpr(8)  # the int4 number that stands for 0 where a scale is not a token's
DS_GROUP: tl.constexpr = tl.constexpr(128)  # numbers that share a scale in a row of fp8_ds_mla
NV_BLOCK: tl.constexpr = tl.constexpr(16)  # numbers that share a scale in a row of nvfp4


@triton.jit
def dequantize(tile, like, KV_FORMAT: tl.constexpr):
    """A tile of stored numbers in the dtype of `like`; as it is where the cache holds numbers of that dtype.

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
    """A tile [N, W] of bytes that hold two int4 numbers each as [N, 2W] in the dtype of `like`, less what stands for 0.

    Of a byte the lower four bits come first. Numbers are 0 to 15. What stands for 0 is 8, or of rows whose tokens have
    scales of their own (`scales`, [N], as they are stored) what a scale's lowest four bits say. Source: vLLM's
    int4_per_token_head. Whole numbers up to 15 are exact in float16 and in bfloat16.
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
    """Tokens' scales of int4 numbers, without the bits that say what stands for 0."""
    return (scales.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)


@triton.jit
def widened_blocks(tile, like, scales, table, start, end, pages, stride_page, stride_row,
                   COLS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr,
                   PAGE_SIZE: tl.constexpr, PAGE_LOOP: tl.constexpr, READS: tl.constexpr):  # fmt: skip
    """A tile [BLOCK_N, BLOCK_D / 2] of bytes that hold two nvfp4 numbers each as [BLOCK_N, BLOCK_D], times the scales
    of their blocks, in the dtype of `like`.

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
    blocks = load_rows(scales, table, start, end, pages, stride_page, stride_row, 1, COLS // NV_BLOCK, BLOCK_N,
                       BLOCK_D // NV_BLOCK, BOUNDED, "pointer", PAGE_SIZE, PAGE_LOOP, READS)  # fmt: skip
    factors = dequantize(blocks, numbers, "e4m3")
    factors = tl.broadcast_to(factors[:, :, None], [BLOCK_N, BLOCK_D // NV_BLOCK, NV_BLOCK])
    return (numbers * tl.reshape(factors, [BLOCK_N, BLOCK_D])).to(like.dtype)


@triton.jit
def widened_groups(tile, like, rows, table, start, end, pages, stride_page, stride_row,
                   COLS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr,
                   PAGE_SIZE: tl.constexpr, PAGE_LOOP: tl.constexpr, READS: tl.constexpr):  # fmt: skip
    """A tile [BLOCK_N, BLOCK_D] of the e4m3 numbers of fp8_ds_mla rows, times their scales, in the dtype of `like`.

    A row is COLS numbers, then a float32 scale for each 128 of them, then bfloat16 numbers. Source: vLLM,
    flashmla_sparse.py. `rows` is a byte pointer, as the strides are distances in bytes.
    """
    # Offsets follow the cast: triton-ascend 3.2.0 counts one before it in elements of the type after it.
    scales = rows.to(tl.pointer_type(tl.float32)) + COLS // 4
    base, offsets = tile_place(scales, table, start, end, pages, stride_page // 4, stride_row // 4, BLOCK_N, PAGE_SIZE,
                               PAGE_LOOP, READS)  # fmt: skip
    there = start + tl.arange(0, BLOCK_N) < end
    columns = tl.arange(0, BLOCK_D)
    factors = tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32)
    for group in tl.static_range(COLS // DS_GROUP):
        if BOUNDED:
            scale = tl.load(base + offsets + group, mask=there, other=0.0)
        else:
            scale = tl.load(base + offsets + group)
        factors = tl.where((columns // DS_GROUP == group)[None, :], scale[:, None], factors)
    return (dequantize(tile, like, "e4m3").to(tl.float32) * factors).to(like.dtype)


@triton.jit
def head_scale(scales, sequence, head, stride_b, stride_h, there):
    """The one scale of a sequence's key/value head; 1 for what is no sequence."""
    return tl.load(scales + sequence.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h, mask=there, other=1.0)


@triton.jit
def token_scales(scales, table, start, end, pages, stride_page, stride_row,
                 BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_LOOP: tl.constexpr,
                 READS: tl.constexpr):  # fmt: skip
    """The scales [BLOCK_N] of the keys from `start` on; those from `end` on read as 0 when BOUNDED."""
    base, offsets = tile_place(scales, table, start, end, pages, stride_page, stride_row, BLOCK_N, PAGE_SIZE,
                               PAGE_LOOP, READS)  # fmt: skip
    if BOUNDED:
        found = tl.load(base + offsets, mask=start + tl.arange(0, BLOCK_N) < end, other=0.0)
    else:
        found = tl.load(base + offsets)
    return found
