"""Attention of one sequence by its definition, in float64 or in the inputs' own dtype: what the flash_attn tests
compare with. Nothing of the library is used but the error budget."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from portattn.testing.tolerance import budget, largest

NONE = (-1, -1)


def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = NONE, softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None, kept: torch.Tensor | None = None, dropout_p: float = 0.0, exact: bool = True,
        attention_chunk: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out (Sq, Hq, Dv), lse (Hq, Sq), probabilities (Hq, Sq, Sk)) of q (Sq, Hq, D), k (Sk, Hk, D), v (Sk, Hk, Dv).

    alibi_slopes, sinks  (Hq,)
    kept                 (Hq, Sq, Sk) bool: what dropout leaves
    exact                in float64; otherwise products in the inputs' dtype and all else in float32"""
    if exact:
        q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores if exact else scores.float()
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = q.shape[0], k.shape[0]
    here = torch.arange(rows)[:, None] + keys - rows  # the key at a row's own position
    key = torch.arange(keys)[None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * (here - key).abs()
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    left, right = window_size
    if causal:
        hidden |= key > here
    if left >= 0:
        hidden |= key < here - left
    if right >= 0:
        hidden |= key > here + right
    if attention_chunk:
        begin = here - here % attention_chunk
        hidden |= (key < begin) | (key >= begin + attention_chunk)
    scores = scores.masked_fill(hidden, -math.inf)
    all_scores = (
        scores if sinks is None else torch.cat((scores, sinks.to(scores)[:, None, None].expand(-1, rows, 1)), -1)
    )
    lse = torch.logsumexp(all_scores, dim=-1) if all_scores.shape[-1] else scores.new_full(scores.shape[:2], -math.inf)
    probabilities = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])
    used = probabilities
    if kept is not None:
        used = torch.where(kept, probabilities, 0.0) / (1.0 - dropout_p)
    return torch.einsum("hqk,khd->qhd", used.to(v.dtype), v), lse, probabilities


def check_one(out: torch.Tensor, lse: torch.Tensor | None, q: Any, k: Any, v: Any, nothing: float,
        **scores: Any) -> None:  # fmt: skip
    """A sequence's result against the definition, under the error budget. nothing: the LSE of rows without keys."""
    expected, expected_lse, _ = one(q, k, v, **scores)
    same, same_lse, _ = one(q, k, v, **scores, exact=False)
    within(out, expected, same)
    if lse is not None:
        empty = expected_lse.isneginf()
        assert torch.equal(lse == nothing, empty)
        within(lse.masked_fill(empty, 0.0), expected_lse.masked_fill(empty, 0.0), same_lse.masked_fill(empty, 0.0), 8.0)


def within(ours: torch.Tensor, expected: torch.Tensor, same: torch.Tensor, least: float = 0.0) -> None:
    """|ours - expected| under the error budget; all finite. same: torch's own result in the dtype."""
    assert ours.shape == expected.shape
    assert torch.isfinite(ours).all()
    error, limit = largest(ours.detach().double() - expected), budget(ours.dtype, expected, same.detach(), least)
    assert error <= limit, f"error {error:.3g} beyond the budget {limit:.3g}"


def within_gradients(found: Any, tensors: Any, loss: Callable[..., torch.Tensor]) -> None:
    """Check gradients against those of loss(*tensors, exact=…), in float64 and in the tensors' dtype."""
    results = []
    for exact in (True, False):
        leaves = [(t.detach().double() if exact else t.detach().clone()).requires_grad_() for t in tensors]
        loss(*leaves, exact=exact).backward()
        results.append([leaf.grad for leaf in leaves])
    for ours, right, same in zip(found, *results, strict=True):
        within(ours, right, same)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def beginnings(lengths: Sequence[int]) -> torch.Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


def strided(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers in a tensor that is no contiguous one: every second column of a wider one."""
    return torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float32).to(dtype)[..., ::2]
