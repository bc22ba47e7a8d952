"""How one checked call runs: over a ring, over Ulysses groups, over both, or on a rank that has all rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from portattn.api.ops import attention, plan, varlen_attention
from portattn.api.request import settings_for
from portattn.distributed.arguments import Arguments
from portattn.distributed.groups import Ranks, connect
from portattn.distributed.local import RankRows, ScoreOptions, attend, differentiate, of_sinks, plan_span
from portattn.distributed.merging import PARTS, StateMerger, Sum, can_fuse, most_parts
from portattn.distributed.sharding import Documents, Mask, RingStep, Shards, step
from portattn.distributed.ulysses import Ulysses
from portattn.errors import ArgumentError, PortattnError
from portattn.launch.run import device_guard, load_kernels
from portattn.schema.lowering import FUSED

PAUSE = 12_000  # products one after the other: 51 µs on an H100, where messages begin after one or two


@dataclass(frozen=True, slots=True)
class Ring:
    """One call of ring attention.

    ranks      the ring
    shards     how the sequence is cut over it
    length     of the whole sequence
    documents  of a packed sequence, or None
    """

    ranks: Ranks
    shards: Shards
    length: int
    mask: Mask
    documents: Documents | None
    scores: ScoreOptions

    def step(self, place: int, source: int) -> RingStep:
        """What the rank at `place` attends of the keys of that at `source`."""
        join = self.scores.slopes is None
        return step(self.shards, self.length, self.mask, self.documents, join, place, source)

    def steps(self) -> list[RingStep]:
        """What this rank attends, by distance: its own keys first."""
        mine, count = self.ranks.rank, self.ranks.size
        return [self.step(mine, (mine - distance) % count) for distance in range(count)]

    def real_rows(self) -> tuple[int, int] | None:
        """Rows of this rank that are part of a document: padding lies behind them, in the last piece that has rows."""
        if self.documents is None:
            return None
        end, at = self.documents.cu[-1], 0
        for start, stop in self.shards.pieces(self.length, self.ranks.rank):
            at += max(0, min(stop, end) - start)
        return 0, at

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, LSE) of this rank's rows over all keys, of views (B, H, S, D): contiguous, in q's dtype and float32.

        Differentiable in q, k, v and sinks; the sinks' gradient is of this rank's rows. Every rank of the ring comes
        here, also one that neither sends nor receives.
        """
        connect(self.ranks, q.device)
        found: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(self, q, k, v, sinks)
        return found

    @torch.no_grad()  # as a node of autograd's graph runs
    def plan(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise what a local call of the forward pass would raise before anything runs. Nothing is sent.

        Memory: of one block, while the calls on it are planned.
        """
        mine = self.ranks.rank
        for source in range(self.ranks.size):
            found = self.step(mine, source)
            block = (k, v) if source == mine or not found.spans else _received(k, v, found.keys)[1:]
            for span in found.spans:
                plan_span(span, q, *block, self.scores)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out, lse = _forward(ring, q, k, v, sinks)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        rows = RankRows(q, out, lse, grad_out, grad_lse)
        of_q, of_k, of_v = _backward(ctx.ring, rows, k, v)
        wanted = sinks is not None and ctx.needs_input_grad[4]
        return None, of_q, of_k, of_v, of_sinks(sinks, rows) if wanted else None


def _forward(ring: Ring, q: Any, k: Any, v: Any, sinks: Any) -> tuple[torch.Tensor, torch.Tensor]:
    parts = most_parts(span.rows for block in ring.steps() for span in block.spans)
    if sinks is not None:
        parts = PARTS + 1  # a sink scales the sum, which is not to be rounded before
    merged = StateMerger((*q.shape[:3], v.shape[3]), q.dtype, q.device, parts)
    for _, block, keys, values in _blocks(ring, k, v):
        for span in block.spans:
            merged.add(span.rows, *attend(span, q, keys, values, ring.scores))
        del keys, values  # before the next but one is received
    if sinks is not None:
        merged.count_sinks(sinks, ring.real_rows())
    merged.finish()
    return merged.out.to(q.dtype).contiguous(), merged.lse.contiguous()


def _backward(ring: Ring, rows: RankRows, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mine, count = ring.ranks.rank, ring.ranks.size
    steps = ring.steps()
    of_q = Sum(rows.q, most_parts(span.rows for block in steps for span in block.spans))
    # Of this rank's own keys: its own parts, and one of each rank that they were sent to.
    users = [part for t in range(1, count) for part in ring.step((mine + t) % count, mine).ranges]
    parts = most_parts([*(span.keys for span in steps[0].spans), *users])
    home = _Home(ring, Sum(k, parts), Sum(v, parts))
    for distance, block, keys, values in _blocks(ring, k, v):
        # Of the own block, the gradients are added where they belong.
        several = most_parts(span.keys for span in block.spans)
        of_keys, of_values = (Sum(keys, several), Sum(values, several)) if distance else (home.of_k, home.of_v)
        for span in block.spans:
            found = differentiate(span, rows, keys, values, ring.scores)
            of_q.add(span.rows, found[0])
            of_keys.add(span.keys, found[1])
            of_values.add(span.keys, found[2])
            del found
        del keys, values  # before the next but one is received
        if distance:
            home.send(distance, (mine - distance) % count, of_keys.result(k.device), of_values.result(v.device))
        del of_keys, of_values
    home.finish()
    return of_q.result(k.device), home.of_k.result(k.device), home.of_v.result(v.device)


def _blocks(ring: Ring, k: torch.Tensor, v: torch.Tensor) -> Any:
    """(Distance, step, keys, values) of each block, this rank's own first. The next one is on its way meanwhile."""
    mine, count = ring.ranks.rank, ring.ranks.size
    own, next_one = ring.step(mine, mine), _fetch(ring, k, v, 1)
    yield 0, own, k, v
    for distance in range(1, count):
        keys, values = next_one.wait()
        next_one = _fetch(ring, k, v, distance + 1)
        yield distance, ring.step(mine, (mine - distance) % count), keys, values


class _Moving:
    """Keys and values, or their gradients, on their way from and to another rank."""

    __slots__ = ("_sent", "_works", "parts")

    def __init__(self, works: Sequence[Any], parts: tuple[torch.Tensor, torch.Tensor], sent: Any) -> None:
        self._works, self.parts, self._sent = works, parts, sent

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What was received. Raises what torch.distributed raises where a rank is gone or does not answer in time."""
        for work in self._works:
            work.wait()
        self._works, self._sent = (), None  # works keep what they have sent
        return self.parts


def _move(ranks: Ranks, to: int, sent: Sequence[torch.Tensor], source: int, into: torch.Tensor) -> list[Any]:
    """Start sending tensors as one message, and receiving one. Both may be empty: then there is no message."""
    operations = []
    for tensor in sent:
        if tensor.numel():
            operations.append(dist.P2POp(dist.isend, tensor, ranks.members[to], ranks.group))
    if into.numel():
        operations.append(dist.P2POp(dist.irecv, into, ranks.members[source], ranks.group))
    works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
    return works


def _message(k: torch.Tensor, v: torch.Tensor, parts: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Rows of k and of v, one flat tensor."""
    whole, *both = _received(k, v, sum(stop - start for start, stop in parts))
    at = 0
    for start, stop in parts:
        for tensor, into in zip((k, v), both, strict=True):
            into[:, :, at : at + stop - start] = tensor[:, :, start:stop]
        at += stop - start
    return whole


def _received(k: torch.Tensor, v: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory of a message of so many rows, and its two parts (B, Hk, keys, D) and (B, Hk, keys, Dv)."""
    sizes = [(*tensor.shape[:2], keys, tensor.shape[3]) for tensor in (k, v)]
    whole = k.new_empty(sum(batch * heads * keys * width for batch, heads, keys, width in sizes))
    first = sizes[0][0] * sizes[0][1] * sizes[0][2] * sizes[0][3]
    return whole, whole[:first].view(sizes[0]), whole[first:].view(sizes[1])


def _fetch(ring: Ring, k: torch.Tensor, v: torch.Tensor, distance: int) -> _Moving:
    mine, count = ring.ranks.rank, ring.ranks.size
    if distance >= count:
        return _Moving((), (k, v), None)
    to, source = (mine + distance) % count, (mine - distance) % count
    sent = _message(k, v, ring.step(to, mine).ranges)
    into, keys, values = _received(k, v, ring.step(mine, source).keys)
    works = _move(ring.ranks, to, [sent], source, into)
    if works:
        _let_messages_begin(k)
    return _Moving(works, (keys, values), sent)


def _let_messages_begin(memory: torch.Tensor) -> None:
    """What is launched next begins some microseconds after the messages that were started before.

    NCCL moves messages by a kernel of its own, on a stream that waits for this one. An attention kernel takes every
    multiprocessor until it ends, and would have them before: the messages would not be hidden at all.
    """
    if can_fuse(memory.device):
        kernels: Any = load_kernels("portattn.kernels.pause", False)
        with device_guard(memory):
            kernels.pause[(1,)](memory, 0.0, PAUSE, num_warps=1, **FUSED)


class _Home:
    """Return of gradients of keys and values to the ranks that hold these, one step at a time."""

    def __init__(self, ring: Ring, of_k: Sum, of_v: Sum) -> None:
        self._ring, self.of_k, self.of_v = ring, of_k, of_v
        self._moving: tuple[_Moving, RingStep] | None = None

    def send(self, distance: int, source: int, of_keys: torch.Tensor, of_values: torch.Tensor) -> None:
        """Send `source` its block's gradients; receive the gradients of the block that this rank sent in that step."""
        self.finish()
        ranks = self._ring.ranks
        user = (ranks.rank + distance) % ranks.size
        used = self._ring.step(user, ranks.rank)
        sent = torch.cat([of_keys.reshape(-1), of_values.reshape(-1)])
        sizes = (of_keys.new_empty((*of_keys.shape[:2], 0, of_keys.shape[3])),
                 of_values.new_empty((*of_values.shape[:2], 0, of_values.shape[3])))  # fmt: skip
        into, keys, values = _received(*sizes, used.keys)
        self._moving = _Moving(_move(ranks, source, [sent], user, into), (keys, values), sent), used

    def finish(self) -> None:
        """Add the received gradients to this rank's own."""
        if self._moving is None:
            return
        moving, used = self._moving
        self._moving, at = None, 0
        keys, values = moving.wait()
        for start, stop in used.ranges:
            part = slice(at, at + stop - start)
            self.of_k.add((start, stop), keys[:, :, part])
            self.of_v.add((start, stop), values[:, :, part])
            at += stop - start


@dataclass(frozen=True)
class Execution:
    """Runs and plans calls over these ranks. `by_heads`: q, k and v have all rows already, and nothing is sent.

    shards  how a sequence is cut
    ring    the ranks that keys and values go round; None where there is no ring
    inner   the ranks that exchange heads for rows; None where there are none
    """

    shards: Shards
    ring: Ranks | None
    inner: Ranks | None

    def run(self, call: Arguments, by_heads: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, LSE) as (B, Hq, S, Dv) and (B, Hq, S)."""
        if by_heads:
            return _whole(call, call.q, call.k, call.v, call.alibi_slopes, call.sinks)
        inner = self.inner
        if inner is None:
            return self._around(call, call.q, call.k, call.v, call.alibi_slopes, call.sinks)
        run = Ulysses.over(inner, self.shards, call.length, call.q.shape[1], call.k.shape[1])
        q, k, v = run.to_heads(call.q, call.k, call.v, of=(run.heads.q, run.heads.kv, run.heads.kv))
        out, lse = self._around(call, q, k, v, *_of_heads(call, run))
        return run.to_rows(out, lse)

    def _around(
        self, call: Arguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: Any, sinks: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a shard of the ring; without a ring, of the whole sequence."""
        if self.ring is None:
            return _whole(call, q, k, v, slopes, sinks)
        return self._ring_of(self.ring, call, slopes).attention(q, k, v, sinks)

    def _ring_of(self, ranks: Ranks, call: Arguments, slopes: Any) -> Ring:
        scores = ScoreOptions(call.scale, call.softcap, call.backend, None if slopes is None else slopes.detach())
        return Ring(ranks, self.shards, call.length, call.mask, call.documents, scores)

    def refuse_what_cannot_run(self, op: str, call: Arguments, by_heads: bool) -> None:
        """Raise ArgumentError where this rank's own calls would raise once others wait for what it sends: where a path
        is named or nothing may fall back. Without that each call runs on some path, and nothing is planned here."""
        settings = settings_for(op, call.backend, None)
        if settings.backend == "auto" and settings.fallback != "error" and not settings.quirks:
            return
        try:
            self._plan(call, by_heads)
        except ArgumentError as error:
            raise ArgumentError(op, error.argument, error.value, error.limit) from None
        except PortattnError as error:
            raise ArgumentError(op, "backend", settings.backend, f"cannot run here: {error}") from error

    def _plan(self, call: Arguments, by_heads: bool) -> None:
        """Plan what `run` is going to run, of tensors like those that it will have then."""
        q, k, v, slopes, sinks = call.q, call.k, call.v, call.alibi_slopes, call.sinks
        if self.inner is not None and not by_heads:
            run = Ulysses.over(self.inner, self.shards, call.length, q.shape[1], k.shape[1])
            q, k, v = run.like_heads(q, k, v, of=(run.heads.q, run.heads.kv, run.heads.kv))
            slopes, sinks = _of_heads(call, run)
        if self.ring is not None and not by_heads:
            self._ring_of(self.ring, call, slopes).plan(q, k, v)
        else:
            which, given = _whole_call(call, q, k, v, slopes, sinks)
            plan(which, **given)


def _whole(
    call: Arguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: Any, sinks: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention where all rows are here: (B, H, S, Dv), and the LSE."""
    which, given = _whole_call(call, q, k, v, slopes, sinks)
    if which == "attention":
        found: Any = attention(**given)
        return found
    packed: Any = varlen_attention(**given)
    out, lse = packed
    return out.transpose(0, 1)[None], lse[None]


def _whole_call(
    call: Arguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: Any, sinks: Any
) -> tuple[str, dict[str, Any]]:
    """The operation of a call where all rows are here, and its arguments."""
    given: dict[str, Any] = {"scale": call.scale, "causal": call.causal, "window": call.window, "softcap": call.softcap}
    given |= {"alibi_slopes": slopes, "sinks": sinks, "backend": call.backend, "return_lse": True}
    if call.documents is None:
        return "attention", given | {"q": q, "k": k, "v": v}
    cu = torch.tensor(call.documents.cu, dtype=torch.int32).to(q.device, non_blocking=True)
    longest = max((b - a for a, b in itertools.pairwise(call.documents.cu)), default=0)
    given |= {name: tensor[0].transpose(0, 1) for name, tensor in (("q", q), ("k", k), ("v", v))}
    given |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return "varlen_attention", given


def _of_heads(call: Arguments, run: Ulysses) -> tuple[Any, Any]:
    """Slopes and sinks of this rank's heads."""
    slopes = None if call.alibi_slopes is None else call.alibi_slopes[..., run.mine]
    return slopes, None if call.sinks is None else call.sinks[run.mine]
