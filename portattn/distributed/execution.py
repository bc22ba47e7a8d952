"""Execution of one checked call: a ring, Ulysses groups, both, or a rank with all rows; and each rank's own spans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from portattn.api.backward import gradients, may_have_kernels, sink_share
from portattn.api.ops import attention, plan, varlen_attention
from portattn.api.request import settings_for
from portattn.distributed.arguments import Arguments
from portattn.distributed.collectives import PARTS, Ranks, StateMerger, Sum, can_fuse, connect, most_parts
from portattn.distributed.sharding import Documents, Mask, RingStep, Shards, Span, Ulysses, step
from portattn.errors import ArgumentError, PortattnError
from portattn.launch.run import device_guard, load_kernels
from portattn.schema.lowering import FUSED
from portattn.schema.ops import ROWS

Pair = tuple[torch.Tensor, torch.Tensor]
_UNSET = {"causal": False, "dropout_p": 0.0, "layout": "bhsd", "return_lse": True, "validate": False}
PAUSE = 12_000  # products one after the other: 51 µs on an H100, where messages begin after one or two


# One rank's own work: attention of a span and its gradients, on views (B, H, rows, D); packed rows have B = 1.


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Options of scores for every span; `slopes` are ALiBi's, (Hq,) or (sequences, Hq) float32."""

    scale: float | None = None
    softcap: float | None = None
    backend: str | None = None
    slopes: torch.Tensor | None = None


@dataclass(slots=True)
class _SpanCall:
    """A span as a call of portattn: the operation and its arguments."""

    op: str
    given: dict[str, Any]
    lacks: torch.Tensor | None = None  # (B or 1, Hq, rows): an LSE with whole distances less the call's own

    @property
    def packed(self) -> bool:
        return self.op == "varlen_attention"


def _call(span: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreOptions) -> _SpanCall:
    rows, keys = slice(*span.rows), slice(*span.keys)
    q, k, v = q[:, :, rows], k[:, :, keys], v[:, :, keys]
    window = None if span.left is None and span.right is None else (span.left, span.right)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "window": window, "scale": scores.scale}
    given |= {"softcap": scores.softcap, "backend": scores.backend}
    if span.cu is not None:
        cu = torch.tensor(span.cu, dtype=torch.int32).to(q.device, non_blocking=True)
        longest = max(stop - start for start, stop in itertools.pairwise(span.cu))
        given |= {name: given[name][0].transpose(0, 1) for name in "qkv"}
        given |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
        if scores.slopes is not None:
            several = scores.slopes.ndim == 2
            last = span.document + len(span.cu) - 1
            given["alibi_slopes"] = scores.slopes[span.document : last] if several else scores.slopes
        return _SpanCall("varlen_attention", given)
    call = _SpanCall("attention", given)
    if scores.slopes is not None:
        _add_distances(call, span, scores.slopes)
    return call


def _add_distances(call: _SpanCall, span: Span, slopes: torch.Tensor) -> None:
    """Add ALiBi by positions in the whole sequence.

    If rows and keys are the same piece, the call's own distances are right. If all keys come before or after all rows,
    a distance is the sum of a row's and a key's part: the key's is a bias (·, Hq, 1, keys), the row's changes the LSE
    alone."""
    q, k = call.given["q"], call.given["k"]
    count_q, count_k = q.shape[2], k.shape[2]
    if slopes.ndim == 2 and q.shape[0] == 1:
        slopes = slopes[span.document : span.document + 1]
    if span.shift == count_k - count_q:
        call.given["alibi_slopes"] = slopes
        return
    of_heads = slopes.float()[None] if slopes.ndim == 1 else slopes.float()
    at_q = torch.arange(count_q, dtype=torch.float32, device=q.device)
    at_k = torch.arange(count_k, dtype=torch.float32, device=q.device)
    if span.shift >= count_k - 1:  # the keys come first
        of_keys, of_rows = at_k - (count_k - 1), -(at_q + (span.shift - count_k + 1))
    else:
        assert span.shift <= 1 - count_q, span
        of_keys, of_rows = -at_k, at_q + span.shift
    call.given["bias"] = of_heads[:, :, None, None] * of_keys
    call.lacks = of_heads[:, :, None] * of_rows


