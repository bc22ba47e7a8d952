"""Calls of indexer_logits and topk_indices, and memory for their results: every error comes before a write."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import MAX_LENGTH, Op
from portattn.schema.symbolic_int import is_size
from portattn.validate import values
from portattn.validate.checks import (
    DTYPES,
    check_apart,
    check_done,
    check_equal,
    check_flag,
    check_int32,
    check_like,
    check_place,
    check_tensor,
    check_width,
    is_large,
    refuse_gradients_of_writes,
    rows_aligned,
    shape_or_value,
)
from portattn.validate.paged import check_table
from portattn.validate.quantized import as_stored, check_scale, dtypes_of, format_of

LOGITS: Op = "indexer_logits"
TOPK: Op = "topk_indices"
ROW_AXES = {False: ("rows", "heads", "head_dim"), True: ("batch", "seq", "heads", "head_dim")}  # whether k has pages
KEY_AXES = {False: ("keys", "head_dim"), True: ("pages", "page_size", "head_dim")}


def new_logits(q: Any, k: Any, page_table: Any) -> torch.Tensor | None:
    """Return memory for the logits; None for arguments that validation refuses."""
    paged = page_table is not None
    given = [(q, len(ROW_AXES[paged])), (k, len(KEY_AXES[paged])), *([(page_table, 2)] if paged else [])]
    if any(not isinstance(tensor, torch.Tensor) or tensor.ndim != axes for tensor, axes in given):
        return None
    keys = page_table.shape[1] * k.shape[1] if paged else k.shape[0]
    made: torch.Tensor = q.new_empty((*q.shape[:-2], keys), dtype=torch.float32)
    return made


def new_indices(logits: Any, k: Any) -> torch.Tensor | None:
    """Return memory for the indices; None for arguments that validation refuses."""
    if not isinstance(logits, torch.Tensor) or not logits.ndim or isinstance(k, bool):
        return None
    if not (is_size(k) or isinstance(k, Integral)) or not 1 <= k <= MAX_LENGTH:
        return None
    return logits.new_empty((*logits.shape[:-1], k), dtype=torch.int32)


def in_order(logits: torch.Tensor, out: torch.Tensor, sorted: bool) -> torch.Tensor:
    """Return the indices, with `sorted` by descending logits, in `out`. Equal logits keep the order of their keys."""
    if not sorted or not logits.shape[-1]:
        return out
    found = logits.gather(-1, out.clamp(min=0).long()).masked_fill(out < 0, float("-inf"))
    return out.copy_(out.gather(-1, found.sort(dim=-1, descending=True, stable=True).indices))


def logits_call(
    q: Any, k: Any, weights: Any, k_scale: Any, row_starts: Any, row_ends: Any, page_table: Any, seqlens_k: Any,
    out: Any, *, settings: Settings,
) -> Call:  # fmt: skip
    op, paged = LOGITS, page_table is not None
    check_tensor(op, "q", q, ROW_AXES[paged], dtypes_of(op))
    check_tensor(op, "k", k, KEY_AXES[paged], dtypes_of(op))
    check_like(op, "k", k, "q", q)
    kind = format_of(op, k, k.shape[-1])
    rows, (heads, width), device = tuple(q.shape[:-2]), q.shape[-2:], q.device
    check_equal(op, "k's head_dim", k.shape[-1], "q's", width)
    check_width(op, "q", width)
    check_tensor(op, "weights", weights, ROW_AXES[paged][:-1], (torch.float32,))
    for axis, word in enumerate(ROW_AXES[paged][:-1]):
        check_equal(op, f"weights' {word}", weights.shape[axis], "q's", q.shape[axis])
    for name, tensor in (("q", q), ("k", k), ("weights", weights)):
        check_done(op, name, tensor)
    if weights.device != device:
        raise ArgumentError(op, "weights.device", str(weights.device), f"must be q's, {device}")
    if paged:
        for name, tensor in (("row_starts", row_starts), ("row_ends", row_ends)):
            if tensor is not None:
                raise ArgumentError(op, name, shape_or_value(tensor), "goes without page_table: seqlens_k has the ends")
        if k.shape[1] < 1:
            raise ArgumentError(op, "k's page_size", k.shape[1], "must be at least 1")
        if not k.shape[0]:  # to which a page id could be clamped
            raise ArgumentError(op, "k's pages", 0, "must be at least 1 with page_table")
        check_int32(op, "seqlens_k", seqlens_k, rows[:1], "(batch,)", device)
        keys = check_table(op, page_table, seqlens_k, rows[0], device, k, k.shape[1])
    else:
        if seqlens_k is not None:
            raise ArgumentError(op, "seqlens_k", shape_or_value(seqlens_k), "goes with page_table; rows have row_ends")
        keys = k.shape[0]
    reads = values.reads(settings, q)
    if k_scale is not None:
        if kind == "as_q":
            raise ArgumentError(op, "k_scale", shape_or_value(k_scale), "goes with q and k of torch.float8_e4m3fn")
        check_scale(op, kind, "k_scale", k_scale, device)
        if tuple(k_scale.shape) != tuple(k.shape[:-1]):
            limit = f"must be ({', '.join(KEY_AXES[paged][:-1])}), {tuple(k.shape[:-1])}"
            raise ArgumentError(op, "k_scale.shape", tuple(k_scale.shape), limit)
    _check_ranges(op, row_starts, row_ends, rows, keys, device, reads)
    if paged and reads:
        values.lengths(op, "k", seqlens_k, None, keys)
        values.page_table(op, page_table, [(0, n) for n in seqlens_k.tolist()], k.shape[1], k.shape[0])
    if k_scale is not None and reads:
        of = values.Tokens(keys, seqlens_k, None, page_table)
        values.scales(op, {"k_scale": k_scale[:, None] if paged else k_scale[None, None]}, of)
    read = {"q": q, "k": k, "weights": weights, "k_scale": k_scale, "row_starts": row_starts, "row_ends": row_ends}
    read |= {"page_table": page_table, "seqlens_k": seqlens_k}
    _check_out(op, out, (*rows, k.shape[1] * page_table.shape[1] if paged else keys), torch.float32, read)
    refuse_gradients_of_writes(op, q, k, weights, k_scale, out)
    queries, columns = as_stored(q, kind), as_stored(k, kind)
    queries = queries.transpose(1, 2) if paged else queries.transpose(0, 1)[None]
    columns = columns[:, None] if paged else columns[None, None]
    weights = weights if paged else weights[None]
    problem = Problem(
        op=op, batch=rows[0] if paged else 1, heads_q=heads, heads_k=1, seq_q=rows[-1], seq_k=keys, head_dim=width,
        dtype=DTYPES[q.dtype] if kind == "as_q" else "bf16",  # type: ignore[arg-type]
        kv_format=kind, kv_scales="none" if k_scale is None else "token",  # type: ignore[arg-type]
        page_size=k.shape[1] if paged else 0, seqlens_k=paged,
        aligned=all(rows_aligned(tensor) for tensor in (queries, columns, weights[:, None])),
        large=is_large(queries, columns, out),
    )  # fmt: skip
    return Call(
        problem=problem, q=queries, k=columns, v=columns, scale=1.0, weights=weights,
        k_scale=None if k_scale is None else k_scale[:, None] if paged else k_scale[None, None],
        row_starts=row_starts, row_ends=row_ends, page_table=page_table, seqlens_k=seqlens_k,
        result=out if paged else out[None],
    )  # fmt: skip


def topk_call(
    logits: Any, row_starts: Any, row_ends: Any, out: Any, k: Any, sorted: Any, *, settings: Settings
) -> Call:
    op = TOPK
    axes = ("batch", "seq", "keys") if isinstance(logits, torch.Tensor) and logits.ndim == 3 else ("rows", "keys")
    check_tensor(op, "logits", logits, axes)
    check_done(op, "logits", logits)
    check_flag(op, "sorted", sorted)
    if isinstance(k, bool) or not is_size(k) or not 1 <= k <= MAX_LENGTH:
        raise ArgumentError(op, "k", k, f"must be an integer in 1..{MAX_LENGTH}")
    rows, keys = tuple(logits.shape[:-1]), logits.shape[-1]
    _check_ranges(op, row_starts, row_ends, rows, keys, logits.device, values.reads(settings, logits))
    read = {"logits": logits, "row_starts": row_starts, "row_ends": row_ends}
    _check_out(op, out, (*rows, k), torch.int32, read)
    refuse_gradients_of_writes(op, logits, out)
    found = logits[:, None] if len(rows) == 2 else logits[None, None]
    problem = Problem(
        op=op, batch=found.shape[0], heads_q=1, heads_k=1, seq_q=rows[-1], seq_k=keys, head_dim=1, tokens=k,
        dtype=DTYPES[logits.dtype], aligned=rows_aligned(found), large=is_large(found, out),  # type: ignore[arg-type]
    )  # fmt: skip
    return Call(
        problem=problem, q=found, k=found, v=found, scale=1.0, row_starts=row_starts, row_ends=row_ends,
        result=out if len(rows) == 2 else out[None],
    )  # fmt: skip


def _check_ranges(
    op: str, row_starts: Any, row_ends: Any, rows: tuple[int, ...], keys: int, device: torch.device, reads: bool
) -> None:
    axes = "(batch, seq)" if len(rows) == 2 else "(rows,)"
    for name, tensor in (("row_starts", row_starts), ("row_ends", row_ends)):
        if tensor is None:
            continue
        check_int32(op, name, tensor, rows, axes, device)
        for place in ((tensor < 0) | (tensor > keys)).nonzero().tolist()[:1] if reads else ():
            limit = f"must be in 0..{keys}, the keys there are"
            raise ArgumentError(op, f"{name}{place}", int(tensor[tuple(place)]), limit)


def _check_out(op: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, read: dict[str, Any]) -> None:
    if not isinstance(out, torch.Tensor) or out.dtype != dtype or tuple(out.shape) != shape:
        given = (tuple(out.shape), out.dtype) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ArgumentError(op, "out", given, f"must be {shape} of {dtype}")
    check_place(op, "out", out, next(iter(read.values())).device, contiguous=False)
    if any(size > 1 and stride < shape[-1] for size, stride in zip(shape[:-1], out.stride(), strict=False)):
        limit = f"must be at least {shape[-1]} between rows: each number is written"
        raise ArgumentError(op, "out.stride()", out.stride(), limit)
    for name, tensor in read.items():
        if tensor is not None:
            check_apart(op, (name, "out"), (tensor, out))
