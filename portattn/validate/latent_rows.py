"""The rows of a latent cache: of the queries' dtype, quantised with scales beside them, or with scales inside."""

from __future__ import annotations

from typing import Any

import torch

from portattn.errors import ArgumentError
from portattn.schema.problem_limits import DS_GROUP, DS_MLA, ds_row_bytes
from portattn.schema.tensors import KV_STORED
from portattn.validate.checks import check_tensor
from portattn.validate.stored import CACHE_DTYPES, as_stored, check_format, check_scale

AXES = ("pages", "page_size", "rank + rope")
_ROTARY = torch.bfloat16  # of rows of fp8_ds_mla
_SCALE_BYTES = 4


def check_latent(
    op: str, kv_pages: Any, kv_scale: Any, q: torch.Tensor, rank: int, rope: int
) -> tuple[torch.Tensor, str]:
    """The pages as a Call's k has them, without the axis of heads, and their format. Raises ArgumentError.

    q           q_nope, whose dtype and device decide
    rank, rope  widths of q_nope and of q_rope
    """
    check_tensor(op, "kv_pages", kv_pages, AXES, CACHE_DTYPES)
    if kv_pages.dtype == torch.uint8:
        _check_ds_rows(op, kv_pages, kv_scale, q, rank, rope)
        return kv_pages.view(KV_STORED), DS_MLA
    kind = check_format(op, ("kv_pages", "kv_pages"), kv_pages, kv_pages, q, "q_nope")
    if kv_pages.shape[2] != rank + rope:
        limit = f"must be q_nope's and q_rope's head_dim together, {rank} + {rope}"
        raise ArgumentError(op, "kv_pages's head_dim", kv_pages.shape[2], limit)
    return as_stored(kv_pages, kind), kind


def _check_ds_rows(op: str, rows: torch.Tensor, kv_scale: Any, q: torch.Tensor, rank: int, rope: int) -> None:
    """Bytes of fp8_ds_mla rows."""
    if rank % DS_GROUP:
        limit = f"must be a multiple of {DS_GROUP} with kv_pages of {DS_MLA} rows (torch.uint8)"
        raise ArgumentError(op, "q_nope's head_dim", rank, limit)
    width = ds_row_bytes(rank + rope, rank)
    if rows.shape[2] != width:
        limit = (
            f"must be {width} bytes as torch.uint8, a row of {DS_MLA}: {rank} e4m3 numbers, {rank // DS_GROUP} float32 "
            f"scales, {rope} bfloat16 numbers"
        )
        raise ArgumentError(op, "kv_pages's row", rows.shape[2], limit)
    if q.dtype != _ROTARY:
        raise ArgumentError(op, "q_nope.dtype", q.dtype, f"must be {_ROTARY} with kv_pages of {DS_MLA} rows")
    if rows.device != q.device:
        raise ArgumentError(op, "kv_pages.device", str(rows.device), f"must be q_nope's, {q.device}")
    if kv_scale is not None:
        raise ArgumentError(op, "kv_scale", tuple(kv_scale.shape), f"must be None: {DS_MLA} rows hold their scales")
    strides = rows.stride()
    if (
        strides[2] != 1
        or strides[0] % _SCALE_BYTES
        or strides[1] % _SCALE_BYTES
        or rows.storage_offset() % _SCALE_BYTES
    ):
        limit = (
            f"must be 1 along a row, the others and the offset ({rows.storage_offset()}) multiples of {_SCALE_BYTES}"
        )
        raise ArgumentError(op, "kv_pages.stride()", strides, limit)


def check_latent_scale(
    op: str, kind: str, kv_scale: Any, pages: torch.Tensor, batch: int, device: torch.device
) -> tuple[str, dict[str, Any]]:
    """What the scale belongs to (Problem.kv_scales), and k_scale and v_scale as a Call has them. Raises ArgumentError.

    pages  (P, page, width)
    """
    if kv_scale is None:
        if kind == "int8":
            raise ArgumentError(op, "kv_scale", None, "must be a float32 torch.Tensor with a cache of torch.int8")
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
