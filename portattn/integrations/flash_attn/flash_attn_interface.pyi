# Written by scripts/typing_stubs.py from the signatures of the modules. Do not edit.
# fmt: off

from typing import Literal, overload

import torch

from portattn.integrations.flash_attn.core import WindowSize as WindowSize
from portattn.integrations.flash_attn.core import _get_block_size_n as _get_block_size_n
from portattn.integrations.flash_attn.low_level import USE_TRITON_ROCM as USE_TRITON_ROCM
from portattn.integrations.flash_attn.low_level import _flash_attn_backward as _flash_attn_backward
from portattn.integrations.flash_attn.low_level import _flash_attn_forward as _flash_attn_forward
from portattn.integrations.flash_attn.low_level import _flash_attn_varlen_backward as _flash_attn_varlen_backward
from portattn.integrations.flash_attn.low_level import _flash_attn_varlen_forward as _flash_attn_varlen_forward
from portattn.integrations.flash_attn.low_level import flash_attn_gpu as flash_attn_gpu
from portattn.validate.checks import Number as Number

@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: Number = 0.0,
    softmax_scale: Number | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False) -> torch.Tensor: ...
@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: Number = 0.0,
    softmax_scale: Number | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: Number, softmax_scale: Number | None,
    causal: bool, window_size: WindowSize, softcap: Number, alibi_slopes: torch.Tensor | None, deterministic: bool,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: Number = 0.0,
    softmax_scale: Number | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, dropout_p: Number = 0.0,
    softmax_scale: Number | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False) -> torch.Tensor: ...
@overload
def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, dropout_p: Number = 0.0,
    softmax_scale: Number | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, dropout_p: Number, softmax_scale: Number | None,
    causal: bool, window_size: WindowSize, softcap: Number, alibi_slopes: torch.Tensor | None, deterministic: bool,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, dropout_p: Number = 0.0,
    softmax_scale: Number | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, dropout_p: Number = 0.0, softmax_scale: Number | None = None,
    causal: bool = False, window_size: WindowSize = (-1, -1), softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False) -> torch.Tensor: ...
@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, dropout_p: Number = 0.0, softmax_scale: Number | None = None,
    causal: bool = False, window_size: WindowSize = (-1, -1), softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, dropout_p: Number, softmax_scale: Number | None, causal: bool,
    window_size: WindowSize, softcap: Number, alibi_slopes: torch.Tensor | None, deterministic: bool,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, dropout_p: Number = 0.0, softmax_scale: Number | None = None,
    causal: bool = False, window_size: WindowSize = (-1, -1), softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    block_table: torch.Tensor | None = None) -> torch.Tensor: ...
@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, *, return_attn_probs: Literal[True],
    block_table: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor, dropout_p: Number,
    softmax_scale: Number | None, causal: bool, window_size: WindowSize, softcap: Number,
    alibi_slopes: torch.Tensor | None, deterministic: bool, return_attn_probs: Literal[True],
    block_table: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False) -> torch.Tensor: ...
@overload
def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, *,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor, dropout_p: Number,
    softmax_scale: Number | None, causal: bool, window_size: WindowSize, softcap: Number,
    alibi_slopes: torch.Tensor | None, deterministic: bool,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int | torch.Tensor,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False) -> torch.Tensor: ...
@overload
def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int | torch.Tensor,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, *,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int | torch.Tensor,
    dropout_p: Number, softmax_scale: Number | None, causal: bool, window_size: WindowSize, softcap: Number,
    alibi_slopes: torch.Tensor | None, deterministic: bool,
    return_attn_probs: Literal[True]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int | torch.Tensor,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: Literal[False] = False) -> torch.Tensor: ...
@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None, num_splits: int = 0, *,
    return_softmax_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None,
    v: torch.Tensor | None, rotary_cos: torch.Tensor | None, rotary_sin: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None, cache_batch_idx: torch.Tensor | None, cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None, softmax_scale: Number | None, causal: bool, window_size: WindowSize,
    softcap: Number, rotary_interleaved: bool, alibi_slopes: torch.Tensor | None, num_splits: int,
    return_softmax_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, softmax_scale: Number | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: Number = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def maybe_contiguous(x: torch.Tensor | None) -> torch.Tensor | None: ...
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
__all__ = ['USE_TRITON_ROCM', '_flash_attn_backward', '_flash_attn_forward', '_flash_attn_varlen_backward',
    '_flash_attn_varlen_forward', '_get_block_size_n', '_wrapped_flash_attn_backward', '_wrapped_flash_attn_forward',
    '_wrapped_flash_attn_varlen_backward', '_wrapped_flash_attn_varlen_forward', 'flash_attn_func', 'flash_attn_gpu',
    'flash_attn_kvpacked_func', 'flash_attn_qkvpacked_func', 'flash_attn_varlen_func',
    'flash_attn_varlen_kvpacked_func', 'flash_attn_varlen_qkvpacked_func', 'flash_attn_with_kvcache',
    'maybe_contiguous']
