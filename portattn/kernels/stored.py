"""Tiles of a cache of narrow numbers: widened to the products' dtype in registers, and their scales.

float8 numbers are read as bytes and widened by integer operations: each compiler knows some of the formats, on some
chips, and a format that a chip does not have is still read for what it is. Every number of these formats is exact in
float16 and in bfloat16.
"""

import triton
import triton.language as tl

from portattn.kernels.tiles import tile_place


@triton.jit
def widened(tile, like, KV_FORMAT: tl.constexpr):
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
