"""Constructors of masks: dropout, trees of new tokens, blocks of queries and keys."""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from portattn.api.score_functions import KeptLists, cached_trace, is_capturing, kept_lists, made_once, state_of
from portattn.config import Settings, current
from portattn.errors import ArgumentError, warn_caller
from portattn.kernels.score_program import fits
from portattn.launch.torch_compat import in_mode
from portattn.reference.dropout import block_mask
from portattn.reference.score_functions import PART, WHOLE, block_lists
from portattn.schema.problem_limits import MAX_TREE
from portattn.validate.checks import check_dense, check_share, check_size
from portattn.validate.score_options import as_window
from portattn.validate.values import reads

DROPOUT_MASK = "dropout_mask"
SEEDS = range(-(2**63), 2**63)


def dropout_mask(
    seed: int | torch.Tensor,
    dropout_p: float,
    batch: int,
    heads: int,
    seq_q: int,
    seq_k: int,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the mask of the attention probabilities that dropout with this seed keeps: True = kept.

    The mask that a call with this seed and dropout_p applies in its forward and its backward pass, on every path and
    device. A kept probability counts 1/(1 − dropout_p) times, a dropped one not at all; the LSE knows no dropout.

    Args:
        seed: an int in [−2⁶³, 2⁶³), or a tensor (1,) of int64
        dropout_p: probability of each to be dropped, in [0, 1), to 2⁻¹⁷
        batch, heads, seq_q, seq_k: sizes; heads are the query heads. Rows and keys count from the first of the (B, H,
            S, D) tensors, padding included; of packed sequences from the first row and key of each, and batch is their
            number
        device: the mask's device; by default the seed tensor's, or the CPU for an int

    Returns:
        bool (batch, heads, seq_q, seq_k).

    Element (b, h, i, j) is kept where its 16 bits are no less than round(dropout_p·2¹⁶). They are of word w of
    Philox2x32-10 with the key a and the counter (g(j), g(i) ^ c): the upper ones where bit 3 of j is set, of word 1
    where bit 3 of i is. g leaves bit 3 out: g(x) = 8·⌊x/16⌋ + x mod 8. a and c are words 0 and 1 of Philox4x32-10 with
    the key `seed` and the counter (b·heads + h, 0, 0, 0) (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
    2011). So a larger mask with as many heads contains a smaller one.

    Memory: the mask, and on a device other than the CPU a few int64 tensors of its shape.

    Raises:
        ArgumentError: A size or the probability is out of range or the seed is no such number.

    Examples:
        >>> import portattn
        >>> mask = portattn.dropout_mask(seed=7, dropout_p=0.25, batch=2, heads=4, seq_q=64, seq_k=64)
        >>> mask.shape, round(mask.float().mean().item(), 2)
        (torch.Size([2, 4, 64, 64]), 0.75)
    """
    probability = check_share(DROPOUT_MASK, dropout_p)
    for name, size in {"batch": batch, "heads": heads, "seq_q": seq_q, "seq_k": seq_k}.items():
        check_size(DROPOUT_MASK, name, size)
    return block_mask(_key(seed, device), probability, batch, heads, range(seq_q), range(seq_k))


def _key(seed: int | torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    if device is not None:
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                DROPOUT_MASK, "device", device, f"must be a torch.device or the name of one: {error}"
            ) from error
    if isinstance(seed, torch.Tensor):
        check_dense(DROPOUT_MASK, "seed", seed)
        if seed.dtype != torch.int64 or seed.shape != (1,):
            raise ArgumentError(
                DROPOUT_MASK, "seed", (tuple(seed.shape), seed.dtype), "must be a tensor (1,) of torch.int64"
            )
        return seed.detach() if device is None else seed.detach().to(device)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed not in SEEDS:
        raise ArgumentError(
            DROPOUT_MASK, "seed", seed, "must be an integer in [-2**63, 2**63), or a tensor (1,) of torch.int64"
        )
    return torch.tensor([seed], dtype=torch.int64, device=device or "cpu")


TREE_MASK = "tree_mask"


def tree_mask(tree: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """The `tree_mask` of decode_, paged_ and mla_attention: the new tokens that each new token's query attends.

    Args:
        tree: parents: int32 or int64 (..., S), or a list of S ints. Element i is the parent of token i: below i,
            or negative if the parent is the last token before the tree. A token attends itself and its
            ancestors. Or bool (..., S, S): element (i, j) says whether token i attends token j. S is at most 64.
            On any device, with any axes in front

    Returns:
        int64 (..., S) on the tree's device: bit j of word i is set where token i attends token j. Packed queries take
        the sequences' words one after the other: `torch.cat([tree_mask(a), tree_mask(b)])`.

    Nothing waits for the device, so a CUDA graph can hold it. Parents are checked on the CPU alone.

    Raises:
        ArgumentError: The tree has another dtype or shape, or more than 64 nodes; on the CPU also if a parent does not
            come before its node.

    Examples:
        >>> import portattn
        >>> words = portattn.tree_mask([-1, 0, 0, 1])  # two tokens follow token 0; token 3 follows token 1
        >>> [f"{word:04b}" for word in words.tolist()]
        ['0001', '0011', '0101', '1011']
    """
    if not isinstance(tree, torch.Tensor):
        tree = _parents(tree)
    check_dense(TREE_MASK, "tree", tree)
    if tree.dtype is torch.bool:
        if tree.ndim < 2 or tree.shape[-1] != tree.shape[-2]:
            raise ArgumentError(TREE_MASK, "tree.shape", tuple(tree.shape), "must be (..., S, S) of bools")
    elif tree.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            TREE_MASK, "tree.dtype", tree.dtype, "must be torch.bool, or torch.int32 or torch.int64 of parents"
        )
    elif tree.ndim < 1:
        raise ArgumentError(TREE_MASK, "tree.shape", tuple(tree.shape), "must be (..., S) of parents")
    count = tree.shape[-1]
    if count > MAX_TREE:
        raise ArgumentError(TREE_MASK, "tree.shape", tuple(tree.shape), f"must have at most {MAX_TREE} nodes")
    seen = tree if tree.dtype is torch.bool else _ancestors(tree)
    return (seen.long() << torch.arange(count, device=tree.device)).sum(dim=-1)


def _parents(numbers: Sequence[int]) -> torch.Tensor:
    try:
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
        return torch.tensor(list(numbers), dtype=torch.int64) if whole else _refused(numbers)
    except (TypeError, OverflowError, ValueError):
        return _refused(numbers)


def _refused(given: object) -> torch.Tensor:
    raise ArgumentError(
        TREE_MASK, "tree", given, "must be a torch.Tensor of parents or of bools, or a list of int parents"
    )


def _ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Return bool (..., S, S): whether node i is node j, or follows it however far back."""
    count = parents.shape[-1]
    nodes = torch.arange(count, device=parents.device)
    read = parents.device.type == "cpu" and not torch.compiler.is_compiling()  # a graph holds no number
    if read and bool((parents >= nodes).any()):
        place = int((parents >= nodes).reshape(-1, count).any(dim=0).nonzero()[0])
        wrong = int(parents.reshape(-1, count)[:, place].max())
        raise ArgumentError(
            TREE_MASK, f"tree's parent of node {place}", wrong, f"must be below {place}, or negative for none"
        )
    # Steps of 0 or 1 up the tree, squared: of up to 2, 4, … 64.
    steps = ((parents[..., None] == nodes) | torch.eye(count, dtype=torch.bool, device=parents.device)).float()
    for _ in range((MAX_TREE - 1).bit_length()):
        steps = (steps @ steps).clamp(max=1.0)
    return steps.bool()


ATTENTION = "attention"


class BlockMask(NamedTuple):
    """The blocks of keys that each block of queries attends: block_mask of attention.

    Attributes:
        kv_num_blocks: int32 (B, Hq, R): blocks of keys that each block of queries attends in part, as `mask` says
        kv_indices: int32 (B, Hq, R, most): their numbers; the first kv_num_blocks of the last axis count
        full_kv_num_blocks, full_kv_indices: the same for fully attended blocks, or None
        block_size: (queries, keys) of a block

    B and Hq may be 1, for all of them. R is Sq divided by the block's queries, rounded up. The tensors are on q's
    device. FA4's block-sparse tensors begin with the same four in this order. torch's BlockMask has them too, and
    attention takes it as it is.

    Examples:
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


class _Seen(NamedTuple):
    """Results of block_tensors for torch's BlockMask, for calls like the one that they were found in."""

    fields: tuple[Any, ...]  # the BlockMask's; a mask with others in their place is checked anew
    states: list[Any]  # of the tensors among them
    call: tuple[Any, ...]  # all else that the checks read
    settings: Settings
    kept: KeptLists | None  # None for a function that is a window, which needs no lists
    found: tuple[Any, Any, Any, Any]


_seen: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()  # by the BlockMask
_fields = operator.attrgetter(
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "mask_mod", "BLOCK_SIZE", "seq_lengths"
)


def block_tensors(
    block_mask: Any, mask: Any, mask_mod: Any, q: Any, k: Any, layout: Any, validate: bool | None = None
) -> tuple[Any, Any, Any, Any]:
    """Return lists of blocks, the mask, the block size and the mask function. Raises ArgumentError.

    The lists are int32 (B or 1, Hq or 1, R, C + 2), as a Call has them: a block whose scores the mask function decides
    is a part, any other whole. Nothing waits for the device unless values are checked there. Results for one of torch's
    BlockMasks are kept."""
    given = (block_mask, mask, mask_mod, q, k, layout, validate)
    if torch.compiler.is_compiling() or in_mode() or torch._C._are_functorch_transforms_active():
        return _block_tensors(*given)
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    alone = mask is None and mask_mod is None and type(q) is torch.Tensor and type(k) is torch.Tensor
    if flex is None or type(block_mask) is not flex.BlockMask or not alone or is_capturing(q.device):
        return _block_tensors(*given)
    fields, call, settings = _fields(block_mask), (q.shape, k.shape, q.device, layout, validate), current()
    seen = _seen.get(block_mask)
    if seen is not None and seen.settings is settings and seen.call == call:
        same = all(map(operator.is_, fields, seen.fields))
        if same and [state_of(t) for t in fields[:4] if t is not None] == seen.states:
            if seen.kept is not None:
                seen.kept.wait()
                return seen.found
            if _are_of_window(block_mask):  # the function's values may have changed
                return seen.found
    found = _block_tensors(*given)
    kept = kept_lists(found[0]) if found[1] is None else None
    if kept is not None or (found[0] is None and found[3] is not None):
        states = [state_of(t) for t in fields[:4] if t is not None]
        _seen[block_mask] = _Seen(fields, states, call, settings, kept, found)
    return found


def _block_tensors(
    block_mask: Any, mask: Any, mask_mod: Any, q: Any, k: Any, layout: Any, validate: bool | None
) -> tuple[Any, Any, Any, Any]:
    lists = block_mask
    if not isinstance(block_mask, BlockMask):
        lists = _of_torch(block_mask)
    check_dense(ATTENTION, "q", q)
    check_dense(ATTENTION, "k", k)
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor):
        return None, mask, None, mask_mod
    if q.ndim != 4 or k.ndim != 4:
        return None, mask, None, mask_mod  # validation raises
    axis = 1 if layout == "bshd" else 2
    rows, keys = q.shape[axis], k.shape[axis]
    size = lists.block_size
    good = isinstance(size, tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if not good:
        raise ArgumentError(ATTENTION, "block_mask's block_size", size, "must be a tuple of two integers above 0")
    across, down = -(-keys // size[1]), -(-rows // size[0])
    if lists is not block_mask:
        _check_lengths(block_mask, rows, keys)
    checked = _is_checked(q, validate)
    given = [("kv", lists.kv_num_blocks, lists.kv_indices)]
    if (lists.full_kv_num_blocks is None) != (lists.full_kv_indices is None):
        raise ArgumentError(
            ATTENTION, "block_mask's full_kv_indices", lists.full_kv_indices, "goes with full_kv_num_blocks"
        )
    if lists.full_kv_num_blocks is not None:
        given.append(("full_kv", lists.full_kv_num_blocks, lists.full_kv_indices))
    for name, counts, indices in given:
        _check_list(name, counts, indices, down, q)
    if lists.full_kv_num_blocks is not None:
        _check_same(lists.kv_num_blocks, lists.full_kv_num_blocks)
    if lists is not block_mask:
        _check_heads([counts for _, counts, _ in given], q.shape[0], q.shape[3 - axis])
        if _are_of_window(block_mask):
            return None, mask, None, _and(block_mask.mask_mod, mask_mod)
        mask, mask_mod = _with_mod(block_mask, mask, mask_mod, q, rows, keys)
    decides = PART if mask_mod is not None else WHOLE

    def make() -> torch.Tensor:
        places = [_places(*each, across, checked) for each in given]
        marks = [_map(place, down, across, mark) for place, mark in zip(places, (decides, WHOLE), strict=False)]
        return block_lists(marks[0] if len(marks) == 1 else torch.maximum(*marks), (rows, keys), size)

    tensors = [tensor for _, *pair in given for tensor in pair]
    return made_once(("blocks", rows, keys, size, decides, checked), tensors, make), mask, size, mask_mod


def _check_same(part: torch.Tensor, full: Any) -> None:
    """Raise ArgumentError unless both pairs of lists have the same batch and heads, or 1."""
    if any(
        mine != other and 1 not in (mine, other) for mine, other in zip(full.shape[:2], part.shape[:2], strict=True)
    ):
        limit = f"must have kv_num_blocks' batch and heads, {tuple(part.shape[:2])}, or 1 in the place of either"
        raise ArgumentError(ATTENTION, "block_mask's full_kv_num_blocks.shape", tuple(full.shape), limit)


def _check_heads(lists: list[torch.Tensor], batch: int, heads: int) -> None:
    """Raise ArgumentError on the lists' batch and heads: the error about mask_mod's mask would name `mask`."""
    for axis, whose, most in ((0, "B", batch), (1, "Hq", heads)):
        for given in (each.shape[axis] for each in lists):
            if given not in (1, most):
                limit = "must be 1" if most == 1 else f"must be 1 or {most}"
                raise ArgumentError(ATTENTION, f"block_mask's {whose}", given, limit)


def _map(place: torch.Tensor, down: int, across: int, mark: int) -> torch.Tensor:
    """Return int8 (B or 1, Hq or 1, R, C): the mark of the blocks that a list names, or 0."""
    # The columns before the first block and after the last take numbers of no block.
    found = torch.zeros(*place.shape[:2], down, across + 2, dtype=torch.int8, device=place.device)
    return found.scatter(3, place.clamp(-1, across).long() + 1, mark)[..., 1:-1]


def _of_torch(block_mask: Any) -> BlockMask:
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None or not isinstance(block_mask, flex.BlockMask):
        limit = "must be a portattn.BlockMask, or torch.nn.attention.flex_attention's"
        if callable(block_mask):
            limit += " (hint: create_block_mask(block_mask, B, Hq, Sq, Sk, device=q.device))"
        raise ArgumentError(ATTENTION, "block_mask", type(block_mask).__name__, limit)
    size = tuple(int(n) for n in block_mask.BLOCK_SIZE)
    full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    return BlockMask(block_mask.kv_num_blocks, block_mask.kv_indices, *full, size)  # type: ignore[arg-type]


def _check_lengths(block_mask: Any, rows: int, keys: int) -> None:
    """Raise ArgumentError unless torch's BlockMask is for these lengths, or for any, as one block for everything is.
    BlockMask.from_kv_blocks rounds its lengths up to whole blocks."""
    from torch.nn.attention import flex_attention

    if set(block_mask.BLOCK_SIZE) == {flex_attention._LARGE_SPARSE_BLOCK_SIZE}:
        return
    made = tuple(block_mask.seq_lengths)
    whole = tuple(-(-n // size) * size for n, size in zip((rows, keys), block_mask.BLOCK_SIZE, strict=True))
    if made not in ((rows, keys), whole):
        limit = f"must be the call's queries and keys, {(rows, keys)}: make the mask for these, or adjust() it"
        raise ArgumentError(ATTENTION, "block_mask's seq_lengths", made, limit)


def _is_checked(q: torch.Tensor, validate: bool | None) -> bool:
    if torch.compiler.is_compiling():
        return False
    settings = current()
    if isinstance(validate, bool):  # anything else is refused with the call
        settings = msgspec.structs.replace(settings, validate="always" if validate else "never")
    return reads(settings, q)


def _check_values(name: str, counts: torch.Tensor, indices: torch.Tensor, across: int) -> None:
    most = indices.shape[3]
    wrong = (counts < 0) | (counts > most)
    if bool(wrong.any()):
        limit = f"must be from 0 to {most}, the places of a list"
        raise ArgumentError(ATTENTION, f"block_mask's {name}_num_blocks", int(counts[wrong][0]), limit)
    counted = torch.arange(most, device=indices.device) < counts[..., None]
    wrong = counted & ((indices < 0) | (indices >= across))
    if bool(wrong.any()):
        limit = f"must be from 0 to {across - 1} where it counts: there are {across} blocks of keys"
        raise ArgumentError(ATTENTION, f"block_mask's {name}_indices", int(indices[wrong][0]), limit)


def _check_list(name: str, counts: Any, indices: Any, down: int, q: torch.Tensor) -> None:
    for what, tensor, ndim in ((f"{name}_num_blocks", counts, 3), (f"{name}_indices", indices, 4)):
        whose = f"block_mask's {what}"
        check_dense(ATTENTION, whose, tensor)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(
                ATTENTION, whose, getattr(tensor, "dtype", type(tensor).__name__), "must be a torch.int32 tensor"
            )
        if tensor.device != q.device:
            raise ArgumentError(ATTENTION, f"{whose}.device", str(tensor.device), f"must be q's, {q.device}")
        if tensor.ndim != ndim or tensor.shape[2] != down:
            axes = "(B, Hq, R)" if ndim == 3 else "(B, Hq, R, most)"
            limit = f"must be {axes} with R the {down} blocks of queries"
            raise ArgumentError(ATTENTION, f"{whose}.shape", tuple(tensor.shape), limit)
    if counts.shape != indices.shape[:3]:
        limit = f"must be {tuple(counts.shape)} and one axis more, as {name}_num_blocks"
        raise ArgumentError(ATTENTION, f"block_mask's {name}_indices.shape", tuple(indices.shape), limit)


def _places(name: str, counts: torch.Tensor, indices: torch.Tensor, across: int, checked: bool) -> torch.Tensor:
    """Return (B or 1, Hq or 1, R, most): the blocks that a list names, and -1 after them."""
    if checked and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, (counts, indices))):
        _check_values(name, counts, indices, across)
    # Numbers after the count are arbitrary, and unchecked numbers before it too: _map skips numbers of no block.
    return torch.where(torch.arange(indices.shape[3], device=indices.device) < counts[..., None], indices, -1)


def _and(own: Any, mask_mod: Any) -> Any:
    from torch.nn.attention.flex_attention import and_masks

    return own if mask_mod is None else and_masks(own, mask_mod)


# For each BlockMask of portattn's create_block_mask: the program of its mask_mod, and its lists with their versions.
made_lists: weakref.WeakKeyDictionary[Any, tuple[str, list[tuple[str, torch.Tensor, int]]]]
made_lists = weakref.WeakKeyDictionary()


def _are_of_window(block_mask: Any) -> bool:
    """Return whether create_block_mask made the lists, unchanged since, of a mask function that is a window."""
    if torch.compiler.is_compiling() or block_mask not in made_lists:
        return False
    text, lists = made_lists[block_mask]
    if as_window(text) is None:
        return False
    try:
        if cached_trace(ATTENTION, "mask_mod", block_mask.mask_mod)[0] != text:
            return False
    except ArgumentError:  # another function stands there now, which `_with_mod` computes
        return False
    return all(getattr(block_mask, name) is own and own._version == version for name, own, version in lists)


def _with_mod(
    block_mask: Any, mask: Any, mask_mod: Any, q: torch.Tensor, rows: int, keys: int
) -> tuple[Any, Any]:  # fmt: skip
    """Return the mask and the mask function with torch's mask_mod: traced, or as a mask where it cannot be."""
    from torch.nn.attention import flex_attention

    own = block_mask.mask_mod
    if own in (None, flex_attention.noop_mask):
        return mask, mask_mod
    if not torch.compiler.is_compiling():
        try:
            _, tensors = cached_trace(ATTENTION, "mask_mod", own)  # the trace that the call takes
        except ArgumentError:
            tensors = None
        if tensors is not None and fits([tensor.ndim for tensor in tensors]):
            return mask, _and(own, mask_mod)
        _warn_once()
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    made = flex_attention.create_mask(own, batch, heads, rows, keys, device=str(q.device))
    return made if mask is None else made & mask, mask_mod


@functools.lru_cache(maxsize=1)
def _warn_once() -> None:
    warn_caller(
        "block_mask's mask_mod cannot be traced, or reads too many tensors: attention computes it for every score at "
        "each call (create_mask: Sq·Sk bytes a head that it tells apart); for less, give the mask once as mask=, and "
        "the lists as portattn.BlockMask"
    )
