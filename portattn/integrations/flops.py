"""Floating-point operations of the torch operators, for torch.utils.flop_counter."""

from __future__ import annotations

from typing import Any

import torch

from portattn.api.torch_ops import SIGNATURES, OperatorSignature
from portattn.validate.quantized import value_width


def register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for op, signature in SIGNATURES.items():
        register_flop_formula(getattr(torch.ops.portattn, op), get_raw=True)(_forward(signature))
        register_flop_formula(getattr(torch.ops.portattn, f"{op}_backward"), get_raw=True)(_backward(signature))


def _forward(signature: OperatorSignature) -> Any:
    def formula(*arguments: Any, out_val: Any = None) -> int:
        pairs, width, width_v = sizes(signature, arguments)
        return 2 * pairs * (width + width_v)

    return formula


def _backward(signature: OperatorSignature) -> Any:
    def formula(
        grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Any, *arguments: Any, out_val: Any = None
    ) -> int:
        # Scores again, and dQ and dK of their gradients; the gradients of the probabilities, and dV.
        pairs, width, width_v = sizes(signature, arguments)
        return 2 * pairs * (3 * width + 2 * width_v)

    return formula


def sizes(signature: OperatorSignature, arguments: Any) -> tuple[int, int, int]:
    """Return (pairs of a query row and a key in all heads, width of keys, width of values), as torch counts them.

    Masked pairs count too. Packed rows, pages and chosen tokens count by lengths, read back; fakes by capacity."""
    given = dict(zip((*signature.tensors, *signature.values), arguments, strict=True))
    op, q = signature.op, arguments[0]
    bshd = given.get("layout") == "bshd"
    if op == "mla_attention":
        rope = given["q_rope"]
        width, width_v = q.shape[-1] + (0 if rope is None else rope.shape[-1]), q.shape[-1]
    else:
        k, v = arguments[1], arguments[2]
        width, width_v = q.shape[-1], value_width(op, q, k, v)
    if q.ndim == 3 and given.get("cu_seqlens_q") is None:  # a list of keys for each query
        heads, batch, rows = q.shape[1], 1, [q.shape[0]]
    elif q.ndim == 3:
        heads, batch = q.shape[1], given["cu_seqlens_q"].shape[0] - 1
        rows = _lengths(given["cu_seqlens_q"])
        rows = rows or [given["max_seqlen_q"] or q.shape[0]] * batch
    else:
        heads, batch = q.shape[2 if bshd else 1], q.shape[0]
        rows = [q.shape[1 if bshd else 2]] * batch
    keys = _keys(given, op, batch, bshd)
    return round(heads * sum(r * k for r, k in zip(rows, keys, strict=True))), width, width_v


def _keys(given: dict[str, Any], op: str, batch: int, bshd: bool) -> list[Any]:
    """Return the keys of each sequence; with chosen tokens, the mean over heads or queries."""
    if given.get("indices") is not None:
        counts = given["counts" if op == "sparse_attention" else "topk_length"]
        room = [given["indices"].shape[-1]] * batch
        return room if counts is None or _no_data(counts) else counts.reshape(batch, -1).double().mean(1).tolist()
    if op == "varlen_attention":
        return _lengths(given["cu_seqlens_k"]) or [given["max_seqlen_k"]] * batch
    if given.get("page_table") is not None:
        lengths = given["seqlens_k"]
        if lengths is not None and not _no_data(lengths):
            found: list[Any] = lengths.tolist()
            return found
        pages = given["kv_pages"] if op == "mla_attention" else given["k_pages"]
        size = pages.shape[2] if given.get("page_layout") == "hpd" else pages.shape[1]
        return [given["page_table"].shape[1] * size] * batch
    k = given["k"] if op == "attention" else given["k_cache"]
    return [k.shape[1 if bshd else 2]] * batch


def _lengths(ends: torch.Tensor) -> list[Any]:
    return [] if _no_data(ends) else ends.diff().tolist()


def _no_data(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)
