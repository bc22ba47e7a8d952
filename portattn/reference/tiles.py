"""The blockwise path's parts: which rows and keys are taken together, and what each row of a block attends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from portattn.reference.dropout import keep_mask
from portattn.reference.extents import Extent, Reach, key_extent, query_extent, reach
from portattn.reference.keyblocks import KeyBlock, block_size, key_blocks, key_heads, key_places
from portattn.reference.rowblocks import RowBlock, compute_dtype, load_rows
from portattn.schema.call import Call
from portattn.schema.problem_limits import MAX_TREE


def in_tree(call: Call, rows: RowBlock, keys: KeyBlock, queries: Extent, all_keys: Extent) -> torch.Tensor:
    """Which keys of the block the tree mask shows each row: bool (B, 1, rows, keys). All keys before the new ones."""
    assert call.tree_mask is not None
    if rows.storage is None:
        words = call.tree_mask[:, rows.start : rows.stop]
    else:  # a row of no sequence is the one after the last
        words = call.tree_mask[0][rows.storage.clamp(max=call.tree_mask.shape[1] - 1)]
    first = all_keys.end - (queries.end - queries.first)
    node = keys.position - first[:, None, None]  # (B, 1, keys)
    shifted = words[:, :, None] >> node.clamp(0, MAX_TREE - 1)  # (B, rows, keys)
    return ((node < 0) | (shifted & 1).bool())[:, None]


def in_blocks(call: Call, rows: RowBlock, keys: KeyBlock) -> torch.Tensor:
    """Which keys lie in blocks that each row's list names: bool (B, Hq, rows, keys)."""
    assert call.block_mask is not None
    p, device = call.problem, call.q.device
    down = torch.arange(rows.start, rows.stop, device=device) // p.block_q
    across = torch.arange(keys.start, keys.stop, device=device) // p.block_k
    return call.block_mask[:, :, down[:, None], across]


@dataclass(frozen=True, slots=True)
class Tile:
    """A row block's rows and a block of keys.

    k, v      (B, H, n, D), (B, H, n, Dv) in the dtype that is computed with, 0 where no row attends them
    bias      (B, Hq, rows, n) in that dtype, where there is one
    distance  (B, 1 or Hq, rows, n) int64, the query's position less the key's; None where nothing needs it
    keep      (B, 1 or Hq, rows, n) bool: the row attends the key; None where all do
    """

    keys: KeyBlock
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    distance: torch.Tensor | None
    keep: torch.Tensor | None


class Tiling:
    """A call in row blocks, and each of them in tiles.

    size      places of keys that a tile has at most
    elements  scores held at a time
    rows      that a block has at most where only some of them see a key
    """

    def __init__(self, call: Call, size: int, elements: int, rows: int) -> None:
        p = call.problem
        self.call, self.dtype = call, compute_dtype(call)
        self.q_extent, self.k_extent = query_extent(call), key_extent(call)
        self.places = key_places(call, self.k_extent)
        self.size = block_size(call, size, elements)
        # Padded rows are results as well; of packed sequences only those that exist are.
        self.longest = self.q_extent.longest(p.seq_q) if p.packed else p.seq_q
        if p.batch == 0 or call.q.shape[2] == 0:
            self.longest = 0
        self.count = max(elements // max(p.batch * p.heads_q * min(self.size, self.places or 1), 1), 1)
        if p.causal != "none" or p.window or p.chunk or p.block_mask:
            self.count = min(self.count, rows)  # the more rows, the more keys that only some of them see

    def row_blocks(self) -> Iterator[tuple[RowBlock, Reach]]:
        """Blocks of rows, and what each of them can see."""
        for start in range(0, self.longest, self.count):
            rows = load_rows(self.call, self.q_extent, start, min(start + self.count, self.longest))
            yield rows, reach(self.call, self.q_extent, self.k_extent, rows.start, rows.stop, self.places)

    def tiles(self, rows: RowBlock, seen: Reach) -> Iterator[Tile]:
        """The tiles of a row block."""
        call, p = self.call, self.call.problem
        at = _positions(call, rows, self.q_extent, self.k_extent)
        for keys in key_blocks(call, self.k_extent, self.size, seen.begin, seen.end):
            listed = None if call.block_mask is None else in_blocks(call, rows, keys)
            if listed is not None and listed.device.type == "cpu" and not listed.any():
                continue
            k, v = keys.k.to(self.dtype), keys.v.to(self.dtype)
            open_to_all = seen.all_begin <= keys.start and keys.stop <= seen.all_end
            bias = distance = keep = None
            if call.bias is not None:
                bias = call.bias[:, :, rows.start : rows.stop, keys.start : keys.stop].to(self.dtype)
            if call.alibi_slopes is not None or not open_to_all:
                distance = at - keys.position[:, :, None]  # (B, 1 or Hq, rows, keys)
            if not open_to_all or any(hides is not None for hides in (bias, call.mask, call.tree_mask, listed)):
                keep = _keep(call, rows, keys, distance, bias)
                if p.chunk and not open_to_all:
                    first = self.k_extent.first[:, None, None, None]
                    keep = keep & ((at - first) // p.chunk == (keys.position[:, :, None] - first) // p.chunk)
                if call.tree_mask is not None:
                    keep = keep & in_tree(call, rows, keys, self.q_extent, self.k_extent)
                if listed is not None:
                    keep = keep & listed
                # What no row attends can hold NaN, and 0·NaN is NaN in the output as well as in gradients.
                unused = ~keep.any(dim=2)  # (B, 1 or Hq, keys)
                if unused.shape[1] != 1:
                    unused = unused.reshape(p.batch, key_heads(call), -1, keys.stop - keys.start).all(dim=2)
                if unused.device.type != "cpu" or unused.any():
                    k, v = k.masked_fill(unused[..., None], 0.0), v.masked_fill(unused[..., None], 0.0)
            yield Tile(keys, k, v, bias, distance, keep)


def dropout_keep_mask(call: Call, rows: RowBlock, keys: KeyBlock) -> torch.Tensor:
    """Which probabilities dropout's seed keeps: bool (B, Hq, rows, keys)."""
    assert call.dropout_seed is not None
    p, device = call.problem, call.q.device
    heads = torch.arange(p.batch * p.heads_q, device=device).view(p.batch, p.heads_q, 1, 1)
    places = torch.arange(keys.start, keys.stop, device=device)
    return keep_mask(call.dropout_seed, call.dropout_p, heads, rows.position[0][:, None], places)


def _positions(call: Call, rows: RowBlock, queries: Extent, keys: Extent) -> torch.Tensor:
    """Where each query stands among the keys: (B, 1, rows, 1)."""
    shift = keys.first - queries.first if call.problem.causal == "top_left" else keys.end - queries.end
    return (rows.position + shift[:, None])[:, None, :, None]


def _keep(
    call: Call, rows: RowBlock, keys: KeyBlock, distance: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Which keys each row attends: bool (B, 1 or Hq, rows, keys).

    distance  the query's position less the key's; None where lengths, causal mask and window hide nothing
    """
    p = call.problem
    keep = rows.inside[:, None, :, None] & keys.valid[:, :, None]
    if distance is not None:
        if p.causal != "none":
            keep = keep & (distance >= 0)
        if p.window_left >= 0:
            keep = keep & (distance <= p.window_left)
        if p.window_right >= 0:
            keep = keep & (distance >= -p.window_right)
    if call.mask is not None:
        keep = keep & call.mask[:, :, rows.start : rows.stop, keys.start : keys.stop]
    if bias is not None:
        keep = keep & (bias != float("-inf"))
    return keep
