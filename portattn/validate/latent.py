"""Calls of mla_attention: a latent cache in the queries' dtype, quantized, or of rows that hold their scales."""

from __future__ import annotations

from typing import Any

import torch

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.schema.call import Call
from portattn.schema.problem_limits import BY_POSITION, DS_GROUP, MAX_LENGTH, Op, cache_format, ds_row_bytes
from portattn.validate import values
from portattn.validate.checks import check_int32, check_tensor, check_width, starts_aligned
from portattn.validate.features import Features, build
from portattn.validate.paged import Queries, check_table
from portattn.validate.quantized import StoredCache, as_stored, check_scale, dtypes_of, format_of

OP: Op = "mla_attention"
AXES = ("pages", "page_size", "rank + rope")
_ROTARY = torch.bfloat16  # of rows that hold their scales
_SCALE_BYTES = 4


def mla_call(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor | None,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    *,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    settings: Settings,
    kv_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    layout: str = "bhsd",
    **asked: Any,
) -> Call:
    if indices is not None:
        _check_alone({
            "page_table": page_table, "seqlens_k": seqlens_k, "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_q": max_seqlen_q,
            **{name: value for name, value in asked.items() if name in BY_POSITION},
        })  # fmt: skip
    elif topk_length is not None:
        _check_alone({"topk_length": topk_length}, "goes with indices, which are not given")
    named = {"q_nope": q_nope} | ({} if q_rope is None else {"q_rope": q_rope})
    packed = indices is not None and getattr(q_nope, "ndim", 4) == 3
    queries = Queries(OP, named, layout, cu_seqlens_q, max_seqlen_q, settings, packed)
    rank, rope = q_nope.shape[-1], 0 if q_rope is None else q_rope.shape[-1]
    differentiable = (q_nope, q_rope, kv_pages, kv_scale)  # as given: float8 is read as int8
    kv_pages, stored = check_latent(OP, kv_pages, kv_scale, q_nope, rank, rope)
    check_width(OP, "kv_pages", rank + rope)
    for name, tensor in named.items():
        if tensor.shape[-1] < 1:
            raise ArgumentError(OP, f"{name}'s head_dim", tensor.shape[-1], "must be at least 1")
    page_size = kv_pages.shape[1]
    if page_size < 1:
        raise ArgumentError(OP, "kv_pages's page_size", page_size, "must be at least 1")
    kv_scales, scales = check_latent_scale(OP, stored, kv_scale, kv_pages, queries.batch, q_nope.device)
    places = 0
    if indices is None:
        capacity = check_table(OP, page_table, seqlens_k, queries.batch, q_nope.device, kv_pages, page_size)
        if seqlens_k is None:
            raise ArgumentError(OP, "seqlens_k", None, "must be an int32 torch.Tensor of shape (batch,)")
    else:
        shape = q_nope.shape[:1] if packed else (queries.batch, queries.rows)
        capacity = places = _check_lists(indices, topk_length, tuple(shape), q_nope.device)
        if not kv_pages.shape[0]:  # to which an index could be clamped
            raise ArgumentError(OP, "kv_pages's pages", 0, "must be at least 1 with indices")
    found = Features(OP, q_nope.device, q_nope.dtype, asked)
    found.check_numbers()
    found.check_scored(queries.scores(capacity))
    if values.reads(settings, q_nope) and indices is not None:
        counted = values.slots(OP, indices, topk_length, kv_pages.shape[0] * page_size)
        if kv_scale is not None and kv_scale.ndim == 2:
            used = kv_scale.flatten()[counted]
            values.scales(OP, {"kv_scale": used[None, None]}, values.Tokens(used.numel(), None, None))
        elif kv_scale is not None:
            values.scales(OP, scales, values.Tokens(0, None, None))
    elif values.reads(settings, q_nope):
        assert page_table is not None
        assert seqlens_k is not None
        values.lengths(OP, "k", seqlens_k, None, capacity)
        seen = queries.seen_keys(found.problem, seqlens_k)
        values.page_table(OP, page_table, seen, page_size, kv_pages.shape[0])
        if kv_scale is not None:
            tokens = values.Tokens(capacity, seqlens_k, None, page_table, seen)
            values.scales(OP, {"kv_scale": scales["k_scale"]}, tokens)
    views = dict(zip(("q", "q_rope"), queries.tensors, strict=False))
    return build(
        OP,
        views | {"k": kv_pages[:, None]},
        found,
        problem={
            "heads_k": 1,
            "seq_k": capacity,
            "head_dim": rank + rope,
            "head_dim_v": rank,
            "seqlens_k": indices is None or topk_length is not None,
            "page_size": page_size,
            "tokens": places,
            "kv_format": stored,
            "kv_scales": kv_scales,
            **queries.problem,
        },
        call={
            "seqlens_k": seqlens_k,
            "page_table": page_table,
            "indices": indices,
            "counts": topk_length,
            **scales,
            **queries.call,
        },
        differentiable=differentiable,
    )


_NOTHING = (None, False, (None, None), (-1, -1))


def _check_alone(
    given: dict[str, Any], limit: str = "must be absent with indices, which list each query's keys"
) -> None:
    for name, value in given.items():
        if isinstance(value, torch.Tensor) or value not in _NOTHING:
            shown = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise ArgumentError(OP, name, shown, limit)


