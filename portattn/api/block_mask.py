"""block_mask of attention: lists of blocks, torch's BlockMask among them, as one bool for each pair of blocks."""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import torch

from portattn.errors import ArgumentError, warn_caller
from portattn.validate.checks import check_dense

OP = "attention"


class BlockMask(NamedTuple):
    """Which blocks of keys each block of queries attends: block_mask of attention.

    kv_num_blocks        int32 (B, Hq, R): blocks of keys that each block of queries attends in part, as `mask` says
    kv_indices           int32 (B, Hq, R, most): which ones: the first kv_num_blocks of the last axis count
    full_kv_num_blocks, full_kv_indices  the same of blocks that are attended whole; None for none
    block_size           (queries, keys) of a block

    B and Hq may be 1, for all of them. R is Sq divided by the block's queries, rounded up. The tensors are on q's
    device. FA4's block-sparse tensors begin with the same four in this order. torch's BlockMask has them too, and
    attention takes it as it is.

    >>> import torch, portattn
    >>> one = torch.tensor([[[1, 1]]], dtype=torch.int32)  # each block of queries attends one block of keys
    >>> mask = portattn.BlockMask(one, torch.tensor([[[[0], [1]]]], dtype=torch.int32), block_size=(16, 16))
    >>> q = k = v = torch.randn(1, 4, 32, 64)
    >>> out = portattn.attention(q, k, v, block_mask=mask)
    >>> torch.allclose(out[:, :, 16:], portattn.attention(q[:, :, 16:], k[:, :, 16:], v[:, :, 16:]), atol=1e-5)
    True
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor | None = None
    full_kv_indices: torch.Tensor | None = None
    block_size: tuple[int, int] = (128, 128)


def replace(given: dict[str, Any]) -> None:
    """Replace a block mask among attention's arguments by a map of blocks, with what its mask_mod says in `mask`.

    attention itself has done so before it looks for an earlier call, and gives the block's size.
    """
    if given.get("block_size") is not None:
        return
    found = block_tensors(given["block_mask"], given["mask"], given["q"], given["k"], given["layout"])
    given["block_mask"], given["mask"], given["block_size"] = found


def block_tensors(block_mask: Any, mask: Any, q: Any, k: Any, layout: Any) -> tuple[Any, Any, Any]:
    """(bool (B or 1, Hq or 1, R, C): some list names the block, the mask, the block's size). Nothing waits for the
    device. Raises ArgumentError on lists that are none."""
    if block_mask is None:
        return None, mask, None
    lists = block_mask
    if not isinstance(block_mask, BlockMask):
        lists = _of_torch(block_mask)
    check_dense(OP, "q", q)
    check_dense(OP, "k", k)
    if q.ndim != 4 or k.ndim != 4:
        return None, mask, None  # validation says what is wrong with them
    axis = 1 if layout == "bshd" else 2
    rows, keys = q.shape[axis], k.shape[axis]
    size = lists.block_size
    good = isinstance(size, tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if not good:
        raise ArgumentError(OP, "block_mask's block_size", size, "must be a tuple of two integers above 0")
    across, down = -(-keys // size[1]), -(-rows // size[0])
    found = _map("kv", lists.kv_num_blocks, lists.kv_indices, down, across, q)
    if (lists.full_kv_num_blocks is None) != (lists.full_kv_indices is None):
        raise ArgumentError(OP, "block_mask's full_kv_indices", lists.full_kv_indices, "goes with full_kv_num_blocks")
    if lists.full_kv_num_blocks is not None:
        found = found | _map("full_kv", lists.full_kv_num_blocks, lists.full_kv_indices, down, across, q)
    if lists is not block_mask:
        mask = _with_mod(block_mask, mask, q, rows, keys)
    return found, mask, size


def _of_torch(block_mask: Any) -> BlockMask:
    """torch's BlockMask in our form."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None or not isinstance(block_mask, flex.BlockMask):
        limit = "must be a portattn.BlockMask, or torch.nn.attention.flex_attention's"
        raise ArgumentError(OP, "block_mask", type(block_mask).__name__, limit)
    size = tuple(int(n) for n in block_mask.BLOCK_SIZE)
    full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    return BlockMask(block_mask.kv_num_blocks, block_mask.kv_indices, *full, size)  # type: ignore[arg-type]


def _map(name: str, counts: Any, indices: Any, down: int, across: int, q: torch.Tensor) -> torch.Tensor:
    for what, tensor, ndim in ((f"{name}_num_blocks", counts, 3), (f"{name}_indices", indices, 4)):
        whose = f"block_mask's {what}"
        check_dense(OP, whose, tensor)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(
                OP, whose, getattr(tensor, "dtype", type(tensor).__name__), "must be a torch.int32 tensor"
            )
        if tensor.device != q.device:
            raise ArgumentError(OP, f"{whose}.device", str(tensor.device), f"must be q's, {q.device}")
        if tensor.ndim != ndim or tensor.shape[2] != down:
            axes = "(B, Hq, R)" if ndim == 3 else "(B, Hq, R, most)"
            limit = f"must be {axes} with R the {down} blocks of queries"
            raise ArgumentError(OP, f"{whose}.shape", tuple(tensor.shape), limit)
    if counts.shape != indices.shape[:3]:
        limit = f"must be {tuple(counts.shape)} and one axis more, as {name}_num_blocks"
        raise ArgumentError(OP, f"block_mask's {name}_indices.shape", tuple(indices.shape), limit)
    # Behind the count stands anything; so may it before, where nothing has checked it: what is no block is passed over.
    counted = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
    there = counted & (indices >= 0) & (indices < across)
    found = torch.zeros(*counts.shape, across + 1, dtype=torch.bool, device=indices.device)
    place = torch.where(there, indices, across).long()
    return found.scatter(3, place, torch.ones_like(there))[..., :across].contiguous()


def _with_mod(block_mask: Any, mask: Any, q: torch.Tensor, rows: int, keys: int) -> Any:
    """`mask`, and what the block mask's mask_mod says of each score."""
    from torch.nn.attention import flex_attention

    if block_mask.mask_mod in (None, flex_attention.noop_mask):
        return mask
    _warn_once()
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    made = flex_attention.create_mask(block_mask.mask_mod, batch, heads, rows, keys, device=str(q.device))
    return made if mask is None else made & mask


@functools.lru_cache(maxsize=1)
def _warn_once() -> None:
    warn_caller(
        "attention computes block_mask's mask_mod for every score at each call (create_mask: Sq·Sk bytes a head that "
        "it tells apart); for less, give the mask once as mask=, and the lists as portattn.BlockMask"
    )
