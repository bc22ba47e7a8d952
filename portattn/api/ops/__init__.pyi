# Written by scripts/typing_stubs.py from the signatures of the modules. Do not edit.
# fmt: off

from collections.abc import Callable
from typing import Literal, overload

import torch

from portattn.api.masks import BlockMask as BlockMask
from portattn.api.ops.write import append_kv as append_kv
from portattn.api.ops.write import indexer_logits as indexer_logits
from portattn.api.ops.write import topk_indices as topk_indices
from portattn.api.ops.write import write_pages as write_pages
from portattn.api.page_table import PageTable as PageTable
from portattn.api.prepare import explain as explain
from portattn.api.prepare import make_request as make_request
from portattn.api.prepare import plan as plan
from portattn.api.prepare import prepare as prepare
from portattn.api.request import Window as Window
from portattn.validate.checks import Number as Number

@overload
def decode_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seqlens_k: torch.Tensor | None, *,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None, leftpad_k: torch.Tensor | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    num_splits: int | None = None, return_lse: Literal[False] = False, layout: str = 'bhsd', backend: str | None = None,
    validate: bool | None = None) -> torch.Tensor: ...
@overload
def decode_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seqlens_k: torch.Tensor | None, *,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None, leftpad_k: torch.Tensor | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    num_splits: int | None = None, return_lse: Literal[True], layout: str = 'bhsd', backend: str | None = None,
    validate: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def decode_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seqlens_k: torch.Tensor | None, *,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None, leftpad_k: torch.Tensor | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    num_splits: int | None = None, return_lse: bool = False, layout: str = 'bhsd', backend: str | None = None,
    validate: bool | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def mla_attention(q_nope: torch.Tensor, q_rope: torch.Tensor | None, kv_pages: torch.Tensor,
    page_table: torch.Tensor | PageTable | None = None, seqlens_k: torch.Tensor | None = None, *, scale: Number,
    indices: torch.Tensor | None = None, topk_length: torch.Tensor | None = None, kv_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool | str = False,
    window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None, num_splits: int | None = None,
    return_lse: Literal[False] = False, layout: str = 'bhsd', backend: str | None = None,
    validate: bool | None = None) -> torch.Tensor: ...
