"""Which rows of a sequence each rank has, and what the rows of one rank attend of the keys of another: pure geometry.

A sequence is cut over `ring` shards. A contiguous shard is one piece; a zig-zag shard is two, pieces r and 2N-1-r of
2N, so that under a causal mask all ranks have the same work. With an inner dimension (Ulysses) each shard is cut once
more, evenly. Nothing here touches a tensor's numbers or a process group.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

LAYOUTS = ("zigzag", "contiguous")
Rows = tuple[int, int]  # from the first on, up to the last, exclusive


@dataclass(frozen=True, slots=True)
class Shards:
    """How a sequence is cut.

    layout  "zigzag" or "contiguous"
    ring    shards of the sequence
    inner   ranks that share a shard
    """

    layout: str
    ring: int
    inner: int = 1

    @property
    def ranks(self) -> int:
        return self.ring * self.inner

    @property
    def unit(self) -> int:
        """Sequences must be multiples of this."""
        if self.layout == "contiguous":
            return self.ranks
        return 2 * self.inner if self.ring == 1 else math.lcm(2 * self.ring, self.ranks)

    def pieces(self, length: int, place: int) -> tuple[Rows, ...]:
        """Rows of one shard of the ring, in the order in which they lie there."""
        if self.layout == "contiguous" or self.ring == 1:
            size = length // self.ring
            return ((place * size, (place + 1) * size),)
        return _pair(length, self.ring, place)

    def rows(self, length: int, place: int, inner: int = 0) -> tuple[Rows, ...]:
        """Rows of one rank, in the order in which they lie there."""
        if self.layout == "zigzag" and self.ring == 1:
            return _pair(length, self.inner, inner)
        return tuple(_part(self.pieces(length, place), inner, self.inner))

    def gathered(self, length: int, inner: int) -> tuple[Rows, ...]:
        """Where the rows of one of the inner ranks lie in the shard that these share; of the whole `length`."""
        if self.layout == "zigzag" and self.ring == 1:
            return _pair(length, self.inner, inner)
        size = length // self.ranks
        return ((inner * size, (inner + 1) * size),)


def _pair(length: int, count: int, place: int) -> tuple[Rows, ...]:
    size, other = length // (2 * count), 2 * count - 1 - place
    return ((place * size, (place + 1) * size), (other * size, (other + 1) * size))


def _part(pieces: Sequence[Rows], place: int, count: int) -> list[Rows]:
    """The part that one of `count` ranks has of the rows of several pieces, laid one after the other."""
    size = sum(stop - start for start, stop in pieces) // count
    first, last, at, found = place * size, (place + 1) * size, 0, []
    for start, stop in pieces:
        low, high = max(first, at), min(last, at + stop - start)
        if low < high:
            found.append((start + low - at, start + high - at))
        at += stop - start
    return found or [(0, 0)]


class Documents:
    """The documents of a packed sequence: cu, (documents + 1,) ascending from 0 on. Compared by its numbers."""

    __slots__ = ("_hash", "cu")

    def __init__(self, cu: Sequence[int]) -> None:
        self.cu = tuple(cu)
        self._hash = hash(self.cu)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self._hash == other._hash and self.cu == other.cu

    def inside(self, rows: Rows) -> list[tuple[int, Rows]]:
        """Return (document, its rows) for each document in these rows."""
        found = []
        for place in range(max(0, bisect.bisect_right(self.cu, rows[0]) - 1), len(self.cu) - 1):
            start, stop = max(rows[0], self.cu[place]), min(rows[1], self.cu[place + 1])
            if start >= rows[1]:
                break
            if start < stop:
                found.append((place, (start, stop)))
        return found


@dataclass(frozen=True, slots=True)
class Mask:
    """What a row attends by its position: from `left` keys before its own to `right` after it; None for no limit."""

    left: int | None = None
    right: int | None = None


CAUSAL = Mask(None, 0)


@dataclass(frozen=True, slots=True)
class Span:
    """One local call: rows of this rank's queries over rows of a block of keys.

    left, right  the window that portattn's functions take, aligned by the last row and the last key; None: no limit
    shift        position of the first row less that of the first key
    document     of packed sequences, the one that all rows and keys are part of
    cu           of several documents: their beginnings within the rows, (documents + 1,); rows and keys are the same
    """

    rows: Rows
    keys: Rows
    left: int | None = None
    right: int | None = None
    shift: int = 0
    document: int = 0
    cu: tuple[int, ...] | None = None

    @property
    def open(self) -> bool:
        """Whether each row attends every key."""
        return self.cu is None and self.left is None and self.right is None

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key that it attends."""
        if self.cu is not None:
            return sum(_pairs(b - a, b - a, self.left, self.right) for a, b in itertools.pairwise(self.cu))
        return _pairs(self.rows[1] - self.rows[0], self.keys[1] - self.keys[0], self.left, self.right)


def _pairs(rows: int, keys: int, left: int | None, right: int | None) -> int:
    """As Span.pairs: of each row, by its place among the keys."""
    if left is None and right is None:
        return rows * keys
    found, offset = 0, keys - rows
    for row in range(rows):
        first = 0 if left is None else max(0, row + offset - left)
        last = keys - 1 if right is None else min(keys - 1, row + offset + right)
        found += max(0, last - first + 1)
    return found


