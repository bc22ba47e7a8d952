"""MagicPIG's sampling probability by its definition, for the oracle: the blockwise path has a form of its own."""

from __future__ import annotations

import math

import torch

SERIES_TERMS = 20  # leave less than float64's last place where the series is used


def log_sampling_probability(cosine: torch.Tensor, bits: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """log u of u = 1 − (1−x)^L − L·x·(1−x)^(L−1) with x = (1 − acos(c)/π)^K, in the dtype of `cosine` (float32 or 64).

    The probability that a key at cosine c falls into the query's bucket in at least two of L hash tables of K bits each
    (Chen et al., "MagicPIG: LSH Sampling for Efficient LLM Generation", arXiv 2410.16179). bits (K) and tables (L)
    broadcast. Where L·x < 1 the formula cancels, and the sum over k ≥ 2 of (−1)^k·(k−1)·C(L, k)·x^k, which it equals,
    takes its place; where u is below float32's smallest normal number, that number does.
    """
    count, like = tables.to(cosine.dtype), cosine.clamp(-1.0, 1.0)
    x = (1.0 - torch.acos(like) / math.pi) ** bits.to(cosine.dtype)
    direct = 1.0 - (1.0 - x) ** count - count * x * (1.0 - x) ** (count - 1.0)
    series, term = torch.zeros_like(x), count * x  # C(L, 1)·x
    for k in range(2, 2 + SERIES_TERMS):
        term = term * (count - (k - 1)) / k * x
        series = series + (-1) ** k * (k - 1) * term
    u = torch.where(count * x < 1.0, series, direct)
    return torch.log(u.clamp(min=torch.finfo(torch.float32).tiny))
