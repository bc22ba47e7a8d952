"""Calls of attention, decode_attention and varlen_attention, over contiguous and packed keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.schema.call import Call
from portattn.schema.ops import BACKWARD, ROWS
from portattn.schema.problem import check_groups
from portattn.schema.problem_limits import Op
from portattn.schema.symbolic_int import least
from portattn.validate import values
from portattn.validate.checks import (
    DTYPES,
    as_tensor,
    check_equal,
    check_int32,
    check_size,
    check_tensor,
    check_width,
)
from portattn.validate.features import Features, Scores, build
from portattn.validate.quantized import Operands, ScaleShapes, StoredCache, as_stored, dtypes_of, format_of

AXES = {"bhsd": ("batch", "heads", "seq", "head_dim"), "bshd": ("batch", "seq", "heads", "head_dim")}
PACKED_AXES = ("tokens", "heads", "head_dim")
VARLEN: Op = "varlen_attention"
_SHAPES = ("batch", "head_dim", "heads", "seq", "heads_q")  # last words of `argument` in errors about them
_LAYOUT = "layout='{}'"
# Which of q, k and v are transposed, the likeliest first; all three are the other layout.
_MISTAKEN = ((0, 1, 2), (0,), (1, 2), (1,), (2,), (0, 1), (0, 2))


def with_advice(
    error: ArgumentError, layout: str, names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> ArgumentError:
    """Return the error, with the remedy if the shapes agree once some tensors are transposed."""
    if error.argument.split(" ")[-1] not in _SHAPES or layout not in AXES:
        return error
    if not all(isinstance(one, torch.Tensor) and one.ndim == 4 for one in tensors):
        return error
    shapes = [_bhsd(one, layout) for one in tensors]
    if _agree(shapes):
        return error
    for several in _MISTAKEN:
        turned = [_swapped(one) if index in several else one for index, one in enumerate(shapes)]
        if _agree(turned) and _likelier(turned, shapes, len(several) == len(shapes)):
            other = next(one for one in AXES if one != layout)
            if len(several) == len(shapes):
                advice = f"as ({', '.join(AXES[other])}) the shapes agree: give {_LAYOUT.format(other)}"
            else:
                which = [names[index] for index in several]
                advice = f"with {' and '.join(which)} as ({', '.join(AXES[other])}) the shapes agree: give "
                advice += _turned(which)
            return ArgumentError(error.op, error.argument, error.value, f"{error.limit}; {advice}")
    return error


def without_layout(limit: str, names: Sequence[str]) -> str:
    """Return an error's limit for a function without `layout`: it names the transposed tensors."""
    for layout in AXES:
        limit = limit.replace(f"give {_LAYOUT.format(layout)}", f"give {_turned(names)}")
    return limit


def _turned(names: Sequence[str]) -> str:
    return ", ".join(f"{name}.transpose(1, 2)" for name in names)


def _bhsd(tensor: torch.Tensor, layout: str) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return shape if layout == "bhsd" else _swapped(shape)


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1], shape[3])


def _likelier(turned: Sequence[tuple[int, ...]], given: Sequence[tuple[int, ...]], every: bool) -> bool:
    """Return whether the caller probably meant the transposed shapes."""
    # 8 query heads over 3 key heads of 16 rows agree as 16 of 8 and 3 rows, too: keys have no more heads than rows.
    if turned[1] != given[1] and turned[1][1] > turned[1][2]:
        return False
    # A transposed q or k alone does not have as many rows as the other.
    return every or not given[0][2] == given[1][2] == given[2][2]


