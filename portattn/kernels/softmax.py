"""The softmax over scores: their base, their terms, masks and score functions, and one step of the online softmax."""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import ScoreMods, ScoreTerms
from portattn.kernels.tiles import is_key

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
# A masked score where -inf is not wanted: the lowest float32, which loses against every finite score but itself.
FINITE_MASK: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)

# Scores are held in base 2 (EXP "exp2", log2(e) folded into their scale) or natural (EXP "exp"). With NATURAL they are
# natural in either case, and log2(e) multiplies differences of scores: a score near float32's limits, which only what
# is added to it makes it, must not become infinite.


@triton.jit
def exponential(x, EXP: tl.constexpr, NATURAL: tl.constexpr):
    """Return exp of a difference of two scores, in the scores' base (see softmax_scale)."""
    if EXP == "exp2":
        if NATURAL:
            x = x * LOG2_E
        y = tl.exp2(x)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def softmax_scale(scale, EXP: tl.constexpr, NATURAL: tl.constexpr):
    """Return the factor on raw scores that puts them in the base of `exponential`."""
    if EXP == "exp2" and not NATURAL:
        factor = scale * LOG2_E
    else:
        factor = scale
    return factor


@triton.jit
def sink_score(sink, EXP: tl.constexpr, NATURAL: tl.constexpr):
    """Return a sink, float32, in the base of `exponential`.

    One that base 2 cannot hold stays as it is: both numbers are beyond every score. +inf becomes float32's largest
    number, which takes all the weight as well, since inf - inf is NaN; `natural_lse` gives +inf for it.
    """
    score = softmax_scale(sink, EXP, NATURAL)
    if EXP == "exp2" and not NATURAL:
        score = tl.where(tl.abs(score) == float("inf"), sink, score)
    return tl.where(score == float("inf"), LARGEST, score)


@triton.jit
def natural_lse(row_max, row_sum, sinks, heads, EXP: tl.constexpr, NATURAL: tl.constexpr):
    """Return the natural log of the row's sum of exponentials; -inf for a row with nothing to attend (row_sum 0).

    sinks, heads  as in init_softmax
    """
    largest = row_max
    if EXP == "exp2" and not NATURAL:
        largest = row_max * LN_2
    if sinks is not None:
        sink = tl.load(sinks + heads).to(tl.float32)
        largest = tl.where(row_max == sink_score(sink, EXP, NATURAL), sink, largest)
    empty = row_sum == 0.0  # and not "is no positive number": a NaN that was attended must stay one
    return tl.where(empty, float("-inf"), largest + tl.log(tl.where(empty, 1.0, row_sum)))


@triton.jit
def store_state(states, rows, row_max, row_sum, valid):
    """Store the state of rows' softmax over a share of their keys, a pair in `states` (rows, 2): maximum and sum.

    The maximum is in the base of `exponential`, and the sum that of exponentials against it; a sum of 0 says that
    nothing was attended, with any maximum. They are kept apart since a maximum of 1e38 has no room for a sum's log.
    """
    tl.store(states + rows * 2, row_max, mask=valid)
    tl.store(states + rows * 2 + 1, row_sum, mask=valid)


@triton.jit
def finalize(acc, row_sum):
    """Return acc [BLOCK_M, BLOCK_DV] over its rows' sums; 0 for rows with nothing to attend. NaN sums stay NaN."""
    empty = row_sum == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, row_sum)
    return tl.where(empty[:, None], 0.0, acc * inverse[:, None])


@triton.jit
def lowest(MASK_VALUE: tl.constexpr):
    """Return the value of a masked score, from which a row's maximum starts too."""
    if MASK_VALUE == "finite":
        value = FINITE_MASK
    else:
        value = float("-inf")
    return value


