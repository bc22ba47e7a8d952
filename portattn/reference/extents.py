"""Which positions of each sequence exist, and where they lie, for the blockwise path."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from portattn.schema.call import Call


@dataclass(frozen=True, slots=True)
class Extent:
    """Positions [first, end) of each sequence; position 0 lies at row `origin` of the storage. All (B,) int64.

    Clamped to the storage, as the kernels do: lengths may hold anything.
    """

    origin: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor

    def longest(self, most: int) -> int:
        """An end that no sequence passes: the largest where reading it back costs nothing, else `most`."""
        if self.end.device.type != "cpu" or not len(self.end):
            return most
        return min(int(self.end.max()), most)


def query_extent(call: Call) -> Extent:
    """Of the query rows."""
    p = call.problem
    if call.cu_seqlens_q is not None:
        return _packed(call.cu_seqlens_q, call.q.shape[2], p.seq_q)
    return _padded(call.seqlens_q, call.leftpad_q, p.batch, p.seq_q, call.q.device)


def key_extent(call: Call) -> Extent:
    """Of the keys. Positions of a paged cache count along the sequence, whatever page they lie on."""
    p = call.problem
    if call.cu_seqlens_k is not None:
        return _packed(call.cu_seqlens_k, call.k.shape[2], p.seq_k)
    return _padded(call.seqlens_k, call.leftpad_k, p.batch, p.seq_k, call.q.device)


def _padded(
    length: torch.Tensor | None, pad: torch.Tensor | None, batch: int, size: int, device: torch.device
) -> Extent:
    origin = torch.zeros(batch, dtype=torch.long, device=device)
    first = origin if pad is None else pad.long().clamp(0, size)
    end = torch.full_like(first, size)
    if length is not None:
        end = (first + length.long().clamp(min=0)).clamp(max=size)
    return Extent(origin, first, end)


def _packed(cu_seqlens: torch.Tensor, rows: int, longest: int) -> Extent:
    cu = cu_seqlens.long().clamp(0, rows)
    return Extent(cu[:-1], torch.zeros_like(cu[:-1]), (cu[1:] - cu[:-1]).clamp(0, longest))
