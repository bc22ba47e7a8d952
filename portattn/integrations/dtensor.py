"""How DTensors may be sharded in a call: by sequences of the batch, or by heads.

Rules for torch.distributed.tensor, which inserts what communication a call's operands need. A placement that is not
among them is redistributed, at worst to whole copies.
"""

from __future__ import annotations

from typing import Any

import torch

from portattn.api.torch_ops import SIGNATURES, OperatorSignature

# Where each tensor has its batch and its heads; None for none. Of q, k, v and what is broadcast: see _axes.
_PER_SEQUENCE = frozenset({"seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k", "page_table"})
_PER_HEAD = {"indices": (0, 1), "counts": (0, 1), "log_weights": (0, 1), "sinks": (None, 0),
             "magicpig_bits": (None, 0), "magicpig_tables": (None, 0)}  # fmt: skip
_QUERIES = frozenset({"q", "q_nope", "q_rope"})
_PAGES = frozenset({"k_pages", "v_pages"})
_STORED = frozenset({"k_cache", "v_cache", "k_block_scale", "v_block_scale"})
_KEYS = _PAGES | _STORED | {"k", "v"}

Axes = tuple[int | None, int | None]


def register() -> None:
    """Tell torch the rules. To be called once torch.distributed.tensor is imported."""
    from torch.distributed.tensor.experimental import register_sharding

    for op, signature in SIGNATURES.items():
        for name, rule in ((op, _forward(signature)), (f"{op}_backward", _backward(signature))):
            overload = getattr(torch.ops.portattn, name).default
            register_sharding(overload)(rule)
            _distinguish(overload)


def _distinguish(overload: Any) -> None:
    """Have a rule asked anew for other layouts: register_sharding lets it be asked once for all strings and flags."""
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
    """(Placements of the arguments, of out, of the LSE) for each way to shard a call."""
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
    """Of the arguments, for sharding by sequences (0), by heads (1) or not at all."""
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
    """Where a tensor has the axes of sequences and of heads."""
    if name in _PER_SEQUENCE:
        return 0, None
    if name in _PER_HEAD:
        return _PER_HEAD[name]
    if name == "alibi_slopes":
        return (0, 1) if tensor.ndim == 2 else (None, 0)
    if name == "block_mask":
        return (0 if tensor.shape[0] > 1 else None), (1 if tensor.shape[1] > 1 else None)
    if name == "tree_mask":
        return (0 if tensor.ndim == 2 else None), None
    if name in ("q_scale", "k_scale", "v_scale"):
        if tensor.ndim < 3:
            several = tensor.ndim and tensor.shape[-1] > 1
            return (0 if tensor.ndim == 2 else None), (tensor.ndim - 1 if several else None)
        paged = named.get("page_table") is not None
        last = named["page_layout"] == "phd" if paged else named["layout"] == "bshd"
        return (None if paged else 0), (2 if last else 1)
    if name in ("bias", "mask"):
        sizes = (1,) * (4 - tensor.ndim) + tuple(tensor.shape)
        first = 4 - tensor.ndim
        return (0 if sizes[0] > 1 else None), (1 - first if sizes[1] > 1 else None)
    if name in ("kv_pages", "kv_scale") or name.startswith("cu_seqlens"):
        return None, None
    if name in _PAGES or (name in _STORED and named.get("page_table") is not None):
        return None, (1 if named["page_layout"] == "hpd" else 2)
    if tensor.ndim == 3:
        return None, 1
    return 0, (2 if named.get("layout") == "bshd" else 1)


def _heads(signature: OperatorSignature, named: dict[str, Any]) -> tuple[int, int]:
    """Heads of queries and of keys."""
    name_q, name_k = signature.tensors[0], next(n for n in signature.tensors if n not in _QUERIES)
    q, k = named[name_q], named[name_k]
    at, at_k = _axes(named, name_q, q)[1], _axes(named, name_k, k)[1]
    assert at is not None
    return q.shape[at], 1 if at_k is None else k.shape[at_k]


def _divides(signature: OperatorSignature, named: dict[str, Any], axis: int) -> bool:
    """Whether a call may be sharded along an axis: packed sequences not by sequences; heads in equal shares alone, so
    that each query head finds its key head."""
    q = named[signature.tensors[0]]
    if axis == 0:
        return q.ndim != 3
    heads, kv_heads = _heads(signature, named)
    ranks = q.mesh.size()
    return heads % ranks == 0 and (kv_heads % ranks == 0 or kv_heads == 1)
