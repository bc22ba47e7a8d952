"""Ulysses: an all-to-all gives each rank all rows of some of the heads, and another one gives its own rows back.

Each rank has Hq / N query heads, and the key/value heads that these need. With fewer key/value heads than ranks, or
heads that do not divide, a key/value head goes to every rank that needs it; its gradients come back from all of them
and are added. Attention itself is a call of portattn's own over whole sequences, or a ring of such groups.

Memory of a rank: q, k, v and out of its heads over the whole sequence (as much as its own rows of all heads, and more
where key/value heads are replicated), and once more each while a message is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from portattn.distributed.groups import Ranks
from portattn.distributed.sharding import Shards

Heads = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadShards:
    """Which heads each rank has, by rank.

    q, kv  heads of the queries, and of the keys and values: as many of these as make every one of them serve the same
           number of query heads
    """

    q: tuple[Heads, ...]
    kv: tuple[Heads, ...]


def head_shards(ranks: int, heads_q: int, heads_k: int) -> HeadShards:
    """Heads_q must be a multiple of ranks and of heads_k."""
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
    """The exchange of one call.

    length  rows that the ranks of this dimension share: of the whole sequence, or of a shard of the ring around it
    places  where the rows of each rank lie among them
    """

    ranks: Ranks
    heads: HeadShards
    length: int
    places: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def over(cls, ranks: Ranks, shards: Shards, length: int, heads_q: int, heads_k: int) -> Ulysses:
        """length: of the whole sequence."""
        places = tuple(shards.gathered(length, place) for place in range(ranks.size))
        return cls(ranks, head_shards(ranks.size, heads_q, heads_k), length // shards.ring, places)

    @property
    def mine(self) -> slice:
        """This rank's query heads."""
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
        """(B, H, S / N, ·) of all heads -> (B, heads of this rank, S, ·), contiguous; one message for all tensors.

        of  each tensor's heads by rank
        """
        found: tuple[torch.Tensor, ...] = _ToHeads.apply(self, tuple(of), *tensors)
        return found

    def to_rows(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the query heads, (B, heads of this rank, S, Dv) -> (B, Hq, S / N, Dv), contiguous; lse without the last
        axis.

        One node of autograd: a rank whose loss has only one of the two answers both messages of the others' backward.
        """
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
    """The reverse. counts: heads of the results; what comes of one head from several ranks is added, in float32."""
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
    """Heads that follow one another as slices, each with the place of its first one. An index made of a list would be
    copied to the device, and the host would wait for that."""
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
    """parts: flat tensors for each rank; sizes: of the tensors that come from each rank. What a rank has for itself is
    not sent, and not copied."""
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
