"""Dropout of probabilities: which score is kept follows from the seed and from where it stands, and from nothing else.

The forward, the backward and every backend compute the same mask, whatever tiles they use. Source of the generators:
Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011). Philox4x32-10 turns seed and head into
two words, once for all scores of a head; Philox2x32-10, half as much work, turns these and a group's place into two.

A group is four scores: rows r and r + 8 by keys k and k + 8, of 16 bits each. With 16 rows and 16 keys a thread of a
tensor core's result holds all four, whichever of both its rows are.
"""

import triton
import triton.language as tl

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
    """Return (high half, low half) of x · (HIGH·2¹⁶ + LOW), uint32, from products of 16-bit halves."""
    low, high = x & 0xFFFF, x >> 16
    carried = (low * LOW >> 16) + high * LOW
    middle = low * HIGH + (carried & 0xFFFF)
    return high * HIGH + (carried >> 16) + (middle >> 16), (middle << 16) | (low * LOW & 0xFFFF)


@triton.jit
def philox_by_halves(seed, c0, c1, c2, c3):
    """Compute words 0 and 1 of tl.philox, without a product's high half."""
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
def head_words(seed, head, DROPS: tl.constexpr):
    """Return (key, turn) of a head, uint32 and int32: the generator's key for its scores, the turn of row numbers.

    seed   pointer to one int64
    head   number of the query head, counted over all sequences
    DROPS  `halves`: a product's high half is computed from products of 16-bit halves
    """
    nothing = head - head
    if DROPS == "halves":
        none = nothing.to(tl.uint32, bitcast=True)
        key, turn = philox_by_halves(tl.load(seed), head.to(tl.uint32, bitcast=True), none, none, none)
    else:
        key, turn, _, _ = tl.philox(tl.load(seed), head, nothing, nothing, nothing)
    return key.to(tl.uint32, bitcast=True), turn.to(tl.int32, bitcast=True)


@triton.jit
def group_words(key, keys, rows, DROPS: tl.constexpr):
    """Compute both words of Philox2x32-10, in the joint broadcast shape of keys and rows, numbers of groups."""
    word, other = keys.to(tl.uint32, bitcast=True), rows.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(ROUNDS):
        if DROPS == "halves":
            high, low = product(word, FACTOR_HIGH, FACTOR_LOW)
        else:  # one instruction of NVIDIA's and of AMD's chips, where both halves by themselves are three times as long
            wide = word.to(tl.uint64) * FACTOR
            high, low = (wide >> 32).to(tl.uint32), wide.to(tl.uint32)
        word, other = high ^ key ^ other, low
        key += WEYL
    return word, other


@triton.jit
def keep_from_words(word, other, later_row, later_key, threshold):
    """Return the scores that a group's words keep; later_row, later_key: its second row, or key."""
    bits = tl.where(later_row, other, word)
    bits = tl.where(later_key, bits >> 16, bits & 0xFFFF)
    return bits.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def kept_scores(key, turn, keys, rows, threshold, DROPS: tl.constexpr):
    """Return which scores are kept, in the shape that keys and rows broadcast to: a group's words for each.

    key, turn   of the head, by head_words
    keys, rows  positions in the sequence, int32
    threshold   round(p·2¹⁶): the share p of 16 bits is below it
    """
    word, other = group_words(key, keys >> 4 << 3 | keys & 7, (rows >> 4 << 3 | rows & 7) ^ turn, DROPS)
    return keep_from_words(word, other, (rows & 8) != 0, (keys & 8) != 0, threshold)


@triton.jit
def kept_tile(key, turn, key_0, row_0, threshold, KEYS: tl.constexpr, ROWS: tl.constexpr, BY_KEY: tl.constexpr,
              DROPS: tl.constexpr):  # fmt: skip
    """Return kept_scores of a tile: [ROWS, KEYS], or with BY_KEY [KEYS, ROWS]. A group's words are computed once where
    DROPS is `tiles`: then key_0 and row_0, the tile's first positions, are multiples of 16."""
    if DROPS == "tiles":
        of_keys, of_rows = key_0 // 2 + tl.arange(0, KEYS // 2), (row_0 // 2 + tl.arange(0, ROWS // 2)) ^ turn
        second = tl.arange(0, 2) != 0
        if BY_KEY:
            word, other = group_words(
                key, tl.reshape(of_keys, [KEYS // 16, 1, 8, 1, 1, 1]), tl.reshape(of_rows, [1, 1, 1, ROWS // 16, 1, 8]),
                DROPS,
            )  # fmt: skip
            later_key, later_row = tl.reshape(second, [1, 2, 1, 1, 1, 1]), tl.reshape(second, [1, 1, 1, 1, 2, 1])
            found = tl.reshape(keep_from_words(word, other, later_row, later_key, threshold), [KEYS, ROWS])
        else:
            word, other = group_words(
                key, tl.reshape(of_keys, [1, 1, 1, KEYS // 16, 1, 8]), tl.reshape(of_rows, [ROWS // 16, 1, 8, 1, 1, 1]),
                DROPS,
            )  # fmt: skip
            later_row, later_key = tl.reshape(second, [1, 2, 1, 1, 1, 1]), tl.reshape(second, [1, 1, 1, 1, 2, 1])
            found = tl.reshape(keep_from_words(word, other, later_row, later_key, threshold), [ROWS, KEYS])
    else:
        keys, rows = key_0 + tl.arange(0, KEYS), row_0 + tl.arange(0, ROWS)
        if BY_KEY:
            found = kept_scores(key, turn, keys[:, None], rows[None, :], threshold, DROPS)
        else:
            found = kept_scores(key, turn, keys[None, :], rows[:, None], threshold, DROPS)
    return found