@triton.jit
def init_softmax(sinks, heads, counted,
                BLOCK_M: tl.constexpr, EXP: tl.constexpr, NATURAL: tl.constexpr,
                MASK_VALUE: tl.constexpr):  # fmt: skip
    """Return row maxima and sums before any key. A sink is a score without a value: it counts from the start, once.

    sinks    (Hq,) or None        heads   head of each row [BLOCK_M], or one for all
    counted  whether this program counts the sink: of the programs that share a row's keys, one does
    """
    row_max = tl.full([BLOCK_M], lowest(MASK_VALUE), tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, tl.float32)
    if sinks is not None:
        sink = sink_score(tl.load(sinks + heads).to(tl.float32), EXP, NATURAL)
        sink = tl.where(counted, sink, float("-inf"))
        row_max = tl.where(sink == float("-inf"), row_max, sink)
        row_sum += tl.where(sink == float("-inf"), 0.0, 1.0)
    return row_max, row_sum


@triton.jit
def tanh(t):
    """Return tanh(t) by common operations; below 1/4 a series to x⁹ (relative error 1e-8)."""
    size = tl.abs(t)
    decay = tl.exp(-2.0 * size)
    far = (1.0 - decay) / (1.0 + decay)
    # tanh x = x − x³/3 + 2x⁵/15 − 17x⁷/315 + 62x⁹/2835: near 0 the quotient above loses what cancels in 1 − decay.
    s = t * t
    near = size * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0)))))
    magnitude = tl.where(size < 0.25, near, far)
    return tl.where(t < 0.0, -magnitude, magnitude)


@triton.jit
def apply_softcap(x, softcap):
    return softcap * tanh(x / softcap)


@records.jit
def mod_indices(positions, keys, mods: ScoreMods):
    """Return q_idx and kv_idx; a row or key that fills a tile up has the index of the nearest real row or key."""
    q_idx = tl.minimum(tl.maximum(positions - mods.first_row, 0), mods.rows - 1)
    kv_idx = tl.minimum(tl.maximum(keys - mods.first_key, 0), mods.keys - 1)
    return q_idx, kv_idx


@records.jit
def call_mod(score, positions, keys, mods: ScoreMods, FUNCTION: tl.constexpr):
    """Call a score or mask function for a tile of scores; positions and keys broadcast with it."""
    q_idx, kv_idx = mod_indices(positions, keys, mods)
    return FUNCTION(score, mods.batch, mods.head, q_idx, kv_idx, mods.c0, mods.c1, mods.c2, mods.c3,
                    mods.n0, mods.n1, mods.n2, mods.n3, mods.n4, mods.n5, mods.n6, mods.n7)  # fmt: skip


@records.jit
def mod_gradient(score, positions, keys, mods: ScoreMods, FUNCTION: tl.constexpr, gradient):
    """Return the gradient of a score for that of its score function's result; 0 where the latter is 0."""
    q_idx, kv_idx = mod_indices(positions, keys, mods)
    found = FUNCTION(score, mods.batch, mods.head, q_idx, kv_idx, mods.c0, mods.c1, mods.c2, mods.c3,
                     mods.n0, mods.n1, mods.n2, mods.n3, mods.n4, mods.n5, mods.n6, mods.n7, gradient)  # fmt: skip
    return tl.where(gradient == 0.0, 0.0, found)


@records.jit
def add_captured_gradients(score, positions, keys, mods: ScoreMods, FUNCTION: tl.constexpr, gradient, g0, g1, g2, g3):
    """Add a tile's part of the gradients of captured tensors; gradient: of the score function's result."""
    q_idx, kv_idx = mod_indices(positions, keys, mods)
    FUNCTION(score, mods.batch, mods.head, q_idx, kv_idx, mods.c0, mods.c1, mods.c2, mods.c3, mods.n0, mods.n1, mods.n2,
             mods.n3, mods.n4, mods.n5, mods.n6, mods.n7, gradient, g0, g1, g2, g3)  # fmt: skip