def _agree(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether these are one call's q, k and v, each (B, H, S, D)."""
    q, k, v = shapes
    return q[0] == k[0] and k[:3] == v[:3] and q[3] == k[3] and k[1] > 0 and q[1] % k[1] == 0


# Layouts' names in other libraries, in small letters -> the argument here.
OTHER_LAYOUTS = {
    **{layout: f"layout={layout!r}" for layout in AXES},
    "nhd": "layout='bshd'",
    "hnd": "layout='bhsd'",
    "thd": "varlen_attention takes packed rows",
}


def check_layout(op: str, layout: Any) -> None:
    if not isinstance(layout, str) or layout not in AXES:
        limit = f"must be one of {', '.join(AXES)}"
        meant = OTHER_LAYOUTS.get(layout.lower(), "") if isinstance(layout, str) else ""
        raise ArgumentError(op, "layout", layout, limit + (f" (hint: {meant})" if meant else ""))


def attention_call(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, names: tuple[str, str, str], **rest: Any
) -> Call:
    """Check the arguments and build the Call of (B, H, S, D) views; errors say if shapes agree in the other layout."""
    try:
        return _attention_call(op, q, k, v, names=names, **rest)
    except ArgumentError as error:
        raise with_advice(error, rest.get("layout", "bhsd"), names, (q, k, v)) from None


def _attention_call(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    names: tuple[str, str, str],
    settings: Settings,
    layout: str = "bhsd",
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    leftpad_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **asked: Any,
) -> Call:
    check_layout(op, layout)
    every = "q_scale" in ROWS[op].tensors  # queries may be quantised too
    for name, tensor in zip(names, (q, k, v), strict=True):
        narrow = name != names[0] or every
        check_tensor(op, name, tensor, AXES[layout], dtypes_of(op) if narrow else DTYPES)
    differentiable = (q, k, v, q_scale, k_scale, v_scale)  # as given: float8 is read as int8, which has no gradients
    q_name, k_name, v_name = names
    operands = Operands(op, q, k, v, out_dtype) if every else None
    blocks, by_block = (k_block_scale, v_block_scale), {}
    kind = format_of(op, k, q.shape[-1], blocks) if operands is None else operands.kind
    cache = StoredCache(op, (k_name, v_name), (k, v), kind, layout == "bshd", blocks)
    given_rows, given_tokens = tuple(q.shape[:3]), tuple(k.shape[:3])
    if operands is None:
        cache.check_like("q", q)
        k, v = as_stored(k, kind), as_stored(v, kind)
    else:
        q, k, v = operands.stored(q, k, v)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    batch, heads_q, seq_q, head_dim = q.shape
    seq_k = k.shape[2]
    check_equal(op, f"{k_name}'s batch", k.shape[0], f"{q_name}'s", batch)
    check_equal(op, f"{v_name}'s batch", v.shape[0], f"{q_name}'s", batch)
    cache.check_width(k_name, k, f"{q_name}'s", head_dim)
    check_width(op, q_name, head_dim)
    head_dim_v = cache.numbers(v)
    check_width(op, v_name, head_dim_v)
    if operands is None:
        by_block = cache.block_scales()
    check_equal(op, f"{v_name}'s heads", v.shape[1], f"{k_name}'s", k.shape[1])
    check_equal(op, f"{v_name}'s seq", v.shape[2], f"{k_name}'s", seq_k)
    check_groups(op, heads_q, k.shape[1])  # before the lengths, which are too long for the other order of axes

    found = Features(op, q.device, q.dtype if operands is None else operands.dtype, asked, head_dim)
    found.check_numbers()
    lengths: dict[str, Any] = {
        "seqlens_q": seqlens_q,
        "seqlens_k": seqlens_k,
        "leftpad_q": leftpad_q,
        "leftpad_k": leftpad_k,
    }
    for name, length in lengths.items():
        if length is not None:
            check_int32(op, name, length, (batch,), "(batch,)", q.device)
    shapes = ScaleShapes(batch, k.shape[1], given_tokens, ", ".join(AXES[layout][:3]), layout == "bshd")
    if operands is None:
        kv_scales, scales = cache.scales(k_scale, v_scale, shapes, q.device)
    else:
        by_row = ScaleShapes(batch, k.shape[1], given_rows, shapes.axes, shapes.swapped)
        kv_scales, scales = operands.scales({"q": q_scale, "k": k_scale, "v": v_scale}, {"q": by_row, "k": shapes})
    if values.reads(settings, q):
        values.lengths(op, "q", seqlens_q, leftpad_q, seq_q)
        values.lengths(op, "k", seqlens_k, leftpad_k, seq_k)
        tokens = values.Tokens(seq_k, seqlens_k, leftpad_k)
        values.scales(op, {n: s for n, s in scales.items() if n != "q_scale" or s.ndim == 2}, tokens)
        values.block_scales(op, by_block, tokens)
        rows = values.Tokens(seq_q, seqlens_q, leftpad_q)
        values.scales(op, {n: s for n, s in scales.items() if n == "q_scale" and s.ndim == 3}, rows)
    if asked.get("block_mask") is not None:
        for name in ("leftpad_q", "leftpad_k"):
            if lengths[name] is not None:
                limit = "goes without block_mask, whose blocks count from the first row and key"
                raise ArgumentError(op, name, tuple(lengths[name].shape), limit)
    whole = not settings.invariant and (op not in BACKWARD or all(length is None for length in lengths.values()))
    found.check_scored(Scores(batch, heads_q, seq_q, seq_k, seq_q + seq_k, whole=whole, invariant=settings.invariant))

    return build(
        op,
        {"q": q, "k": k, "v": v},
        found,
        problem={
            "batch": batch,
            "heads_q": heads_q,
            "heads_k": k.shape[1],
            "seq_q": seq_q,
            "seq_k": seq_k,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            **{name: length is not None for name, length in lengths.items()},
            "kv_format": kind,
            "kv_scales": kv_scales,
            "layout": layout,
        },
        call={**lengths, **scales, **by_block},
        differentiable=differentiable,
        dtype=None if operands is None else operands.dtype,
    )


def dense_call(*, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> Call:
    return attention_call("attention", q, k, v, names=("q", "k", "v"), **rest)


def decode_call(*, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **rest: Any) -> Call:
    return attention_call("decode_attention", q, k_cache, v_cache, names=("q", "k_cache", "v_cache"), **rest)


def beginnings(op: str, name: str, cu_seqlens: object, device: torch.device) -> int:
    """Check a (B + 1,) int32 tensor of sequences' beginnings, and return B."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        shape = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        hint = as_tensor(name, cu_seqlens, ", dtype=torch.int32") if isinstance(cu_seqlens, (list, tuple)) else ""
        raise ArgumentError(op, name, shape, f"must be an int32 torch.Tensor of shape (batch + 1,){hint}")
    check_int32(op, name, cu_seqlens, tuple(cu_seqlens.shape), "(batch + 1,)", device)
    return cu_seqlens.shape[0] - 1


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return (T, H, D) as the (1, H, T, D) view that kernels take."""
    return tensor.transpose(0, 1)[None]


def varlen_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    settings: Settings,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **asked: Any,
) -> Call:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(VARLEN, name, tensor, PACKED_AXES, dtypes_of(VARLEN))
    differentiable = (q, k, v, q_scale, k_scale, v_scale)  # as given: float8 is read as int8, which has no gradients
    operands = Operands(VARLEN, q, k, v, out_dtype)
    q, k, v = operands.stored(q, k, v)
    head_dim = q.shape[2]
    check_equal(VARLEN, "k's head_dim", k.shape[2], "q's", head_dim)
    check_width(VARLEN, "q", head_dim)
    check_width(VARLEN, "v", v.shape[2])
    check_equal(VARLEN, "v's heads", v.shape[1], "k's", k.shape[1])
    check_equal(VARLEN, "v's tokens", v.shape[0], "k's", k.shape[0])
    batch = beginnings(VARLEN, "cu_seqlens_q", cu_seqlens_q, q.device)
    batch_k = beginnings(VARLEN, "cu_seqlens_k", cu_seqlens_k, q.device)
    check_equal(VARLEN, "cu_seqlens_k's size", batch_k + 1, "cu_seqlens_q's", batch + 1)
    check_size(VARLEN, "max_seqlen_q", max_seqlen_q)
    check_size(VARLEN, "max_seqlen_k", max_seqlen_k)
    found = Features(VARLEN, q.device, operands.dtype, asked, head_dim)
    found.check_numbers()
    axes = ", ".join(PACKED_AXES[:2])
    by_row, by_key = (
        ScaleShapes(batch, k.shape[1], tuple(rows.shape[:2]), axes, swapped=True, packed=True) for rows in (q, k)
    )
    kv_scales, scales = operands.scales({"q": q_scale, "k": k_scale, "v": v_scale}, {"q": by_row, "k": by_key})
    if values.reads(settings, q):
        values.cu_seqlens(VARLEN, "q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        values.cu_seqlens(VARLEN, "k", cu_seqlens_k, k.shape[0], max_seqlen_k)
        for name, given in scales.items():
            ends = cu_seqlens_q if name == "q_scale" else cu_seqlens_k
            rows = values.Tokens(given.shape[-1], ends[-1:], None)  # rows after the last sequence do not count
            of = values.Tokens(max_seqlen_k, cu_seqlens_k.diff(), None) if given.ndim == 2 else rows
            values.scales(VARLEN, {name: given}, of)
    # No sequence is longer than all rows: a larger max_seqlen changes nothing.
    seq_q, seq_k = least(max_seqlen_q, q.shape[0]), least(max_seqlen_k, k.shape[0])
    reach, invariant = q.shape[0] + k.shape[0], settings.invariant
    found.check_scored(Scores(batch, q.shape[1], seq_q, seq_k, reach, packed=True, invariant=invariant))
    return build(
        VARLEN,
        {"q": packed(q), "k": packed(k), "v": packed(v)},
        found,
        problem={
            "batch": batch,
            "heads_q": q.shape[1],
            "heads_k": k.shape[1],
            "seq_q": seq_q,
            "seq_k": seq_k,
            "head_dim": head_dim,
            "head_dim_v": v.shape[2],
            "total_q": q.shape[0],
            "total_k": k.shape[0],
            "kv_format": operands.kind,
            "kv_scales": kv_scales,
        },
        call={"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **scales},
        differentiable=differentiable,
        dtype=operands.dtype,
    )
