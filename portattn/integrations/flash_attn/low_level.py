"""The functions below flash_attn's public ones: its forward and backward passes apart from each other, for code that
joins them itself (ring attention). They make no graph.

flash_attn's extension has other argument orders: `flash_attn_gpu` has its functions `fwd`, `varlen_fwd`, `bwd` and
`varlen_bwd`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from portattn.api import backward, ops
from portattn.api.binding import named_arguments
from portattn.api.in_graph import new_seed
from portattn.api.request import request_of
from portattn.errors import ArgumentError
from portattn.integrations.flash_attn.calls import lengths_of, scores_of, shape_of, size_of
from portattn.integrations.flash_attn.options import (
    FlashAttnError,
    check_tensors,
    infinite,
    named,
    repeated_bits,
    splits_of,
)
from portattn.integrations.flash_attn.probabilities import signed_packed, signed_probabilities
from portattn.integrations.flash_attn.used import used_rows
from portattn.validate.checks import check_share

USE_TRITON_ROCM = os.environ.get("FLASH_ATTENTION_TRITON_AMD_ENABLE", "FALSE") == "TRUE"
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@named()
@torch.no_grad()
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> Four:
    """Return (out, lse, S_dmask, rng_state) of q (B, Sq, Hq, D), k and v; the backward pass takes rng_state."""
    op = "_flash_attn_forward"
    check_tensors(op, q=q, k=k, v=v)
    window = window_size_left, window_size_right
    scores = scores_of(op, softmax_scale, causal, window, softcap, alibi_slopes)
    dropout_p, seed = check_share(op, dropout_p), new_seed(q)
    out, lse = ops.attention(
        q, k, v, dropout_p=dropout_p, dropout_seed=seed if dropout_p else None, return_lse=True, layout="bshd",
        **scores.arguments(),
    )  # fmt: skip
    signed = out.new_empty(0)
    if return_softmax and dropout_p:
        signed = signed_probabilities(scores, q, k, dropout_p, seed)
    return out, infinite(lse), signed, seed


@named(page_table="block_table", seqlens_k="cu_seqlens_k", k_pages="k", v_pages="v")
@torch.no_grad()
def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
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
    check_tensors(op, q=q, k=k, v=v)
    window = window_size_left, window_size_right
    scores = scores_of(op, softmax_scale, causal, window, softcap, alibi_slopes)
    dropout_p, seed = check_share(op, dropout_p), new_seed(q)
    longest = size_of(max_seqlen_q), size_of(max_seqlen_k)
    if leftpad_k is not None:
        raise ArgumentError(op, "leftpad_k", shape_of(leftpad_k), "is not taken: flash_attn_with_kvcache has it")
    if block_table is not None:
        if (splits_of(op, num_splits) or 1) > 1:
            raise ArgumentError(op, "num_splits", num_splits, "num_splits > 1 is not supported over pages")
        if dropout_p:
            raise ArgumentError(op, "dropout_p", dropout_p, "is not taken with block_table")
        lengths = lengths_of(op, "cu_seqlens_k", cu_seqlens_k) if seqused_k is None else seqused_k
        out, lse = ops.paged_attention(
            q, k, v, block_table, lengths, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=longest[0], return_lse=True,
            **scores.arguments(),
        )  # fmt: skip
        return out, infinite(lse), out.new_empty(0), seed
    keys = used_rows(op, "k", cu_seqlens_k, seqused_k, k)
    if keys is not None:
        k, v, cu_seqlens_k = keys.packed(k), keys.packed(v), keys.beginnings
    out, lse = ops.varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, dropout_p=dropout_p, dropout_seed=seed if dropout_p else None,
        return_lse=True, **scores.arguments(),
    )  # fmt: skip
    signed = out.new_empty(0)
    if return_softmax and dropout_p:
        signed = signed_packed(scores, q, k, dropout_p, seed, (cu_seqlens_q, cu_seqlens_k), longest)
    return out, infinite(lse), signed, seed


@named()
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
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the gradients to dq, dk and dv, and return the row sums of dout·out, float32 (B, Hq, Sq).

    dq, dk, dv  like q, k and v; None where a gradient is not wanted
    rng_state   of the forward pass, where it has dropout
    """
    op = "_flash_attn_backward"
    window = window_size_left, window_size_right
    scores = scores_of(op, softmax_scale, causal, window, softcap, alibi_slopes)
    given = {"q": q, "k": k, "v": v, "layout": "bshd"}
    return _gradients(
        op, "attention", given | _dropout(dropout_p, rng_state) | scores.arguments(), dout, out, softmax_lse,
        {"q": dq, "k": dk, "v": dv}, deterministic,
    )  # fmt: skip


