"""A block of keys and values at a time, wherever they lie: in one tensor, packed, on pages, or chosen by indices.

Ids and positions are clamped to the storage, and what they then read is marked as not valid or, where a page table
holds garbage inside a sequence, is at least memory of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from portattn.reference.extents import Extent
from portattn.reference.stored import dequantize, latent_rows
from portattn.schema.call import Call
from portattn.schema.problem_limits import DS_MLA


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Places [start, stop) of the keys of all sequences.

    k, v       (B, H, n, D), (B, H, n, Dv) as stored; of a quantised cache dequantised, float32. H is Hk, or Hq where
               each query head has chosen its own tokens
    position   (1, 1, n) or (B, Hq, n) int64
    valid      (B, 1 or Hq, n) bool: there is a key; others can hold anything
    """

    start: int
    stop: int
    k: torch.Tensor
    v: torch.Tensor
    position: torch.Tensor
    valid: torch.Tensor


def key_heads(call: Call) -> int:
    """H of the blocks."""
    return call.problem.heads_k if call.indices is None else call.problem.heads_q


def key_places(call: Call, extent: Extent) -> int:
    """Places of keys that there are to visit; those after them hold no valid key."""
    p = call.problem
    if p.seq_k == 0 or 0 in call.k.shape[:3]:
        return 0  # no storage, so nothing that an index could be clamped to
    if call.counts is None:
        return extent.longest(p.seq_k)
    if call.counts.device.type == "cpu" and call.counts.numel():
        return min(max(int(call.counts.max()), 0), p.tokens)
    return p.tokens


def block_size(call: Call, size: int, elements: int) -> int:
    """Places of a block: `size`, or fewer where every query head has tokens of its own and more than `elements` numbers
    would be gathered."""
    if call.indices is None:
        return size
    p = call.problem
    return max(min(size, elements // max(p.batch * p.heads_q * max(p.head_dim, p.head_dim_v), 1)), 1)


def key_blocks(call: Call, extent: Extent, size: int, begin: int, end: int) -> Iterator[KeyBlock]:
    """The keys at places [begin, end), `size` at a time. Every block begins at a multiple of `size`, so that what is
    summed up together does not depend on where `begin` is."""
    for start in range(begin - begin % size, end, size):
        stop = min(start + size, end)
        yield _positions(call, extent, start, stop) if call.indices is None else _chosen(call, extent, start, stop)


def _positions(call: Call, extent: Extent, start: int, stop: int) -> KeyBlock:
    """Keys at positions [start, stop) of every sequence."""
    j = torch.arange(start, stop, device=call.q.device)
    valid = (j >= extent.first[:, None]) & (j < extent.end[:, None])  # (B, n)
    if call.page_table is not None:
        page = call.problem.page_size
        pages = call.page_table[:, j // page].long().clamp(0, call.k.shape[0] - 1)  # (B, n)
        offsets = (j % page).expand_as(pages)
        k, v = _both(call, lambda storage: storage[pages, :, offsets].transpose(1, 2))
    elif call.cu_seqlens_k is not None:
        rows = (extent.origin[:, None] + j).clamp(max=call.k.shape[2] - 1)  # (B, n)
        k, v = _both(call, lambda storage: storage[0][:, rows].transpose(0, 1))
    else:
        k, v = call.k[:, :, start:stop], call.v[:, :, start:stop]
    if call.problem.kv_format == DS_MLA:
        k = latent_rows(k, call.problem.head_dim_v)
        v = k[..., : call.problem.head_dim_v]
    elif call.problem.kv_format != "as_q":
        k = _widened(call, k, call.k_scale, call.k_block_scale, extent, start, stop)
        if call.problem.v_format != "as_q":
            v = _widened(call, v, call.v_scale, call.v_block_scale, extent, start, stop)
    return KeyBlock(start, stop, k, v, j[None, None], valid[:, None])


def _widened(
    call: Call,
    numbers: torch.Tensor,
    scale: torch.Tensor | None,
    blocks: torch.Tensor | None,
    extent: Extent,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Narrow numbers (B, H, n, D) at positions [start, stop), with their scales."""
    p = call.problem
    scale = None if scale is None else _of_tokens(call, scale, extent, start, stop)
    blocks = None if blocks is None else _of_tokens(call, blocks, extent, start, stop)
    return dequantize(numbers, p.kv_format, scale, p.kv_scales == "token", blocks)


def _of_tokens(call: Call, scale: torch.Tensor, extent: Extent, start: int, stop: int) -> torch.Tensor:
    """Scales at positions [start, stop): (B, H, n) or (B, H, 1), and of nvfp4's blocks (B, H, n, D / 16)."""
    if scale.ndim == 2:
        scale = scale[:, :, None]
    elif call.cu_seqlens_k is not None:
        rows = extent.origin[:, None] + torch.arange(start, stop, device=scale.device)
        scale = scale[0][:, rows.clamp(max=scale.shape[2] - 1)].transpose(0, 1)
    elif call.page_table is None:
        scale = scale[:, :, start:stop]
    else:
        j, page = torch.arange(start, stop, device=scale.device), call.problem.page_size
        pages = call.page_table[:, j // page].long().clamp(0, scale.shape[0] - 1)
        scale = scale[pages, :, (j % page).expand_as(pages)].transpose(1, 2)
    return scale


def _chosen(call: Call, extent: Extent, start: int, stop: int) -> KeyBlock:
    """Places [start, stop) of the tokens that each query head has chosen."""
    p, device = call.problem, call.q.device
    assert call.indices is not None
    assert call.counts is not None
    token = call.indices[:, :, start:stop].long()  # (B, Hq, n)
    place = torch.arange(start, stop, device=device)
    valid = (place < call.counts[..., None]) & (token >= extent.first[:, None, None])
    valid = valid & (token < extent.end[:, None, None])
    if call.log_weights is not None:  # a token without weight is not attended, whatever its key holds
        valid = valid & (call.log_weights[:, :, start:stop] != float("-inf"))
    token = token.clamp(0, p.seq_k - 1)
    sequence = torch.arange(p.batch, device=device)[:, None, None]
    head = (torch.arange(p.heads_q, device=device) // p.group)[None, :, None]
    slot, place = sequence, token
    if call.page_table is not None:
        slot = call.page_table[sequence, token // p.page_size].long().clamp(0, call.k.shape[0] - 1)
        place = token % p.page_size
    k, v = _both(call, lambda storage: storage[slot, head, place])
    if p.kv_format != "as_q":

        def chosen(scale: torch.Tensor | None) -> torch.Tensor | None:
            if scale is None or scale.ndim == 2:
                return None if scale is None else scale.repeat_interleave(p.group, dim=1)[..., None]
            return scale[slot, head, place]

        k, v = (
            dequantize(numbers, p.kv_format, chosen(scale), p.kv_scales == "token")
            for numbers, scale in ((k, call.k_scale), (v, call.v_scale))
        )
    return KeyBlock(start, stop, k, v, token, valid)


def _both(call: Call, gather: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The gathered keys and values; of latent rows, whose first columns are the values, one gather."""
    k = gather(call.k)
    return k, k[..., : call.problem.head_dim_v] if call.problem.op == "mla_attention" else gather(call.v)
