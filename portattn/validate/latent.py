"""Calls over a latent cache: mla_attention."""

from __future__ import annotations

from typing import Any

import torch

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.schema.call import Call
from portattn.schema.problem_limits import Op
from portattn.validate import values
from portattn.validate.building import build
from portattn.validate.checks import (
    check_causal,
    check_flag,
    check_scale,
    check_splits,
    check_width,
)
from portattn.validate.features import Features
from portattn.validate.latent_rows import check_latent, check_latent_scale
from portattn.validate.paged import Queries, check_table

OP: Op = "mla_attention"


def mla_call(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    seqlens_k: torch.Tensor | None,
    *,
    settings: Settings,
    kv_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    scale: float,
    causal: bool | str = False,
    num_splits: int | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    **features: Any,
) -> Call:
    """Check everything and build the Call; `features` are checked by Features. Raises ArgumentError."""
    queries = Queries(OP, {"q_nope": q_nope, "q_rope": q_rope}, layout, cu_seqlens_q, max_seqlen_q, settings)
    rank, rope = q_nope.shape[-1], q_rope.shape[-1]
    differentiable = (q_nope, q_rope, kv_pages, kv_scale)  # as given: float8 is read as int8
    kv_pages, stored = check_latent(OP, kv_pages, kv_scale, q_nope, rank, rope)
    check_width(OP, "kv_pages", rank + rope)
    for name, width in (("q_nope", rank), ("q_rope", rope)):
        if width < 1:
            raise ArgumentError(OP, f"{name}'s head_dim", width, "must be at least 1")
    page_size = kv_pages.shape[1]
    if page_size < 1:
        raise ArgumentError(OP, "kv_pages's page_size", page_size, "must be at least 1")
    kv_scales, scales = check_latent_scale(OP, stored, kv_scale, kv_pages, queries.batch, q_nope.device)
    capacity = check_table(OP, page_table, seqlens_k, queries.batch, q_nope.device, kv_pages, page_size)
    if seqlens_k is None:
        raise ArgumentError(OP, "seqlens_k", None, "must be an int32 torch.Tensor of shape (batch,)")
    alignment = check_causal(OP, causal)
    scale = check_scale(OP, scale)
    check_flag(OP, "return_lse", return_lse)
    splits = check_splits(OP, num_splits)
    found = Features(OP, q_nope.device, q_nope.dtype)
    found.check(features, queries.scores(alignment, capacity))
    if values.reads(settings, q_nope):
        values.lengths(OP, "k", seqlens_k, None, capacity)
        seen = queries.seen_keys(found.problem, seqlens_k)
        values.page_table(OP, page_table, seen, page_size, kv_pages.shape[0])
        if kv_scale is not None:
            tokens = values.Tokens(capacity, seqlens_k, None, page_table, seen)
            values.scales(OP, {"kv_scale": scales["k_scale"]}, tokens)
    q, rotated = queries.tensors
    return build(
        OP,
        {"q": q, "q_rope": rotated, "k": kv_pages[:, None]},
        found,
        scale=scale,
        problem={
            "heads_k": 1,
            "seq_k": capacity,
            "head_dim": rank + rope,
            "head_dim_v": rank,
            "seqlens_k": True,
            "page_size": page_size,
            "num_splits": splits,
            "return_lse": return_lse,
            "kv_format": stored,
            "kv_scales": kv_scales,
            **queries.problem,
        },
        call={"seqlens_k": seqlens_k, "page_table": page_table, **scales, **queries.call},
        differentiable=differentiable,
    )
