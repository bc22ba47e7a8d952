"""block_mask of attention: lists of blocks, torch's BlockMask among them, as one bool for each pair of blocks."""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import msgspec
import torch

from portattn.config import current
from portattn.errors import ArgumentError, warn_caller
from portattn.validate.checks import check_dense
from portattn.validate.values import reads

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
    names = ("block_mask", "mask", "q", "k", "layout", "validate")
    found = block_tensors(*(given[name] for name in names))
    given["block_mask"], given["mask"], given["block_size"] = found


def block_tensors(
    block_mask: Any, mask: Any, q: Any, k: Any, layout: Any, validate: bool | None = None
) -> tuple[Any, Any, Any]:
    """(bool (B or 1, Hq or 1, R, C): some list names the block, the mask, the block's size). Nothing waits for the
    device unless values are to be checked there. Raises ArgumentError on lists that are none."""
    if block_mask is None:
        return None, mask, None
    lists = block_mask
    if not isinstance(block_mask, BlockMask):
        lists = _of_torch(block_mask)
    check_dense(OP, "q", q)
    check_dense(OP, "k", k)
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor):
        return None, mask, None
    if q.ndim != 4 or k.ndim != 4:
        return None, mask, None  # validation says what is wrong with them
    axis = 1 if layout == "bshd" else 2
    rows, keys = q.shape[axis], k.shape[axis]
    size = lists.block_size
    good = isinstance(size, tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if not good:
        raise ArgumentError(OP, "block_mask's block_size", size, "must be a tuple of two integers above 0")
    across, down = -(-keys // size[1]), -(-rows // size[0])
    if lists is not block_mask:
        _check_lengths(block_mask, rows, keys)
    checked = _is_checked(q, validate)
    places = [_places("kv", lists.kv_num_blocks, lists.kv_indices, down, across, q, checked)]
    if (lists.full_kv_num_blocks is None) != (lists.full_kv_indices is None):
        raise ArgumentError(OP, "block_mask's full_kv_indices", lists.full_kv_indices, "goes with full_kv_num_blocks")
    if lists.full_kv_num_blocks is not None:
        places.append(_places("full_kv", lists.full_kv_num_blocks, lists.full_kv_indices, down, across, q, checked))
        _check_same(lists.kv_num_blocks, lists.full_kv_num_blocks)
    if lists is not block_mask:
        _check_heads(places, q.shape[0], q.shape[3 - axis])
        mask = _with_mod(block_mask, mask, q, rows, keys)
    return _map(places, down, across), mask, size


def _check_same(part: torch.Tensor, full: Any) -> None:
    """Both pairs are of the same batch and heads, or of one for all of them."""
    if any(
        mine != other and 1 not in (mine, other) for mine, other in zip(full.shape[:2], part.shape[:2], strict=True)
    ):
        limit = f"must have kv_num_blocks' batch and heads, {tuple(part.shape[:2])}, or 1 in the place of either"
        raise ArgumentError(OP, "block_mask's full_kv_num_blocks.shape", tuple(full.shape), limit)


def _check_heads(places: list[torch.Tensor], batch: int, heads: int) -> None:
    """Before mask_mod is asked for a mask of as many: an error about that would name `mask`."""
    for axis, whose, most in ((0, "B", batch), (1, "Hq", heads)):
        for given in (each.shape[axis] for each in places):
            if given not in (1, most):
                limit = "must be 1" if most == 1 else f"must be 1 or {most}"
                raise ArgumentError(OP, f"block_mask's {whose}", given, limit)


def _map(places: list[torch.Tensor], down: int, across: int) -> torch.Tensor:
    """bool (B or 1, Hq or 1, R, C), the last axis contiguous: what any of the lists names. In few steps, each of which
    attention waits for."""
    batch, heads = (max(each.shape[axis] for each in places) for axis in (0, 1))
    place = torch.cat([each.expand(batch, heads, -1, -1) for each in places], -1)
    # The columns before the first block and after the last take up what is no block.
    found = torch.zeros(batch, heads, down, across + 2, dtype=torch.bool, device=place.device)
    return found.scatter(3, place.clamp(-1, across).long() + 1, True)[..., 1:-1]


def _of_torch(block_mask: Any) -> BlockMask:
    """torch's BlockMask in our form."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None or not isinstance(block_mask, flex.BlockMask):
        limit = "must be a portattn.BlockMask, or torch.nn.attention.flex_attention's"
        if callable(block_mask):
            limit += " (hint: create_block_mask(block_mask, B, Hq, Sq, Sk, device=q.device))"
        raise ArgumentError(OP, "block_mask", type(block_mask).__name__, limit)
    size = tuple(int(n) for n in block_mask.BLOCK_SIZE)
    full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    return BlockMask(block_mask.kv_num_blocks, block_mask.kv_indices, *full, size)  # type: ignore[arg-type]


def _check_lengths(block_mask: Any, rows: int, keys: int) -> None:
    """torch's BlockMask is made for some numbers of queries and keys: for others its lists and function say nothing.

    A mask of one block for everything, which torch makes where none is given, is for any of them. One that was made
    of lists alone (BlockMask.from_kv_blocks) has whole blocks for its lengths.
    """
    from torch.nn.attention import flex_attention

    if set(block_mask.BLOCK_SIZE) == {flex_attention._LARGE_SPARSE_BLOCK_SIZE}:
        return
    made = tuple(block_mask.seq_lengths)
    whole = tuple(-(-n // size) * size for n, size in zip((rows, keys), block_mask.BLOCK_SIZE, strict=True))
    if made not in ((rows, keys), whole):
        limit = f"must be the call's queries and keys, {(rows, keys)}: make the mask for these, or adjust() it"
        raise ArgumentError(OP, "block_mask's seq_lengths", made, limit)


def _is_checked(q: torch.Tensor, validate: bool | None) -> bool:
    if torch.compiler.is_compiling():
        return False
    settings = current()
    if isinstance(validate, bool):  # anything else is refused with the call
        settings = msgspec.structs.replace(settings, validate="always" if validate else "never")
    return reads(settings, q)


def _check_values(name: str, counts: torch.Tensor, indices: torch.Tensor, across: int) -> None:
    """Reads them back."""
    most = indices.shape[3]
    wrong = (counts < 0) | (counts > most)
    if bool(wrong.any()):
        limit = f"must be from 0 to {most}, the places of a list"
        raise ArgumentError(OP, f"block_mask's {name}_num_blocks", int(counts[wrong][0]), limit)
    counted = torch.arange(most, device=indices.device) < counts[..., None]
    wrong = counted & ((indices < 0) | (indices >= across))
    if bool(wrong.any()):
        limit = f"must be from 0 to {across - 1} where it counts: there are {across} blocks of keys"
        raise ArgumentError(OP, f"block_mask's {name}_indices", int(indices[wrong][0]), limit)


def _places(
    name: str, counts: Any, indices: Any, down: int, across: int, q: torch.Tensor, checked: bool
) -> torch.Tensor:
    """(B or 1, Hq or 1, R, most): each block that a list names; elsewhere a number that is no block's."""
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
    if checked:
        _check_values(name, counts, indices, across)
    # Behind the count stands anything; so may it before, where nothing has checked it: what is no block is passed over.
    return torch.where(torch.arange(indices.shape[3], device=indices.device) < counts[..., None], indices, -1)


def _with_mod(block_mask: Any, mask: Any, q: torch.Tensor, rows: int, keys: int) -> Any:
    """`mask`, and what the block mask's mask_mod says of each score."""
    from torch.nn.attention import flex_attention

    if block_mask.mask_mod in (None, flex_attention.noop_mask):
        return mask
    if not torch.compiler.is_compiling():
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
