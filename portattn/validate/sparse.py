"""Calls of sparse_attention, over chosen tokens of a cache, and of block_sparse_attention, over chosen blocks."""

from __future__ import annotations

from typing import Any

import torch

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.schema.call import Call
from portattn.schema.problem import check_groups
from portattn.schema.problem_limits import KEY_BLOCKS, MAX_LENGTH, Op
from portattn.validate import values
from portattn.validate.checks import (
    check_equal,
    check_int32,
    check_like,
    check_place,
    check_tensor,
    check_width,
)
from portattn.validate.dense import AXES, check_layout
from portattn.validate.features import Features, Scores, build, ceil_div
from portattn.validate.paged import PAGE_AXES, check_page_layout, check_pages, check_table
from portattn.validate.quantized import ScaleShapes, StoredCache, as_stored, dtypes_of, format_of

OP: Op = "sparse_attention"
LEAST_TABLES = 2  # MagicPIG samples keys that are found in two tables or more


def sparse_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    settings: Settings,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    log_weights: torch.Tensor | None = None,
    magicpig: tuple[torch.Tensor, torch.Tensor] | tuple[int, int] | None = None,
    magicpig_bits: torch.Tensor | None = None,
    magicpig_tables: torch.Tensor | None = None,
    layout: str = "bhsd",
    page_layout: str = "phd",
    **asked: Any,
) -> Call:
    """Check sparse_attention's arguments and build the Call; Features checks `asked`.

    `magicpig` is K and L: checked integers, or tensors, which may also come as magicpig_bits and magicpig_tables."""
    if magicpig_bits is not None and magicpig_tables is not None:
        magicpig = magicpig_bits, magicpig_tables
    names = "k_cache", "v_cache"
    check_layout(OP, layout)
    check_page_layout(OP, page_layout)
    check_tensor(OP, "q", q, AXES[layout])
    if page_table is None:
        for name, tensor in zip(names, (k_cache, v_cache), strict=True):
            check_tensor(OP, name, tensor, AXES[layout], dtypes_of(OP))
        k, v = (t.transpose(1, 2) if layout == "bshd" else t for t in (k_cache, v_cache))
        for axis, word in enumerate(("batch", "heads", "seq")):
            check_equal(OP, f"v_cache's {word}", v.shape[axis], "k_cache's", k.shape[axis])
    else:
        k, v = check_pages(OP, names, k_cache, v_cache, page_layout, dtypes_of(OP))
    kind = format_of(OP, k, q.shape[-1])
    cache = StoredCache(OP, names, (k, v), kind)
    cache.check_like("q", q)
    differentiable = (q, k, v, k_scale, v_scale, log_weights)  # as given: float8 is read as int8
    k, v = as_stored(k, kind), as_stored(v, kind)
    q = q.transpose(1, 2) if layout == "bshd" else q
    batch, heads_q, seq_q, head_dim = q.shape
    if seq_q != 1:
        raise ArgumentError(OP, "q's seq", seq_q, "must be 1: tokens are chosen for one query a sequence")
    cache.check_width("k_cache", k, "q's", head_dim)
    check_width(OP, "q", head_dim)
    head_dim_v = cache.numbers(v)
    check_width(OP, "v_cache", head_dim_v)
    if page_table is None:
        check_equal(OP, "k_cache's batch", k.shape[0], "q's", batch)
        page_size, capacity = 0, k.shape[2]
        if seqlens_k is not None:
            check_int32(OP, "seqlens_k", seqlens_k, (batch,), "(batch,)", q.device)
    else:
        page_size = k.shape[2]
        capacity = check_table(OP, page_table, seqlens_k, batch, q.device, k, page_size)
    if isinstance(indices, torch.Tensor) and indices.ndim != 3:
        raise ArgumentError(OP, "indices.ndim", indices.ndim, "must be 3: (batch, heads_q, places)")
    places = indices.shape[2] if isinstance(indices, torch.Tensor) else 0
    shape = (batch, heads_q, places)
    check_int32(OP, "indices", indices, shape, "(batch, heads_q, places)", q.device, contiguous=False)
    check_int32(OP, "counts", counts, shape[:2], "(batch, heads_q)", q.device, contiguous=False)
    axes, swapped = (
        (AXES[layout], layout == "bshd") if page_table is None else (PAGE_AXES[page_layout], page_layout == "phd")
    )
    shapes = ScaleShapes(batch, k.shape[1], tuple(k_cache.shape[:3]), ", ".join(axes[:3]), swapped)
    kv_scales, scales = cache.scales(k_scale, v_scale, shapes, q.device)
    if values.reads(settings, q):
        values.lengths(OP, "k", seqlens_k, None, capacity)
        lengths = [capacity] * batch if seqlens_k is None else seqlens_k.tolist()
        values.tokens(OP, indices, counts, lengths)
        if page_table is not None:
            values.chosen_pages(OP, page_table, indices, counts, page_size, k.shape[0])
        values.scales(OP, scales, values.ChosenTokens(indices, counts, page_table))
    found = Features(OP, q.device, q.dtype, asked, head_dim)
    found.check_numbers()
    extra = _weights(log_weights, magicpig, counts, shape, settings)
    found.check_scored(Scores(batch, heads_q, seq_q, capacity))
    return build(
        OP,
        {"q": q, "k": k, "v": v},
        found,
        problem={
            "batch": batch,
            "heads_q": heads_q,
            "heads_k": k.shape[1],
            "seq_q": 1,
            "seq_k": capacity,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "seqlens_k": seqlens_k is not None,
            "page_size": page_size,
            "page_layout": page_layout if page_size else "phd",
            "tokens": places,
            "log_weights": log_weights is not None,
            "magicpig": magicpig is not None,
            "kv_format": kind,
            "kv_scales": kv_scales,
            "layout": layout,
        },
        call={
            "seqlens_k": seqlens_k,
            "page_table": page_table,
            "indices": indices,
            "counts": counts,
            **scales,
            **extra,
        },
        differentiable=differentiable,
    )


