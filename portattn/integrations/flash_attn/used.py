"""Packed sequences of which only the first rows count (seqused_q, seqused_k), as packed sequences of those rows alone.

Rows are gathered, and results put back, by torch operations that have gradients; nothing is read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from portattn.config import current
from portattn.errors import ArgumentError
from portattn.integrations.flash_attn.cached_call import places
from portattn.integrations.flash_attn.calls import lengths_of
from portattn.validate.checks import check_dense
from portattn.validate.values import cu_seqlens, reads


@dataclass(frozen=True)
class UsedRows:
    """The rows of packed sequences that count, and the sequences that they make up.

    beginnings  (B + 1,) int32: what the operation gets for cu_seqlens
    """

    given: torch.Tensor
    used: torch.Tensor
    beginnings: torch.Tensor

    def packed(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that count, of (T, ...), one after the other; what follows the last one is never looked at."""
        if not rows.shape[0]:
            return rows
        sequence, within = places(self.beginnings, rows.shape[0])
        return rows[(self.given[sequence] + within).clamp(0, rows.shape[0] - 1)]

    def restored(self, rows: torch.Tensor, empty: float) -> torch.Tensor:
        """Results (T, ...) where their rows were; `empty` in those that do not count."""
        if not rows.shape[0]:
            return rows
        at = torch.arange(rows.shape[0], device=rows.device)
        sequence, within = places(self.given, rows.shape[0])
        counts = (within < self.used[sequence]) & (at < self.given[-1])
        found = rows[(self.beginnings[sequence] + within).clamp(0, rows.shape[0] - 1)]
        return torch.where(counts.view(-1, *[1] * (rows.ndim - 1)), found, empty)


def used_rows(op: str, side: str, beginnings: Any, used: Any, rows: torch.Tensor) -> UsedRows | None:
    """None where all rows count. Raises ArgumentError. rows: the packed tensor, (T, ...)."""
    if used is None:
        return None
    check_dense(op, f"seqused_{side}", used)
    lengths, name = lengths_of(op, f"cu_seqlens_{side}", beginnings), f"seqused_{side}"
    if not isinstance(used, torch.Tensor) or used.dtype != torch.int32 or used.shape != lengths.shape:
        given = (tuple(used.shape), used.dtype) if isinstance(used, torch.Tensor) else type(used).__name__
        raise ArgumentError(op, name, given, f"must be an int32 torch.Tensor of shape (batch,), {tuple(lengths.shape)}")
    if used.device != lengths.device:
        raise ArgumentError(op, f"{name}.device", str(used.device), f"must be cu_seqlens_{side}'s, {lengths.device}")
    if not torch.compiler.is_dynamo_compiling() and reads(current(), used):
        total = rows.shape[0] if rows.ndim else 0
        if beginnings.shape[0]:  # the operation sees what counts alone, which begins at 0 whatever was given
            cu_seqlens(op, side, beginnings, total, total)
        for index, (value, length) in enumerate(zip(used.tolist(), lengths.tolist(), strict=True)):
            if not 0 <= value <= length:
                raise ArgumentError(op, f"{name}[{index}]", value, f"must be in 0..{length}, the sequence's rows")
    used = torch.minimum(used.clamp(min=0), lengths)
    return UsedRows(beginnings, used, torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0)))
