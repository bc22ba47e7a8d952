"""Continuous batching of transformers (`generate_batch`) by the paged operation.

Every forward is one ragged batch: queries of all requests one after the other, prompts and single tokens mixed. Keys
and values go into transformers' PagedAttentionCache. Layers that see everything then read its pages where they lie;
layers with a window get from the cache what it gathers, since their pages are rings.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from portattn.api import ops
from portattn.api.dynamo_disabled import leave_out, left_out
from portattn.integrations.transformers_mask import ELSEWHERE, CompactMask, refuse

_WHAT = "continuous batching"


class Batch(NamedTuple):
    """What transformers hands to each layer about a batch.

    cache            its PagedAttentionCache
    begin_q, longest_q   (requests + 1,) beginnings of the queries, and the most of one request
    begin_k, longest_k   the same of the keys, by the kind of layer
    named            everything else by name: read_index and write_index, lists of tensors by the cache's allocators
    """

    cache: Any
    begin_q: torch.Tensor
    begin_k: dict[str, torch.Tensor]
    longest_q: int
    longest_k: dict[str, int]
    named: dict[str, Any]


class _Pages(NamedTuple):
    """The pages of a batch: whose reading positions they were made of, (requests, pages) and (requests,) int32."""

    read_index: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


# Of each allocator's forward under way. The first layer of an allocator makes them anew.
_pages: weakref.WeakKeyDictionary[Any, _Pages] = weakref.WeakKeyDictionary()


def is_paged(cache: Any) -> bool:
    """Whether this is a cache that `attend_batch` knows how to use."""
    return hasattr(cache, "layer_to_allocator") and hasattr(cache, "update")


def attend_batch(*arguments: Any) -> torch.Tensor:
    """As _attend_batch, also in what dynamo traces."""
    return left_out["paged cache"](*arguments)


def _attend_batch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: CompactMask,
    window: int | None,
    batch: Batch,
    options: dict[str, Any],
) -> torch.Tensor:
    """Put keys and values into the cache, and attend.

    query (1, Hq, T, D), key and value (1, Hk, T, D) -> (1, T, Hq, D)

    window   the layer's own: so many keys, the query's among them
    options  of the operation: scale, softcap, sinks, backend

    Raises ArgumentError for a batch that says less or more than is supported.
    """
    named = dict(batch.named)
    if batch.begin_q is None or not isinstance(batch.begin_k, dict) or not isinstance(batch.longest_k, dict):
        raise refuse("cu_seq_lens_k", batch.begin_k, f"{_WHAT} gives lengths of each kind of layer; {ELSEWHERE}")
    if named.get("block_table") is not None:
        raise refuse("block_table", named["block_table"], "is for FlashAttention alone; set max_blocks_per_request=0")
    if mask.mask is not None or mask.chunk is not None or (mask.q_length > 1 and not mask.causal):
        raise refuse("attention_mask", mask.shape, f"{_WHAT} is causal and has no mask functions; {ELSEWHERE}")
    layer: Any = module.layer_idx
    allocator = batch.cache.layer_to_allocator[layer]
    begin_q, begin_k = batch.begin_q.to(torch.int32), batch.begin_k[allocator.layer_type].to(torch.int32)
    longest_k = batch.longest_k[allocator.layer_type]
    options = {**options, "causal": True, "window": None if window is None else (window - 1, 0)}
    read_index = named["read_index"][allocator.index]
    q = query[0].transpose(0, 1)
    out: Any
    if allocator.supports_block_table and read_index.numel():
        # Without positions to read, keys and values are written alone.
        k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
        write_index = named["write_index"][allocator.index]
        allocator.update(k, v, layer, read_index[:0], write_index)
        pages = _pages_of(allocator, layer, read_index, begin_k, longest_k)
        k_pages, v_pages = allocator.get_cache_for_block_table(layer)
        if batch.longest_q == 1 and len(begin_q) == len(q) + 1:  # a query each: the keys are split over programs
            out = ops.paged_attention(q.unsqueeze(2), k_pages, v_pages, pages.table, pages.lengths, **options)
            return out.squeeze(2).unsqueeze(0)
        out = ops.paged_attention(
            q, k_pages, v_pages, pages.table, pages.lengths, cu_seqlens_q=begin_q, max_seqlen_q=batch.longest_q,
            **options,
        )  # fmt: skip
        return out.unsqueeze(0)
    named["cu_seq_lens_k"], named["max_length_k"] = batch.begin_k, batch.longest_k
    key, value = batch.cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=named)
    k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
    out = ops.varlen_attention(q, k, v, begin_q, begin_k, batch.longest_q, longest_k, **options)
    return out.unsqueeze(0)


# transformers leaves it out, too.
leave_out("paged cache", _attend_batch, "the cache is written in place through views of one tensor, which graphs copy")


def _pages_of(allocator: Any, layer: int, read_index: torch.Tensor, begin_k: torch.Tensor, longest_k: int) -> _Pages:
    """The page table of a batch, of the positions that would be gathered: request b's are those from begin_k[b] on, and
    its pages begin at every tokens_per_page-th. Made once a forward and allocator, on the device."""
    kept = _pages.get(allocator)
    if kept is not None and kept.read_index is read_index and layer != allocator.layer_indices[0]:
        return kept
    size = allocator.tokens_per_page
    columns = torch.arange(0, max(longest_k, 1), size, device=read_index.device)
    places = (begin_k[:-1, None] + columns).clamp(max=read_index.numel() - 1)
    table = read_index[places].div(size, rounding_mode="floor").to(torch.int32)
    pages = _Pages(read_index, table, begin_k.diff())
    _pages[allocator] = pages
    return pages
