"""Attention by its definition, of whole sequences on one process: what calls over several ranks are compared with."""

import math
from typing import Any

import torch

NAMES = ("q", "k", "v", "sinks", "alibi_slopes")


def attended(length: int, causal: bool, window: tuple[int | None, int | None] | None, cu: Any) -> torch.Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    keep = torch.ones(length, length, dtype=torch.bool)
    left, right = window or (None, None)
    if causal:
        keep &= distance >= 0
    if left is not None:
        keep &= distance <= left
    if right is not None:
        keep &= distance >= -right
    if cu is not None:
        of = torch.bucketize(torch.arange(length), torch.tensor(cu), right=True)
        keep &= (of[:, None] == of) & (torch.arange(length) < cu[-1])[:, None] & (torch.arange(length) < cu[-1])
    return keep


def definition(case: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """{out, lse, and the gradients} of a case in a dtype.

    tensors  by name, (B, H, S, D) of float64; grad_out and grad_lse among them

    In less than float64, products are in the dtype and what comes on top of them in float32, as kernels compute."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    leaves = {n: tensors[n].clone().to(dtype if n in "qkv" else wide).requires_grad_() for n in NAMES if n in tensors}
    q, k, v = (leaves[name] for name in "qkv")
    length, group = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    cu = case.get("cu")
    keep = attended(length, case.get("causal", False), case.get("window"), cu)
    padding = torch.zeros(length, dtype=torch.bool) if cu is None else torch.arange(length) >= cu[-1]
    q, k, v = (tensor.masked_fill(padding[:, None], 0.0) for tensor in (q, k, v))
    scale = case.get("scale", 1 / math.sqrt(q.shape[3]))
    scores = (q @ k.transpose(2, 3)).to(wide) * scale
    if case.get("softcap"):
        scores = case["softcap"] * torch.tanh(scores / case["softcap"])
    if "alibi_slopes" in leaves:
        slopes = leaves["alibi_slopes"]
        distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
        if cu is not None and slopes.ndim == 2:
            of = torch.bucketize(torch.arange(length), torch.tensor(cu), right=True) - 1
            rows = slopes[of.clamp(max=len(cu) - 2)]  # (S, Hq)
            scores = scores - rows.T[None, :, :, None] * distance
        else:
            scores = scores - (slopes if slopes.ndim == 2 else slopes[None])[:, :, None, None] * distance
    scores = scores.masked_fill(~keep, -math.inf)
    if "sinks" in leaves:
        sink = leaves["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink.masked_fill(padding[:, None], -math.inf)], 3)
    nothing = torch.isneginf(scores).all(3)
    lse = torch.logsumexp(scores, 3)
    weights = torch.softmax(scores.masked_fill(nothing[..., None], 0.0), 3).masked_fill(nothing[..., None], 0.0)
    out = weights[..., :length].to(dtype) @ v
    loss = (out.to(wide) * tensors["grad_out"].to(dtype).to(wide)).sum()
    if "grad_lse" in tensors:
        loss = loss + (lse.masked_fill(nothing, 0.0) * tensors["grad_lse"].to(wide)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found = {"out": out.detach(), "lse": lse.detach()}
    return found | {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
