"""Gradients of dense and of packed attention, and what their kernels have in common: probabilities anew from scores and
LSE, in either order of rows and keys.

row_gradients.py    backward_delta, backward_rows
key_gradients.py    backward_keys
bias_gradient.py    backward_bias

No program adds to what another one writes: results repeat bit by bit.

P = exp(S - LSE), dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P·(dP - delta), dQ = scale·dS·K, dK = scale·dSᵀ·Q.
Source: Dao, "FlashAttention-2" (2023), algorithm 2.

Rows and keys come as [N, 1] and [1, N] tiles, or the other way round: each kernel holds the one and goes through the
other.
"""

import triton
import triton.language as tl

from portattn.kernels.descriptor import describe_numbers
from portattn.kernels.tiles import apply_softcap, exponential, softmax_scale


@triton.jit
def number_source(tensor, first, end, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    """What tiles of one head's row numbers are read through: a descriptor, or a pointer to the first.

    tensor  (B, Hq, Sq) float32
    first   index of the head's first number; for a descriptor a multiple of 4, as `start` of its tiles is
    """
    source = tensor + first
    if NUMBERS == "descriptor":
        source = describe_numbers(source, end, BLOCK)
    return source


@triton.jit
def load_numbers(source, start, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    """A tile of numbers that all are real, from row `start` on."""
    if NUMBERS == "descriptor":
        numbers = source.load([start])
    else:
        numbers = tl.load(source + start + tl.arange(0, BLOCK))
    return numbers


@triton.jit
def load_row_numbers(lse, delta, rows, valid):
    """LSE and delta of rows; +inf for an LSE of -inf and for rows that are not real, which makes each probability 0."""
    sums = tl.load(lse + rows, mask=valid, other=float("inf"))
    sums = tl.where(sums == float("-inf"), float("inf"), sums)
    return sums, tl.load(delta + rows, mask=valid, other=0.0)


@triton.jit
def score_tile(values, batch, head, rows, keys, there, other, stride_b, stride_h, stride_q, stride_k):
    """Load a tile of a tensor with a value for each score; `other` outside `there`."""
    base = values + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    return tl.load(base + rows.to(tl.int64) * stride_q + keys * stride_k, mask=there, other=other)


@triton.jit
def score_gradients(products, lse, positions, keys, row_start, row_end, slope, added, shown, scale, softcap,
                    LIMITED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                    EXP: tl.constexpr):  # fmt: skip
    """Of raw products Q·K: the probabilities, the derivative of the cap, and which scores are attended.

    lse  of each row, +inf where it attends nothing
    When LIMITED, a row attends the keys before row_end and, with WINDOW, from row_start on. The derivative is the
    products themselves where there is no cap, and `keep` where nothing is masked: both are then not to be used.
    """
    bend = products
    keep = products == products
    if SOFTCAP or (slope is not None or added is not None):
        x = products * scale
        if SOFTCAP:
            x = apply_softcap(x, softcap)
            share = x / softcap
            bend = 1.0 - share * share
        if slope is not None:
            x = x - slope * tl.abs(positions - keys).to(tl.float32)
        if added is not None:
            x = x + added
        p = exponential(x - lse, EXP, True)
    else:
        p = exponential(products * softmax_scale(scale, EXP, False) - softmax_scale(lse, EXP, False), EXP, False)
    if LIMITED or (added is not None or shown is not None):
        if LIMITED:
            keep = keys < row_end
            if WINDOW:
                keep = keep & (keys >= row_start)
            if added is not None:
                keep = keep & (added != float("-inf"))
            if shown is not None:
                keep = keep & shown
        elif added is not None:
            keep = added != float("-inf")
            if shown is not None:
                keep = keep & shown
        else:
            keep = shown
        p = tl.where(keep, p, 0.0)
    return p, bend, keep
