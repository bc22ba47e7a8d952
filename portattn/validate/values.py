"""Checks of lengths, page ids and indices. They are read back, which on an accelerator waits for the device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.schema.problem_limits import UNLIMITED
from portattn.validate.checks import has_no_data


def reads(settings: Settings, like: torch.Tensor) -> bool:
    """Return whether values are checked: with data, on the CPU unless forbidden, elsewhere only on demand."""
    if has_no_data(like):
        return False
    return settings.validate == "always" or (settings.validate == "auto" and like.device.type == "cpu")


def lengths(op: str, side: str, length: torch.Tensor | None, pad: torch.Tensor | None, capacity: int) -> None:
    """Check seqlens_* and leftpad_* against the number of rows."""
    pads: Sequence[int] = pad.tolist() if pad is not None else ()
    for index, value in enumerate(pads):
        if not 0 <= value <= capacity:
            raise ArgumentError(op, f"leftpad_{side}[{index}]", value, f"must be in 0..{capacity}, the rows there are")
    for index, value in enumerate(length.tolist() if length is not None else ()):
        room = capacity - (pads[index] if pads else 0)
        if not 0 <= value <= room:
            less = f" less its left padding of {pads[index]}" if pads else ""
            raise ArgumentError(
                op, f"seqlens_{side}[{index}]", value, f"must be in 0..{room}, the rows there are{less}"
            )


def cu_seqlens(op: str, side: str, beginnings: torch.Tensor, total: int, longest: int) -> None:
    """Check that cu_seqlens_* starts at 0, never falls, and has no sequence beyond `total` rows or max_seqlen_*."""
    values = beginnings.tolist()
    name = f"cu_seqlens_{side}"
    if values[0] != 0:
        raise ArgumentError(op, f"{name}[0]", values[0], "must be 0, the first row; lengths are summed up first")
    for index, (before, value) in enumerate(itertools.pairwise(values), 1):
        if value < before:
            raise ArgumentError(op, f"{name}[{index}]", value, f"must be at least {name}[{index - 1}], {before}")
        if value > total:
            raise ArgumentError(op, f"{name}[{index}]", value, f"must be at most the packed rows, {total}")
        if value - before > longest:
            raise ArgumentError(
                op,
                f"{name}[{index}] - {name}[{index - 1}]",
                value - before,
                f"must be at most max_seqlen_{side}, {longest}",
            )


Ranges = Sequence[tuple[int, int]]


def seen_keys(problem: Mapping[str, Any], rows: Sequence[int], lengths_k: Sequence[int]) -> Ranges:
    """Return each sequence's range of keys that window, chunk and causal mask show to some of its `rows` queries."""
    causal, left, right = problem["causal"], problem["window_left"], problem["window_right"]
    right, chunk = right if causal == "none" else 0, problem.get("chunk", 0)
    found = []
    for count, size in zip(rows, lengths_k, strict=True):
        diagonal = 0 if causal == "top_left" else size - count  # of the first query
        first = 0 if left == UNLIMITED else max(diagonal - left, 0)
        end = size if right == UNLIMITED else min(diagonal + count + right, size)
        if chunk:
            first = max(diagonal // chunk * chunk, first)
            end = min((diagonal + count - 1) // chunk * chunk + chunk, end)
        found.append((first, max(first, end)) if count else (0, 0))
    return found


def page_table(op: str, table: torch.Tensor, seen: Ranges, page_size: int, pages: int) -> None:
    """Check the page ids of keys that some query sees: engines free other pages and leave any id there."""
    for index, (row, (first, end)) in enumerate(zip(table.tolist(), seen, strict=True)):
        for place in range(first // page_size, -(-end // page_size) if end > first else 0):
            check_page(op, index, place, row[place], pages)


def check_page(op: str, sequence: int, place: int, page: int, pages: int) -> None:
    if not 0 <= page < pages:
        limit = f"must be in 0..{pages - 1}, the pages of the cache"
        raise ArgumentError(op, f"page_table[{sequence}, {place}]", page, limit)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a cache whose scales count. Lengths and left paddings may be absent."""

    capacity: int  # the longest sequence that it has room for
    seqlens_k: torch.Tensor | None
    leftpad_k: torch.Tensor | None
    page_table: torch.Tensor | None = None
    seen: Ranges | None = None  # keys that some query sees, if known: other pages may have any id
    words = ("sequence", "head", "token")

    def scales(self, scale: torch.Tensor) -> torch.Tensor:
        """Return a Call's scales as (B, Hk) or (B, Hk, Sk), with 1 where there is no token."""
        if scale.ndim == 2:
            return scale if self.seqlens_k is None else scale.masked_fill((self.seqlens_k == 0)[:, None], 1.0)
        at = torch.arange(self.capacity, device=scale.device)[None]
        first = at.new_zeros(1) if self.leftpad_k is None else self.leftpad_k
        end = at.new_full((1,), self.capacity) if self.seqlens_k is None else first + self.seqlens_k
        inside = (at >= first[:, None]) & (at < end[:, None])
        if self.seen is not None:
            bounds = at.new_tensor(self.seen)
            inside &= (at >= bounds[:, :1]) & (at < bounds[:, 1:])
        if self.page_table is not None and self.capacity:
            size = scale.shape[2]
            pages = self.page_table[:, at[0] // size].long().clamp(0, scale.shape[0] - 1)
            scale = scale[pages, :, at % size].transpose(1, 2)
        elif self.page_table is not None:
            return scale.new_ones(self.page_table.shape[0], scale.shape[1], 0)
        return scale.masked_fill(~inside[:, None], 1.0)


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Like Tokens, for sparse_attention's chosen tokens: no other scale is read. Indices and counts are checked."""

    indices: torch.Tensor
    counts: torch.Tensor
    page_table: torch.Tensor | None
    words = ("sequence", "query head", "place")

    def scales(self, scale: torch.Tensor) -> torch.Tensor:
        """Return scales as (B, Hk), or (B, Hq, Lmax) by token and head, with 1 where no token is chosen."""
        batch, heads, most = self.indices.shape
        if scale.ndim == 2:
            used = (self.counts > 0).reshape(*scale.shape, heads // scale.shape[1]).any(dim=2)
            return scale.masked_fill(~used, 1.0)
        token = self.indices.long()
        counted = (torch.arange(most, device=token.device) < self.counts[..., None]) & (token >= 0)
        token = token.masked_fill(~counted, 0)
        if not counted.any():
            return scale.new_ones(batch, heads, most)
        sequence = torch.arange(batch, device=token.device)[:, None, None]
        head = torch.arange(heads, device=token.device)[None, :, None] // (heads // scale.shape[1])
        if self.page_table is None:
            found = scale[sequence, head, token]
        else:
            size = scale.shape[2]
            pages = self.page_table[sequence, token // size].long().clamp(0, scale.shape[0] - 1)
            found = scale[pages, head, token % size]
        return found.masked_fill(~counted, 1.0)


def scales(op: str, given: Mapping[str, torch.Tensor], of: Tokens | ChosenTokens) -> None:
    """Check that the scales of existing tokens are positive and finite. Lengths and page ids have been checked."""
    for name, scale in given.items():
        found = of.scales(scale)
        for place in (~((found > 0) & torch.isfinite(found))).nonzero().tolist()[:1]:
            words = zip(Tokens.words if scale.ndim == 2 else of.words, place, strict=False)
            where = ", ".join(f"{word} {index}" for word, index in words)
            raise ArgumentError(op, f"{name} of {where}", float(found[tuple(place)]), "must be positive and finite")


def block_scales(op: str, given: Mapping[str, torch.Tensor], of: Tokens) -> None:
    """Check that nvfp4's block scales (B, Hk, Sk, D/16) are finite and not negative; a block of zeros has scale 0."""
    for name, stored in given.items():
        scale = stored.view(torch.float8_e4m3fn).float()
        if not scale.shape[-1]:
            continue
        wrong = ~((scale >= 0) & torch.isfinite(scale))
        first = wrong.int().argmax(-1, keepdim=True)
        of_token = torch.where(wrong.any(-1), scale.gather(-1, first)[..., 0], 1.0)  # 1: nothing is wrong
        found = of.scales(of_token)
        for place in (found != 1.0).nonzero().tolist()[:1]:
            where = ", ".join(f"{word} {index}" for word, index in zip(of.words, place, strict=True))
            limit = "must be finite and not negative"
            raise ArgumentError(op, f"{name} of {where}", float(found[tuple(place)]), limit)


def chosen_pages(
    op: str, table: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor, size: int, pages: int
) -> None:
    """Check the page id of every chosen token. Tokens have been checked against the lengths."""
    counted = (torch.arange(indices.shape[2], device=indices.device) < counts[..., None]) & (indices >= 0)
    for index, row in enumerate(table.tolist()):
        for place in (indices[index][counted[index]] // size).unique().tolist():
            check_page(op, index, place, row[place], pages)


def slots(op: str, indices: torch.Tensor, lengths: torch.Tensor | None, most: int) -> torch.Tensor:
    """Check topk_length, and each counted slot against the cache's `most`; return those slots, without holes."""
    places = indices.shape[-1]
    if lengths is not None:
        for place in ((lengths < 0) | (lengths > places)).nonzero().tolist()[:1]:
            limit = f"must be in 0..{places}, the places there are"
            raise ArgumentError(op, f"topk_length{place}", int(lengths[tuple(place)]), limit)
    counted = indices >= 0
    if lengths is not None:
        counted &= torch.arange(places, device=indices.device) < lengths[..., None]
    for place in (counted & (indices >= most)).nonzero().tolist()[:1]:
        limit = f"must be below {most}, the slots of the cache (negative ones are holes)"
        raise ArgumentError(op, f"indices{place}", int(indices[tuple(place)]), limit)
    return indices[counted].long()


def tokens(op: str, indices: torch.Tensor, counts: torch.Tensor, lengths: Sequence[int]) -> None:
    """Check counts against Lmax, and the counted tokens against the lengths. Negative tokens are padding."""
    most = indices.shape[2]
    for b, h in ((counts < 0) | (counts > most)).nonzero().tolist():
        raise ArgumentError(op, f"counts[{b}, {h}]", int(counts[b, h]), f"must be in 0..{most}, the places there are")
    counted = torch.arange(most, device=counts.device) < counts[..., None]
    sizes = torch.tensor(lengths, device=indices.device)[:, None, None]
    for b, h, n in (counted & (indices >= sizes)).nonzero().tolist():
        limit = f"must be below {lengths[b]}, the sequence's length (negative ones are passed over)"
        raise ArgumentError(op, f"indices[{b}, {h}, {n}]", int(indices[b, h, n]), limit)


def blocks(op: str, indices: torch.Tensor, counts: torch.Tensor | None, most: int) -> None:
    """Check block_counts, and each row's counted blocks against the `most` blocks of keys: no number is repeated."""
    places = indices.shape[-1]
    counted = indices >= 0
    if counts is not None:
        for place in ((counts < 0) | (counts > places)).nonzero().tolist()[:1]:
            limit = f"must be in 0..{places}, the places there are"
            raise ArgumentError(op, f"block_counts{place}", int(counts[tuple(place)]), limit)
        counted &= torch.arange(places, device=indices.device) < counts[..., None]
    for place in (counted & (indices >= most)).nonzero().tolist()[:1]:
        limit = f"must be below {most}, the blocks of keys (negative ones are holes)"
        raise ArgumentError(op, f"block_indices{place}", int(indices[tuple(place)]), limit)
    ordered, _ = torch.where(counted, indices, -1).sort(dim=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    for place in twice.nonzero().tolist()[:1]:
        row, limit = place[:-1], "must be in a row's list once"
        raise ArgumentError(op, f"block_indices{row}", int(ordered[..., 1:][tuple(place)]), limit)
