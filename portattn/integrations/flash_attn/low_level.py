"""flash_attn's forward and backward passes without autograd, for code that joins them (ring attention)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from portattn.api import backward
from portattn.api.signatures import request_of
from portattn.config import current
from portattn.errors import ArgumentError
from portattn.integrations.flash_attn.core import (
    Packing,
    attend,
    check_memory,
    check_tensors,
    lengths_of,
    rename_errors,
    repeated_bits,
    scores_of,
    shape_of,
    size_of,
    splits_of,
)
from portattn.integrations.flash_attn.kvcache_checks import places
from portattn.validate.checks import Number, check_dense, check_share
from portattn.validate.values import cu_seqlens, reads


@dataclass(frozen=True)
class UsedRows:
    """Valid rows of packed sequences, and the sequences that they make up."""

    given: torch.Tensor
    used: torch.Tensor
    beginnings: torch.Tensor

    def packed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the valid rows of (T, ...), one after the other; rows behind them are arbitrary."""
        if not rows.shape[0]:
            return rows
        sequence, within = places(self.beginnings, rows.shape[0])
        return rows[(self.given[sequence] + within).clamp(0, rows.shape[0] - 1)]

    def restored(self, rows: torch.Tensor, empty: float) -> torch.Tensor:
        """Return results (T, ...) in their rows' places, with `empty` in invalid rows."""
        if not rows.shape[0]:
            return rows
        at = torch.arange(rows.shape[0], device=rows.device)
        sequence, within = places(self.given, rows.shape[0])
        counts = (within < self.used[sequence]) & (at < self.given[-1])
        found = rows[(self.beginnings[sequence] + within).clamp(0, rows.shape[0] - 1)]
        return torch.where(counts.view(-1, *[1] * (rows.ndim - 1)), found, empty)


def used_rows(op: str, side: str, beginnings: Any, used: Any, rows: torch.Tensor) -> UsedRows | None:
    """Check seqused_* and return its rows, or None if all rows count; `rows` is the packed tensor (T, ...)."""
    if used is None:
        return None
    check_dense(op, f"seqused_{side}", used)
    lengths, name = lengths_of(op, f"cu_seqlens_{side}", beginnings), f"seqused_{side}"
    if not isinstance(used, torch.Tensor) or used.dtype != torch.int32 or used.shape != lengths.shape:
        given = (tuple(used.shape), used.dtype) if isinstance(used, torch.Tensor) else type(used).__name__
        raise ArgumentError(op, name, given, f"must be an int32 torch.Tensor of shape (batch,), {tuple(lengths.shape)}")
    if used.device != lengths.device:
        raise ArgumentError(op, f"{name}.device", str(used.device), f"must be cu_seqlens_{side}'s, {lengths.device}")
    if not torch.compiler.is_dynamo_compiling() and reads(current(), used):
        total = rows.shape[0] if rows.ndim else 0
        if beginnings.shape[0]:  # the operation sees what counts alone, which begins at 0 whatever was given
            cu_seqlens(op, side, beginnings, total, total)
        for index, (value, length) in enumerate(zip(used.tolist(), lengths.tolist(), strict=True)):
            if not 0 <= value <= length:
                raise ArgumentError(op, f"{name}[{index}]", value, f"must be in 0..{length}, the sequence's rows")
    used = torch.minimum(used.clamp(min=0), lengths)
    return UsedRows(beginnings, used, torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0)))


