"""Numbers of a quantised cache out of tiles of 16-bit words, widened to float16: by bytes, or by NVIDIA's instructions.

A word holds two numbers of a byte, or four of int4 or nvfp4; each of these places gives a tile of its own. UNPACK is
the choice of that name (schema/lowering.py): "ptx", or "words" without instructions of a vendor's.
"""

import triton
import triton.language as tl

from portattn.kernels.dequantize import NV_BLOCK, ZERO_BITS, dequantize

BITS_OF_2_23: tl.constexpr = tl.constexpr(0x4B000000)  # of a float32
NV_RAISED: tl.constexpr = tl.constexpr(16384.0)  # 2^14: by what nvfp4 numbers in float16's bits are too small
NV_WORDS: tl.constexpr = tl.constexpr(NV_BLOCK.value // 2)  # words of a row whose two scales are one word


@triton.jit
def two_places(words, KV_FORMAT: tl.constexpr, UNPACK: tl.constexpr):
    """Return the first and the second numbers of words of two, float16 of the words' shape."""
    if UNPACK == "ptx" and KV_FORMAT == "e4m3":
        first, second = tl.inline_asm_elementwise(
            """{ .reg .b32 sorted; .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high; }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif UNPACK == "ptx" and KV_FORMAT == "e5m2":
        first, second = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;",
            "=&r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif UNPACK == "ptx" and KV_FORMAT == "int8":
        # A number plus 128 as the lowest bits of a float16 between 1024 and 1280.
        first, second = tl.inline_asm_elementwise(
            """{ .reg .b32 raised, one, two, middle;
            xor.b32 raised, $2, 0x80808080;
            mov.b32 middle, 0x64806480;
            prmt.b32 one, raised, 0x64646464, 0x4240;
            prmt.b32 two, raised, 0x64646464, 0x4341;
            sub.rn.f16x2 $0, one, middle;
            sub.rn.f16x2 $1, two, middle; }""",
            "=&r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        like = tl.full([1], 0.0, tl.float16)
        first = dequantize(words.to(tl.int8), like, KV_FORMAT)
        second = dequantize((words >> 8).to(tl.int8), like, KV_FORMAT)
    return first, second


@triton.jit
def four_places(words, UNPACK: tl.constexpr):
    """Return the four numbers of words of int4, 0 to 15, float16 of the words' shape.

    With `ptx` they stay where they are in the bits, as numbers below float16's normal ones: the first and the third are
    times 2^-24, the others times 2^-20. Products of matrices hold such numbers exactly, and nothing is subtracted.
    """
    if UNPACK == "ptx":
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{ .reg .b32 high;
            shr.u32 high, $4, 8;
            and.b32 $0, $4, 0x000f000f;
            and.b32 $1, $4, 0x00f000f0;
            and.b32 $2, high, 0x000f000f;
            and.b32 $3, high, 0x00f000f0; }""",
            "=&r,=&r,=r,=r,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first = (words & 15).to(tl.float16)
        second = ((words >> 4) & 15).to(tl.float16)
        third = ((words >> 8) & 15).to(tl.float16)
        fourth = ((words >> 12) & 15).to(tl.float16)
    return first, second, third, fourth


@triton.jit
def four_differences(words, zeros, UNPACK: tl.constexpr):
    """Return the four numbers of words of int4 minus the zero point, float16 of the words' shape.

    zeros  zero points, int16 of a shape that broadcasts with the words'
    """
    if UNPACK == "ptx":
        # A number as the lowest bits of 1024, or 16 times it, less 1024, or 64 once it is a 16th, and the zero.
        zeros, words = tl.broadcast(zeros, words)
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{ .reg .b32 one, two, three, four, zero, zero64, high, part;
            or.b32 zero, $5, 0x64006400;
            shl.b32 zero64, $5, 4;
            add.u32 zero64, zero64, 0xd400d400;
            mov.b32 part, 0x2c002c00;
            shr.u32 high, $4, 8;
            lop3.b32 one, $4, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 two, $4, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 three, high, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 four, high, 0x00f000f0, 0x64006400, 0xea;
            sub.rn.f16x2 $0, one, zero;
            fma.rn.f16x2 $1, two, part, zero64;
            sub.rn.f16x2 $2, three, zero;
            fma.rn.f16x2 $3, four, part, zero64; }""",
            "=&r,=&r,=&r,=r,r,r", [words, zeros], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first = ((words & 15) - zeros).to(tl.float16)
        second = (((words >> 4) & 15) - zeros).to(tl.float16)
        third = (((words >> 8) & 15) - zeros).to(tl.float16)
        fourth = (((words >> 12) & 15) - zeros).to(tl.float16)
    return first, second, third, fourth


@triton.jit
def halves_of_words(source, WORDS: tl.constexpr, UNPACK: tl.constexpr):
    """Return the half of a scales' word that holds each word's scale [WORDS * NV_WORDS], int16: 0 or 1.

    With `ptx` they are what stands for a load that is never made. Triton 3.6.0 brings what a product's operand is made
    of into the operand's layout as it was loaded, before it is widened; but nothing of an operand that is made of a
    range, which takes 5 times the instructions for shared memory.

    source  any pointer: nothing is read there
    """
    halves = (tl.arange(0, WORDS * NV_WORDS) * 2 // NV_WORDS % 2).to(tl.int16)
    if UNPACK == "ptx":
        pointers = source.to(tl.pointer_type(tl.int16)) + tl.arange(0, WORDS * NV_WORDS)
        halves = tl.load(pointers, mask=halves < 0, other=halves)
    return halves


@triton.jit
def scales_of_words(scales, halves, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, UNPACK: tl.constexpr):
    """Return the scale of each word of rows of nvfp4 [BLOCK_N, WORDS * NV_WORDS], float16, from words of two scales.

    Scales are read as words too: where what goes into a product was read in bytes, compilers lay all of it out for
    bytes.
    """
    COLS: tl.constexpr = WORDS * NV_WORDS
    pairs = tl.reshape(tl.broadcast_to(scales[:, :, None], [BLOCK_N, WORDS, NV_WORDS]), [BLOCK_N, COLS])
    places = halves[None, :]
    if UNPACK == "ptx":
        pairs, places = tl.broadcast(pairs, places)
        factors = tl.inline_asm_elementwise(
            """{ .reg .b32 which, both; .reg .b16 pair, rest;
            shr.u32 which, $2, 12;
            lop3.b32 which, which, $2, 0x20, 0xfe;
            prmt.b32 both, $1, 0, which;
            mov.b32 {pair, rest}, both;
            cvt.rn.f16x2.e4m3x2 $0, pair; }""",
            "=r,r,r", [pairs, places], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        factors = dequantize(pairs >> (places * 8), tl.full([1], 0.0, tl.float16), "e4m3")
    return factors


@triton.jit
def e2m1(codes):
    """Return 2^-14 times the numbers of nvfp4 codes, the four lowest bits of each, float16."""
    # The exponent's two bits become the lowest of a float16's five.
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def four_scaled(words, factors, UNPACK: tl.constexpr):
    """Return the four numbers of words of nvfp4 times their words' factors, float16 of the words' shape.

    A product has 6 bits, from 2^-10 to 2688. With `ptx` all are times 2^-14, so that a number is its bits in other
    places: the smallest is then float16's smallest, and products of matrices hold it exactly.
    """
    if UNPACK == "ptx":
        # First the upper bytes of the float16 numbers, of all four upper halves of bytes together, and all four lower.
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{ .reg .b32 part, raised, upper, lower, one, two, three, four;
            shr.u32 part, $4, 3;
            and.b32 part, part, 0x0e0e0e0e;
            lop3.b32 upper, $4, 0x80808080, part, 0xea;
            shl.b32 raised, $4, 4;
            shl.b32 part, $4, 1;
            and.b32 part, part, 0x0e0e0e0e;
            lop3.b32 lower, raised, 0x80808080, part, 0xea;
            prmt.b32 one, lower, 0, 0x2404;
            prmt.b32 two, upper, 0, 0x2404;
            and.b32 three, lower, 0xff00ff00;
            and.b32 four, upper, 0xff00ff00;
            mul.rn.f16x2 $0, one, $5;
            mul.rn.f16x2 $1, two, $5;
            mul.rn.f16x2 $2, three, $5;
            mul.rn.f16x2 $3, four, $5; }""",
            "=&r,=&r,=&r,=r,r,r", [words, factors], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        codes = words.to(tl.int32)
        wide = factors.to(tl.float32) * NV_RAISED
        first = (e2m1(codes).to(tl.float32) * wide).to(tl.float16)
        second = (e2m1(codes >> 4).to(tl.float32) * wide).to(tl.float16)
        third = (e2m1(codes >> 8).to(tl.float32) * wide).to(tl.float16)
        fourth = (e2m1(codes >> 12).to(tl.float32) * wide).to(tl.float16)
    return first, second, third, fourth


@triton.jit
def zero_numbers(scales):
    """Return the zero points in tokens' scales of int4 numbers, float32: as the lowest bits of 2^23, minus that."""
    word = (scales.to(tl.int32, bitcast=True) & ZERO_BITS) | BITS_OF_2_23
    return word.to(tl.float32, bitcast=True) - 8388608.0