def _weights(
    log_weights: Any, magicpig: Any, counts: torch.Tensor, shape: tuple[int, ...], settings: Settings
) -> dict[str, Any]:
    """Return the Call's fields for log_weights (B, Hq, Lmax) and MagicPIG's two numbers or (Hq,) tensors."""
    found: dict[str, Any] = {}
    device = counts.device
    if log_weights is not None:
        if not isinstance(log_weights, torch.Tensor) or log_weights.dtype != torch.float32:
            kind = getattr(log_weights, "dtype", type(log_weights).__name__)
            raise ArgumentError(OP, "log_weights", kind, "must be a torch.Tensor of torch.float32")
        if tuple(log_weights.shape) != shape:
            raise ArgumentError(OP, "log_weights.shape", tuple(log_weights.shape), f"must be indices', {shape}")
        check_place(OP, "log_weights", log_weights, device, contiguous=False)
        found["log_weights"] = log_weights
    if magicpig is not None and not isinstance(magicpig[0], torch.Tensor):
        found["magicpig"] = magicpig
    elif magicpig is not None:
        names = ("magicpig's K", "magicpig's L")
        for name, tensor in zip(names, magicpig, strict=True):
            check_int32(OP, name, tensor, shape[1:2], "(heads_q,)", device)
        if values.reads(settings, counts):
            for name, tensor, least in zip(names, magicpig, (1, LEAST_TABLES), strict=True):
                for head, value in enumerate(tensor.tolist()):
                    if value < least:
                        raise ArgumentError(OP, f"{name}[{head}]", value, f"must be at least {least}")
        found["magicpig_bits"], found["magicpig_tables"] = magicpig
    return found


BLOCKS: Op = "block_sparse_attention"


