"""Dropout of probabilities: which score is kept follows from the seed and from where it stands, and from nothing else.

The forward, the backward and every backend compute the same mask, whatever tiles they use. Source of the generator:
Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), Philox4x32-10.
"""

import triton
import triton.language as tl

# Flips the highest bit: unsigned numbers compare as signed ones do.
HIGHEST_BIT: tl.constexpr = tl.constexpr(-2147483648)


# Philox4x32: the multipliers of its two products, each as its halves of 16 bits.
FIRST_HIGH: tl.constexpr = tl.constexpr(0xD251)
FIRST_LOW: tl.constexpr = tl.constexpr(0x1F53)
SECOND_HIGH: tl.constexpr = tl.constexpr(0xCD9E)
SECOND_LOW: tl.constexpr = tl.constexpr(0x8D57)


@triton.jit
def product(x, HIGH: tl.constexpr, LOW: tl.constexpr):
    """(high half, low half) of x · (HIGH·2¹⁶ + LOW), uint32, from products of 16-bit halves."""
    low, high = x & 0xFFFF, x >> 16
    carried = (low * LOW >> 16) + high * LOW
    middle = low * HIGH + (carried & 0xFFFF)
    return high * HIGH + (carried >> 16) + (middle >> 16), (middle << 16) | (low * LOW & 0xFFFF)


@triton.jit
def philox_by_halves(seed, c0, c1, c2, c3):
    """Word 0 of tl.philox, without a product's high half."""
    seed = seed.to(tl.uint64)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high_0, low_0 = product(c0, FIRST_HIGH, FIRST_LOW)
        high_2, low_2 = product(c2, SECOND_HIGH, SECOND_LOW)
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0


@triton.jit
def kept_scores(seed, keys, rows, head, threshold, MULHI: tl.constexpr):
    """Which scores are kept, of the shape that keys and rows together broadcast to.

    seed        pointer to one int64
    keys, rows  positions in the sequence, int32
    head        number of the query head among those of all sequences
    threshold   round(p·2³²) - 2³¹: the share p of all numbers is below it
    """
    nothing = (keys + rows) * 0
    if MULHI == "halves":
        word = philox_by_halves(
            tl.load(seed),
            (keys + nothing).to(tl.uint32, bitcast=True),
            (rows + nothing).to(tl.uint32, bitcast=True),
            (head + nothing).to(tl.uint32, bitcast=True),
            nothing.to(tl.uint32, bitcast=True),
        )
    else:
        word, _, _, _ = tl.philox(tl.load(seed), keys + nothing, rows + nothing, head + nothing, nothing)
    return (word.to(tl.int32, bitcast=True) ^ HIGHEST_BIT) >= threshold