@triton.jit
def load_scores(rows, stride, keys, end, row_valid, other, BY_KEY: tl.constexpr, CLAMPED: tl.constexpr):
    """Load a tile of values for each score, [BLOCK_M, BLOCK_N], from rows' pointers; `other` outside.

    BY_KEY: the values are the same for all rows, `rows` is one pointer, and the tile is [1, BLOCK_N].
    CLAMPED: masked loads may read all the same, so they read at a key that exists.
    """
    if BY_KEY:
        tile = tl.load(rows + keys * stride, mask=keys < end, other=other)[None, :]
    else:
        there = row_valid[:, None] & (keys < end)[None, :]
        if CLAMPED:
            keys = tl.minimum(keys, end - 1)
        tile = tl.load(rows[:, None] + keys[None, :] * stride, mask=there, other=other)
    return tile


@triton.jit
def tree_bits(words):
    """Return the two halves of tree masks [BLOCK_M] int64, as int32: bits 0 to 31 and 32 to 63."""
    return words.to(tl.int32), (words >> 32).to(tl.int32)


@triton.jit
def in_tree(node, low, high):
    """Return the keys that each row's tree mask shows: bool [BLOCK_M, BLOCK_N].

    node       number of each key among its sequence's own new ones [BLOCK_N], below 0 for all before them, which every
               row sees
    low, high  the halves of each row's mask [BLOCK_M]: bit j is that of node j
    """
    bit = (node - node + 1) << (node & 31)  # once a key: rows then take an `and` each
    of_low = tl.where((node >= 0) & (node < 32), bit, 0)
    of_high = tl.where(node >= 32, bit, 0)
    seen = (low[:, None] & of_low[None, :]) | (high[:, None] & of_high[None, :])
    return (seen != 0) | (node < 0)[None, :]


@records.jit
def final_scores(raw, keys, end, scores: ScoreTerms, NATURAL: tl.constexpr, CLAMPED: tl.constexpr):
    """Turn raw products [BLOCK_M, BLOCK_N] into scores in the base of `exponential`, with every additive feature.

    In the order of the field: scaled, capped, minus slope·|distance|, plus bias; a score function takes the scaled
    score. What is not asked for is None.
    """
    if scores.SOFTCAP or (scores.slopes is not None or (scores.bias is not None or scores.mods.SCORE is not None)):
        x = raw * scores.scale
        if scores.mods.SCORE is not None:
            x = call_mod(x, scores.positions[:, None], keys[None, :], scores.mods, scores.mods.SCORE)
        if scores.SOFTCAP:
            x = apply_softcap(x, scores.softcap)
        if scores.slopes is not None:
            distance = tl.abs(scores.positions[:, None] - keys[None, :]).to(tl.float32)
            x = x - scores.slopes[:, None] * distance
        if scores.bias is not None:
            bias = load_scores(scores.bias, scores.bias_stride, keys, end, scores.row_valid, float("-inf"),
                               scores.BIAS_BY_KEY, CLAMPED)  # fmt: skip
            bias = bias.to(tl.float32)
            # -inf masks, whatever the key holds.
            x = tl.where(bias == float("-inf"), float("-inf"), x + bias)
        x = softmax_scale(x, scores.EXP, NATURAL)
    else:
        x = raw * softmax_scale(scores.scale, scores.EXP, NATURAL)
    return x