def _check_lists(indices: Any, lengths: Any, shape: tuple[int, ...], device: torch.device) -> int:
    """Check indices (B, Sq, topk) or (Tq, topk) and topk_length of queries of this shape; return topk."""
    axes = "(queries, topk)" if len(shape) == 1 else "(batch, seq_q, topk)"
    if isinstance(indices, torch.Tensor) and indices.ndim != len(shape) + 1:
        raise ArgumentError(OP, "indices.ndim", indices.ndim, f"must be {len(shape) + 1}: {axes}")
    places = indices.shape[-1] if isinstance(indices, torch.Tensor) else 0
    check_int32(OP, "indices", indices, (*shape, places), axes, device, contiguous=False)
    if not 1 <= places <= MAX_LENGTH:
        raise ArgumentError(OP, "indices.shape[-1]", places, f"must be from 1 to {MAX_LENGTH}")
    if len(shape) == 2 and min(shape) > 1 and indices.stride(0) != shape[1] * indices.stride(1):
        limit = f"must be {shape[1]} times indices.stride(1), {indices.stride(1)}: rows at equal distances"
        raise ArgumentError(OP, "indices.stride(0)", indices.stride(0), limit)
    if lengths is not None:
        check_int32(OP, "topk_length", lengths, shape, "(queries,)" if len(shape) == 1 else "(batch, seq_q)", device)
    return places


def check_latent(
    op: str, kv_pages: Any, kv_scale: Any, q: torch.Tensor, rank: int, rope: int
) -> tuple[torch.Tensor, str]:
    """Return the pages like a Call's k, without the axis of heads, and their format."""
    check_tensor(op, "kv_pages", kv_pages, AXES, dtypes_of(op))
    kind = format_of(op, kv_pages, rank + rope)
    if cache_format(kind).latent:
        _check_ds_rows(op, kind, kv_pages, kv_scale, q, rank, rope)
        return as_stored(kv_pages, kind), kind
    StoredCache(op, ("kv_pages", "kv_pages"), (kv_pages, kv_pages), kind).check_like("q_nope", q)
    if kv_pages.shape[2] > rank and not rope:
        limit = f"must be a torch.Tensor: kv_pages have {kv_pages.shape[2]} columns, and q_nope {rank}"
        raise ArgumentError(op, "q_rope", type(None).__name__, limit)
    if kv_pages.shape[2] != rank + rope:
        limit = f"must be q_nope's and q_rope's head_dim together, {rank} + {rope}"
        raise ArgumentError(op, "kv_pages's head_dim", kv_pages.shape[2], limit)
    return as_stored(kv_pages, kind), kind


def _check_ds_rows(
    op: str, kind: str, rows: torch.Tensor, kv_scale: Any, q: torch.Tensor, rank: int, rope: int
) -> None:
    if rank % DS_GROUP:
        limit = f"must be a multiple of {DS_GROUP} with kv_pages of {kind} rows (torch.uint8)"
        raise ArgumentError(op, "q_nope's head_dim", rank, limit)
    width = ds_row_bytes(rank + rope, rank)
    if rows.shape[2] != width:
        limit = (
            f"must be {width} bytes as torch.uint8, a row of {kind}: {rank} e4m3 numbers, {rank // DS_GROUP} float32 "
            f"scales, {rope} bfloat16 numbers"
        )
        raise ArgumentError(op, "kv_pages's row", rows.shape[2], limit)
    if q.dtype != _ROTARY:
        raise ArgumentError(op, "q_nope.dtype", q.dtype, f"must be {_ROTARY} with kv_pages of {kind} rows")
    if rows.device != q.device:
        raise ArgumentError(op, "kv_pages.device", str(rows.device), f"must be q_nope's, {q.device}")
    if kv_scale is not None:
        raise ArgumentError(op, "kv_scale", tuple(kv_scale.shape), f"must be None: {kind} rows hold their scales")
    strides = rows.stride()
    if (
        strides[2] != 1
        or strides[0] % _SCALE_BYTES
        or strides[1] % _SCALE_BYTES
        or not starts_aligned(rows, _SCALE_BYTES)
    ):
        limit = (
            f"must be 1 along a row, the others and the offset ({rows.storage_offset()}) multiples of {_SCALE_BYTES}"
        )
        raise ArgumentError(op, "kv_pages.stride()", strides, limit)


def check_latent_scale(
    op: str, kind: str, kv_scale: Any, pages: torch.Tensor, batch: int, device: torch.device
) -> tuple[str, dict[str, Any]]:
    """Return the scale's unit (Problem.kv_scales), and k_scale and v_scale for the Call; pages are (P, page, width)."""
    if kv_scale is None:
        if "none" not in cache_format(kind).scales:
            raise ArgumentError(op, "kv_scale", None, f"must be a float32 torch.Tensor with a cache of {pages.dtype}")
        return "none", {}
    check_scale(op, kind, "kv_scale", kv_scale, device)
    shape, tokens = tuple(kv_scale.shape), tuple(pages.shape[:2])
    if shape == tokens:
        scale, belongs = kv_scale[:, None], "token"
    elif shape in ((), (1,)):
        scale, belongs = kv_scale.expand(batch, 1), "head"
    else:
        limit = f"must be (), (1,) or (pages, page_size), {tokens}"
        raise ArgumentError(op, "kv_scale.shape", shape, limit)
    return belongs, {"k_scale": scale, "v_scale": scale}