USE_TRITON_ROCM = os.environ.get("FLASH_ATTENTION_TRITON_AMD_ENABLE", "FALSE") == "TRUE"
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@rename_errors()
@torch.no_grad()
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: Number,
    softmax_scale: Number | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: Number,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> Four:
    """Return (out, lse, S_dmask, rng_state) of q (B, Sq, Hq, D), k and v; the backward pass takes rng_state."""
    op = "_flash_attn_forward"
    scores = scores_of(op, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    return _with_state(attend(op, q, k, v, dropout_p, scores, None, True, return_softmax))


@rename_errors(page_table="block_table", seqlens_k="cu_seqlens_k", k_pages="k", v_pages="v")
@torch.no_grad()
def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: Number,
    softmax_scale: Number | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Four:
    """Return (out, lse, S_dmask, rng_state) of packed q (Tq, Hq, D), k and v, or of pages with block_table."""
    op = "_flash_attn_varlen_forward"
    scores = scores_of(op, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    if leftpad_k is not None:
        raise ArgumentError(op, "leftpad_k", shape_of(leftpad_k), "is not taken: flash_attn_with_kvcache has it")
    if block_table is not None and (splits_of(op, num_splits) or 1) > 1:
        raise ArgumentError(op, "num_splits", num_splits, "num_splits > 1 is not supported over pages")
    used = seqused_k
    if block_table is None:
        check_tensors(op, k=k, v=v)
        used, keys = None, used_rows(op, "k", cu_seqlens_k, seqused_k, k)
        if keys is not None:
            k, v, cu_seqlens_k = keys.packed(k), keys.packed(v), keys.beginnings
    packing = Packing((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), block_table, used)
    return _with_state(attend(op, q, k, v, dropout_p, scores, packing, True, return_softmax))


def _with_state(found: Any) -> Four:
    out, lse, signed, seed = found
    return out, lse, signed, out.new_zeros(1, dtype=torch.int64) if seed is None else seed


@rename_errors(dropout_seed="rng_state")
@torch.no_grad()
def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: Number,
    softmax_scale: Number | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: Number,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write dq, dk and dv (None: unwanted), and return rowsum(dout·out); dropout needs the forward's rng_state."""
    op = "_flash_attn_backward"
    scores = scores_of(op, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    given = {"q": q, "k": k, "v": v, "layout": "bshd"}
    return _gradients(
        op, "attention", given | _dropout(op, dropout_p, rng_state) | scores.arguments(), dout, out, softmax_lse,
        {"q": dq, "k": dk, "v": dv}, deterministic,
    )  # fmt: skip


@rename_errors(dropout_seed="rng_state")
@torch.no_grad()
def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: Number,
    softmax_scale: Number | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: Number,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Write the gradients of packed sequences to dq, dk and dv, and return the row sums of dout·out, (Hq, Tq)."""
    op = "_flash_attn_varlen_backward"
    scores = scores_of(op, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given |= {"max_seqlen_q": size_of(max_seqlen_q), "max_seqlen_k": size_of(max_seqlen_k)}
    return _gradients(
        op, "varlen_attention", given | _dropout(op, dropout_p, rng_state) | scores.arguments(), dout, out, softmax_lse,
        {"q": dq, "k": dk, "v": dv}, deterministic,
    )  # fmt: skip


def _dropout(op: str, dropout_p: Number, rng_state: torch.Tensor | None) -> dict[str, Any]:
    dropout_p = check_share(op, dropout_p)
    if dropout_p and rng_state is None:
        limit = "must be the rng_state that the forward pass returned: dropout_p > 0, and a new one drops other numbers"
        raise ArgumentError(op, "rng_state", None, limit)
    return {"dropout_p": dropout_p, "dropout_seed": rng_state if dropout_p else None}


def _gradients(
    op: str, operation: str, given: Mapping[str, Any], dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    into: Mapping[str, torch.Tensor | None], deterministic: Any,
) -> torch.Tensor:  # fmt: skip
    """Write gradients from the forward pass's results; return the row sums of dout·out, laid out like the LSE."""
    check_tensors(op, dout=dout, q=given["q"], k=given["k"], v=given["v"], out=out, softmax_lse=lse)
    memories = {name: memory for name, memory in into.items() if memory is not None}
    for name, memory in memories.items():
        check_memory(op, f"d{name}", memory, name, given[name])
    parts = request_of(operation, **given, return_lse=True).parts
    lse = torch.where(torch.isposinf(lse), -torch.inf, lse)
    # `kernel_backward` ignores out and LSE where no kernel runs. In ring attention these are of more keys than k has.
    with repeated_bits(op, deterministic):
        made = backward.gradients(operation, *parts, out, lse, dout, None, list(memories), "reference")
    assert made is not None  # the reference takes every call
    for name, memory in memories.items():
        memory.copy_(made[name])
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


@torch.no_grad()
def _into(op: str, out: Any, found: Four) -> Four:
    if out is None:
        return found
    check_memory(op, "out", out, "the result", found[0])
    return (out.copy_(found[0]), *found[1:])


@rename_errors()
def fwd(
    q: Any, k: Any, v: Any, out: Any, alibi: Any, dropout_p: Number, scale: float, causal: bool, left: int, right: int,
    softcap: Number, return_softmax: bool, generator: None,
) -> Four:  # fmt: skip
    _check_no_generator("fwd", generator)
    found = _flash_attn_forward(q, k, v, dropout_p, scale, causal, left, right, softcap, alibi, return_softmax)
    return _into("fwd", out, found)


@rename_errors()
def varlen_fwd(
    q: Any, k: Any, v: Any, out: Any, cu_q: Any, cu_k: Any, seqused_k: Any, leftpad_k: Any, block_table: Any,
    alibi: Any, max_q: int, max_k: int, dropout_p: Number, scale: float, zero_tensors: bool, causal: bool, left: int,
    right: int, softcap: Number, return_softmax: bool, generator: None, num_splits: int = 0,
) -> Four:  # fmt: skip
    _check_no_generator("varlen_fwd", generator)
    found = _flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, scale, causal, left, right, softcap, alibi, return_softmax,
        block_table, leftpad_k, seqused_k, zero_tensors, num_splits,
    )  # fmt: skip
    return _into("varlen_fwd", out, found)


@rename_errors()
def bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, alibi: Any, dropout_p: Number,
    scale: float, causal: bool, left: int, right: int, softcap: Number, deterministic: bool, generator: None,
    rng_state: Any,
) -> Four:  # fmt: skip
    """Run `_flash_attn_backward`, with the extension's arguments. Returns dq, dk, dv and the row sums."""
    _check_no_generator("bwd", generator)
    dq, dk, dv = (_or_new(memory, like) for memory, like in ((dq, q), (dk, k), (dv, v)))
    rows = _flash_attn_backward(
        dout, q, k, v, out, lse, dq, dk, dv, dropout_p, scale, causal, left, right, softcap, alibi, deterministic,
        rng_state,
    )  # fmt: skip
    return dq, dk, dv, rows


@rename_errors()
def varlen_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, cu_q: Any, cu_k: Any, alibi: Any,
    max_q: int, max_k: int, dropout_p: Number, scale: float, zero_tensors: bool, causal: bool, left: int, right: int,
    softcap: Number, deterministic: bool, generator: None, rng_state: Any,
) -> Four:  # fmt: skip
    """Run `_flash_attn_varlen_backward`, with the extension's arguments. Returns dq, dk, dv and the row sums."""
    _check_no_generator("varlen_bwd", generator)
    dq, dk, dv = (_or_new(memory, like) for memory, like in ((dq, q), (dk, k), (dv, v)))
    rows = _flash_attn_varlen_backward(
        dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, max_q, max_k, dropout_p, scale, causal, left, right, softcap,
        alibi, deterministic, rng_state, zero_tensors,
    )  # fmt: skip
    return dq, dk, dv, rows


def _or_new(memory: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like) if memory is None else memory


def _check_no_generator(op: str, generator: Any) -> None:
    """Raise ArgumentError for a generator: dropout draws from torch's own."""
    if generator is not None:
        raise ArgumentError(op, "generator", shape_of(generator), "the `generator` argument is no longer supported")


# The functions of flash_attn's extension, which has other argument orders.
flash_attn_gpu = SimpleNamespace(fwd=fwd, varlen_fwd=varlen_fwd, bwd=bwd, varlen_bwd=varlen_bwd)
