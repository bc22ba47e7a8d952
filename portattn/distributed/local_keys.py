"""What one rank's keys are to each query: how many it sees of them, and which, where positions matter.

A rank's keys are some of the sequence's, in its order. So a causal mask shows a query a prefix of them, and a plain
length says it all where there is one query a sequence. Else, and with windows and ALiBi, which go by the distance in
the whole sequence, a mask or a bias is made for this rank's keys, on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from portattn.distributed.cache_shard import CacheShard
from portattn.errors import ArgumentError

UNLIMITED = -1


class Reach(NamedTuple):
    """How far queries see: a causal mask, if any, and a window.

    causal  "none", "bottom_right" or "top_left": also how queries are aligned
    left, right  keys before and after a query's own position; UNLIMITED
    """

    causal: str
    left: int
    right: int

    @property
    def limited(self) -> bool:
        return self.left >= 0 or self.right >= 0


def reach_of(op: str, causal: Any, window: Any) -> Reach:
    """`causal` and `window` of a call, as portattn's operations take them. Raises ArgumentError for others."""
    named = {False: "none", True: "bottom_right", "bottom_right": "bottom_right", "top_left": "top_left"}
    if not isinstance(causal, (bool, str)) or causal not in named:
        raise ArgumentError(op, "causal", causal, "must be False, True, 'bottom_right' or 'top_left'")
    sides = (UNLIMITED, UNLIMITED)
    if window is not None:
        if not isinstance(window, tuple) or len(window) != 2:
            raise ArgumentError(op, "window", window, "must be a tuple (left, right), keys before and after")
        for name, side in zip(("left", "right"), window, strict=True):
            if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < UNLIMITED):
                limit = "must be an integer ≥ 0, or None or -1 for no limit"
                raise ArgumentError(op, f"window's {name}", side, limit)
        sides = tuple(UNLIMITED if side is None else side for side in window)  # type: ignore[assignment]
    left, right = sides
    if named[causal] != "none":
        right = 0
    return Reach(named[causal], left, right)


class Rows(NamedTuple):
    """The queries of a call: (B, Hq, Sq, …), or one a sequence of packed queries.

    lengths    (B,) keys of each whole sequence
    positions  (B, Sq) int64, each query's place in its sequence; negative before its beginning
    """

    lengths: torch.Tensor
    positions: torch.Tensor


def dense_rows(reach: Reach, lengths: torch.Tensor, count: int) -> Rows:
    """Of `count` queries a sequence."""
    step = torch.arange(count, device=lengths.device)
    if reach.causal == "top_left":
        return Rows(lengths, step.expand(lengths.shape[0], count))
    return Rows(lengths, lengths.long()[:, None] - count + step)


def packed_rows(
    reach: Reach, lengths: torch.Tensor, cu_seqlens_q: torch.Tensor, total: int
) -> tuple[Rows, torch.Tensor]:
    """Of packed queries, each a sequence of its own, and (Tq,) int64, whose query it is. Rows past the last sequence
    have no keys."""
    row = torch.arange(total, device=lengths.device)
    beginnings = cu_seqlens_q.long()
    found = torch.searchsorted(beginnings, row, right=True) - 1
    sequence = found.clamp(0, max(lengths.shape[0] - 1, 0))
    own = torch.where(found < lengths.shape[0], lengths.long()[sequence], 0)
    inside = row - beginnings[sequence]
    count = beginnings[sequence + 1] - beginnings[sequence]
    place = inside if reach.causal == "top_left" else own - count + inside
    return Rows(own.to(lengths.dtype), place[:, None]), sequence


def seen_lengths(reach: Reach, rows: Rows) -> torch.Tensor:
    """(B,) keys of the whole sequence that some query of it sees: its beginning, up to the last query's right side."""
    if reach.right < 0 or not rows.positions.shape[1]:
        return rows.lengths
    last = rows.positions[:, -1] + reach.right + 1
    return torch.minimum(rows.lengths.long(), last.clamp(min=0)).to(rows.lengths.dtype)


def visible(shard: CacheShard, reach: Reach, rows: Rows, keys: int) -> torch.Tensor:
    """(B, 1, Sq, keys) bool: whether a query sees each row of this rank's part. Rows past the length do not matter."""
    distance = shard.positions(keys, rows.positions.device) - rows.positions[:, None, :, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if reach.left >= 0:
        seen &= distance >= -reach.left
    if reach.right >= 0:
        seen &= distance <= reach.right
    return seen


def alibi_bias(shard: CacheShard, slopes: torch.Tensor, rows: Rows, keys: int) -> torch.Tensor:
    """(B, Hq, Sq, keys) float32: −slope·|distance| of slopes (Hq,) or (B, Hq)."""
    distance = (shard.positions(keys, rows.positions.device) - rows.positions[:, None, :, None]).abs()
    return -(slopes[..., None, None] * distance.float())
