"""Query rows a block at a time, padded or packed, and the results put back where the rows lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from portattn.reference.extents import Extent
from portattn.reference.stored import dequantize
from portattn.schema.call import Call


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows [start, stop) of every sequence.

    q         (B, Hq, n, D) in the dtype that is computed with, 0 outside the sequences, whose padding can hold NaN
    position  (1, n) int64
    inside    (B, n) bool: the row belongs to its sequence
    storage   (B, n) int64, packed queries only: the row of the packed tensor, and for rows of no sequence the one
              after its last, where results are thrown away
    """

    start: int
    stop: int
    q: torch.Tensor
    position: torch.Tensor
    inside: torch.Tensor
    storage: torch.Tensor | None


def compute_dtype(call: Call) -> torch.dtype:
    """What products are computed in."""
    return torch.float64 if call.q.dtype is torch.float64 else torch.float32


def load_rows(call: Call, extent: Extent, start: int, stop: int) -> RowBlock:
    """The block of rows [start, stop)."""
    i = torch.arange(start, stop, device=call.q.device)[None]
    inside = (i >= extent.first[:, None]) & (i < extent.end[:, None])
    storage = None
    parts = [call.q] if call.q_rope is None else [call.q, call.q_rope]
    if call.problem.packed:
        rows = extent.origin[:, None] + i
        total = call.q.shape[2]
        storage = rows.masked_fill(~inside, total)
        rows = rows.clamp(max=total - 1)
        parts = [part[0][:, rows].transpose(0, 1) for part in parts]
    else:
        parts = [part[:, :, start:stop] for part in parts]
    if call.problem.q_format != "as_q":
        parts = [_widened(call, part, slice(start, stop) if storage is None else rows) for part in parts]
    parts = [part.to(compute_dtype(call)) for part in parts]
    q = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    return RowBlock(start, stop, q.masked_fill(~inside[:, None, :, None], 0.0), i, inside, storage)


def _widened(call: Call, numbers: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Quantised queries (B, Hq, n, D) of these rows, of packed ones the storage's rows (B, n), times their scales."""
    scale = call.q_scale
    if scale is not None and scale.ndim == 2:
        scale = scale.repeat_interleave(call.problem.group, dim=1)[..., None]
    elif scale is not None:
        scale = scale[:, :, rows] if isinstance(rows, slice) else scale[0][:, rows].transpose(0, 1)
    return dequantize(numbers, call.problem.q_format, scale)


class RowBlockResults:
    """Takes the results of row blocks in order, and gives the call's output and LSE.

    With gradients the pieces are kept: in-place assembly would record every slice, and one concatenation is what
    autograd wants.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        p = call.problem
        self.pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.storage: list[torch.Tensor] = []
        rows = p.query_rows[1] + p.packed  # packed: one row more, for what is thrown away
        if p.packed:
            self.out = call.empty(rows, p.heads_q, p.head_dim_v).zero_()
            self.lse = call.empty(rows, p.heads_q, dtype=compute_dtype(call)).fill_(float("-inf"))
        else:
            self.out, self.lse = torch.zeros_like(call.new_out()), call.new_lse().to(compute_dtype(call))

    def add(self, rows: RowBlock, out: torch.Tensor, lse: torch.Tensor) -> None:
        """out (B, Hq, n, Dv) and lse (B, Hq, n) of a block."""
        if rows.storage is not None:
            self.storage.append(rows.storage)
        if self.call.problem.needs_grad:
            self.pieces.append((out, lse))
        elif rows.storage is not None:
            index = rows.storage.flatten()
            self.out.index_copy_(0, index, _by_row(out))
            self.lse.index_copy_(0, index, _by_row(lse))
        else:
            self.out[:, :, rows.start : rows.stop], self.lse[:, :, rows.start : rows.stop] = out, lse

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE, shaped as Call.new_out and Call.new_lse say."""
        out, lse = self.out, self.lse
        if self.pieces:
            out, lse = (torch.cat(parts, dim=2) for parts in zip(*self.pieces, strict=True))
        if not self.call.problem.packed:
            return out, lse
        if self.pieces:
            index = torch.cat(self.storage, dim=1).flatten()
            out = self.out.index_copy(0, index, _by_row(out))
            lse = self.lse.index_copy(0, index, _by_row(lse))
        return out[:-1].transpose(0, 1)[None], lse[:-1].t().contiguous()[None]


def _by_row(values: torch.Tensor) -> torch.Tensor:
    """(B, Hq, n, …) as (B·n, Hq, …)."""
    return values.transpose(1, 2).flatten(0, 1)


class RowTensor:
    """A tensor (B, Hq, Sq, X), or of packed rows (1, Hq, Tq + 1, X), of which row blocks are taken and put.

    The last row of packed ones stands for those that belong to no sequence; what it holds is never used.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @classmethod
    def zeros(cls, call: Call, width: int) -> RowTensor:
        """In the dtype that is computed with."""
        p = call.problem
        batch, count = p.query_rows
        return cls(call.empty(batch, p.heads_q, count + p.packed, width, dtype=compute_dtype(call)).zero_())

    @classmethod
    def of(cls, call: Call, values: torch.Tensor) -> RowTensor:
        """Of values laid out as the call's queries are, (B, Hq, Sq, X) or (1, Hq, Tq, X)."""
        values = values.to(compute_dtype(call))
        return cls(torch.nn.functional.pad(values, (0, 0, 0, 1)) if call.problem.packed else values)

    def take(self, rows: RowBlock) -> torch.Tensor:
        """(B, Hq, n, X)."""
        if rows.storage is None:
            return self.values[:, :, rows.start : rows.stop]
        return self.values[0][:, rows.storage].transpose(0, 1)

    def put(self, rows: RowBlock, values: torch.Tensor) -> None:
        """values (B, Hq, n, X) of a block."""
        if rows.storage is None:
            self.values[:, :, rows.start : rows.stop] = values
        else:
            self.values[0].index_copy_(1, rows.storage.flatten(), values.transpose(0, 1).flatten(1, 2))

    def whole(self, call: Call) -> torch.Tensor:
        """(B, Hq, Sq, X) or (1, Hq, Tq, X)."""
        return self.values[:, :, : call.q.shape[2]]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the forward pass leaves of each row: its largest score, the sum of exp(score − largest), which is 0 where
    nothing is attended, and its output. In the dtype that is computed with.

    out  None where the call's output is in that dtype
    """

    largest: RowTensor
    sum: RowTensor
    out: RowTensor | None

    @classmethod
    def empty(cls, call: Call) -> Statistics:
        rounded = call.dtype is not compute_dtype(call)
        out = RowTensor.zeros(call, call.problem.head_dim_v) if rounded else None
        return cls(RowTensor.zeros(call, 1), RowTensor.zeros(call, 1), out)

    def put(self, rows: RowBlock, largest: torch.Tensor, total: torch.Tensor, out: torch.Tensor) -> None:
        """(B, Hq, n, 1), (B, Hq, n, 1), (B, Hq, n, Dv) of a block."""
        for where, values in ((self.largest, largest), (self.sum, total), (self.out, out)):
            if where is not None:
                where.put(rows, values)