@dataclass(frozen=True, slots=True)
class RingStep:
    """What one rank attends of another's keys.

    ranges  rows of the other's shard that are sent, in order; what is received has them one after the other
    spans   the calls, with keys as places in what is received
    """

    ranges: tuple[Rows, ...] = ()
    spans: tuple[Span, ...] = field(default=())

    @property
    def keys(self) -> int:
        """Rows that are sent."""
        return sum(stop - start for start, stop in self.ranges)


@functools.lru_cache(maxsize=4096)
def step(
    shards: Shards, length: int, mask: Mask, documents: Documents | None, join: bool, place: int, source: int
) -> RingStep:
    """What shard `place` of the ring attends of the keys of shard `source`.

    length  rows of the whole sequence
    join    whether calls with positions in several pieces may become one: not if scores depend on distances
    """
    if join and documents is None and place == source and mask == CAUSAL:
        # Rows and keys are the same, in the sequence's order: causal by position is causal by place in the shard.
        mine = (0, sum(stop - start for start, stop in shards.pieces(length, place)))
        return RingStep((mine,), (Span(mine, mine, None, 0),) if mine[1] else ())
    spans: list[Span] = []
    ranges: list[Rows] = []
    local_k = received = 0
    for keys in shards.pieces(length, source):
        found, local_q = [], 0
        for rows in shards.pieces(length, place):
            found += _between(rows, keys, local_q, mask, documents)
            local_q += rows[1] - rows[0]
        if found or place == source:
            low, high = min((s.keys[0] for s in found), default=0), max((s.keys[1] for s in found), default=0)
            if place == source:  # its own keys are where they are
                low, high = 0, keys[1] - keys[0]
            ranges.append((local_k + low, local_k + high))
            moved = received - low
            spans += [replace(s, keys=(s.keys[0] + moved, s.keys[1] + moved)) for s in found]
            received += high - low
        local_k += keys[1] - keys[0]
    if join and documents is None:
        spans = _joined(spans)
    return RingStep(tuple(_merged(ranges)), tuple(spans))


def _between(rows: Rows, keys: Rows, local: int, mask: Mask, documents: Documents | None) -> list[Span]:
    """The calls of one piece of rows, which lie from `local` on, and one of keys, counted from its own beginning."""
    if documents is None:
        return _trimmed(rows, keys, rows, keys, local, mask, 0)
    inside = documents.inside(rows)
    if rows == keys and len(inside) > 1:
        first, last = inside[0][0], inside[-1][0]
        start, stop = inside[0][1][0], inside[-1][1][1]
        cu = tuple(min(max(documents.cu[place], start), stop) - start for place in range(first, last + 2))
        at = (start - rows[0] + local, stop - rows[0] + local)
        return [Span(at, (start - keys[0], stop - keys[0]), mask.left, mask.right, 0, first, cu)]
    others = dict(documents.inside(keys))
    found = []
    for document, part in inside:
        if document in others:
            found += _trimmed(part, others[document], rows, keys, local, mask, document)
    return found


def _trimmed(part_q: Rows, part_k: Rows, rows: Rows, keys: Rows, local: int, mask: Mask, document: int) -> list[Span]:
    """The call of part of a piece of rows over part of one of keys, without the rows and keys that see nothing.

    Row i of the part attends its key j where low ≤ j - i ≤ high.
    """
    count_q, count_k = part_q[1] - part_q[0], part_k[1] - part_k[0]
    shift = part_q[0] - part_k[0]
    low = -count_q - count_k if mask.left is None else shift - mask.left
    high = count_q + count_k if mask.right is None else shift + mask.right
    first, last = max(0, -high), min(count_q, count_k - low)
    if first >= last:
        return []
    first_k, last_k = max(0, low + first), min(count_k, last + high)
    if first_k >= last_k:
        return []
    low, high, shift = low + first - first_k, high + first - first_k, shift + first - first_k
    count_q, count_k = last - first, last_k - first_k
    at_q, at_k = part_q[0] - rows[0] + local, part_k[0] - keys[0]
    return [
        Span(
            (at_q + first, at_q + last),
            (at_k + first_k, at_k + last_k),
            None if low <= 1 - count_q else count_k - count_q - low,
            None if high >= count_k - 1 else high - (count_k - count_q),
            shift,
            document,
        )
    ]


def _joined(spans: list[Span]) -> list[Span]:
    """Fewer and larger calls with the same pairs: keys that lie side by side, then rows that do."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.rows, s.keys)):
        last = found[-1] if found else None
        if last and last.rows == span.rows and last.keys[1] == span.keys[0] and last.open and span.left is None:
            found[-1] = replace(span, keys=(last.keys[0], span.keys[1]))
        else:
            found.append(span)
    rows: list[Span] = []
    for span in sorted(found, key=lambda s: (s.keys, s.rows)):
        last = rows[-1] if rows else None
        if last and last.keys == span.keys and last.rows[1] == span.rows[0] and last.open and span.open:
            rows[-1] = replace(last, rows=(last.rows[0], span.rows[1]))
        else:
            rows.append(span)
    return rows


def _merged(ranges: list[Rows]) -> list[Rows]:
    """Ranges that lie side by side as one."""
    found: list[Rows] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
