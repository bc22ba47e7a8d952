"""Cost of a call over several ranks: exact operations and bytes from the calls' geometry, and a model of its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from portattn.distributed.collectives import PARTS, WORD_BYTES, most_parts
from portattn.distributed.cost_report import Cost, LocalCall, Phase, Rates
from portattn.distributed.sharding import LAYOUTS, HeadShards, Mask, Shards, Span, head_shards, step
from portattn.errors import ArgumentError

WHO = "context_parallel_cost"
DECODE = "decode_parallel_cost"
BACKWARD_FACTOR = 2.5  # a backward's five products for a forward's two
FLOAT32_BYTES = 4
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class _Shape(NamedTuple):
    batch: int
    heads_q: int
    heads_k: int
    length: int
    dim: int
    dim_v: int
    item: int


def context_parallel_cost(
    q: Sequence[int],
    kv: Sequence[int],
    *,
    ranks: int,
    inner: int = 1,
    layout: str = "zigzag",
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    dim_v: int | None = None,
    dtype: str = "bf16",
    backward: bool = True,
    rates: Rates | None = None,
) -> Cost:
    """Return the cost of `context_parallel(…).attention` for each rank, without running it.

    Args:
        q, kv: (B, Hq, S, D) and (B, Hk, S, D) of the whole sequence
        ranks: number of ranks, a multiple of inner
        inner: ranks of each Ulysses group: 1 for a ring alone, `ranks` for Ulysses alone, else a ring of groups
        layout: "zigzag" or "contiguous"
        causal, window: as of portattn.attention
        dim_v: v's head_dim, if it is not D
        dtype: "bf16", "fp16" or "fp32"
        backward: whether gradients are computed as well
        rates: of the machine; None for Rates()

    Returns:
        A Cost; its explain() gives the text.

    Raises:
        ArgumentError: An argument is out of its limits, as for `context_parallel`.

    Examples:
        >>> from portattn.distributed import context_parallel_cost
        >>> found = context_parallel_cost((1, 32, 131072, 128), (1, 8, 131072, 128), ranks=2, causal=True)
        >>> found.forward.sent == 65536 * 8 * 2 * 128 * 2  # rank 1 sends both of its pieces, k and v of 8 heads, bf16
        True
        >>> found.forward.hidden
        True
    """
    shape = _checked(WHO, q, kv, dim_v, dtype)
    rates = rates or Rates()
    _check_count(WHO, "ranks", ranks)
    _check_count(WHO, "inner", inner)
    if ranks % inner:
        raise ArgumentError(WHO, "ranks", ranks, f"must be a multiple of inner, {inner}")
    if layout not in LAYOUTS:
        raise ArgumentError(WHO, "layout", layout, f"must be one of {', '.join(LAYOUTS)}")
    if inner > 1 and shape.heads_q % inner:
        raise ArgumentError(WHO, "heads_q", shape.heads_q, f"must be a multiple of inner, {inner}")
    shards = Shards(layout, ranks // inner, inner)
    if shape.length % shards.unit:
        raise ArgumentError(WHO, "S", shape.length, f"must be a multiple of {shards.unit}")
    mask = Mask(window[0], 0 if causal else window[1])
    method = "ring" if inner == 1 else "ulysses" if inner == ranks else "ring of ulysses"
    places = sorted({0, shards.ring // 2, max(shards.ring - 2, 0), shards.ring - 1})
    heads = head_shards(inner, shape.heads_q, shape.heads_k)
    runs = [_Run(shape, shards, mask, heads, place, rates) for place in places]
    whole = pairs(shape.length, shape.length, mask.left, mask.right)
    one = 2.0 * shape.batch * shape.heads_q * whole * (shape.dim + shape.dim_v)
    forward = max((run.phase(one, rates.forward, run.forward) for run in runs), key=lambda phase: phase.seconds)
    busiest = max(runs, key=lambda run: run.flop)
    again = None
    if backward:
        phases = [run.phase(one, rates.backward, run.backward, BACKWARD_FACTOR) for run in runs]
        again = max(phases, key=lambda phase: phase.seconds)
    return Cost(
        method=method, layout=layout, ranks=ranks, inner=inner, q=tuple(q), kv=tuple(kv), dtype=dtype, rates=rates,
        causal=bool(causal), window=(window[0], window[1]),
        calls=busiest.calls(), memory=max(run.memory() for run in runs), forward=forward, backward=again,
    )  # fmt: skip


def decode_parallel_cost(
    q: Sequence[int],
    kv: Sequence[int],
    *,
    ranks: int,
    heads: str = "all",
    dim_v: int | None = None,
    latent: bool = False,
    dtype: str = "bf16",
    rates: Rates | None = None,
) -> Cost:
    """Return the cost of a call of `decode_parallel(…)` for each rank, without running it.

    The model reads a rank's part of the cache at Rates.memory; the collective follows and is not hidden.

    Args:
        q, kv: (B, Hq, Sq, D) and (B, Hk, S, D) of whole sequences of S keys
        heads: the heads that each rank gets, "all" or "shard"
        dim_v: v's head_dim, if it is not D
        latent: whether values are a part of the keys (mla_attention) and read once; then one key head, and dim_v ≤ D
        dtype: "bf16", "fp16" or "fp32", of queries and cache
        ranks: ranks that share each sequence
        rates: of the machine; None for Rates()

    Returns:
        A Cost.

    Raises:
        ArgumentError: An argument is out of its limits.

    Examples:
        >>> from portattn.distributed import decode_parallel_cost
        >>> found = decode_parallel_cost((1, 64, 1, 128), (1, 8, 1048576, 128), ranks=2)
        >>> found.forward.sent  # 64 rows of 128 bf16 elements and an LSE, to the other rank
        16640
        >>> 1.8 < found.forward.speedup < 2
        True
    """
    rates = rates or Rates()
    batch, heads_q, rows, dim = _sizes(DECODE, "q", q)
    shape = _checked(DECODE, (batch, heads_q, _sizes(DECODE, "kv", kv)[2], dim), kv, dim_v, dtype)
    _check_count(DECODE, "ranks", ranks)
    if heads not in ("all", "shard"):
        raise ArgumentError(DECODE, "heads", heads, "must be one of all, shard")
    if heads == "shard" and heads_q % ranks:
        raise ArgumentError(DECODE, "heads_q", heads_q, f"must be a multiple of the {ranks} ranks")
    if latent and shape.heads_k != 1:
        raise ArgumentError(DECODE, "heads_k", shape.heads_k, "must be 1 of latent keys, which all heads read")
    if latent and shape.dim_v > shape.dim:
        limit = f"must be at most D, {shape.dim}: latent values are a part of the keys"
        raise ArgumentError(DECODE, "dim_v", shape.dim_v, limit)
    own = -(-shape.length // ranks)
    row = (-(-shape.dim_v * shape.item // WORD_BYTES) + 1) * WORD_BYTES
    packed = batch * heads_q * rows * row
    each = packed if heads == "all" else packed // ranks
    sent = (ranks - 1) * each
    width = shape.dim if latent else shape.dim + shape.dim_v
    key_bytes = batch * shape.heads_k * width * shape.item
    flop = 2.0 * batch * heads_q * rows * (shape.dim + shape.dim_v)

    def attended(keys: int) -> float:
        return max(keys * key_bytes / rates.memory, flop * keys / rates.forward)

    slowest = rates.bandwidth(0, ranks - 1)
    communication = rates.latency * math.ceil(math.log2(ranks)) + sent / slowest if ranks > 1 else 0.0
    merge = (ranks * each + batch * heads_q * rows * row) / rates.memory if ranks > 1 else 0.0
    compute = attended(own) + merge
    phase = Phase(
        flop=flop * own, flop_mean=flop * shape.length / ranks, sent=sent, messages=int(ranks > 1), compute=compute,
        communication=communication, seconds=compute + communication, one=attended(shape.length),
    )  # fmt: skip
    call = LocalCall(rows=rows, keys=own, heads_q=heads_q, heads_k=shape.heads_k, window=(None, None), count=1)
    return Cost(
        method="decode", layout=f"heads={heads}", ranks=ranks, inner=1, q=tuple(q), kv=tuple(kv), dtype=dtype,
        rates=rates, calls=(call,), memory=packed + ranks * each, forward=phase,
    )  # fmt: skip


class _Run:
    def __init__(
        self, shape: _Shape, shards: Shards, mask: Mask, heads: HeadShards, place: int, rates: Rates
    ) -> None:  # fmt: skip
        self.shape, self.shards, self.rates, self.place = shape, shards, rates, place
        self.heads_q, self.heads_k = len(heads.q[0]), max(len(some) for some in heads.kv)
        self._all_heads = heads
        count = shards.ring

        def of(to: int, source: int) -> tuple[int, tuple[Span, ...]]:
            found = step(shards, shape.length, mask, None, True, to % count, source % count)
            return found.keys, found.spans

        # By distance t: the spans that it attends, rows of keys received for them, and rows that it sends.
        self.steps = [(*of(place, place - t), of(place + t, place)[0]) for t in range(count)]
        self._parts = most_parts(span.rows for _, spans, _ in self.steps for span in spans)
        self.pairs = [sum(_pairs_of(span) for span in spans) for _, spans, _ in self.steps]
        self.key_bytes = shape.batch * self.heads_k * (shape.dim + shape.dim_v) * shape.item
        self.flop = 2.0 * shape.batch * self.heads_q * sum(self.pairs) * (shape.dim + shape.dim_v)

    def phase(
        self, one: float, rate: float, run: Callable[[list[float]], tuple[float, float, int, int]], factor: float = 1.0
    ) -> Phase:  # fmt: skip
        """Return a pass's cost; `one` is the number of operations of the whole call's forward."""
        shape = self.shape
        unit = 2.0 * factor * shape.batch * self.heads_q * (shape.dim + shape.dim_v)
        each = shape.batch * self.heads_q * shape.dim_v / self.rates.memory
        times = [unit * pairs / rate + each * moved for pairs, moved in zip(self.pairs, self._merged(), strict=True)]
        seconds, communication, sent, messages = run(times)
        return Phase(
            flop=unit * sum(self.pairs), flop_mean=factor * one / self.shards.ranks, sent=sent, messages=messages,
            compute=sum(times), communication=communication, seconds=seconds, one=factor * one / rate,
        )  # fmt: skip

    def _merged(self) -> list[int]:
        """Return the bytes moved by merging in each step, by head and column: part read, sum read and written."""
        item, rows = self.shape.item, self.shape.length // self.shards.ring
        held = FLOAT32_BYTES if self._parts > PARTS else item
        found = []
        for place, (_, spans, _) in enumerate(self.steps):
            merges = [span for span in spans if place or span.rows != (0, rows)]
            found.append(sum(span.rows[1] - span.rows[0] for span in merges) * (item + 2 * held))
        if held != item:
            found[0] += rows * (item + held)
            found[-1] += rows * (item + held)
        return found

    def forward(self, times: list[float]) -> tuple[float, float, int, int]:
        fetched = [self._moved(t) for t in range(1, self.shards.ring)] + [0.0]
        ring = sum(max(own, moving) for own, moving in zip(times, fetched, strict=True))
        sent = sum(sent for _, _, sent in self.steps[1:]) * self.key_bytes
        messages = sum(1 for _, _, sent in self.steps[1:] if sent)
        more, exchanging, exchanges = self._exchanged()
        return ring + exchanging, sum(fetched) + exchanging, sent + more, messages + exchanges

    def backward(self, times: list[float]) -> tuple[float, float, int, int]:
        """Return the cost of a backward: a block's gradients return while the next block, sent again, is computed."""
        fetched = [self._moved(t) for t in range(1, self.shards.ring)] + [0.0]
        home = [0.0, *fetched[:-1]]  # of the block at distance t: as large as the block
        during = [fetched[t] + (home[t - 1] if t else 0.0) for t in range(self.shards.ring)]
        ring = sum(max(own, moving) for own, moving in zip(times, during, strict=True)) + home[-1]
        rows = sum(sent + received for received, _, sent in self.steps[1:])
        messages = sum((sent > 0) + (received > 0) for received, _, sent in self.steps[1:])
        more, exchanging, exchanges = self._exchanged()
        total = sum(fetched) + sum(home) + exchanging
        return ring + exchanging, total, rows * self.key_bytes + more, messages + exchanges

    def _moved(self, distance: int) -> float:
        """Return the seconds of a step's messages, to the rank `distance` places ahead and from the one behind."""
        received, _, sent = self.steps[distance]
        times = []
        for rows, other in ((sent, self.place + distance), (received, self.place - distance)):
            if rows:
                inner = self.shards.inner
                width = self.rates.bandwidth(self.place * inner, other % self.shards.ring * inner)
                times.append(self.rates.latency + rows * self.key_bytes / width)
        return max(times, default=0.0)

    def _exchanged(self) -> tuple[int, float, int]:
        """Return (bytes, seconds, messages) of Ulysses' all-to-alls."""
        inner, shape = self.shards.inner, self.shape
        if inner == 1:
            return 0, 0.0, 0
        rows = shape.batch * shape.length // self.shards.ranks
        columns = [
            len(q) * shape.dim + len(kv) * (shape.dim + shape.dim_v)
            for q, kv in zip(self._all_heads.q, self._all_heads.kv, strict=True)
        ]
        messages = [rows * shape.item * (sum(columns) - min(columns))]
        each = rows * (inner - 1) * self.heads_q
        messages += [each * shape.dim_v * shape.item, each * FLOAT32_BYTES]
        width = self.rates.bandwidth(0, inner - 1)
        latency = self.rates.latency * math.ceil(math.log2(inner))
        return sum(messages), sum(latency + sent / width for sent in messages), len(messages)

    def calls(self) -> tuple[LocalCall, ...]:
        found: dict[tuple[int, int, int | None, int | None], int] = {}
        for _, spans, _ in self.steps:
            for span in spans:
                key = (span.rows[1] - span.rows[0], span.keys[1] - span.keys[0], span.left, span.right)
                found[key] = found.get(key, 0) + 1
        return tuple(
            LocalCall(
                rows=rows, keys=keys, heads_q=self.heads_q, heads_k=self.heads_k, window=(left, right), count=count
            )
            for (rows, keys, left, right), count in found.items()
        )  # fmt: skip

    def memory(self) -> int:
        """Return the bytes of a forward: the largest step's blocks and partial result, LSEs, sums, Ulysses' tensors."""
        shape, ring = self.shape, self.shards.ring
        rows = shape.length // ring
        found = 0
        if ring > 1:
            wide, head_rows = self._parts > PARTS, shape.batch * self.heads_q
            by_step = []
            for place, (attended, spans, _) in enumerate(self.steps):
                # The first part of all rows is the result, or what is widened to the sum.
                parts = [s.rows[1] - s.rows[0] for s in spans if place or wide or s.rows != (0, rows)]
                each = head_rows * (shape.dim_v * shape.item + FLOAT32_BYTES)
                following = self.steps[place + 1] if place + 1 < ring else (0, (), 0)
                keys = (attended if place else 0) + following[0] + following[2]
                by_step.append(keys * self.key_bytes + max(parts, default=0) * each)
            sums = shape.dim_v * FLOAT32_BYTES if wide else 0
            found = max(by_step) + head_rows * rows * (sums + FLOAT32_BYTES)
        if self.shards.inner > 1:
            columns = self.heads_q * (shape.dim + shape.dim_v) + self.heads_k * (shape.dim + shape.dim_v)
            found += 2 * shape.batch * rows * columns * shape.item
        return found