def attend(span: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreOptions) -> Pair:
    """Return (out, LSE) of a span: (B, Hq, rows, Dv) in q's dtype and (B, Hq, rows) float32."""
    call = _call(span, q, k, v, scores)
    if call.packed:
        out, lse = varlen_attention(**call.given, return_lse=True, validate=False)
        return out.transpose(0, 1)[None], lse[None]
    out, lse = attention(**call.given, return_lse=True)
    return out, lse if call.lacks is None else lse + call.lacks


def plan_span(span: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreOptions) -> None:
    """Plan the call of `attend`, so that its errors come before anything runs."""
    call = _call(span, q, k, v, scores)
    plan(call.op, **call.given, return_lse=True, **({"validate": False} if call.packed else {}))


@dataclass(frozen=True, slots=True)
class RankRows:
    """This rank's rows in the backward: of attention over all keys, not one block's."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor  # (B, Hq, S) float32, as grad_lse
    grad_out: torch.Tensor | None
    grad_lse: torch.Tensor | None


def differentiate(
    span: Span, rows: RankRows, k: torch.Tensor, v: torch.Tensor, scores: ScoreOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a span's parts of (dQ, dK, dV), which only need to be added; out and LSE are over all keys."""
    call = _call(span, rows.q, k, v, scores)
    at = slice(*span.rows)
    out, lse = rows.out[:, :, at], rows.lse[:, :, at]
    grad_out = None if rows.grad_out is None else rows.grad_out[:, :, at]
    grad_lse = None if rows.grad_lse is None else rows.grad_lse[:, :, at]
    if call.lacks is not None:
        lse = lse - call.lacks
    if call.packed:
        out, lse = out[0].transpose(0, 1), lse[0]
        grad_out = None if grad_out is None else grad_out[0].transpose(0, 1)
        grad_lse = None if grad_lse is None else grad_lse[0]
    row = ROWS[call.op]
    given: dict[str, Any] = _UNSET | call.given
    # Where no kernel takes the shapes or runs here, the reference computes them of the same LSE.
    if not may_have_kernels(call.op, given["q"], given["v"], given["backend"]):
        given["backend"] = "reference"
    found = gradients(
        call.op,
        [given.get(name) for name in row.parameters],
        [given.get(name) for name in (*row.fixed, "backend", "validate")],
        [given[name] for name in row.lengths],
        out,
        lse.contiguous(),
        grad_out,
        grad_lse,
        ("q", "k", "v"),
        otherwise="reference",
    )
    assert found is not None
    made = (found["q"], found["k"], found["v"])
    if call.packed:
        q, k, v = (gradient.transpose(0, 1)[None] for gradient in made)
        return q, k, v
    return made


def of_sinks(sinks: torch.Tensor, rows: RankRows) -> torch.Tensor:
    """Return this rank's part of the sinks' gradient, (Hq,): -P·(rowsum(out·grad_out) - grad_lse), summed."""
    delta = torch.zeros_like(rows.lse)
    if rows.grad_out is not None:
        delta = (rows.out.float() * rows.grad_out.float()).sum(-1)
    if rows.grad_lse is not None:
        delta = delta - rows.grad_lse
    nothing = torch.isneginf(rows.lse)
    return -(sink_share(sinks, rows.lse) * delta.masked_fill(nothing, 0.0)).sum((0, 2)).to(sinks.dtype)


# A call over several ranks.


