"""Products of float32 tiles, as DOT_PRECISION has them; `bf16x6` is made here of products of bfloat16 tiles.

Each number is the sum of three bfloat16 numbers, which hold its 24 bits. Of the nine products of two numbers' parts six
count: the other three together are less than 2^-20 of the product, and 2^-23 of it on average. bfloat16 has float32's
exponents: no number is too large for it, and parts of those over 2^-110 are not too small.
"""

import triton
import triton.language as tl

# The bits of a float32 that bfloat16 has too.
UPPER: tl.constexpr = tl.constexpr(-65536)


@triton.jit
def bfloat16_parts(x):
    """Three bfloat16 tiles whose sum is x, float32: the first 8 bits of each significand, the next 8, and the last 8.

    They are cut off, not rounded: that takes two instructions for each number, and a conversion for two.
    """
    first = (x.to(tl.int32, bitcast=True) & UPPER).to(tl.float32, bitcast=True)
    rest = x - first
    second = (rest.to(tl.int32, bitcast=True) & UPPER).to(tl.float32, bitcast=True)
    third = rest - second
    return first.to(tl.bfloat16), second.to(tl.bfloat16), third.to(tl.bfloat16)


@triton.jit
def product_of_parts(a_first, a_second, a_third, b_first, b_second, b_third, GUARD: tl.constexpr):
    """A·B of tiles given by their parts, float32, summed from the smallest products on.

    GUARD: a product with an infinite number is what float32 makes of it; without, it is NaN
    """
    found = tl.dot(a_third, b_first)
    found = tl.dot(a_first, b_third, found)
    found = tl.dot(a_second, b_second, found)
    found = tl.dot(a_second, b_first, found)
    found = tl.dot(a_first, b_second, found)
    if GUARD:  # the second and the third part of an infinite number are NaN
        found = tl.where(found == found, found, 0.0)
    return tl.dot(a_first, b_first, found)


@triton.jit
def dot(a, b, DOT_PRECISION: tl.constexpr):
    """A·B, float32; operands of 16 bits have one precision."""
    if DOT_PRECISION == "bf16x6" and a.dtype == tl.float32:
        a_1, a_2, a_3 = bfloat16_parts(a)
        b_1, b_2, b_3 = bfloat16_parts(b)
        found = product_of_parts(a_1, a_2, a_3, b_1, b_2, b_3, True)
    elif DOT_PRECISION == "bf16x6":
        found = tl.dot(a, b)
    else:
        found = tl.dot(a, b, input_precision=DOT_PRECISION)
    return found


@triton.jit
def add_dot(a, b, acc, DOT_PRECISION: tl.constexpr):
    """acc + A·B. Of parts the products are summed first: an accumulator of many steps would cut off more of them."""
    if DOT_PRECISION == "bf16x6" and a.dtype == tl.float32:
        a_1, a_2, a_3 = bfloat16_parts(a)
        b_1, b_2, b_3 = bfloat16_parts(b)
        acc += product_of_parts(a_1, a_2, a_3, b_1, b_2, b_3, False)
    elif DOT_PRECISION == "bf16x6":
        acc = tl.dot(a, b, acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=DOT_PRECISION)
    return acc
