"""torch's scaled_dot_product_attention, each of its fused kernels by itself."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as functional

from portattn.bench.cases import Case
from portattn.bench.contenders import Build, Contender
from portattn.bench.tensors import Tensors

KERNELS = {
    "sdpa-cudnn": "CUDNN_ATTENTION",
    "sdpa-flash": "FLASH_ATTENTION",
    "sdpa-efficient": "EFFICIENT_ATTENTION",
}


def available() -> bool:
    return True


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    """Lengths and chosen tokens are masks to it, which are made before the timed call. It knows no pages."""
    if case.op not in ("attention", "decode_attention", "sparse_attention"):
        return {}
    if case.page_size or case.windowed or case.magicpig or (case.causal != "none" and case.seq_q != case.seq_k):
        return {}
    return {name: functools.partial(_build, kernel, case, t) for name, kernel in KERNELS.items()}


def _build(kernel: str, case: Case, t: Tensors) -> Contender:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend, is_causal = getattr(SDPBackend, kernel), case.causal != "none"
    mask = _mask(case, t)
    if mask is not None and is_causal:  # it takes one or the other
        rows = torch.arange(case.seq_q, device=t.q.device)
        mask, is_causal = mask & (rows[None, :] <= rows[:, None]), False
    grouped = case.group > 1

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                t.q, t.k, t.v, attn_mask=mask, is_causal=is_causal, scale=case.scale, enable_gqa=grouped
            )

    return Contender(run)


def _mask(case: Case, t: Tensors) -> torch.Tensor | None:
    """Which keys a query may attend, but for the causal mask: broadcasts to (B, Hq, Sq, Sk)."""
    if t.indices is not None:
        mask = torch.zeros(case.batch, case.heads_q, case.seq_k, dtype=torch.bool, device=t.q.device)
        return mask.scatter_(2, t.indices.long(), True)[:, :, None]
    if t.seqlens_k is None:
        return None
    keys = torch.arange(case.seq_k, device=t.q.device)
    return (keys[None, :] < t.seqlens_k[:, None])[:, None, None, :]
