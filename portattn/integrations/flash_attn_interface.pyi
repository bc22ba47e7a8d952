# Written by scripts/typing_stubs.py from the signatures of the modules. Do not edit.
# fmt: off

from typing import Literal, overload

import torch

from portattn.integrations.flash_attn.core import WindowSize as WindowSize
from portattn.validate.checks import Number as Number

def flash_attn_combine(out_partial: torch.Tensor, lse_partial: torch.Tensor, out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: Number | None = None,
    causal: bool = False, qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0, softcap: Number = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: Literal[False] = False) -> torch.Tensor: ...
@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: Number | None = None,
    causal: bool = False, qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0, softcap: Number = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, *,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: Number | None, causal: bool,
    qv: torch.Tensor | None, q_descale: torch.Tensor | None, k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None, window_size: WindowSize, attention_chunk: int, softcap: Number, num_splits: int,
    pack_gqa: bool | None, deterministic: bool, sm_margin: int,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: Number | None = None,
    causal: bool = False, qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0, softcap: Number = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: Number | None = None, causal: bool = False,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
    window_size: WindowSize = (-1, -1), attention_chunk: int = 0, softcap: Number = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: Literal[False] = False) -> torch.Tensor: ...
@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: Number | None = None, causal: bool = False,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
    window_size: WindowSize = (-1, -1), attention_chunk: int = 0, softcap: Number = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, *,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: Number | None, causal: bool,
    q_descale: torch.Tensor | None, k_descale: torch.Tensor | None, v_descale: torch.Tensor | None,
    window_size: WindowSize, attention_chunk: int, softcap: Number, deterministic: bool, num_heads_q: int | None,
    sm_margin: int, return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: Number | None = None, causal: bool = False,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
    window_size: WindowSize = (-1, -1), attention_chunk: int = 0, softcap: Number = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0,
    return_attn_probs: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor,
    seqused_q: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None, softmax_scale: Number | None = None,
    causal: bool = False, qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0, softcap: Number = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: Literal[False] = False) -> torch.Tensor: ...
@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor,
    seqused_q: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None, softmax_scale: Number | None = None,
    causal: bool = False, qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0, softcap: Number = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, *,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor,
    seqused_q: torch.Tensor | None, seqused_k: torch.Tensor | None, softmax_scale: Number | None, causal: bool,
    qv: torch.Tensor | None, q_descale: torch.Tensor | None, k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None, window_size: WindowSize, attention_chunk: int, softcap: Number, num_splits: int,
    pack_gqa: bool | None, deterministic: bool, sm_margin: int,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor,
    seqused_q: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None, softmax_scale: Number | None = None,
    causal: bool = False, qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0, softcap: Number = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None, rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
    softmax_scale: Number | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0, softcap: Number = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None,
    sm_margin: int = 0, return_softmax_lse: Literal[False] = False) -> torch.Tensor: ...
@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None, rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
    softmax_scale: Number | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0, softcap: Number = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None,
    sm_margin: int = 0, *,
    return_softmax_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None,
    v: torch.Tensor | None, qv: torch.Tensor | None, rotary_cos: torch.Tensor | None, rotary_sin: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None, cache_batch_idx: torch.Tensor | None, cache_leftpad: torch.Tensor | None,
    page_table: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k_new: torch.Tensor | None,
    max_seqlen_q: int | torch.Tensor | None, rotary_seqlens: torch.Tensor | None, q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None, v_descale: torch.Tensor | None, softmax_scale: Number | None, causal: bool,
    window_size: WindowSize, attention_chunk: int, softcap: Number, rotary_interleaved: bool,
    scheduler_metadata: torch.Tensor | None, num_splits: int, pack_gqa: bool | None, sm_margin: int,
    return_softmax_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None, rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
    softmax_scale: Number | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0, softcap: Number = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None,
    sm_margin: int = 0, return_softmax_lse: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...
def get_scheduler_metadata(batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int,
    headdim: int, cache_seqlens: torch.Tensor, qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, page_size: int | None = None, max_seqlen_k_new: int = 0,
    causal: bool = False, window_size: WindowSize = (-1, -1), attention_chunk: int = 0, has_softcap: bool = False,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0) -> None: ...
__all__ = ['flash_attn_combine', 'flash_attn_func', 'flash_attn_qkvpacked_func', 'flash_attn_varlen_func',
    'flash_attn_with_kvcache', 'get_scheduler_metadata']
