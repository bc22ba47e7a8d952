"""Rules for torch.distributed.tensor to shard calls, by sequences or by heads; other placements are redistributed."""

from __future__ import annotations

from typing import Any

import torch

from portattn.api.torch_ops import SIGNATURES, OperatorSignature
from portattn.schema.ops import FEATURES

# Axes of tensors that are no features, by letters of Feature.axes. For q, k and v: see _axes.
_LETTERS = {"page_table": "bk", "indices": "bht", "counts": "bh", "magicpig_bits": "h", "magicpig_tables": "h"}
_LISTS = {"indices": "bqt", "topk_length": "bq"}  # of mla_attention
_LETTERS |= {name: feature.axes for name, feature in FEATURES.items() if feature.axes}
_QUERIES = frozenset({"q", "q_nope", "q_rope"})
_PAGES = frozenset({"k_pages", "v_pages"})
_STORED = frozenset({"k_cache", "v_cache", "k_block_scale", "v_block_scale"})
_KEYS = _PAGES | _STORED | {"k", "v"}

Axes = tuple[int | None, int | None]


def register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    for op, signature in SIGNATURES.items():
        for name, rule in ((op, _forward(signature)), (f"{op}_backward", _backward(signature))):
            overload = getattr(torch.ops.portattn, name).default
            register_sharding(overload)(rule)
            _distinguish(overload)


def _distinguish(overload: Any) -> None:
    """Make torch ask a rule again for other layouts: register_sharding caches over all strings and flags."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    known[overload] = RuntimeSchemaInfo(0, needs_pytree=True)


def _forward(signature: OperatorSignature) -> Any:
    def rule(*arguments: Any) -> list[Any]:
        from torch.distributed.tensor import Replicate

        return [
            ([out, lse if signature.value(arguments, "return_lse") else Replicate()], inputs)
            for inputs, out, lse in _ways(signature, arguments)
        ]

    return rule


def _backward(signature: OperatorSignature) -> Any:
    def rule(grad_out: Any, grad_lse: Any, kept: Any, kept_lse: Any, wanted: Any, *arguments: Any) -> list[Any]:
        from torch.distributed.tensor import Partial, Replicate

        found = []
        for inputs, out, lse in _ways(signature, arguments):
            whole = all(placement is None or placement == Replicate() for placement in inputs)
            results = []
            for place, needed in zip(signature.gradients, wanted, strict=True):
                shared = inputs[place] == Replicate() and not whole  # each rank has a share of its gradient
                results.append(Replicate() if not needed else Partial() if shared else inputs[place])
            given = ((grad_out, out), (grad_lse, lse), (kept, out), (kept_lse, lse))
            before = [None if tensor is None else placement for tensor, placement in given] + [None]
            found.append((results, before + inputs))
        return found

    return rule


def _ways(signature: OperatorSignature, arguments: Any) -> list[tuple[list[Any], Any, Any]]:
    """Return (placements of the arguments, of out, of the LSE) for each way to shard a call."""
    from torch.distributed.tensor import Replicate, Shard

    named = dict(zip((*signature.tensors, *signature.values), arguments, strict=True))
    packed = named[signature.tensors[0]].ndim == 3
    found: list[tuple[list[Any], Any, Any]] = [(_placements(signature, named, None), Replicate(), Replicate())]
    if _divides(signature, named, 0):
        found.append((_placements(signature, named, 0), Shard(0), Shard(0)))
    if _divides(signature, named, 1):
        out = Shard(2 if named.get("layout") == "bshd" and not packed else 1)
        found.append((_placements(signature, named, 1), out, Shard(0 if packed else 1)))
    return found


def _placements(signature: OperatorSignature, named: dict[str, Any], axis: int | None) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    found: list[Any] = []
    for name in signature.tensors:
        tensor = named[name]
        if tensor is None:
            found.append(None)
            continue
        at = None if axis is None else _axes(named, name, tensor)[axis]
        if axis == 1 and name in _KEYS and _heads(signature, named)[1] == 1:
            at = None  # the one head of keys is all query heads'
        found.append(Replicate() if at is None else Shard(at))
    return found + [None] * len(signature.values)


def _axes(named: dict[str, Any], name: str, tensor: Any) -> Axes:
    letters = {**_LETTERS, **_LISTS} if "topk_length" in named else _LETTERS
    if name in letters:
        first = len(letters[name]) - tensor.ndim  # leading axes that it lacks
        places = (letters[name].replace("s", "b").find(letter) - first for letter in "bh")
        batch, head = (place if place >= 0 and tensor.shape[place] > 1 else None for place in places)
        return batch, head
    if name in ("q_scale", "k_scale", "v_scale"):
        if tensor.ndim < 3:
            several = tensor.ndim and tensor.shape[-1] > 1
            return (0 if tensor.ndim == 2 else None), (tensor.ndim - 1 if several else None)
        paged = named.get("page_table") is not None
        last = named["page_layout"] == "phd" if paged else named["layout"] == "bshd"
        return (None if paged else 0), (2 if last else 1)
    if name in ("kv_pages", "kv_scale") or name.startswith("cu_seqlens"):
        return None, None
    if name in _PAGES or (name in _STORED and named.get("page_table") is not None):
        return None, (1 if named["page_layout"] == "hpd" else 2)
    if tensor.ndim == 3:
        return None, 1
    return 0, (2 if named.get("layout") == "bshd" else 1)


def _heads(signature: OperatorSignature, named: dict[str, Any]) -> tuple[int, int]:
    name_q, name_k = signature.tensors[0], next(n for n in signature.tensors if n not in _QUERIES)
    q, k = named[name_q], named[name_k]
    at, at_k = _axes(named, name_q, q)[1], _axes(named, name_k, k)[1]
    assert at is not None
    return q.shape[at], 1 if at_k is None else k.shape[at_k]


def _divides(signature: OperatorSignature, named: dict[str, Any], axis: int) -> bool:
    """Return whether a call can be sharded along an axis: packed sequences by heads only, heads in equal shares."""
    q = named[signature.tensors[0]]
    if axis == 0:
        return q.ndim != 3
    # In equal shares each query head finds its key head.
    heads, kv_heads = _heads(signature, named)
    ranks = q.mesh.size()
    return heads % ranks == 0 and (kv_heads % ranks == 0 or kv_heads == 1)
