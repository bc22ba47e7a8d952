"""Calls of dispatch_attention_fn, and what is right: attention by its definition in float64, in diffusers' layout."""

import math
from typing import Any

import torch

from portattn.testing.tolerance import budget, largest


def dispatch(backend: Any, *tensors: torch.Tensor, **named: Any) -> Any:
    """A call as models make it; return_lse as attention_kwargs have it. backend: a name, or a Registration."""
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    member = AttentionBackendName(getattr(backend, "name", backend))
    if "return_lse" in named:
        named["attention_kwargs"] = {"return_lse": named.pop("return_lse")}
    return dispatch_attention_fn(*tensors, backend=member, **named)


def definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None,
    is_causal: bool = False, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse), (B, Sq, Hq, Dv) and (B, Sq, Hq), in the dtype of the tensors. mask broadcasts to (B, Hq, Sq, Sk)."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    idle = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(idle, 0.0), -1).masked_fill(idle, 0.0)
    return (weights @ v).transpose(1, 2), lse.transpose(1, 2)


def assert_right(ours: torch.Tensor, same: torch.Tensor, right: torch.Tensor) -> None:
    """The rule of all tests: max|ours - right| ≤ 2 · max|same dtype - right| + tiny, and no NaN."""
    assert ours.shape == right.shape, (ours.shape, right.shape)
    right = right.detach().double().cpu()
    ours, same = ours.detach().double().cpu(), same.detach().cpu()
    assert not ours.isnan().any()
    assert largest(ours - right) <= budget(same.dtype, right, same.double()), largest(ours - right)


def qkv(
    *, batch: int = 2, rows: int = 19, keys: int = 23, heads: int = 4, heads_k: int = 4, width: int = 16,
    dtype: torch.dtype = torch.float32, device: str = "cpu", requires_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """query (B, Sq, Hq, D), key and value (B, Sk, Hk, D); not contiguous, as a model's slices are."""

    def numbers(length: int, count: int) -> torch.Tensor:
        whole = torch.randn(batch, length, count, 2 * width, dtype=torch.float64).to(device, dtype)
        return whole[..., ::2].detach().requires_grad_(requires_grad)

    return numbers(rows, heads), numbers(keys, heads_k), numbers(keys, heads_k)