@records.jit
def softmax_step(raw, start, end, row_max, row_sum, scores: ScoreTerms, BLOCK_N: tl.constexpr, LIMITED: tl.constexpr,
                 value_logs=None):  # fmt: skip
    """Take one step of the online softmax over raw scores [BLOCK_M, BLOCK_N] of the keys from `start` on.

    When LIMITED, rows attend the keys inside their limits; otherwise every real row attends all of them but for bias
    and mask. A tree mask and a mask function are applied when LIMITED alone. The probability of a key that is masked is
    0, whatever the row's other scores are. Where anything is masked a row that is not real gives weight to no key that
    is masked for all real ones.

    value_logs  None, or what is added to the scores of each key [BLOCK_N] for the maximum alone
    (kernels/attend_packed16.py)

    Returns the probabilities against the new maximum, the factor for everything summed before, the new maximum, and the
    new sum.
    """
    NATURAL: tl.constexpr = scores.slopes is not None or (scores.bias is not None or scores.mods.SCORE is not None)
    keys = start + tl.arange(0, BLOCK_N)
    if LIMITED or (scores.mask is not None or scores.bias is not None):
        # Scaled before it is masked: a finite mask value must stay what it is, for row_max - base to be exactly 0.
        scaled = final_scores(raw, keys, end, scores, NATURAL, LIMITED and scores.CLAMPED)
        if LIMITED:
            keep = keys[None, :] < scores.row_end[:, None]
        else:
            # Rows that are not real read a bias of -inf and a mask of False. What all rows share masks them as others.
            keep = keys[None, :] < end
        if LIMITED and scores.WINDOW:
            keep = keep & (keys[None, :] >= scores.row_start[:, None])
        if LIMITED and scores.tree_low is not None:
            keep = keep & in_tree(keys - scores.tree_first, scores.tree_low, scores.tree_high)
        if LIMITED and scores.mods.MASK is not None:
            keep = keep & call_mod(raw, scores.positions[:, None], keys[None, :], scores.mods, scores.mods.MASK)
        if LIMITED and scores.slots is not None:
            keep = keep & is_key(scores.slots, keys, end, "slots", scores.READS)[None, :]
        if scores.mask is not None:
            shown = load_scores(scores.mask, scores.mask_stride, keys, end, scores.row_valid, 0, scores.MASK_BY_KEY,
                                LIMITED and scores.CLAMPED)  # fmt: skip
            keep = keep & (shown.to(tl.int32) != 0)
        scaled = tl.where(keep, scaled, lowest(scores.MASK_VALUE))
        if value_logs is None:
            new_max = tl.maximum(row_max, tl.max(scaled, 1))
        else:
            new_max = tl.maximum(row_max, tl.max(tl.where(keep, scaled + value_logs[None, :], scaled), 1))
        if scores.MASK_VALUE == "finite":
            base = new_max
            p = tl.where(keep, exponential(scaled - base[:, None], scores.EXP, NATURAL), 0.0)
        else:
            # A row that has seen no key yet, or NaN: -inf minus either would be NaN.
            base = tl.where(new_max > float("-inf"), new_max, 0.0)
            p = exponential(scaled - base[:, None], scores.EXP, NATURAL)
    elif scores.SOFTCAP or (scores.slopes is not None or scores.mods.SCORE is not None):
        scaled = final_scores(raw, keys, end, scores, NATURAL, False)
        if value_logs is None:
            new_max = tl.maximum(row_max, tl.max(scaled, 1))
        else:
            new_max = tl.maximum(row_max, tl.max(scaled + value_logs[None, :], 1))
        base = new_max
        if scores.mods.SCORE is not None and scores.MASK_VALUE != "finite":
            base = tl.where(new_max > float("-inf"), new_max, 0.0)  # a function may give -inf for a whole row
        p = exponential(scaled - base[:, None], scores.EXP, NATURAL)
    else:
        # No score is masked, so the scale can go after the maximum and into the exponential's subtraction. The
        # launcher makes it non-negative.
        factor = softmax_scale(scores.scale, scores.EXP, NATURAL)
        if value_logs is None:
            new_max = tl.maximum(row_max, tl.max(raw, 1) * factor)
        else:
            new_max = tl.maximum(row_max, tl.max(raw * factor + value_logs[None, :], 1))
        base = new_max
        p = exponential(raw * factor - base[:, None], scores.EXP, NATURAL)
    correction = exponential(row_max - base, scores.EXP, NATURAL)
    return p, correction, new_max, row_sum * correction + tl.sum(p, 1)