def block_call(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor | None = None,
    block_size: int,
    seqlens_k: torch.Tensor | None = None,
    settings: Settings,
    layout: str = "bhsd",
    **asked: Any,
) -> Call:
    """Check block_sparse_attention's arguments and build the Call; Features checks `asked`."""
    check_layout(BLOCKS, layout)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(BLOCKS, name, tensor, AXES[layout])
        check_like(BLOCKS, name, tensor, "q", q)
    if not isinstance(block_size, int) or block_size not in KEY_BLOCKS:
        raise ArgumentError(BLOCKS, "block_size", block_size, f"must be one of {', '.join(map(str, KEY_BLOCKS))}")
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    batch, heads_q, seq_q, head_dim = q.shape
    heads_k, seq_k = k.shape[1:3]
    check_equal(BLOCKS, "k's batch", k.shape[0], "q's", batch)
    check_equal(BLOCKS, "k's head_dim", k.shape[3], "q's", head_dim)
    for axis, word in enumerate(("batch", "heads", "seq")):
        check_equal(BLOCKS, f"v's {word}", v.shape[axis], "k's", k.shape[axis])
    check_width(BLOCKS, "q", head_dim)
    check_width(BLOCKS, "v", v.shape[3])
    check_groups(BLOCKS, heads_q, heads_k)
    axes, rows = ("batch, heads_k, seq_q", (batch, heads_k, seq_q))
    if layout == "bshd":
        axes, rows = ("batch, seq_q, heads_k", (batch, seq_q, heads_k))
    if isinstance(block_indices, torch.Tensor) and block_indices.ndim != 4:
        raise ArgumentError(BLOCKS, "block_indices.ndim", block_indices.ndim, f"must be 4: ({axes}, places)")
    places = block_indices.shape[-1] if isinstance(block_indices, torch.Tensor) else 0
    check_int32(
        BLOCKS, "block_indices", block_indices, (*rows, places), f"({axes}, places)", q.device, contiguous=False
    )
    if not 1 <= places <= MAX_LENGTH // max(KEY_BLOCKS):
        limit = f"must be from 1 to {MAX_LENGTH // max(KEY_BLOCKS)}"
        raise ArgumentError(BLOCKS, "block_indices.shape[-1]", places, limit)
    if places > 1 and block_indices.stride(-1) != 1:
        limit = "must be 1: a row's places are neighbours"
        raise ArgumentError(BLOCKS, "block_indices.stride(-1)", block_indices.stride(-1), limit)
    if block_counts is not None:
        check_int32(BLOCKS, "block_counts", block_counts, rows, f"({axes})", q.device, contiguous=False)
    if seqlens_k is not None:
        check_int32(BLOCKS, "seqlens_k", seqlens_k, (batch,), "(batch,)", q.device)
    if values.reads(settings, q):
        values.lengths(BLOCKS, "k", seqlens_k, None, seq_k)
        values.blocks(BLOCKS, block_indices, block_counts, ceil_div(seq_k, block_size))
    if layout == "bshd":
        block_indices = block_indices.transpose(1, 2)
        block_counts = None if block_counts is None else block_counts.transpose(1, 2)
    found = Features(BLOCKS, q.device, q.dtype, asked, head_dim)
    found.check_numbers()
    found.check_scored(Scores(batch, heads_q, seq_q, seq_k, seq_q + seq_k))
    return build(
        BLOCKS,
        {"q": q, "k": k, "v": v},
        found,
        problem={
            "batch": batch,
            "heads_q": heads_q,
            "heads_k": heads_k,
            "seq_q": seq_q,
            "seq_k": seq_k,
            "head_dim": head_dim,
            "head_dim_v": v.shape[3],
            "seqlens_k": seqlens_k is not None,
            "tokens": places,
            "block_k": block_size,
            "layout": layout,
        },
        call={"seqlens_k": seqlens_k, "indices": block_indices, "counts": block_counts},
        differentiable=(q, k, v),
    )