@overload
def mla_attention(q_nope: torch.Tensor, q_rope: torch.Tensor | None, kv_pages: torch.Tensor,
    page_table: torch.Tensor | PageTable | None = None, seqlens_k: torch.Tensor | None = None, *, scale: Number,
    indices: torch.Tensor | None = None, topk_length: torch.Tensor | None = None, kv_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool | str = False,
    window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None, num_splits: int | None = None,
    return_lse: Literal[True], layout: str = 'bhsd', backend: str | None = None,
    validate: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def mla_attention(q_nope: torch.Tensor, q_rope: torch.Tensor | None, kv_pages: torch.Tensor,
    page_table: torch.Tensor | PageTable | None = None, seqlens_k: torch.Tensor | None = None, *, scale: Number,
    indices: torch.Tensor | None = None, topk_length: torch.Tensor | None = None, kv_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool | str = False,
    window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None, num_splits: int | None = None,
    return_lse: bool = False, layout: str = 'bhsd', backend: str | None = None,
    validate: bool | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def paged_attention(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: torch.Tensor | PageTable,
    seqlens_k: torch.Tensor | None = None, *, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None, v_block_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    num_splits: int | None = None, return_lse: Literal[False] = False, layout: str = 'bhsd', page_layout: str = 'phd',
    backend: str | None = None, validate: bool | None = None) -> torch.Tensor: ...
@overload
def paged_attention(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: torch.Tensor | PageTable,
    seqlens_k: torch.Tensor | None = None, *, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None, v_block_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    num_splits: int | None = None, return_lse: Literal[True], layout: str = 'bhsd', page_layout: str = 'phd',
    backend: str | None = None, validate: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def paged_attention(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: torch.Tensor | PageTable,
    seqlens_k: torch.Tensor | None = None, *, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None, v_block_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    num_splits: int | None = None, return_lse: bool = False, layout: str = 'bhsd', page_layout: str = 'phd',
    backend: str | None = None, validate: bool | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def sparse_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, indices: torch.Tensor,
    counts: torch.Tensor, *, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    page_table: torch.Tensor | PageTable | None = None, seqlens_k: torch.Tensor | None = None,
    log_weights: torch.Tensor | None = None, magicpig: tuple[int | torch.Tensor, int | torch.Tensor] | None = None,
    scale: Number | None = None, softcap: Number | None = None, alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, num_splits: int | None = None, return_lse: Literal[False] = False,
    layout: str = 'bhsd', page_layout: str = 'phd', backend: str | None = None,
    validate: bool | None = None) -> torch.Tensor: ...
@overload
def sparse_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, indices: torch.Tensor,
    counts: torch.Tensor, *, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    page_table: torch.Tensor | PageTable | None = None, seqlens_k: torch.Tensor | None = None,
    log_weights: torch.Tensor | None = None, magicpig: tuple[int | torch.Tensor, int | torch.Tensor] | None = None,
    scale: Number | None = None, softcap: Number | None = None, alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, num_splits: int | None = None, return_lse: Literal[True], layout: str = 'bhsd',
    page_layout: str = 'phd', backend: str | None = None,
    validate: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def sparse_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, indices: torch.Tensor,
    counts: torch.Tensor, *, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    page_table: torch.Tensor | PageTable | None = None, seqlens_k: torch.Tensor | None = None,
    log_weights: torch.Tensor | None = None, magicpig: tuple[int | torch.Tensor, int | torch.Tensor] | None = None,
    scale: Number | None = None, softcap: Number | None = None, alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, num_splits: int | None = None, return_lse: bool = False, layout: str = 'bhsd',
    page_layout: str = 'phd', backend: str | None = None,
    validate: bool | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, block_mask: BlockMask | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    seqlens_q: torch.Tensor | None = None, seqlens_k: torch.Tensor | None = None, leftpad_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None, dropout_p: Number = 0.0, dropout_seed: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, return_lse: Literal[False] = False, layout: str = 'bhsd',
    backend: str | None = None, validate: bool | None = None) -> torch.Tensor: ...
@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, block_mask: BlockMask | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    seqlens_q: torch.Tensor | None = None, seqlens_k: torch.Tensor | None = None, leftpad_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None, dropout_p: Number = 0.0, dropout_seed: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, return_lse: Literal[True], layout: str = 'bhsd', backend: str | None = None,
    validate: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, block_mask: BlockMask | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    seqlens_q: torch.Tensor | None = None, seqlens_k: torch.Tensor | None = None, leftpad_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None, dropout_p: Number = 0.0, dropout_seed: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, return_lse: bool = False, layout: str = 'bhsd', backend: str | None = None,
    validate: bool | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def block_sparse_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_indices: torch.Tensor, *,
    block_size: int = 64, block_counts: torch.Tensor | None = None, seqlens_k: torch.Tensor | None = None,
    scale: Number | None = None, causal: bool | str = False, sinks: torch.Tensor | None = None,
    num_splits: int | None = None, return_lse: Literal[False] = False, layout: str = 'bhsd', backend: str | None = None,
    validate: bool | None = None) -> torch.Tensor: ...
@overload
def block_sparse_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_indices: torch.Tensor, *,
    block_size: int = 64, block_counts: torch.Tensor | None = None, seqlens_k: torch.Tensor | None = None,
    scale: Number | None = None, causal: bool | str = False, sinks: torch.Tensor | None = None,
    num_splits: int | None = None, return_lse: Literal[True], layout: str = 'bhsd', backend: str | None = None,
    validate: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def block_sparse_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_indices: torch.Tensor, *,
    block_size: int = 64, block_counts: torch.Tensor | None = None, seqlens_k: torch.Tensor | None = None,
    scale: Number | None = None, causal: bool | str = False, sinks: torch.Tensor | None = None,
    num_splits: int | None = None, return_lse: bool = False, layout: str = 'bhsd', backend: str | None = None,
    validate: bool | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *, q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    dropout_p: Number = 0.0, dropout_seed: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    return_lse: Literal[False] = False, backend: str | None = None, validate: bool | None = None) -> torch.Tensor: ...
@overload
def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *, q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    dropout_p: Number = 0.0, dropout_seed: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    return_lse: Literal[True], backend: str | None = None,
    validate: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *, q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, scale: Number | None = None,
    causal: bool | str = False, window: Window | None = None, chunk: int | None = None, softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, mask_mod: Callable[..., torch.Tensor] | None = None,
    dropout_p: Number = 0.0, dropout_seed: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    return_lse: bool = False, backend: str | None = None,
    validate: bool | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
__all__ = ['append_kv', 'attention', 'block_sparse_attention', 'decode_attention', 'explain', 'indexer_logits',
    'make_request', 'mla_attention', 'paged_attention', 'plan', 'prepare', 'sparse_attention', 'topk_indices',
    'varlen_attention', 'write_pages']
