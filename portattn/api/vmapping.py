"""torch.vmap of an operation: its operator, mapped over one more axis of some of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from portattn.api.torch_ops import OperatorSignature

# Operations whose batch axis a mapped axis can be folded into, and their batch-first tensors that may lack that axis:
# they are expanded.
_FOLDED = frozenset({"attention", "decode_attention"})
_BATCH_FIRST = frozenset({
    "q", "k", "v", "k_cache", "v_cache", "k_block_scale", "v_block_scale", "seqlens_q", "seqlens_k", "leftpad_q",
    "leftpad_k",
})  # fmt: skip


def forward(
    signature: OperatorSignature,
    operator: Callable[..., Any],
    size: int,
    in_dims: Sequence[Any],
    arguments: Sequence[Any],
) -> tuple[Any, Any]:
    """(Results with the mapped axis first, the places of that axis).

    size     of the mapped axis
    in_dims  where each argument has it; None where it has none
    """
    places = _flat(in_dims, arguments)
    moved = [_first(value, dim) for value, dim in zip(arguments, places, strict=True)]
    mapped = [dim is not None for dim in places]
    folded = _fold(signature, size, moved, mapped) if size and signature.op in _FOLDED else None
    if folded is not None:
        out, lse = operator(*folded)
        return tuple(r if r.ndim == 1 else r.unflatten(0, (size, -1)) for r in (out, lse)), (0, _place(lse))
    each = [operator(*_at(moved, mapped, index)) for index in range(size)]
    if not each:  # an axis without elements: the shapes of one
        out, lse = operator(*_nothing(moved, mapped))
        return (out.new_empty((0, *out.shape)), lse.new_empty((0, *lse.shape))), (0, 0)
    return tuple(torch.stack(results) for results in zip(*each, strict=True)), (0, 0)


def backward(
    operator: Callable[..., Any], size: int, in_dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    """As of `forward`, of the operator of gradients: each is stacked."""
    places = _flat(in_dims, arguments)
    moved = [_first(value, dim) for value, dim in zip(arguments, places, strict=True)]
    mapped = [dim is not None for dim in places]
    each = [operator(*_at(moved, mapped, index)) for index in range(size)]
    if not each:
        found = tuple(g.new_empty((0, *g.shape)) for g in operator(*_nothing(moved, mapped)))
    else:
        found = tuple(torch.stack(gradients) for gradients in zip(*each, strict=True))
    return found, (0,) * len(found)


def _flat(in_dims: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """The place of the axis for each argument; a list of numbers, which has a place for each, has none."""
    return [dim if isinstance(a, torch.Tensor) else None for dim, a in zip(in_dims, arguments, strict=True)]


def _place(lse: torch.Tensor) -> int | None:
    return None if lse.ndim == 1 else 0  # one without elements stands for none


def _first(value: Any, dim: Any) -> Any:
    """The mapped axis first. Lengths, tables, slopes and sinks must be contiguous, as the caller's were."""
    if not isinstance(dim, int):
        return value
    return _contiguous(value.movedim(dim, 0))


def _contiguous(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_floating_point() and value.ndim > 3 else value.contiguous()


def _at(values: Sequence[Any], mapped: Sequence[bool], index: int) -> list[Any]:
    return [value[index] if own else value for value, own in zip(values, mapped, strict=True)]


def _nothing(values: Sequence[Any], mapped: Sequence[bool]) -> list[Any]:
    return [v.new_zeros(v.shape[1:]) if own else v for v, own in zip(values, mapped, strict=True)]


def _fold(signature: OperatorSignature, size: int, values: list[Any], mapped: Sequence[bool]) -> list[Any] | None:
    """The arguments with the mapped axis made part of the batch's; None where a tensor has no batch axis for it."""
    found = list(values)
    if "dropout_seed" in signature.tensors and values[signature.tensors.index("dropout_seed")] is not None:
        return None  # what is dropped follows from a sequence's number in its batch
    q = values[0]
    batch = q.shape[1] if mapped[0] else q.shape[0]
    for place, name in enumerate(signature.tensors):
        value = values[place]
        if value is None:
            continue
        if name in _BATCH_FIRST:
            every = value if mapped[place] else value.expand(size, *value.shape)
        elif name in ("alibi_slopes", "tree_mask"):
            value = value if mapped[place] else value[None]
            if value.ndim == 2:  # one for all sequences
                value = value[:, None].expand(-1, batch, -1)
            every = value.expand(size, *value.shape[1:])
        elif name in ("q_scale", "k_scale", "v_scale"):
            value = value if mapped[place] else value[None]
            if value.ndim < 3:  # one for all sequences, or one a head
                heads = values[1].shape[-2 if signature.value(values, "layout") == "bshd" else -3]
                value = value.reshape(value.shape[0], 1, -1).expand(-1, batch, heads)
            every = value.expand(size, *value.shape[1:])
        elif name in ("bias", "mask"):
            value = value if mapped[place] else value[None]
            while value.ndim < 5:
                value = value.unsqueeze(1)
            every = value.expand(size, batch, *value.shape[2:])
        elif mapped[place] or name == "block_mask":  # sinks: one a head, for all sequences
            return None
        else:
            continue
        found[place] = _contiguous(every.reshape(size * every.shape[1], *every.shape[2:]))
    return found
