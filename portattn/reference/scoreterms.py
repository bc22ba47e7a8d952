"""What changes the scores of one block, in the blockwise path: softcap, ALiBi, bias, and weights of sampled tokens."""

from __future__ import annotations

import math

import torch

from portattn.reference.keyblocks import KeyBlock
from portattn.reference.rowblocks import RowBlock
from portattn.schema.call import Call

# Below this expected number of further tables that hold a key, its probability is a sum of powers: 8 of them leave
# less than one unit in float32's last place.
SERIES_BELOW = 0.5
SERIES_TERMS = 8


def has_terms(call: Call) -> bool:
    """Whether scores are anything but scaled products."""
    given = (call.alibi_slopes, call.bias, call.log_weights)
    return call.problem.softcap or call.problem.magicpig or any(tensor is not None for tensor in given)


def finite_sinks(call: Call, dtype: torch.dtype) -> torch.Tensor:
    """Return the call's sinks (Hq,) with +inf as the dtype's largest number: it takes all the weight as well."""
    assert call.sinks is not None
    return call.sinks.to(dtype).clamp(max=torch.finfo(dtype).max)


def with_terms(
    call: Call,
    rows: RowBlock,
    keys: KeyBlock,
    k: torch.Tensor,
    products: torch.Tensor,
    distance: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Scores (B, Hq, rows, keys) of the products Q·Kᵀ of the same shape, in their dtype and in the order
    that the docs give.

    k         (B, H, keys, D), the keys of the products
    distance  (B, 1 or Hq, rows, keys) int64, the query's position less the key's, where there is ALiBi
    bias      (B, Hq, rows, keys), where there is one
    """
    scores = products * call.scale
    if call.problem.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.alibi_slopes is not None:
        assert distance is not None
        scores = scores - call.alibi_slopes.to(scores.dtype)[:, :, None, None] * distance.abs()
    if bias is not None:
        scores = scores + bias
    if call.log_weights is not None:
        scores = scores + call.log_weights[:, :, None, keys.start : keys.stop].to(scores.dtype)
    if (hashing := call.hashing()) is not None:
        bits, tables = (t.to(scores.dtype)[None, :, None, None] for t in hashing)
        norms = rows.q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[:, :, None]  # (B, Hq, rows, keys)
        # Of a vector of zeros every direction is as good; it counts as orthogonal.
        cosine = products / norms.clamp(min=torch.finfo(torch.float32).tiny)
        scores = scores - log_sampled(cosine, bits, tables)
    return scores


def log_sampled(cosine: torch.Tensor, bits: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """log of the probability that a key at this cosine shares the query's bucket in at least two of `tables` hash
    tables of `bits` bits each (Chen et al., "MagicPIG", arXiv 2410.16179, with the collision probability of SimHash).

    All float32. No less than the log of the smallest normal number.
    """
    same_bit = torch.acos(-cosine.clamp(-1.0, 1.0)) / math.pi  # 1 − acos(c)/π without its cancellation
    x = same_bit**bits
    # 1 − (1−x)^L − L·x·(1−x)^(L−1) = −expm1((L−1)·log1p(−x) + log1p((L−1)·x)), which cancels only where (L−1)·x is
    # small. There it is the sum over k ≥ 2 of (−1)^k · (k−1) · C(L, k) · x^k.
    others = tables - 1.0
    expected = others * x
    direct = -torch.expm1(others * torch.log1p(-x.clamp(max=1.0 - 2.0**-24)) + torch.log1p(expected))
    power = 0.5 * tables * expected * x  # C(L, 2)·x², in an order that does not underflow before it has to
    series = power
    for k in range(3, 3 + SERIES_TERMS):
        power = -power * x * (tables - (k - 1)) / k
        series = series + (k - 1) * power
    probability = torch.where(expected < SERIES_BELOW, series, direct)
    return torch.log(probability.clamp(min=torch.finfo(torch.float32).tiny))
