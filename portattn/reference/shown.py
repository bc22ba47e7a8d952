"""Tree masks and block masks in the blockwise path: which keys of a block they show each row."""

from __future__ import annotations

import torch

from portattn.reference.extents import Extent
from portattn.reference.keyblocks import KeyBlock
from portattn.reference.rowblocks import RowBlock
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
