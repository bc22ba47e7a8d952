"""Calls of dense and packed attention with flash_attn's arguments: what its functions of generation 2 share."""

from __future__ import annotations

import functools
from typing import Any

import torch

from portattn.api import ops
from portattn.api.in_graph import new_seed
from portattn.config import current
from portattn.errors import ArgumentError
from portattn.integrations.flash_attn.options import (
    check_bool,
    check_tensors,
    forward_only,
    infinite,
    repeated_bits,
    softcap_of,
    window_of,
)
from portattn.integrations.flash_attn.probabilities import Scores, signed_packed, signed_probabilities
from portattn.schema.tensors import INT32_MAX
from portattn.validate.checks import check_dense, check_share, check_size
from portattn.validate.values import cu_seqlens, reads

Returned = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def scores_of(
    op: str, scale: Any, causal: Any, window_size: Any, softcap: Any, alibi_slopes: Any, attention_chunk: int = 0
) -> Scores:
    """Check and translate. Raises ArgumentError."""
    is_causal = check_bool(op, "causal", causal)
    window = window_of(op, window_size, is_causal)
    return Scores(scale, is_causal, window, softcap_of(op, softcap), alibi_slopes, attention_chunk or None)


def dense(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    scores: Scores,
    deterministic: bool,
    return_attn_probs: bool,
    sinks: torch.Tensor | None = None,
) -> Returned:
    """out (B, Sq, Hq, Dv); with return_attn_probs, (out, lse, S_dmask)."""
    check_tensors(op, q=q, k=k, v=v)
    block = repeated_bits(op, deterministic, q, k, v, scores.alibi_slopes, sinks)
    wanted = check_bool(op, "return_attn_probs", return_attn_probs)
    dropout_p = check_share(op, dropout_p)
    seed = new_seed(q) if wanted and dropout_p else None
    with block:
        found: Any = ops.attention(
            q, k, v, dropout_p=dropout_p, dropout_seed=seed, sinks=sinks, return_lse=wanted, layout="bshd",
            **scores.arguments(),
        )  # fmt: skip
    if not wanted:
        return found
    out, lse = found
    if seed is None:
        return out, infinite(lse), out.detach().new_empty(0)
    return out, infinite(lse), signed_probabilities(scores, q.to(out.dtype), k.to(out.dtype), dropout_p, seed)


def varlen(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beginnings: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[Any, Any],
    dropout_p: float,
    scores: Scores,
    deterministic: bool,
    return_attn_probs: bool,
    block_table: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> Returned:
    """out (Tq, Hq, Dv); with return_attn_probs, (out, lse, S_dmask). With block_table keys and values are pages."""
    check_tensors(op, q=q, k=k, v=v)
    block = repeated_bits(op, deterministic, q, k, v, scores.alibi_slopes, sinks)
    wanted = check_bool(op, "return_attn_probs", return_attn_probs)
    dropout_p = check_share(op, dropout_p)
    longest_q, longest_k = (size_of(size) for size in longest)
    seed = new_seed(q) if wanted and dropout_p else None
    found: Any
    if block_table is not None:
        if dropout_p:
            limit = "is not taken with block_table: paged_attention has no dropout"
            raise ArgumentError(op, "dropout_p", dropout_p, limit)
        lengths = _paged_lengths(op, beginnings[1], longest_k)
        attend = functools.partial(
            ops.paged_attention, q, k, v, block_table, lengths, cu_seqlens_q=beginnings[0], max_seqlen_q=longest_q,
            sinks=sinks, return_lse=wanted, **scores.arguments(),
        )  # fmt: skip
        about = op, "block_table", shape_of(block_table)
        found = forward_only(about, attend, q, k, v, scores.alibi_slopes, sinks)
    else:
        with block:
            found = ops.varlen_attention(
                q, k, v, *beginnings, longest_q, longest_k, dropout_p=dropout_p, dropout_seed=seed, sinks=sinks,
                return_lse=wanted, **scores.arguments(),
            )  # fmt: skip
    if not wanted:
        return found
    out, lse = found
    if seed is None:
        return out, infinite(lse), out.detach().new_empty(0)
    narrow = q.to(out.dtype), k.to(out.dtype)
    return out, infinite(lse), signed_packed(scores, *narrow, dropout_p, seed, beginnings, (longest_q, longest_k))


def _paged_lengths(op: str, beginnings: Any, longest: Any) -> torch.Tensor:
    """(B,) int32 of cu_seqlens_k. Pages need neither its first entry nor max_seqlen_k, so nobody else checks them."""
    check_size(op, "max_seqlen_k", longest)
    lengths = lengths_of(op, "cu_seqlens_k", beginnings)
    if not torch.compiler.is_dynamo_compiling() and beginnings.shape[0] and reads(current(), beginnings):
        cu_seqlens(op, "k", beginnings, INT32_MAX, longest)
    return lengths


def shape_of(value: Any) -> Any:
    """Return the part of an argument that an error shows: a tensor's shape, anything else's type."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def size_of(size: Any) -> Any:
    """A length as an integer: a tensor of one element counts, as in flash_attn, and is read back."""
    return int(size) if isinstance(size, torch.Tensor) and size.numel() == 1 else size


def lengths_of(op: str, name: str, beginnings: Any) -> torch.Tensor:
    """(B,) int32 of a sequence's beginnings (B + 1,)."""
    check_dense(op, name, beginnings)
    if not isinstance(beginnings, torch.Tensor) or beginnings.ndim != 1 or beginnings.dtype != torch.int32:
        given = (tuple(beginnings.shape), beginnings.dtype) if isinstance(beginnings, torch.Tensor) else beginnings
        raise ArgumentError(op, name, given, "must be an int32 torch.Tensor of shape (batch + 1,)")
    return beginnings.diff()
