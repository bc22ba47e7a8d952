"""flash_attn's functions with attention sinks `s_aux`, which transformers looks for in a Hub kernel's parameters."""

from __future__ import annotations

from typing import Any

import torch

from portattn.integrations.flash_attn.core import (
    Packing,
    WindowSize,
    attention_of,
    check_bool,
    infinite,
    rename_errors,
    scores_of,
    splits_of,
)
from portattn.integrations.flash_attn.kvcache import attend_cached
from portattn.integrations.flash_attn.kvcache_checks import CachedCall
from portattn.validate.checks import Number

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
_SINKS = (torch.float16, torch.bfloat16, torch.float64)  # dtypes of a model's sinks that are not the queries'


@rename_errors(sinks="s_aux")
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Run flash_attn's flash_attn_func, with sinks s_aux (Hq,): one more score of each row, without a value.

    Returns:
        As portattn.integrations.flash_attn.flash_attn_func.
    """
    op = "flash_attn_func"
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return attention_of(op, q, k, v, dropout_p, scores, None, deterministic, return_attn_probs, _sinks(s_aux, q))


@rename_errors(sinks="s_aux", page_table="block_table", seqlens_k="cu_seqlens_k", k_pages="k", v_pages="v")
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Run flash_attn's flash_attn_varlen_func, with sinks s_aux (Hq,): one more score of each row, without a value.

    Returns:
        As portattn.integrations.flash_attn.flash_attn_varlen_func.
    """
    op = "flash_attn_varlen_func"
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, alibi_slopes)
    packing = Packing((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), block_table)
    return attention_of(op, q, k, v, dropout_p, scores, packing, deterministic, return_attn_probs, _sinks(s_aux, q))


@rename_errors(sinks="s_aux", page_table="block_table", k_pages="k_cache", v_pages="v_cache")
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Run flash_attn's flash_attn_with_kvcache, with sinks s_aux (Hq,): one more score of each row, without a value.

    Returns:
        As portattn.integrations.flash_attn.flash_attn_with_kvcache.
    """
    op = "flash_attn_with_kvcache"
    wanted = check_bool(op, "return_softmax_lse", return_softmax_lse)
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, alibi_slopes)
    found = attend_cached(
        CachedCall(
            op, "block_table", q, k_cache, v_cache, k, v, scores, rotary_cos, rotary_sin,
            check_bool(op, "rotary_interleaved", rotary_interleaved), cache_seqlens, cache_batch_idx, cache_leftpad,
            block_table, num_splits=splits_of(op, num_splits), return_lse=wanted, sinks=_sinks(s_aux, q),
        )
    )  # fmt: skip
    return (found[0], infinite(found[1])) if wanted else found


def _sinks(s_aux: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Return sinks in a dtype of the operations, since models keep them in their own; other values fail later."""
    if not isinstance(s_aux, torch.Tensor) or not isinstance(q, torch.Tensor) or s_aux.dtype == q.dtype:
        return s_aux
    return s_aux.to(torch.float32) if s_aux.dtype in _SINKS else s_aux
