"""What lengths, page ids and indices must be. They are read back, which on an accelerator waits for the device."""

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
    """Whether values are checked under these settings: on the CPU unless forbidden, elsewhere only when demanded.

    Tensors without data have none.
    """
    if has_no_data(like):
        return False
    return settings.validate == "always" or (settings.validate == "auto" and like.device.type == "cpu")


def lengths(op: str, side: str, length: torch.Tensor | None, pad: torch.Tensor | None, capacity: int) -> None:
    """seqlens_* and leftpad_* against the rows there are."""
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
    """cu_seqlens_*: from 0 on, never falling, inside the packed tensor, and no sequence longer than max_seqlen_*."""
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
    """Return for each sequence the keys from the first to the last that window, chunk and causal mask show some query.

    problem  causal, window_left, window_right and, if there are chunks, chunk, as a Problem has them
    rows     queries of each sequence
    """
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
    """Check every page id that holds keys which some query sees. Engines free other pages and leave any id there."""
    for index, (row, (first, end)) in enumerate(zip(table.tolist(), seen, strict=True)):
        for place in range(first // page_size, -(-end // page_size) if end > first else 0):
            check_page(op, index, place, row[place], pages)


def check_page(op: str, sequence: int, place: int, page: int, pages: int) -> None:
    if not 0 <= page < pages:
        limit = f"must be in 0..{pages - 1}, the pages of the cache"
        raise ArgumentError(op, f"page_table[{sequence}, {place}]", page, limit)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Which tokens of a cache the sequences have: those whose scales count.

    capacity  the longest sequence that it has room for; lengths and left paddings may be absent
    seen      the range of keys that some query of a sequence sees, if known: other pages may have any id
    """

    capacity: int
    seqlens_k: torch.Tensor | None
    leftpad_k: torch.Tensor | None
    page_table: torch.Tensor | None = None
    seen: Ranges | None = None
    words = ("sequence", "head", "token")

    def scales(self, scale: torch.Tensor) -> torch.Tensor:
        """(B, Hk) or (B, Hk, Sk) of scales as a Call has them: 1 where there is no token."""
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
    """As Tokens, of the tokens that sparse_attention's query heads have chosen: no other's scale is read.

    indices, counts  have been checked
    """

    indices: torch.Tensor
    counts: torch.Tensor
    page_table: torch.Tensor | None
    words = ("sequence", "query head", "place")

    def scales(self, scale: torch.Tensor) -> torch.Tensor:
        """(B, Hk), or (B, Hq, Lmax) of scales for each token and head: 1 where no token is chosen."""
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
    """Scales of the tokens that there are: positive and finite. Lengths and page ids have been checked."""
    for name, scale in given.items():
        found = of.scales(scale)
        for place in (~((found > 0) & torch.isfinite(found))).nonzero().tolist()[:1]:
            words = zip(Tokens.words if scale.ndim == 2 else of.words, place, strict=False)
            where = ", ".join(f"{word} {index}" for word, index in words)
            raise ArgumentError(op, f"{name} of {where}", float(found[tuple(place)]), "must be positive and finite")


def block_scales(op: str, given: Mapping[str, torch.Tensor], of: Tokens) -> None:
    """The scales of nvfp4's blocks, (B, Hk, Sk, D/16) as a Call has them, of the tokens that there are: finite, and not
    negative. A block of zeros has a scale of 0."""
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
    """Check the page id of every token that is chosen. Tokens have been checked against the sequences' lengths."""
    counted = (torch.arange(indices.shape[2], device=indices.device) < counts[..., None]) & (indices >= 0)
    for index, row in enumerate(table.tolist()):
        for place in (indices[index][counted[index]] // size).unique().tolist():
            check_page(op, index, place, row[place], pages)


def tokens(op: str, indices: torch.Tensor, counts: torch.Tensor, lengths: Sequence[int]) -> None:
    """counts against Lmax, and the tokens that they count against the sequences' lengths. Negative ones are padding."""
    most = indices.shape[2]
    for b, h in ((counts < 0) | (counts > most)).nonzero().tolist():
        raise ArgumentError(op, f"counts[{b}, {h}]", int(counts[b, h]), f"must be in 0..{most}, the places there are")
    counted = torch.arange(most, device=counts.device) < counts[..., None]
    sizes = torch.tensor(lengths, device=indices.device)[:, None, None]
    for b, h, n in (counted & (indices >= sizes)).nonzero().tolist():
        limit = f"must be below {lengths[b]}, the sequence's length (negative ones are passed over)"
        raise ArgumentError(op, f"indices[{b}, {h}, {n}]", int(indices[b, h, n]), limit)
