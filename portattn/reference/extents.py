"""Which positions of each sequence exist, and where they lie, for the blockwise path."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from portattn.schema.call import Call


@dataclass(frozen=True, slots=True)
class Extent:
    """Positions [first, end) of each sequence; position 0 lies at row `origin` of the storage. All (B,) int64.

    alike  where no lengths are given: the end of all of them, whose first is 0

    Clamped to the storage, as the kernels do: lengths may hold anything.
    """

    origin: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    alike: int | None = None

    def longest(self, most: int) -> int:
        """An end that no sequence passes: the largest where reading it back costs nothing, else `most`."""
        if self.end.device.type != "cpu" or not len(self.end):
            return most
        return min(int(self.end.max()), most)

    def numbers(self) -> list[tuple[int, int]] | None:
        """(first, end) of each sequence, or once of all that are alike; None where reading them back would wait."""
        if self.alike is not None:
            return [(0, self.alike)]
        if self.end.device.type != "cpu":
            return None
        return list(zip(self.first.tolist(), self.end.tolist(), strict=True))


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
    return Extent(origin, first, end, size if length is None and pad is None else None)


def _packed(cu_seqlens: torch.Tensor, rows: int, longest: int) -> Extent:
    cu = cu_seqlens.long().clamp(0, rows)
    return Extent(cu[:-1], torch.zeros_like(cu[:-1]), (cu[1:] - cu[:-1]).clamp(0, longest))


@dataclass(frozen=True, slots=True)
class Reach:
    """What a block of rows can see of the keys: positions outside [begin, end) are seen by none of its rows, and those
    inside [all_begin, all_end) by every row of every sequence, as far as lengths, causal mask,
    window and chunks go."""

    begin: int
    end: int
    all_begin: int
    all_end: int


def reach(call: Call, queries: Extent, keys: Extent, start: int, stop: int, most: int) -> Reach:
    """Of rows [start, stop). Where lengths lie on an accelerator nothing is known, but that there are `most` keys."""
    p = call.problem
    q_numbers, k_numbers = queries.numbers(), keys.numbers()
    if q_numbers is None or k_numbers is None or call.indices is not None:
        return Reach(0, most, most, 0)
    count = max(len(q_numbers), len(k_numbers))
    right = 0 if p.causal != "none" else p.window_right
    begin, end, all_begin, all_end = most, 0, 0, most
    for (q_first, q_end), (k_first, k_end) in zip(
        _repeated(q_numbers, count), _repeated(k_numbers, count), strict=True
    ):
        first, last = max(start, q_first), min(stop, q_end)
        if (first, last) != (start, stop):
            all_end = 0  # rows of padding see nothing
        if first >= last:
            continue
        shift = k_first - q_first if p.causal == "top_left" else k_end - q_end
        low = (k_first, k_first)
        if p.window_left >= 0:
            low = max(k_first, first + shift - p.window_left), max(k_first, last - 1 + shift - p.window_left)
        high = (
            (k_end, k_end) if right < 0 else (min(k_end, first + shift + right + 1), min(k_end, last + shift + right))
        )
        if p.chunk:
            begins = [k_first + (row + shift - k_first) // p.chunk * p.chunk for row in (first, last - 1)]
            low = max(low[0], begins[0]), max(low[1], begins[1])
            high = min(high[0], begins[0] + p.chunk), min(high[1], begins[1] + p.chunk)
        begin, end = min(begin, low[0]), max(end, high[1])
        all_begin, all_end = max(all_begin, low[1]), min(all_end, high[0])
    return Reach(begin, min(end, most), all_begin, all_end)


def _repeated(numbers: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    return numbers * count if len(numbers) == 1 else numbers
