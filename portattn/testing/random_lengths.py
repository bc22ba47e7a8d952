"""Random lengths and paddings of sequences, and where their keys lie: in slots, in a packed tensor or on pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from portattn.schema.problem import Problem

SPARE_PAGES = 3  # pages that no sequence owns
SPARE_ROWS = 3  # rows behind the last packed sequence
GARBAGE_IDS = (-7, 2**30, -(2**31), 2**31 - 1)  # what a page table or an index list holds where nothing may look


@dataclass(frozen=True)
class Lengths:
    """First row and length of each sequence's queries and keys, (B,) int32: inside its slot, or a packed tensor."""

    first_q: torch.Tensor
    q: torch.Tensor
    first_k: torch.Tensor
    k: torch.Tensor

    def given(self, p: Problem) -> dict[str, torch.Tensor | None]:
        """What of them the call has, by its name there."""
        return {
            "seqlens_q": self.q if p.seqlens_q else None,
            "seqlens_k": self.k if p.seqlens_k else None,
            "leftpad_q": self.first_q if p.leftpad_q else None,
            "leftpad_k": self.first_k if p.leftpad_k else None,
            "cu_seqlens_q": _cumulative(self.q) if p.packed else None,
            "cu_seqlens_k": _cumulative(self.k) if p.total_k is not None else None,
        }


@dataclass(frozen=True)
class Storage:
    """Keys lie in `batch` × `rows` places a head: of sequences, of one packed tensor, or of pages."""

    batch: int
    rows: int

    def unused(self, attended: torch.Tensor, places: torch.Tensor, shared: bool) -> torch.Tensor:
        """(batch, Hk, rows) bool: no attended key lies there.

        attended  (B, Hk, Sk) bool, by position
        places    (B, Sk) int64: where a position lies; -1 where it does not exist
        shared    all of `batch` lie in the same memory
        """
        exists = places >= 0
        used = torch.zeros(self.batch * self.rows, attended.shape[1], dtype=torch.bool)
        used[places[exists]] = attended.transpose(1, 2)[exists]
        used = used.view(self.batch, self.rows, attended.shape[1]).transpose(1, 2)
        return ~used.any(dim=0, keepdim=True).expand_as(used) if shared else ~used


def drawn_lengths(p: Problem, generator: torch.Generator, extremes: bool) -> Lengths:
    def padded(size: int, sized: bool, padding: bool) -> tuple[torch.Tensor, torch.Tensor]:
        pad = torch.randint(0, size // 2 + 1, (p.batch,), generator=generator, dtype=torch.int32)
        room = size - pad if padding else torch.full_like(pad, size)
        length = (torch.rand(p.batch, generator=generator) * (room + 1)).int()
        if extremes:
            length[:1] = room[:1]
            length[2::3] = 0
        return pad if padding else torch.zeros_like(pad), length if sized else room

    def packed(total: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = _shares(p.batch, total - min(SPARE_ROWS, total // 4) * extremes, longest, generator, extremes)
        return _cumulative(length)[:-1], length

    first_q, length_q = padded(p.seq_q, p.seqlens_q, p.leftpad_q) if p.total_q is None else packed(p.total_q, p.seq_q)
    if p.total_k is not None:
        return Lengths(first_q, length_q, *packed(p.total_k, p.seq_k))
    first_k, length_k = padded(p.seq_k, p.seqlens_k, p.leftpad_k)
    if p.packed and not extremes:  # three of four sequences have a key for every query, as calls in use do
        enough = (length_q + torch.rand(p.batch, generator=generator) * (p.seq_k - length_q + 1)).int()
        keep = (torch.rand(p.batch, generator=generator) < 0.25) | (length_q > p.seq_k)
        length_k = torch.where(keep, length_k, enough.clamp(max=p.seq_k))
    return Lengths(first_q, length_q, first_k, length_k)


def _shares(batch: int, total: int, longest: int, generator: torch.Generator, extremes: bool) -> torch.Tensor:
    """(B,) int32 lengths up to `longest`, which together have `total` rows if they can."""
    lengths: list[int] = torch.randint(0, longest + 1, (batch,), generator=generator).tolist()
    fixed = set()
    if extremes and batch:
        lengths[0] = min(longest, total)
        fixed = {0, *range(2, batch, 3)}
        lengths[2::3] = [0] * len(lengths[2::3])
    free = [b for b in range(batch) if b not in fixed]
    rest = total - sum(lengths[b] for b in fixed)
    drawn = sum(lengths[b] for b in free)
    for b in free:
        lengths[b] = min(lengths[b] * rest // max(drawn, 1), longest)
    for b in free:
        lengths[b] += min(longest - lengths[b], total - sum(lengths))
    return torch.tensor(lengths, dtype=torch.int32)


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    """cu_seqlens (B + 1,) int32."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])


def query_rows(p: Problem, lengths: Lengths) -> torch.Tensor:
    """Rows of the query tensor that belong to a sequence: (B, Sq) bool, or (1, Tq)."""
    row = torch.arange(p.query_rows[1])
    if p.packed:
        return (row < lengths.q.sum())[None]
    return (row >= lengths.first_q[:, None]) & (row < (lengths.first_q + lengths.q)[:, None])


def key_storage(p: Problem, lengths: Lengths) -> Storage:
    if p.page_size:
        return Storage(int((-(-lengths.k // p.page_size)).sum()) + SPARE_PAGES, p.page_size)
    return Storage(p.batch, p.seq_k) if p.total_k is None else Storage(1, p.total_k)


def page_table(
    p: Problem, lengths: Lengths, storage: Storage, generator: torch.Generator
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The page table (B, pages a sequence) int32, if any, and where each position lies: (B, Sk) int64, or -1."""
    j = torch.arange(p.seq_k)[None]
    if not p.page_size:
        inside = (j >= lengths.first_k[:, None]) & (j < (lengths.first_k + lengths.k)[:, None])
        if p.total_k is None:
            return None, torch.where(inside, torch.arange(p.batch)[:, None] * p.seq_k + j, -1)
        return None, torch.where(j < lengths.k[:, None], lengths.first_k[:, None] + j, -1)
    columns = p.seq_k // p.page_size
    owned = torch.arange(columns)[None] * p.page_size < lengths.k[:, None]
    garbage = torch.tensor(GARBAGE_IDS).repeat(-(-p.batch * columns // len(GARBAGE_IDS)))
    table = garbage[: p.batch * columns].reshape(p.batch, columns)
    table[owned] = torch.randperm(storage.batch, generator=generator)[: int(owned.sum())]
    places = table[:, j[0] // p.page_size] * p.page_size + j % p.page_size if columns else j.expand(p.batch, 0)
    return table.int(), torch.where(j < lengths.k[:, None], places, -1)