def pairs(rows: int, keys: int, left: int | None, right: int | None) -> int:
    """Count the pairs of a row and an attended key, with a window aligned by the last row and the last key."""
    offset = keys - rows
    high = rows * keys if right is None else _clamped(rows, offset + right + 1, keys)
    low = 0 if left is None else _clamped(rows, offset - left, keys)
    return max(0, high - low)


def _pairs_of(span: Span) -> int:
    return pairs(span.rows[1] - span.rows[0], span.keys[1] - span.keys[0], span.left, span.right)


def _clamped(rows: int, first: int, most: int) -> int:
    """Return the sum of min(max(first + i, 0), most) for i in 0 … rows − 1."""
    begin, end = min(max(-first, 0), rows), min(max(most - first, 0), rows)  # from 0 on, and from `most` on
    rising = max(0, end - begin)
    return rising * first + (begin + end - 1) * rising // 2 + (rows - max(end, begin)) * most


def _checked(op: str, q: Sequence[int], kv: Sequence[int], dim_v: int | None, dtype: str) -> _Shape:
    batch, heads_q, length, dim = _sizes(op, "q", q)
    batch_k, heads_k, length_k, dim_k = _sizes(op, "kv", kv)
    if dim_v is not None:
        _check_count(op, "dim_v", dim_v)
    if (batch_k, length_k, dim_k) != (batch, length, dim):
        raise ArgumentError(op, "kv", tuple(kv), f"must have q's batch, length and head_dim, {(batch, length, dim)}")
    if heads_q % heads_k:
        raise ArgumentError(op, "heads_q", heads_q, f"must be a multiple of heads_k, {heads_k}")
    if dtype not in ITEM_BYTES:
        raise ArgumentError(op, "dtype", dtype, f"must be one of {', '.join(ITEM_BYTES)}")
    return _Shape(batch, heads_q, heads_k, length, dim, dim if dim_v is None else dim_v, ITEM_BYTES[dtype])


def _sizes(op: str, name: str, sizes: Sequence[int]) -> tuple[int, int, int, int]:
    if len(sizes) != 4 or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ArgumentError(op, name, tuple(sizes), "must be four integers ≥ 1: batch, heads, length, head_dim")
    batch, heads, length, dim = sizes
    return batch, heads, length, dim


def _check_count(op: str, name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(op, name, value, "must be an integer ≥ 1")
