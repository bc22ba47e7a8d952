"""Calls over contiguous keys: attention and decode_attention."""

from __future__ import annotations

from typing import Any

import torch

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.schema.call import Call
from portattn.schema.ops import ROWS
from portattn.schema.problem import check_groups
from portattn.validate import values
from portattn.validate.building import build
from portattn.validate.checks import (
    DTYPES,
    check_causal,
    check_dropout,
    check_equal,
    check_flag,
    check_int32,
    check_scale,
    check_splits,
    check_tensor,
    check_width,
)
from portattn.validate.features import Features, Scores
from portattn.validate.layouts import AXES as AXES
from portattn.validate.layouts import with_advice
from portattn.validate.quantised import Operands
from portattn.validate.stored import (
    CACHE_DTYPES,
    OPERAND_DTYPES,
    ScaleShapes,
    as_stored,
    check_blocks,
    check_format,
    check_scales,
    check_stored_width,
    numbers_of,
)

# Layouts by their names in other libraries, in small letters, with what to write here.
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
    """Check everything and build the Call; q, k and v become (B, H, S, D) views.

    Raises ArgumentError, which says so where the shapes would agree in the other layout.
    """
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
    scale: float | None = None,
    causal: bool | str = False,
    return_lse: bool = False,
    layout: str = "bhsd",
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    leftpad_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    num_splits: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **features: Any,
) -> Call:
    """As attention_call.

    features  the other arguments by name, each checked by Features
    """
    check_layout(op, layout)
    every = "q_scale" in ROWS[op].tensors  # queries may be quantised too
    for name, tensor in zip(names, (q, k, v), strict=True):
        narrow = name != names[0] or every
        check_tensor(op, name, tensor, AXES[layout], (OPERAND_DTYPES if every else CACHE_DTYPES) if narrow else DTYPES)
    differentiable = (
        q,
        k,
        v,
        q_scale,
        k_scale,
        v_scale,
    )  # as given: bytes of float8 are read as int8, of which there are no gradients
    q_name, k_name, v_name = names
    operands = Operands(op, q, k, v, out_dtype) if every else None
    blocks, by_block = (k_block_scale, v_block_scale), {}
    stored = check_format(op, (k_name, v_name), k, v, q, blocks=blocks) if operands is None else operands.kind
    given_rows, given_tokens, given_caches = tuple(q.shape[:3]), tuple(k.shape[:3]), (k, v)
    if operands is None:
        k, v = as_stored(k, stored), as_stored(v, stored)
    else:
        q, k, v = operands.stored(q, k, v)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    batch, heads_q, seq_q, head_dim = q.shape
    seq_k = k.shape[2]
    check_equal(op, f"{k_name}'s batch", k.shape[0], f"{q_name}'s", batch)
    check_equal(op, f"{v_name}'s batch", v.shape[0], f"{q_name}'s", batch)
    check_stored_width(op, k_name, k, stored, f"{q_name}'s", head_dim)
    check_width(op, q_name, head_dim)
    head_dim_v = numbers_of(v, stored)
    check_width(op, v_name, head_dim_v)
    if operands is None:
        by_block = check_blocks(op, stored, blocks, given_caches, layout == "bshd")
    check_equal(op, f"{v_name}'s heads", v.shape[1], f"{k_name}'s", k.shape[1])
    check_equal(op, f"{v_name}'s seq", v.shape[2], f"{k_name}'s", seq_k)
    check_groups(op, heads_q, k.shape[1])  # before the lengths, which are too long for the other order of axes

    alignment = check_causal(op, causal)
    scale = check_scale(op, head_dim**-0.5 if scale is None else scale)
    dropout_p = check_dropout(op, dropout_p, dropout_seed, q.device)
    check_flag(op, "return_lse", return_lse)
    splits = check_splits(op, num_splits)

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
        kv_scales, scales = check_scales(op, stored, k_scale, v_scale, shapes, q.device)
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
    if features.get("block_mask") is not None:
        for name in ("leftpad_q", "leftpad_k"):
            if lengths[name] is not None:
                limit = "goes without block_mask, whose blocks count from the first row and key"
                raise ArgumentError(op, name, tuple(lengths[name].shape), limit)
    found = Features(op, q.device, q.dtype if operands is None else operands.dtype)
    found.check(features, Scores(batch, heads_q, seq_q, seq_k, alignment, seq_q + seq_k))

    return build(
        op,
        {"q": q, "k": k, "v": v},
        found,
        scale=scale,
        problem={
            "batch": batch,
            "heads_q": heads_q,
            "heads_k": k.shape[1],
            "seq_q": seq_q,
            "seq_k": seq_k,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            **{name: length is not None for name, length in lengths.items()},
            "num_splits": splits,
            "return_lse": return_lse,
            "kv_format": stored,
            "kv_scales": kv_scales,
            "layout": layout,
            "dropout": dropout_p > 0.0,
        },
        call={
            **lengths,
            **scales,
            **by_block,
            "dropout_p": dropout_p,
            "dropout_seed": dropout_seed if dropout_p else None,
        },
        differentiable=differentiable,
        dtype=None if operands is None else operands.dtype,
    )


def dense_call(*, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> Call:
    """attention's arguments as a Call."""
    return attention_call("attention", q, k, v, names=("q", "k", "v"), **rest)


def decode_call(*, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **rest: Any) -> Call:
    """decode_attention's arguments as a Call."""
    return attention_call("decode_attention", q, k_cache, v_cache, names=("q", "k_cache", "v_cache"), **rest)
