"""Shards of sequences and of heads: the rows of each rank, the keys of another rank that they attend, and Ulysses.

A contiguous shard is one piece; a zig-zag shard is pieces r and 2N-1-r of 2N, so that causal work is even.

Ulysses: an all-to-all gives each rank all rows of some heads, and another one returns its own rows. A rank has Hq / N
query heads and the key/value heads that they need, copied to every rank that needs them; the copies' gradients are
added. Memory: q, k, v and out of these heads over the whole sequence, and once more for messages."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from portattn.distributed.collectives import Ranks

LAYOUTS = ("zigzag", "contiguous")
Rows = tuple[int, int]  # from the first on, up to the last, exclusive


@dataclass(frozen=True, slots=True)
class Shards:
    """Cut of a sequence into `ring` shards of a layout, "zigzag" or "contiguous"; `inner` ranks share a shard."""

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
        """Return the rows of one shard of the ring, in their order there."""
        if self.layout == "contiguous" or self.ring == 1:
            size = length // self.ring
            return ((place * size, (place + 1) * size),)
        return _pair(length, self.ring, place)

    def rows(self, length: int, place: int, inner: int = 0) -> tuple[Rows, ...]:
        if self.layout == "zigzag" and self.ring == 1:
            return _pair(length, self.inner, inner)
        return tuple(_part(self.pieces(length, place), inner, self.inner))

    def gathered(self, length: int, inner: int) -> tuple[Rows, ...]:
        """Return the places of an inner rank's rows in the shared shard, for the whole `length`."""
        if self.layout == "zigzag" and self.ring == 1:
            return _pair(length, self.inner, inner)
        size = length // self.ranks
        return ((inner * size, (inner + 1) * size),)


def _pair(length: int, count: int, place: int) -> tuple[Rows, ...]:
    size, other = length // (2 * count), 2 * count - 1 - place
    return ((place * size, (place + 1) * size), (other * size, (other + 1) * size))


def _part(pieces: Sequence[Rows], place: int, count: int) -> list[Rows]:
    size = sum(stop - start for start, stop in pieces) // count
    first, last, at, found = place * size, (place + 1) * size, 0, []
    for start, stop in pieces:
        low, high = max(first, at), min(last, at + stop - start)
        if low < high:
            found.append((start + low - at, start + high - at))
        at += stop - start
    return found or [(0, 0)]


class Documents:
    """Documents of a packed sequence: cu, (documents + 1,) ascending from 0 on; compared by its numbers."""

    __slots__ = ("_hash", "cu")

    def __init__(self, cu: Sequence[int]) -> None:
        self.cu = tuple(cu)
        self._hash = hash(self.cu)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self._hash == other._hash and self.cu == other.cu

    def inside(self, rows: Rows) -> list[tuple[int, Rows]]:
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
    """Keys that a row attends: from `left` before its position to `right` after it; None for no limit."""

    left: int | None = None
    right: int | None = None


CAUSAL = Mask(None, 0)


@dataclass(frozen=True, slots=True)
class Span:
    """One local call: rows of this rank's queries over rows of a block of keys."""

    rows: Rows
    keys: Rows
    left: int | None = None  # portattn's window, aligned by the last row and the last key; None: no limit
    right: int | None = None
    shift: int = 0  # position of the first row less that of the first key
    document: int = 0  # of packed sequences, the document of all rows and keys
    cu: tuple[int, ...] | None = None  # offsets of several documents within the rows; rows and keys are the same

    @property
    def open(self) -> bool:
        return self.cu is None and self.left is None and self.right is None

    @property
    def pairs(self) -> int:
        if self.cu is not None:
            return sum(_pairs(b - a, b - a, self.left, self.right) for a, b in itertools.pairwise(self.cu))
        return _pairs(self.rows[1] - self.rows[0], self.keys[1] - self.keys[0], self.left, self.right)


