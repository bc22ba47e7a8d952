"""Calls by the public functions on what `portattn.quantize` makes, against attention of what is stored in float64."""

from __future__ import annotations

import torch
from oracle64 import masked_attention
from support import Device

import portattn


def check_calls(
    device: Device, backend: str, method: str, causal: bool, near: float, given_near: float, lse_within: float = 1e-3,
    given_lse: tuple[float, float, float] = (0.5, 0.5, 0.5),
) -> None:  # fmt: skip
    """Three calls of other memory with other numbers and scales: each is near attention of what was given, and much
    nearer to that of what is stored. How near in the first, quantize decides, and how large scores are.

    near, given_near  the least cosine similarity to what is stored, and to what was given
    lse_within        how far the LSE may be from that of what is stored
    given_lse         and from that of what was given, in each call
    """
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 500, 128, device=device.name, dtype=torch.bfloat16).unbind()
    seen = torch.ones(len(q), 500, 500, dtype=torch.bool).tril(0 if causal else 500)
    for call in range(3):
        narrow = portattn.quantize(q, k, v, method)
        out, lse = portattn.attention(**narrow.arguments(), causal=causal, backend=backend, return_lse=True)
        assert portattn.last_plan().path == backend
        scales = (narrow.q_scale, narrow.k_scale, narrow.v_scale)
        tensors = (narrow.q, narrow.k, narrow.v)
        stored = [t if s is None else t.double() * _wide(s, t) for t, s in zip(tensors, scales, strict=True)]
        for given, ours, least, within in (
            (stored, lse, near, lse_within),
            ((q, k, v), narrow.corrected(lse), given_near, given_lse[call]),
        ):
            expected, exact_lse = masked_attention(*(t.double() for t in given), q.shape[-1] ** -0.5, seen)
            assert torch.cosine_similarity(out.double().flatten(), expected.flatten(), 0) >= least
            assert (ours - exact_lse).abs().max() < within
        q, k, v = q.flip(1), k.flip(1) * 2, v.flip(1)


def _wide(scale: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Scales of (B, H) or of (B, H, S), beside the tensor's numbers."""
    return scale.double().reshape(*scale.shape, *[1] * (tensor.dim() - scale.dim()))