@named()
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
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Write the gradients of packed sequences to dq, dk and dv, and return the row sums of dout·out, (Hq, Tq)."""
    op = "_flash_attn_varlen_backward"
    window = window_size_left, window_size_right
    scores = scores_of(op, softmax_scale, causal, window, softcap, alibi_slopes)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given |= {"max_seqlen_q": size_of(max_seqlen_q), "max_seqlen_k": size_of(max_seqlen_k)}
    return _gradients(
        op, "varlen_attention", given | _dropout(dropout_p, rng_state) | scores.arguments(), dout, out, softmax_lse,
        {"q": dq, "k": dk, "v": dv}, deterministic,
    )  # fmt: skip


def _dropout(dropout_p: float, rng_state: torch.Tensor | None) -> dict[str, Any]:
    return {"dropout_p": dropout_p, "dropout_seed": rng_state if dropout_p else None}


def _gradients(
    op: str, operation: str, given: Mapping[str, Any], dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    into: Mapping[str, torch.Tensor | None], deterministic: Any,
) -> torch.Tensor:  # fmt: skip
    """Write gradients by what the forward pass gave; return the row sums of dout·out, laid out as the LSE is."""
    check_tensors(op, dout=dout, q=given["q"], k=given["k"], v=given["v"], out=out, softmax_lse=lse)
    asked = [name for name, memory in into.items() if memory is not None]
    parts = request_of(operation, named_arguments(operation)(**given, return_lse=True)).parts
    lse = torch.where(torch.isposinf(lse), -torch.inf, lse)
    with torch.no_grad(), repeated_bits(op, deterministic):
        made = backward.computed(operation, *parts, out, lse, dout, None, asked)
    for name in asked:
        into[name].copy_(made[name])  # type: ignore[union-attr]
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


def _fwd(
    q: Any, k: Any, v: Any, out: Any, alibi: Any, dropout_p: float, scale: float, causal: bool, left: int, right: int,
    softcap: float, return_softmax: bool, generator: None,
) -> Four:  # fmt: skip
    """Run `_flash_attn_forward`, with the extension's arguments."""
    _check_no_generator("fwd", generator)
    found = _flash_attn_forward(q, k, v, dropout_p, scale, causal, left, right, softcap, alibi, return_softmax)
    return found if out is None else (out.copy_(found[0]), *found[1:])


def _varlen_fwd(
    q: Any, k: Any, v: Any, out: Any, cu_q: Any, cu_k: Any, seqused_k: Any, leftpad_k: Any, block_table: Any,
    alibi: Any, max_q: int, max_k: int, dropout_p: float, scale: float, zero_tensors: bool, causal: bool, left: int,
    right: int, softcap: float, return_softmax: bool, generator: None, num_splits: int = 0,
) -> Four:  # fmt: skip
    """Run `_flash_attn_varlen_forward`, with the extension's arguments."""
    _check_no_generator("varlen_fwd", generator)
    found = _flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, scale, causal, left, right, softcap, alibi, return_softmax,
        block_table, leftpad_k, seqused_k, zero_tensors, num_splits,
    )  # fmt: skip
    return found if out is None else (out.copy_(found[0]), *found[1:])


def _bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, alibi: Any, dropout_p: float,
    scale: float, causal: bool, left: int, right: int, softcap: float, deterministic: bool, generator: None,
    rng_state: Any,
) -> Four:  # fmt: skip
    """Run `_flash_attn_backward`, with the extension's arguments. Returns dq, dk, dv and the row sums."""
    _check_no_generator("bwd", generator)
    dq, dk, dv = (_or_new(memory, like) for memory, like in ((dq, q), (dk, k), (dv, v)))
    rows = _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dq,
        dk,
        dv,
        dropout_p,
        scale,
        causal,
        left,
        right,
        softcap,
        alibi,
        deterministic,
        rng_state,
    )
    return dq, dk, dv, rows


def _varlen_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, cu_q: Any, cu_k: Any, alibi: Any,
    max_q: int, max_k: int, dropout_p: float, scale: float, zero_tensors: bool, causal: bool, left: int, right: int,
    softcap: float, deterministic: bool, generator: None, rng_state: Any,
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
    """Raise unless the slot is empty: torch's own generator decides what dropout drops."""
    if generator is not None:
        raise FlashAttnError(op, "generator", shape_of(generator), "the `generator` argument is no longer supported")


flash_attn_gpu = SimpleNamespace(fwd=_fwd, varlen_fwd=_varlen_fwd, bwd=_bwd, varlen_bwd=_varlen_bwd)
