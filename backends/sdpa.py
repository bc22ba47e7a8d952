"""torch's scaled_dot_product_attention, with the kernel that torch picks (cuDNN, FlashAttention, …; AOTriton, CK)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portattn.planning.backend import VendorPath, dropout_check, features_check, first_refusal, op_check

if TYPE_CHECKING:
    import torch

    from portattn.schema.call import Call
    from portattn.schema.plan import Rejection
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target

# Widest head of torch's FlashAttention kernels (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
# check_head_dim_size_flash). Wider ones are left to a path that holds Sq × Sk scores in memory.
MAX_HEAD_DIM = 256

_ALIGNMENT = 16  # bytes that torch's fused kernels load at once


class SdpaPath(VendorPath):
    """torch's scaled_dot_product_attention: dense, differentiable, without LSE; bias and mask as `attn_mask`."""

    name = "sdpa"
    ops = ("attention",)
    takes = frozenset(
        {"causal", "causal_top_left", "bias", "mask", "needs_grad", "negative_scale", "gqa", "head_dim_v"}
    )

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p = problem
        widest = max(p.head_dim, p.head_dim_v)
        given = [n for n in ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k") if getattr(p, n)]
        empty = [n for n in ("batch", "seq_q", "seq_k") if getattr(p, n) == 0]
        masked = [n for n in ("bias", "mask") if getattr(p, n)]
        return first_refusal(
            self.name,
            op_check("SDPA", p, ("attention",), "takes dense tensors of one length, no cache and no packed sequences"),
            features_check("SDPA", p, takes=self.takes),
            dropout_check("SDPA", p),
            (
                bool(masked) and _hides(p),
                f"causal is {p.causal} beside {', '.join(masked)}, and SDPA takes one or the other: together they "
                f"would be a mask of all {p.seq_q} × {p.seq_k} scores",
                "fold the causal mask into the mask, or backend='reference'",
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
        """Return (out (B, Hq, Sq, Dv) in q's dtype, None).

        Memory grows with Sq and Sk, except Sq × Sk bytes on ROCm with a bottom-right mask and Sq < Sk. A bias or mask
        copies K and V and makes a few tensors of its own shape (not broadcast); a float32 bias on 16-bit tensors runs
        all in float32."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        p = call.problem
        q, scale = _with_positive_scale(call.q, call.scale)
        k, v, gqa = call.k, call.v, p.group > 1
        if p.causal == "top_left" and p.seq_k > p.seq_q:
            # What no query attends may be NaN, and torch's kernels multiply it by 0.
            k, v = k[:, :, : p.seq_q], v[:, :, : p.seq_q]
        idle = None
        given: dict[str, Any] = {}
        if p.bias or p.mask:
            keep = _attended(call)
            idle = ~keep.any(dim=3)
            k, v = _without_unseen(call, keep)
            given = {"attn_mask": _attn_mask(call, keep, idle)}
            if call.bias is not None and call.bias.dtype != q.dtype:
                # torch wants them alike, and 16 bits are too few: a bias of 100 would be off by 0.25 in bf16.
                q, k, v = q.float(), k.float(), v.float()
        elif p.causal == "top_left" or (p.causal == "bottom_right" and p.seq_q == p.seq_k):
            given = {"is_causal": True}
        elif _hides(p):
            given = {"attn_mask": _lower_right(p, q.device, hip=torch.version.hip is not None)}
        if gqa and (q.dtype is torch.float32 or p.head_dim != p.head_dim_v or p.bias or p.mask):
            # Here only the memory-efficient kernel serves, and it has no GQA: repeated heads cost group × (K + V),
            # SDPA's fall-back would hold Sq × Sk scores of every head.
            k, v, gqa = k.repeat_interleave(p.group, dim=1), v.repeat_interleave(p.group, dim=1), False
        q, k, v = (_aligned(t) for t in (q, k, v))
        bias = given.get("attn_mask")
        if bias is not None and bias.requires_grad and not (q.requires_grad or k.requires_grad or v.requires_grad):
            # torch 2.11's memory-efficient kernel keeps no LSE for a bias alone: "LSE is not correctly aligned".
            q = q.detach().requires_grad_()
        out = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=gqa, **given)
        return (out if idle is None else out.masked_fill(idle[..., None], 0.0)).to(call.q.dtype), None


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied unless its rows are contiguous and begin at multiples of 16 bytes.

    torch's memory-efficient kernel does not check addresses: rows of 25 fp16 elements gave NaN (torch 2.11, H200)."""
    import torch

    size = tensor.element_size()
    misplaced = tensor.device.type != "cpu" and (
        tensor.data_ptr() % _ALIGNMENT != 0 or any(s * size % _ALIGNMENT for s in tensor.stride()[:-1])
    )
    if tensor.stride(-1) == 1 and not misplaced:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _hides(p: Problem) -> bool:
    """Return whether a causal mask hides anything: a single last row sees every key."""
    return p.causal == "top_left" or (p.causal == "bottom_right" and p.seq_q > 1)


def _attended(call: Call) -> torch.Tensor:
    """Return the keys that bias and mask leave, bool (…, Sk); dimensions that both broadcast over are 1 long."""
    from portattn.schema.tensors import collapse_broadcast  # loads torch

    keep = None if call.bias is None else collapse_broadcast(call.bias) != float("-inf")
    if call.mask is not None:
        keep = collapse_broadcast(call.mask) if keep is None else keep & collapse_broadcast(call.mask)
    assert keep is not None
    return keep.expand(*keep.shape[:3], call.problem.seq_k)


def _attn_mask(call: Call, keep: torch.Tensor, idle: torch.Tensor) -> torch.Tensor:
    """Return bias and mask as SDPA takes them, contiguous in the last dimension: bool, or a term in bias's dtype.

    Rows that attend nothing, which torch does not document, attend everything, and `run` sets them to 0."""
    from portattn.schema.tensors import collapse_broadcast  # loads torch

    keep = (keep | idle[..., None]).contiguous()
    if call.bias is None:
        return keep
    return (
        collapse_broadcast(call.bias).masked_fill(idle[..., None], 0.0).masked_fill(~keep, float("-inf")).contiguous()
    )


def _without_unseen(call: Call, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V with 0 at keys that no query attends: they may hold NaN, which SDPA would spread."""
    p = call.problem
    seen = keep.any(dim=2)  # (B or 1, Hq or 1, Sk)
    if seen.shape[1] > 1:
        seen = seen.reshape(seen.shape[0], p.heads_k, p.group, p.seq_k).any(dim=2)
    return call.k.masked_fill(~seen[..., None], 0.0), call.v.masked_fill(~seen[..., None], 0.0)


def _lower_right(p: Problem, device: torch.device, *, hip: bool) -> torch.Tensor:
    """Return the bottom-right causal mask (Sq, Sk), Sq < Sk: torch's marker, or a boolean mask on ROCm."""
    import torch
    from torch.nn.attention.bias import causal_lower_right

    if hip:
        # torch passes the marker to its flash kernel as `is_causal`, which AOTriton aligns at the top left
        # (ROCm/aotriton PR 55): silently another mask.
        return torch.ones(p.seq_q, p.seq_k, dtype=torch.bool, device=device).tril(p.seq_k - p.seq_q)
    return causal_lower_right(p.seq_q, p.seq_k)


def _with_positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Return q and a scale above 0 with the same scores: fused 16-bit kernels give NaN otherwise (torch 2.11, H200)."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
