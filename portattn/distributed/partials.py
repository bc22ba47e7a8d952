"""Partial results of all ranks, exchanged in one collective and merged by their log-sum-exps.

A row of a partial result travels as 32-bit words: its elements as they are in memory, then its LSE. Words are copied,
so that neither NaN nor -inf changes on the way.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

WORD = torch.int32
WORD_BYTES = 4
Heads = Literal["all", "shard"]


def row_words(width: int, dtype: torch.dtype) -> int:
    """Words of one row: `width` elements, padded to whole words, and the LSE."""
    return -(-width * dtype.itemsize // WORD_BYTES) + 1


def packed(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """out (H, …, Dv) and lse (H, …) -> (H, …, words), contiguous."""
    width = out.shape[-1]
    words = torch.empty(*out.shape[:-1], row_words(width, out.dtype), dtype=WORD, device=out.device)
    words.view(out.dtype)[..., :width].copy_(out)
    words[..., -1].copy_(lse.view(WORD))
    return words


def unpack_rows(words: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(…, words) -> views of it: out (…, Dv) and lse (…)."""
    return words.view(dtype)[..., :width], words[..., -1].view(torch.float32)


def exchange_rows(words: torch.Tensor, group: Any, world_size: int, heads: Heads) -> torch.Tensor:
    """(H, …, words) of this rank -> (N, H, …, words), those of all ranks; with heads="shard" (N, H / N, …, words), of
    this rank's heads alone. One collective."""
    if world_size == 1:
        return words[None]
    if heads == "shard":
        found = torch.empty_like(words)
        dist.all_to_all_single(found, words, group=group)
        return found.unflatten(0, (world_size, words.shape[0] // world_size))
    found = words.new_empty((world_size * words.shape[0], *words.shape[1:]))
    dist.all_gather_into_tensor(found, words, group=group)
    return found.unflatten(0, (world_size, words.shape[0]))


def merge_partials(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """outs (N, …, Dv) and lses (N, …) -> the result over all keys: out (…, Dv) in float32 and lse (…).

    As portattn.merge_states, of one tensor and in fewer launches: a part that attended nothing counts nothing, whatever
    its out holds. Every rank adds in the same order, so that all have the same result, bit for bit.
    """
    largest = lses.amax(0)
    base = torch.where(torch.isneginf(largest), 0.0, largest)
    weights = torch.exp(lses - base)
    total = weights.sum(0)
    nothing = torch.isneginf(lses)[..., None]
    out = (outs.float().masked_fill(nothing, 0.0) * weights[..., None]).sum(0)
    empty = total == 0.0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, float("-inf"), base + torch.log(total))
    return out / total[..., None], lse
