"""Dropout of probabilities: which score is kept follows from the seed and from where it stands, and from nothing else.

The forward, the backward and every backend compute the same mask, whatever tiles they use. Source of the generators:
Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011). Philox4x32-10 turns seed and head into
two words, once for all scores of a head; Philox2x32-10, half as much work, turns these and a score's place into a word.
"""

import triton
import triton.language as tl

# Flips the highest bit: unsigned numbers compare as signed ones do.
HIGHEST_BIT: tl.constexpr = tl.constexpr(-2147483648)
ROUNDS: tl.constexpr = tl.constexpr(10)

# Philox4x32: the multipliers of its two products, each as its halves of 16 bits. FACTOR is that of Philox2x32.
FIRST_HIGH: tl.constexpr = tl.constexpr(0xD251)
FIRST_LOW: tl.constexpr = tl.constexpr(0x1F53)
SECOND_HIGH: tl.constexpr = tl.constexpr(0xCD9E)
SECOND_LOW: tl.constexpr = tl.constexpr(0x8D57)
FACTOR_HIGH: tl.constexpr = tl.constexpr(0xD256)
FACTOR_LOW: tl.constexpr = tl.constexpr(0xD193)
FACTOR: tl.constexpr = tl.constexpr(0xD256D193)
WEYL: tl.constexpr = tl.constexpr(0x9E3779B9)


@triton.jit
def product(x, HIGH: tl.constexpr, LOW: tl.constexpr):
    """(high half, low half) of x · (HIGH·2¹⁶ + LOW), uint32, from products of 16-bit halves."""
    low, high = x & 0xFFFF, x >> 16
    carried = (low * LOW >> 16) + high * LOW
    middle = low * HIGH + (carried & 0xFFFF)
    return high * HIGH + (carried >> 16) + (middle >> 16), (middle << 16) | (low * LOW & 0xFFFF)


@triton.jit
def philox_by_halves(seed, c0, c1, c2, c3):
    """Words 0 and 1 of tl.philox, without a product's high half."""
    seed = seed.to(tl.uint64)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high_0, low_0 = product(c0, FIRST_HIGH, FIRST_LOW)
        high_2, low_2 = product(c2, SECOND_HIGH, SECOND_LOW)
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1


@triton.jit
def head_words(seed, head, MULHI: tl.constexpr):
    """(key, turn) of a head, uint32 and int32: of its scores the generator's key, and what turns rows' numbers.

    seed  pointer to one int64
    head  number of the query head among those of all sequences
    """
    nothing = head - head
    if MULHI == "halves":
        none = nothing.to(tl.uint32, bitcast=True)
        key, turn = philox_by_halves(tl.load(seed), head.to(tl.uint32, bitcast=True), none, none, none)
    else:
        key, turn, _, _ = tl.philox(tl.load(seed), head, nothing, nothing, nothing)
    return key.to(tl.uint32, bitcast=True), turn.to(tl.int32, bitcast=True)


@triton.jit
def kept_scores(key, keys, rows, threshold, MULHI: tl.constexpr):
    """Which scores are kept, of the shape that keys and rows together broadcast to.

    key        of the head, by head_words
    keys       positions in the sequence, int32
    rows       the same, each with the head's turn: row ^ turn
    threshold  round(p·2³²) - 2³¹: the share p of all numbers is below it
    """
    word, other = keys.to(tl.uint32, bitcast=True), rows.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(ROUNDS):
        if MULHI == "halves":
            high, low = product(word, FACTOR_HIGH, FACTOR_LOW)
        else:  # one instruction of NVIDIA's and of AMD's chips, where both halves by themselves are three times as long
            wide = word.to(tl.uint64) * FACTOR
            high, low = (wide >> 32).to(tl.uint32), wide.to(tl.uint32)
        word, other = high ^ key ^ other, low
        key += WEYL
    return (word.to(tl.int32, bitcast=True) ^ HIGHEST_BIT) >= threshold