@dataclass(frozen=True, slots=True)
class Ring:
    """One call of ring attention, of a sequence of `length` rows."""

    ranks: Ranks
    shards: Shards
    length: int
    mask: Mask
    documents: Documents | None
    scores: ScoreOptions

    def step(self, place: int, source: int) -> RingStep:
        join = self.scores.slopes is None
        return step(self.shards, self.length, self.mask, self.documents, join, place, source)

    def steps(self) -> list[RingStep]:
        """Return this rank's steps by distance, its own keys first."""
        mine, count = self.ranks.rank, self.ranks.size
        return [self.step(mine, (mine - distance) % count) for distance in range(count)]

    def real_rows(self) -> tuple[int, int] | None:
        """Return this rank's rows inside documents: padding lies behind them, in the last piece that has rows."""
        if self.documents is None:
            return None
        end, at = self.documents.cu[-1], 0
        for start, stop in self.shards.pieces(self.length, self.ranks.rank):
            at += max(0, min(stop, end) - start)
        return 0, at

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, LSE) of this rank's rows over all keys, from views (B, H, S, D), in q's dtype and float32.

        Differentiable; the sinks' gradient is of this rank's rows. Every rank must call it, also one without messages.
        """
        connect(self.ranks, q.device)
        found: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(self, q, k, v, sinks)
        return found

    @torch.no_grad()  # as a node of autograd's graph runs
    def plan(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Plan the forward's local calls, so that they raise before anything runs or is sent; allocates one block."""
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
    """Yield (distance, step, keys, values) of each block, this rank's own first, while the next one is on its way."""
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
        """Return the received tensors; torch.distributed raises if a rank is gone or does not answer in time."""
        for work in self._works:
            work.wait()
        self._works, self._sent = (), None  # works keep what they have sent
        return self.parts


def _move(ranks: Ranks, to: int, sent: Sequence[torch.Tensor], source: int, into: torch.Tensor) -> list[Any]:
    """Start one message of the tensors and one receive; an empty one is no message."""
    operations = []
    for tensor in sent:
        if tensor.numel():
            operations.append(dist.P2POp(dist.isend, tensor, ranks.members[to], ranks.group))
    if into.numel():
        operations.append(dist.P2POp(dist.irecv, into, ranks.members[source], ranks.group))
    works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
    return works


def _message(k: torch.Tensor, v: torch.Tensor, parts: Sequence[tuple[int, int]]) -> torch.Tensor:
    whole, *both = _received(k, v, sum(stop - start for start, stop in parts))
    at = 0
    for start, stop in parts:
        for tensor, into in zip((k, v), both, strict=True):
            into[:, :, at : at + stop - start] = tensor[:, :, start:stop]
        at += stop - start
    return whole


def _received(k: torch.Tensor, v: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate a message of so many rows, and return it with its parts (B, Hk, keys, D) and (B, Hk, keys, Dv)."""
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
    """Delay the next launch by some microseconds, so that messages started before begin first.

    NCCL moves messages by a kernel of its own, on a stream that waits for this one. An attention kernel that starts
    first takes every multiprocessor until it ends, and the messages would not be hidden at all."""
    if can_fuse(memory.device):
        kernels: Any = load_kernels("portattn.kernels.combine", False)
        with device_guard(memory):
            kernels.pause[(1,)](memory, 0.0, PAUSE, num_warps=1, **FUSED)


class _Home:
    """Return of a block's gradients to the rank that holds it, one step at a time."""

    def __init__(self, ring: Ring, of_k: Sum, of_v: Sum) -> None:
        self._ring, self.of_k, self.of_v = ring, of_k, of_v
        self._moving: tuple[_Moving, RingStep] | None = None

    def send(self, distance: int, source: int, of_keys: torch.Tensor, of_values: torch.Tensor) -> None:
        """Send `source` its block's gradients, and receive gradients of this rank's block in that step."""
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
    """Run and plan calls over a ring of ranks, over `inner` ranks that exchange heads for rows, over both, or alone."""

    shards: Shards
    ring: Ranks | None
    inner: Ranks | None

    def run(self, call: Arguments, by_heads: bool) -> tuple[torch.Tensor, torch.Tensor]:
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
        if self.ring is None:
            return _whole(call, q, k, v, slopes, sinks)
        return self._ring_of(self.ring, call, slopes).attention(q, k, v, sinks)

    def _ring_of(self, ranks: Ranks, call: Arguments, slopes: Any) -> Ring:
        scores = ScoreOptions(call.scale, call.softcap, call.backend, None if slopes is None else slopes.detach())
        return Ring(ranks, self.shards, call.length, call.mask, call.documents, scores)

    def refuse_what_cannot_run(self, op: str, call: Arguments, by_heads: bool) -> None:
        """Raise ArgumentError if this rank's calls would raise while others wait; plan none that can fall back."""
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
    slopes = None if call.alibi_slopes is None else call.alibi_slopes[..., run.mine]
    return slopes, None if call.sinks is None else call.sinks[run.mine]
