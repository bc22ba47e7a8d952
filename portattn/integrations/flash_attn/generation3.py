"""Calls with flash_attn_interface's arguments: what the functions of generation 3 share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from portattn.api import autocast, ops
from portattn.errors import ArgumentError
from portattn.integrations.flash_attn.options import (
    FLOATS,
    check_bool,
    check_dtypes,
    forward_only,
    repeated_bits,
    splits_of,
)
from portattn.integrations.flash_attn.probabilities import ScoreArguments
from portattn.schema.tensors import KV_FORMAT
from portattn.validate.checks import Number, as_plain, check_dense


def check_hints(op: str, num_splits: Any, pack_gqa: Any, attention_chunk: Any, sm_margin: Any) -> None:
    """Check the hints to FlashAttention-3's kernels and the size of a chunk. Raises ArgumentError."""
    splits_of(op, num_splits)
    if pack_gqa is not None:
        check_bool(op, "pack_gqa", pack_gqa)
    if type(as_plain(attention_chunk)) is not int or attention_chunk < 0:
        limit = "must be an integer ≥ 0, the keys of a chunk, or 0 for no chunks"
        raise ArgumentError(op, "attention_chunk", attention_chunk, limit)
    if type(sm_margin) is not int or sm_margin != 0:
        raise ArgumentError(op, "sm_margin", sm_margin, "must be 0: kernels leave no part of the device free")


def dense(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None,
    descales: tuple[torch.Tensor | None, ...],
    scores: ScoreArguments,
    deterministic: bool,
    return_attn_probs: bool,
) -> Any:
    """out (B, Sq, Hq, Dv); with return_attn_probs, (out, lse). Raises ArgumentError."""
    check_dtypes(op, FLOATS, q=q, k=k, v=v, **({} if qv is None else {"qv": qv}))
    block = repeated_bits(op, deterministic)
    wanted = check_bool(op, "return_attn_probs", return_attn_probs)
    q, k, scale = with_qv(op, q, k, v, qv, scores.scale)
    q_scale, k_scale, v_scale = descales
    attend = functools.partial(
        ops.attention, q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=wanted, layout="bshd",
        **scores.arguments() | {"scale": scale},
    )  # fmt: skip
    with block:
        return by_dtype(op, attend, q, k, v)


def by_dtype(op: str, attend: Callable[[], Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Run a call; of float8 tensors, which have no gradient, its forward pass alone."""
    return forward_only((op, "q.dtype", q.dtype), attend, q, k, v) if q.dtype in KV_FORMAT else attend()


def with_qv(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor | None, scale: Number | None
) -> tuple[torch.Tensor, torch.Tensor, Number | None]:
    """Queries and keys whose products are q·k + qv·v, and the scale. Raises ArgumentError."""
    if qv is None:
        return q, k, scale
    for name, tensor in (("q", q), ("k", k), ("v", v), ("qv", qv)):
        check_dense(op, name, tensor)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            given = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ArgumentError(op, name, given, "must be of float16, bfloat16 or float32 with qv")
        # Put beside each other they would be promoted without a word. Autocast's dtype is that of all.
        if tensor.dtype != q.dtype and (name == "qv" or not autocast.is_on(q)):
            raise ArgumentError(op, f"{name}.dtype", tensor.dtype, f"must be q's, {q.dtype}")
        if tensor.device != q.device:
            raise ArgumentError(op, f"{name}.device", str(tensor.device), f"must be q's, {q.device}")
        if tensor.ndim != q.ndim or not tensor.ndim:
            raise ArgumentError(op, f"{name}.shape", tuple(tensor.shape), "must have q's axes, head_dim the last")
    if k.shape[:-1] != v.shape[:-1]:
        limit = f"must be k's but for head_dim, {(*k.shape[:-1], v.shape[-1])}"
        raise ArgumentError(op, "v.shape", tuple(v.shape), limit)
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        limit = f"must be q's with v's head_dim, {(*q.shape[:-1], v.shape[-1])}, {q.dtype}"
        raise ArgumentError(op, "qv", (tuple(qv.shape), qv.dtype), limit)
    width = q.shape[-1] + v.shape[-1]
    return torch.cat((q, qv), -1), torch.cat((k, v), -1), width**-0.5 if scale is None else scale
