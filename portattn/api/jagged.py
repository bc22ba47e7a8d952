"""attention of jagged nested tensors: varlen_attention takes their packed rows as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portattn.api.argument_errors import OPERATIONS
from portattn.errors import ArgumentError
from portattn.schema.ops import ROWS

_OWN = ("q", "k", "v", "layout")
# Arguments that varlen_attention has, too; all others must be None.
_TAKEN = (*ROWS["varlen_attention"].parameters, *ROWS["varlen_attention"].fixed, "backend", "validate")


def are_jagged(q: Any, k: Any, v: Any) -> bool:
    return _is_jagged(q) and _is_jagged(k) and _is_jagged(v)


def _is_jagged(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_nested and tensor.layout is torch.jagged


def _named(tensors: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
    row = ROWS["attention"]
    names = (*row.parameters, *row.fixed, "backend", "validate")
    return dict(zip(names, (*tensors, *values), strict=True))


def packed(tensors: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
    """Return varlen_attention's arguments for an attention call, in its row's order, with jagged q, k and v.

    The ragged axis of q is (B, Hq, *, D), or (B, *, Hq, D) with layout="bshd". The longest length comes from the
    tensors' metadata; without it their offsets are read back once. Raises ArgumentError for a tensor that is ragged
    elsewhere and for an argument that packed rows cannot have."""
    given = _named(tensors, values)
    bshd = given["layout"] == "bshd"
    axis = 1 if bshd else 2
    rows = {}
    for name in ("q", "k", "v"):
        tensor = given[name]
        if tensor.ndim != 4 or tensor._ragged_idx != axis:
            shape = "(B, *, H, D)" if bshd else "(B, H, *, D)"
            limit = f"must be {shape} with layout={given['layout']!r}, ragged at the star"
            raise ArgumentError("attention", name, tuple(tensor.shape), limit)
        if tensor.lengths() is not None:
            raise ArgumentError("attention", name, "jagged with holes", "must have no holes (hint: .contiguous())")
        rows[name] = tensor if bshd else tensor.transpose(1, 2)
    for name in given:
        if name not in (*_OWN, *_TAKEN) and given[name] is not None:
            value = tuple(given[name].shape) if isinstance(given[name], torch.Tensor) else given[name]
            raise ArgumentError("attention", name, value, "goes with dense tensors only, not with jagged ones")
    q, k, v = rows["q"], rows["k"], rows["v"]
    if k.offsets() is not v.offsets() and not _alike(k.offsets(), v.offsets()):
        raise ArgumentError("attention", "v", tuple(v.shape), "must have the sequences of k")
    return {
        "q": q.values(), "k": k.values(), "v": v.values(),
        "cu_seqlens_q": q.offsets().int(), "cu_seqlens_k": k.offsets().int(),
        "max_seqlen_q": q._get_max_seqlen(), "max_seqlen_k": k._get_max_seqlen(),
    } | {name: given[name] for name in given if name in _TAKEN and name not in _OWN}  # fmt: skip


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other))


def call_jagged(tensors: Sequence[Any], values: Sequence[Any]) -> Any:
    """Run attention of jagged tensors by varlen_attention; tensors and values are in the order of attention's row."""
    found = OPERATIONS["varlen_attention"](**packed(tensors, values))
    return _jagged_results(tensors[0], _named(tensors, values)["layout"], found)


def _jagged_results(q: torch.Tensor, layout: str, found: Any) -> Any:
    """Return varlen_attention's results as jagged tensors with q's sequences: out in q's layout, the LSE (B, Hq, *)."""
    q = q if layout == "bshd" else q.transpose(1, 2)
    out, lse = found if isinstance(found, tuple) else (found, None)
    ragged = _like(q, out)
    ragged = ragged if layout == "bshd" else ragged.transpose(1, 2)
    return ragged if lse is None else (ragged, _like(q, lse.transpose(0, 1)).transpose(1, 2))


def _like(q: Any, values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(
        values,
        q.offsets(),
        min_seqlen=q._get_min_seqlen(),
        max_seqlen=q._get_max_seqlen(),
    )
