"""torch's scaled_dot_product_attention as a vendor path, with whichever kernel torch picks.

On NVIDIA: cuDNN's, FlashAttention's or the memory-efficient one. On AMD: AOTriton's or CK's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portattn.backends.base import VendorPath
from portattn.backends.refusal import first_refusal

if TYPE_CHECKING:
    import torch

    from portattn.call import Call
    from portattn.planner import Rejection
    from portattn.problem import Problem
    from portattn.target import Target

# Widest head of torch's FlashAttention kernels (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
# check_head_dim_size_flash). Wider ones are left to a path that holds Sq × Sk scores in memory.
MAX_HEAD_DIM = 256


class SdpaPath(VendorPath):
    """torch.nn.functional.scaled_dot_product_attention: dense attention, differentiable, with dropout.

    It returns no LSE and takes no per-sequence lengths.
    """

    name = "sdpa"

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        """Why SDPA cannot run the problem; None when it can. `target` makes no difference."""
        p = problem
        widest = max(p.head_dim, p.head_dim_v)
        given = [n for n in ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k") if getattr(p, n)]
        empty = [n for n in ("batch", "seq_q", "seq_k") if getattr(p, n) == 0]
        return first_refusal(
            self.name,
            (
                p.op != "attention",
                f"op is {p.op}, and SDPA takes no per-sequence lengths into a cache",
                "backend='reference'",
            ),
            (
                bool(given),
                f"{', '.join(given)} given, and SDPA takes no per-sequence lengths or padding",
                "pass sequences of one length, or backend='reference'",
            ),
            (
                p.return_lse,
                "return_lse is True, and SDPA returns no LSE",
                "return_lse=False, or backend='reference'",
            ),
            (
                widest > MAX_HEAD_DIM,
                f"head_dim is {widest}, and SDPA's fused kernels take up to {MAX_HEAD_DIM}; beyond, it holds "
                f"all {p.seq_q} × {p.seq_k} scores",
                "backend='reference' is blockwise",
            ),
            (
                bool(empty),
                f"{', '.join(empty)} is 0, and torch's fused kernels are not all defined for empty tensors",
                "backend='reference' gives zeros",
            ),
            (
                p.causal == "bottom_right" and p.seq_q > p.seq_k,
                f"causal bottom-right with seq_q {p.seq_q} over seq_k {p.seq_k} leaves the first "
                f"{p.seq_q - p.seq_k} rows without a key, and causal_lower_right is undefined there",
                "drop those rows, or backend='reference'",
            ),
        )

    def run(self, call: Call) -> tuple[torch.Tensor, None]:
        """(out (B, Hq, Sq, Dv) in q's dtype, None).

        Memory grows with Sq and Sk, except on ROCm with a bottom-right mask and Sq < Sk: Sq × Sk bytes.
        """
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        p = call.problem
        q, scale = _with_positive_scale(call.q, call.scale)
        k, v, gqa = call.k, call.v, p.group > 1
        if gqa and (p.dtype == "fp32" or p.head_dim != p.head_dim_v):
            # Here only the memory-efficient kernel serves, and it has no GQA: repeated heads cost group × (K + V),
            # SDPA's fall-back would hold Sq × Sk scores of every head.
            k, v, gqa = k.repeat_interleave(p.group, dim=1), v.repeat_interleave(p.group, dim=1), False
        # Fused kernels need rows that are contiguous.
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        mask: dict[str, Any] = {}
        if p.causal == "top_left" or (p.causal == "bottom_right" and p.seq_q == p.seq_k):
            mask = {"is_causal": True}
        elif p.causal == "bottom_right" and p.seq_q > 1:  # a single last row sees every key
            mask = {"attn_mask": _lower_right(p, q.device, hip=torch.version.hip is not None)}
        out = scaled_dot_product_attention(q, k, v, dropout_p=call.dropout_p, scale=scale, enable_gqa=gqa, **mask)
        return out, None


def _lower_right(p: Problem, device: torch.device, *, hip: bool) -> torch.Tensor:
    """Bottom-right causal mask (Sq, Sk), Sq < Sk: torch's own marker, or on ROCm a boolean mask, True = attend."""
    import torch
    from torch.nn.attention.bias import causal_lower_right

    if hip:
        # torch passes the marker to its flash kernel as `is_causal`, which AOTriton aligns at the top left
        # (ROCm/aotriton PR 55): silently another mask.
        return torch.ones(p.seq_q, p.seq_k, dtype=torch.bool, device=device).tril(p.seq_k - p.seq_q)
    return causal_lower_right(p.seq_q, p.seq_k)


def _with_positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """The same scores with a positive scale.

    The fused 16-bit kernels take a row's maximum before they scale: a scale of 0 or less gives NaN (seen with torch
    2.11 on an H200).
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
