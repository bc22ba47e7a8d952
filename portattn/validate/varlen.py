"""Calls of varlen_attention, over packed sequences."""

from __future__ import annotations

from typing import Any

import torch

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.schema.call import Call
from portattn.schema.problem_limits import Op
from portattn.schema.symbolic_int import least
from portattn.validate import values
from portattn.validate.checks import (
    as_tensor,
    check_equal,
    check_int32,
    check_size,
    check_tensor,
    check_width,
)
from portattn.validate.features import Features, Scores, build
from portattn.validate.quantized import Operands, ScaleShapes, dtypes_of

OP: Op = "varlen_attention"
AXES = ("tokens", "heads", "head_dim")


def beginnings(op: str, name: str, cu_seqlens: object, device: torch.device) -> int:
    """Check a (B + 1,) int32 tensor of sequences' beginnings, and return B."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        shape = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        hint = as_tensor(name, cu_seqlens, ", dtype=torch.int32") if isinstance(cu_seqlens, (list, tuple)) else ""
        raise ArgumentError(op, name, shape, f"must be an int32 torch.Tensor of shape (batch + 1,){hint}")
    check_int32(op, name, cu_seqlens, tuple(cu_seqlens.shape), "(batch + 1,)", device)
    return cu_seqlens.shape[0] - 1


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return (T, H, D) as the (1, H, T, D) view that kernels take."""
    return tensor.transpose(0, 1)[None]


def varlen_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    settings: Settings,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **asked: Any,
) -> Call:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(OP, name, tensor, AXES, dtypes_of(OP))
    differentiable = (q, k, v, q_scale, k_scale, v_scale)  # as given: float8 is read as int8, which has no gradients
    operands = Operands(OP, q, k, v, out_dtype)
    q, k, v = operands.stored(q, k, v)
    head_dim = q.shape[2]
    check_equal(OP, "k's head_dim", k.shape[2], "q's", head_dim)
    check_width(OP, "q", head_dim)
    check_width(OP, "v", v.shape[2])
    check_equal(OP, "v's heads", v.shape[1], "k's", k.shape[1])
    check_equal(OP, "v's tokens", v.shape[0], "k's", k.shape[0])
    batch = beginnings(OP, "cu_seqlens_q", cu_seqlens_q, q.device)
    batch_k = beginnings(OP, "cu_seqlens_k", cu_seqlens_k, q.device)
    check_equal(OP, "cu_seqlens_k's size", batch_k + 1, "cu_seqlens_q's", batch + 1)
    check_size(OP, "max_seqlen_q", max_seqlen_q)
    check_size(OP, "max_seqlen_k", max_seqlen_k)
    found = Features(OP, q.device, operands.dtype, asked, head_dim)
    found.check_numbers()
    axes = ", ".join(AXES[:2])
    by_row, by_key = (
        ScaleShapes(batch, k.shape[1], tuple(rows.shape[:2]), axes, swapped=True, packed=True) for rows in (q, k)
    )
    kv_scales, scales = operands.scales({"q": q_scale, "k": k_scale, "v": v_scale}, {"q": by_row, "k": by_key})
    if values.reads(settings, q):
        values.cu_seqlens(OP, "q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        values.cu_seqlens(OP, "k", cu_seqlens_k, k.shape[0], max_seqlen_k)
        for name, given in scales.items():
            ends = cu_seqlens_q if name == "q_scale" else cu_seqlens_k
            rows = values.Tokens(given.shape[-1], ends[-1:], None)  # rows after the last sequence do not count
            of = values.Tokens(max_seqlen_k, cu_seqlens_k.diff(), None) if given.ndim == 2 else rows
            values.scales(OP, {name: given}, of)
    # No sequence is longer than all rows: a larger max_seqlen changes nothing.
    seq_q, seq_k = least(max_seqlen_q, q.shape[0]), least(max_seqlen_k, k.shape[0])
    reach, invariant = q.shape[0] + k.shape[0], settings.invariant
    found.check_scored(Scores(batch, q.shape[1], seq_q, seq_k, reach, packed=True, invariant=invariant))
    return build(
        OP,
        {"q": packed(q), "k": packed(k), "v": packed(v)},
        found,
        problem={
            "batch": batch,
            "heads_q": q.shape[1],
            "heads_k": k.shape[1],
            "seq_q": seq_q,
            "seq_k": seq_k,
            "head_dim": head_dim,
            "head_dim_v": v.shape[2],
            "total_q": q.shape[0],
            "total_k": k.shape[0],
            "kv_format": operands.kind,
            "kv_scales": kv_scales,
        },
        call={"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **scales},
        differentiable=differentiable,
        dtype=operands.dtype,
    )
