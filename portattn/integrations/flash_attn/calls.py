"""Calls of dense and packed attention with flash_attn's arguments: what its functions of generation 2 share."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from portattn.api import ops
from portattn.api.graph_call import new_seed
from portattn.config import current
from portattn.errors import ArgumentError
from portattn.integrations.flash_attn.options import (
    check_bool,
    check_dtypes,
    forward_only,
    infinite,
    repeated_bits,
    softcap_of,
    window_of,
)
from portattn.integrations.flash_attn.probabilities import ScoreArguments, signed_packed, signed_probabilities
from portattn.schema.tensors import INT32_MAX
from portattn.validate.checks import Number, as_int32, check_dense, check_share, check_size
from portattn.validate.values import cu_seqlens, reads

Returned = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def scores_of(
    op: str, scale: Any, causal: Any, window_size: Any, softcap: Any, alibi_slopes: Any, attention_chunk: int = 0
) -> ScoreArguments:
    """Check and translate. Raises ArgumentError."""
    is_causal = check_bool(op, "causal", causal)
    window = window_of(op, window_size, is_causal)
    return ScoreArguments(scale, is_causal, window, softcap_of(op, softcap), alibi_slopes, attention_chunk or None)


class Packing(NamedTuple):
    """Where packed sequences lie.

    beginnings   cu_seqlens of queries and of keys
    longest      max_seqlen of queries and of keys
    block_table  page ids (B, pages a sequence) if keys and values are pages
    lengths      keys of each sequence in its pages, (B,) int32; None for the differences of cu_seqlens_k
    """

    beginnings: tuple[torch.Tensor, torch.Tensor]
    longest: tuple[Any, Any]
    block_table: torch.Tensor | None = None
    lengths: torch.Tensor | None = None


def attend(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: Number,
    scores: ScoreArguments,
    packing: Packing | None,
    return_lse: bool,
    return_signed: bool,
    deterministic: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (out, lse, S_dmask, dropout's seed) of a dense call, or of a packed one if a packing is given.

    return_lse     whether the LSE is computed; it is None otherwise
    return_signed  whether S_dmask is computed; it has no elements otherwise, and is None without the LSE

    The seed is None without dropout, which leaves torch's generator as it is. Raises ArgumentError.
    """
    check_dtypes(op, q=q, k=k, v=v)
    block = repeated_bits(op, deterministic)
    dropout_p = check_share(op, dropout_p)
    seed = new_seed(q) if dropout_p else None
    given = {"sinks": sinks, "return_lse": return_lse, **scores.arguments()}
    longest = (0, 0) if packing is None else (size_of(packing.longest[0]), size_of(packing.longest[1]))
    found: Any
    if packing is not None and packing.block_table is not None:
        table, beginnings = packing.block_table, packing.beginnings
        if dropout_p:
            limit = "is not taken with block_table: paged_attention has no dropout"
            raise ArgumentError(op, "dropout_p", dropout_p, limit)
        lengths = _paged_lengths(op, beginnings[1], longest[1]) if packing.lengths is None else packing.lengths
        run = functools.partial(
            ops.paged_attention, q, k, v, table, lengths, cu_seqlens_q=beginnings[0], max_seqlen_q=longest[0], **given
        )
        found = forward_only((op, "block_table", shape_of(table)), run, q, k, v, scores.alibi_slopes, sinks)
    else:
        given |= {"dropout_p": dropout_p, "dropout_seed": seed}
        with block:
            if packing is None:
                found = ops.attention(q, k, v, layout="bshd", **given)
            else:
                found = ops.varlen_attention(q, k, v, *packing.beginnings, *longest, **given)
    if not return_lse:
        return found, None, None, seed
    out, lse = found
    if seed is None or not return_signed:
        return out, infinite(lse), out.detach().new_empty(0), seed
    narrow = q.to(out.dtype), k.to(out.dtype)  # autocast's dtype, in which the scores were computed
    if packing is None:
        signed = signed_probabilities(scores, *narrow, dropout_p, seed)
    else:
        signed = signed_packed(scores, *narrow, dropout_p, seed, packing.beginnings, longest)
    return out, infinite(lse), signed, seed


def attention_of(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: Number,
    scores: ScoreArguments,
    packing: Packing | None,
    deterministic: bool,
    return_attn_probs: bool,
    sinks: torch.Tensor | None = None,
) -> Returned:
    """Return out; with return_attn_probs, (out, lse, S_dmask). Raises ArgumentError."""
    wanted = check_bool(op, "return_attn_probs", return_attn_probs)
    found: Any = attend(op, q, k, v, dropout_p, scores, packing, wanted, wanted, deterministic, sinks)
    return found[:3] if wanted else found[0]


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
        hint = as_int32(name, beginnings.dtype) if isinstance(beginnings, torch.Tensor) else ""
        raise ArgumentError(op, name, given, f"must be an int32 torch.Tensor of shape (batch + 1,){hint}")
    return beginnings.diff()