def _pairs(rows: int, keys: int, left: int | None, right: int | None) -> int:
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
    """One rank's calls over another's keys: `ranges` of its shard, sent in order as the block that spans count in."""

    ranges: tuple[Rows, ...] = ()
    spans: tuple[Span, ...] = field(default=())

    @property
    def keys(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@functools.lru_cache(maxsize=4096)
def step(
    shards: Shards, length: int, mask: Mask, documents: Documents | None, join: bool, place: int, source: int
) -> RingStep:
    """Return the attention of shard `place` of the ring to the keys of shard `source`.

    `join`: calls with positions in several pieces may become one, unless scores depend on distances."""
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
    """Return the calls of a piece of rows, from `local` on, and a piece of keys, counted from its own beginning."""
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
    """Return the call of parts of two pieces, without rows and keys that see nothing: low ≤ j - i ≤ high."""
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
    found: list[Rows] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


Heads = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadShards:
    """Heads by rank; every entry of `kv` serves equally many query heads."""

    q: tuple[Heads, ...]
    kv: tuple[Heads, ...]


def head_shards(ranks: int, heads_q: int, heads_k: int) -> HeadShards:
    """Return each rank's heads; heads_q must be a multiple of ranks and of heads_k."""
    each, group = heads_q // ranks, heads_q // heads_k
    q, kv = [], []
    for rank in range(ranks):
        mine = tuple(range(rank * each, (rank + 1) * each))
        served = [head // group for head in mine]
        distinct = tuple(dict.fromkeys(served))
        even = len(served) // len(distinct)
        repeated = [head for head in distinct for _ in range(even)]
        q.append(mine)
        kv.append(distinct if repeated == served else tuple(served))
    return HeadShards(tuple(q), tuple(kv))


@dataclass(frozen=True, slots=True)
class Ulysses:
    """The exchange of one call over `length` rows that the ranks of this dimension share; `places` are each rank's."""

    ranks: Ranks
    heads: HeadShards
    length: int
    places: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def over(cls, ranks: Ranks, shards: Shards, length: int, heads_q: int, heads_k: int) -> Ulysses:
        places = tuple(shards.gathered(length, place) for place in range(ranks.size))
        return cls(ranks, head_shards(ranks.size, heads_q, heads_k), length // shards.ring, places)

    @property
    def mine(self) -> slice:
        heads = self.heads.q[self.ranks.rank]
        return slice(heads[0], heads[-1] + 1) if heads else slice(0, 0)

    def like_heads(self, *tensors: torch.Tensor, of: Sequence[tuple[Heads, ...]]) -> tuple[torch.Tensor, ...]:
        """Allocate the results of `to_heads` without sending anything."""
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        mine = [heads[self.ranks.rank] for heads in of]
        return tuple(
            t.new_empty((t.shape[0], len(heads), self.length, t.shape[3])).requires_grad_(wanted)
            for t, heads in zip(tensors, mine, strict=True)
        )

    def to_heads(self, *tensors: torch.Tensor, of: Sequence[tuple[Heads, ...]]) -> tuple[torch.Tensor, ...]:
        """Exchange (B, H, S / N, ·) of all heads for (B, this rank's heads, S, ·), contiguous, in one message."""
        found: tuple[torch.Tensor, ...] = _ToHeads.apply(self, tuple(of), *tensors)
        return found

    def to_rows(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange (B, heads of this rank, S, Dv) for (B, Hq, S / N, Dv), contiguous; lse has no last axis.

        One node of autograd: a rank whose loss uses one result still answers both messages of the others' backward."""
        found: tuple[torch.Tensor, torch.Tensor] = _ToRows.apply(self, out, lse)
        return found


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Ulysses, of: tuple[tuple[Heads, ...], ...], *tensors: torch.Tensor) -> Any:
        ctx.run, ctx.of, ctx.counts = run, of, [tensor.shape[1] for tensor in tensors]
        return _to_heads(run, of, tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, *_to_rows(ctx.run, ctx.of, ctx.counts, gradients))


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Ulysses, out: torch.Tensor, lse: torch.Tensor) -> Any:
        ctx.run = run  # and gradients that a loss does not give are zeros, which are sent as any others
        of, counts = (run.heads.q,), [sum(map(len, run.heads.q))]
        # A message is of one dtype.
        return _to_rows(run, of, counts, (out,))[0], _to_rows(run, of, counts, (lse[..., None],))[0][..., 0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_out: torch.Tensor, of_lse: torch.Tensor) -> Any:
        run, of = ctx.run, (ctx.run.heads.q,)
        return None, _to_heads(run, of, (of_out,))[0], _to_heads(run, of, (of_lse[..., None],))[0][..., 0]


def _to_heads(
    run: Ulysses, of: Sequence[tuple[Heads, ...]], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    parts = [
        [_of_heads(tensor, heads[to]).reshape(-1) for tensor, heads in zip(tensors, of, strict=True)]
        for to in range(run.ranks.size)
    ]
    sizes = [
        [
            (t.shape[0], len(heads[run.ranks.rank]), _count(rows), t.shape[3])
            for t, heads in zip(tensors, of, strict=True)
        ]
        for rows in run.places
    ]
    received = _exchange(run.ranks, parts, sizes)
    found = []
    for place, tensor in enumerate(tensors):
        batch, heads, _, width = sizes[0][place]
        whole = tensor.new_empty((batch, heads, run.length, width))
        for source, rows in enumerate(run.places):
            _put(whole, rows, received[source][place])
        found.append(whole)
    return tuple(found)


def _to_rows(
    run: Ulysses, of: Sequence[tuple[Heads, ...]], counts: Sequence[int], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return rows for heads; parts of one head (of `counts`) from several ranks are added in float32."""
    parts = [
        [torch.cat([tensor[:, :, start:stop] for start, stop in rows], 2).reshape(-1) for tensor in tensors]
        for rows in run.places
    ]
    own = _count(run.places[run.ranks.rank])
    sizes = [
        [(t.shape[0], len(heads[source]), own, t.shape[3]) for t, heads in zip(tensors, of, strict=True)]
        for source in range(run.ranks.size)
    ]
    received = _exchange(run.ranks, parts, sizes)
    found = []
    for place, (tensor, heads, count) in enumerate(zip(tensors, of, counts, strict=True)):
        shape = (tensor.shape[0], count, own, tensor.shape[3])
        once = sorted(head for some in heads for head in some) == list(range(count))
        whole = tensor.new_empty(shape) if once else torch.zeros(shape, dtype=torch.float32, device=tensor.device)
        for source, some in enumerate(heads):
            for at, run_of in _runs(some):
                there, come = whole[:, run_of], received[source][place][:, at : at + run_of.stop - run_of.start]
                if once:
                    there.copy_(come)
                else:
                    there.add_(come)
        found.append(whole.to(tensor.dtype))
    return tuple(found)


def _of_heads(tensor: torch.Tensor, heads: Heads) -> torch.Tensor:
    parts = [tensor[:, run_of] for _, run_of in _runs(heads)]
    return parts[0] if len(parts) == 1 else torch.cat([tensor[:, :0], *parts], 1)


def _runs(heads: Heads) -> list[tuple[int, slice]]:
    """Return consecutive heads as slices with their places; an index list would be copied, and block the host."""
    found: list[tuple[int, slice]] = []
    for at, head in enumerate(heads):
        if found and found[-1][1].stop == head:
            found[-1] = found[-1][0], slice(found[-1][1].start, head + 1)
        else:
            found.append((at, slice(head, head + 1)))
    return found


def _exchange(
    ranks: Ranks, parts: Sequence[Sequence[torch.Tensor]], sizes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[torch.Tensor]]:
    """Exchange flat tensors of each rank for tensors of these sizes; a rank's own part is neither sent nor copied."""
    mine = ranks.rank
    sent = [0 if to == mine else sum(part.numel() for part in several) for to, several in enumerate(parts)]
    counts = [[math.prod(size) for size in source] for source in sizes]
    come = [0 if source == mine else sum(several) for source, several in enumerate(counts)]
    flat = torch.cat([part for to, several in enumerate(parts) for part in several if to != mine])
    into = flat.new_empty(sum(come))
    dist.all_to_all_single(into, flat, come, sent, group=ranks.group)
    found = []
    for source, (part, count, several) in enumerate(zip(into.split(come), counts, sizes, strict=True)):
        pieces = parts[mine] if source == mine else part.split(count)
        found.append([piece.view(size) for piece, size in zip(pieces, several, strict=True)])
    return found


def _put(whole: torch.Tensor, places: Sequence[tuple[int, int]], rows: torch.Tensor) -> None:
    at = 0
    for start, stop in places:
        whole[:, :, start:stop] = rows[:, :, at : at + stop - start]
        at += stop - start


def _count(rows: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in rows)
