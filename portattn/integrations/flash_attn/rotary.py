"""The rotation of queries by their positions, which portattn's operations leave to the caller. Keys are rotated by the
operations that write them (append_kv, write_pages); both give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from portattn.errors import ArgumentError

INTERLEAVED, HALVES = "interleaved", "neox"


def style(interleaved: bool) -> str:
    """Which columns are rotated together, as portattn's `rotary` says it."""
    return INTERLEAVED if interleaved else HALVES


def check_tables(op: str, cos: Any, sin: Any, q: torch.Tensor) -> None:
    """Check cos and sin (positions, R/2) before the queries are rotated."""
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, torch.Tensor) or table.ndim != 2:
            given = tuple(table.shape) if isinstance(table, torch.Tensor) else type(table).__name__
            raise ArgumentError(op, name, given, "must be a torch.Tensor (positions, rotary_dim / 2)")
        if not table.dtype.is_floating_point:
            raise ArgumentError(op, f"{name}.dtype", table.dtype, "must be a floating-point dtype")
        if table.device != q.device:
            raise ArgumentError(op, f"{name}.device", str(table.device), f"must be q's, {q.device}")
    if cos.shape != sin.shape:
        raise ArgumentError(op, "rotary_sin.shape", tuple(sin.shape), f"must be rotary_cos's, {tuple(cos.shape)}")
    if not cos.shape[0] or not 2 <= 2 * cos.shape[1] <= q.shape[-1]:
        limit = f"must have a row for each position and 1..{q.shape[-1] // 2} columns, half of head_dim at most"
        raise ArgumentError(op, "rotary_cos.shape", tuple(cos.shape), limit)


def as_written(table: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return a table in a dtype that the operations writing keys take: k's and float32 stay, others become float32."""
    return table if table.dtype in (torch.float32, k.dtype) else table.float()


def rotate_queries(
    q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Queries (..., H, D) rotated in their first R columns, by the angles of positions (...); in their own dtype.

    Computed in float32 and rounded once. Positions beyond the tables count as the last, as the writers have it.
    """
    angle = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = (table[angle].float().unsqueeze(-2) for table in (cos, sin))  # (..., 1, R / 2)
    width = 2 * cos.shape[1]
    turned, rest = q[..., :width].float(), q[..., width:]
    if interleaved:
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, dim=-1)
    both = first * c - second * s, second * c + first * s
    found = torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
    return torch.cat((found.to(q.dtype), rest), dim=-1)
