"""attention of jagged nested tensors: their rows are packed, which varlen_attention takes as they lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from portattn.errors import ArgumentError

# Arguments that varlen_attention has, too; all others must have their defaults.
_TAKEN = (
    "q_scale", "k_scale", "v_scale", "out_dtype", "scale", "causal", "window", "chunk", "softcap", "alibi_slopes",
    "sinks", "dropout_p", "dropout_seed", "return_lse", "backend", "validate",
)  # fmt: skip
_DEFAULTS: Mapping[str, Any] = {
    "bias": None, "mask": None, "block_mask": None, "seqlens_q": None, "seqlens_k": None,
    "leftpad_q": None, "leftpad_k": None,
}  # fmt: skip


def are_jagged(q: Any, k: Any, v: Any) -> bool:
    return _is_jagged(q) and _is_jagged(k) and _is_jagged(v)


def _is_jagged(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_nested and tensor.layout is torch.jagged


def packed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of varlen_attention for an attention call whose q, k and v are jagged.

    The ragged axis of q is (B, Hq, *, D), or (B, *, Hq, D) with layout="bshd". The longest length comes from the
    tensors' metadata; without it their offsets are read back once.

    Raises ArgumentError for a tensor that is ragged elsewhere and for an argument that packed rows cannot have.
    """
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
    for name, default in _DEFAULTS.items():
        if given[name] is not default and given[name] != default:
            value = tuple(given[name].shape) if isinstance(given[name], torch.Tensor) else given[name]
            raise ArgumentError("attention", name, value, "goes with dense tensors only, not with jagged ones")
    q, k, v = rows["q"], rows["k"], rows["v"]
    if k.offsets() is not v.offsets() and not _alike(k.offsets(), v.offsets()):
        raise ArgumentError("attention", "v", tuple(v.shape), "must have the sequences of k")
    return {
        "q": q.values(), "k": k.values(), "v": v.values(),
        "cu_seqlens_q": q.offsets().int(), "cu_seqlens_k": k.offsets().int(),
        "max_seqlen_q": q._get_max_seqlen(), "max_seqlen_k": k._get_max_seqlen(),
    } | {name: given[name] for name in _TAKEN}  # fmt: skip


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other))


def jagged_results(given: Mapping[str, Any], found: Any) -> Any:
    """Results of varlen_attention as jagged tensors with q's sequences: out in q's layout, the LSE (B, Hq, *)."""
    q = given["q"] if given["layout"] == "bshd" else given["q"].transpose(1, 2)
    out, lse = found if isinstance(found, tuple) else (found, None)
    ragged = _like(q, out)
    ragged = ragged if given["layout"] == "bshd" else ragged.transpose(1, 2)
    return ragged if lse is None else (ragged, _like(q, lse.transpose(0, 1)).transpose(1, 2))


def _like(q: Any, values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(
        values,
        q.offsets(),
        min_seqlen=q._get_min_seqlen(),
        max_seqlen=q._get_max_seqlen(),
    )
