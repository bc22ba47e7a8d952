"""What hostcost.py calls: for each part some workloads, each a sequence of cases and their tensors."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from portattn.tools.bench.cases import Case
from portattn.tools.bench.tensors import Tensors

PARTS = {
    "a": "The same call again",
    "b": "A length never seen before",
    "c": "n shapes in turn",
    "d": "Two classes of shapes in turn, each call of another length",
    "e": "The first call of a class, its kernels loaded",
    "f": "The same training call again: forward and backward",
}
GROWING, RANDOM = "one key more each call", "a random length"
WARM = 40  # calls of other lengths before the first that is timed: they compile what lengths of all kinds need
NEEDED = 8  # of those, however little time there is
IN_TURN = (4, 8, 9, 64, 1000)


@dataclass(frozen=True, slots=True)
class CallSizes:
    """Of the calls: batch, heads and width as models have them."""

    heads: tuple[int, int] = (32, 8)
    width: int = 128
    prefill: int = 1024
    keys: int = 4096
    most: int = 8192  # keys that a cache has room for
    batch: int = 8
    page: int = 16
    turns: tuple[int, ...] = IN_TURN

    @classmethod
    def small(cls) -> CallSizes:
        """Such that a CPU's reference computes them at once."""
        return cls(heads=(4, 2), width=16, prefill=64, keys=80, most=192, batch=2, turns=(4, 9))


@dataclass(frozen=True, slots=True)
class CallSequence:
    """A sequence of calls. Those with a negative index come before the times; lengths of the others are none of theirs.

    case, tensors  of the call with an index
    most           calls at most; 0 for no limit
    forgets        all that is kept of calls and plans is forgotten before each
    warm_calls, needed   calls before the times, and how many of them there have to be
    trains         a call is a forward of tensors that require gradients, and then torch.autograd.grad of them
    """

    part: str
    name: str
    case: Callable[[int], Case]
    tensors: Callable[[int], Tensors]
    most: int = 10**9
    forgets: bool = False
    warm_calls: int = WARM
    needed: int = NEEDED
    trains: bool = False


def workloads(device: str, sizes: CallSizes) -> list[CallSequence]:
    """Of all parts."""
    made = Maker(device, sizes)
    found = [
        _fixed("attention", made.dense, sizes.prefill), _fixed("decode", made.decode, sizes.keys),
        _fixed("paged decode", made.paged, sizes.keys), _fixed("varlen", made.packed, sizes.prefill),
    ]  # fmt: skip
    grow, jump = _growing(sizes.prefill), _jumping(sizes.prefill // 2, sizes.prefill * 2)
    found += [
        _lengths("b", f"attention, {GROWING}", made.dense, grow),
        _lengths("b", f"attention, {RANDOM}", made.dense, jump),
    ]
    grow, jump = _growing(sizes.keys), _jumping(sizes.keys // 2, sizes.most - 1)
    for name, lengths in ((GROWING, grow), (RANDOM, jump)):
        found.append(_lengths("b", f"decode, a view of a larger cache, {name}", made.decode, lengths))
        found.append(_lengths("b", f"decode, caches of that length, {name}", made.decode_anew, lengths))
    found.append(_lengths("b", "paged decode, a wider table", made.paged, _jumping(sizes.keys // 2, sizes.most - 1)))
    found.append(_lengths("b", "varlen, other totals", made.packed, _jumping(sizes.prefill // 2, sizes.prefill * 2)))
    for count in sizes.turns:
        found.append(_in_turn(f"attention, {count} lengths", made.dense, sizes.prefill, count))
    for count in sizes.turns:
        found.append(_in_turn(f"decode, {count} lengths", made.decode, sizes.keys, count))
    twice: tuple[tuple[str, Make, int, int], ...] = (
        ("attention", made.dense, sizes.prefill // 8, sizes.prefill * 3 // 2),
        ("decode", made.decode, sizes.keys // 8, sizes.keys),
    )
    for name, make, short, long in twice:
        found.append(_lengths("d", f"{name}, short and long", make, _alternating(short, long)))
    ones: tuple[tuple[str, Make, int], ...] = (
        ("attention", made.dense, sizes.prefill), ("decode", made.decode, sizes.keys),
        ("paged decode", made.paged, sizes.keys), ("varlen", made.packed, sizes.prefill),
    )  # fmt: skip
    for name, make, length in ones:
        one = _fixed(name, make, length)
        found.append(CallSequence("e", name, one.case, one.tensors, most=60, forgets=True, warm_calls=3, needed=3))
    for name, make in (("attention", made.dense), ("varlen", made.packed)):
        one = _fixed(name, make, sizes.prefill)
        found.append(CallSequence("f", name, one.case, one.tensors, trains=True))
    return found


Made = tuple[Case, Tensors]
Make = Callable[[int], Made]


def _workload(part: str, name: str, make: Make, length: Callable[[int], int], warm_calls: int = WARM) -> CallSequence:
    @functools.lru_cache(maxsize=2)
    def made(index: int) -> Made:
        return make(length(index))

    return CallSequence(part, name, lambda index: made(index)[0], lambda index: made(index)[1], warm_calls=warm_calls)


def _fixed(name: str, make: Make, length: int) -> CallSequence:
    one = functools.cache(lambda: make(length))
    return CallSequence("a", name, lambda index: one()[0], lambda index: one()[1])


def _lengths(part: str, name: str, make: Make, length: Callable[[int], int]) -> CallSequence:
    return _workload(part, name, make, length)


def _in_turn(name: str, make: Make, length: int, count: int) -> CallSequence:
    """All shapes are made once before the times: what is timed are calls that were made count calls ago."""
    made = functools.lru_cache(maxsize=None)(lambda place: make(length // 2 + place))

    def at(index: int) -> Made:
        return made(index % count)

    return CallSequence(
        "c", name, lambda index: at(index)[0], lambda index: at(index)[1], warm_calls=max(count, WARM), needed=count
    )


def _growing(length: int) -> Callable[[int], int]:
    """One key more each time; before the times it grew up to there."""
    return lambda index: length + 1 + index


def _jumping(low: int, high: int) -> Callable[[int], int]:
    """Every length in between once, in random order; the last WARM of them before the times."""
    order = list(range(low, high))
    random.Random(low).shuffle(order)
    return lambda index: order[index % len(order)]


def _alternating(short: int, long: int) -> Callable[[int], int]:
    """Every other one is long, and each a key longer than the one of its kind before."""
    return lambda index: (long if index % 2 else short) + WARM + index // 2


class Maker:
    """Cases of a length and their tensors: views of memory that is there, or memory of their own."""

    def __init__(self, device: str, sizes: CallSizes) -> None:
        self.device, self.sizes = torch.device(device), sizes
        (hq, hk), s = sizes.heads, sizes
        self._rows = 2 * s.prefill + 8 * WARM
        self._dense = [self._normal(heads * self._rows * s.width) for heads in (hq, hk, hk)]
        self._step = self._normal(s.batch, hq, 1, s.width)
        self._caches = [self._normal(s.batch, hk, s.most + 8 * WARM, s.width) for _ in "kv"]
        pages = s.batch * (-(-(s.most + 8 * WARM) // s.page))
        self._pages = [self._normal(pages, s.page, hk, s.width) for _ in "kv"]
        self._packed = [self._normal(self._rows, heads, s.width) for heads in (hq, hk, hk)]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def _int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _case(self, op: str, batch: int, rows: int, keys: int, **more: object) -> Case:
        hq, hk = self.sizes.heads
        return Case(
            name=op, op=op, batch=batch, heads_q=hq, heads_k=hk, seq_q=rows, seq_k=keys, head_dim=self.sizes.width,  # type: ignore[arg-type]
            **more,  # type: ignore[arg-type]
        )  # fmt: skip

    def dense(self, length: int) -> Made:
        """attention, causal: (1, Hq/Hk, length, D), contiguous."""
        (hq, hk), width = self.sizes.heads, self.sizes.width
        sized = zip(self._dense, (hq, hk, hk), strict=True)
        q, k, v = (pool[: heads * length * width].view(1, heads, length, width) for pool, heads in sized)
        return self._case("attention", 1, length, length, causal="bottom_right"), Tensors(q, k, v)

    def decode(self, length: int) -> Made:
        """decode_attention of one row over the first `length` places of larger caches."""
        k, v = (cache[:, :, :length] for cache in self._caches)
        return self._decode(length, k, v)

    def decode_anew(self, length: int) -> Made:
        """The same over caches of just that length."""
        k, v = (torch.empty(*c.shape[:2], length, c.shape[3], dtype=c.dtype, device=c.device) for c in self._caches)
        return self._decode(length, k.zero_(), v.zero_())

    def _decode(self, length: int, k: torch.Tensor, v: torch.Tensor) -> Made:
        return self._case("decode_attention", self.sizes.batch, 1, length), Tensors(self._step, k, v)

    def paged(self, length: int) -> Made:
        """paged_attention of one row; the table is as wide as the length needs, and has room in no column more."""
        batch, page = self.sizes.batch, self.sizes.page
        columns = -(-length // page)
        table = torch.arange(batch * columns, dtype=torch.int32, device=self.device).view(batch, columns)
        k, v = self._pages
        t = Tensors(self._step, k, v, seqlens_k=self._int32([length] * batch), page_table=table)
        return self._case("paged_attention", batch, 1, length, page_size=page, lengths_k=(length,) * batch), t

    def packed(self, total: int) -> Made:
        """varlen_attention, causal, of four sequences with so many rows together."""
        cuts = [total // 8, total // 4, total // 4]
        lengths = (*cuts, total - sum(cuts))
        begin = self._int32([0, *accumulate(lengths)])
        q, k, v = (pool[:total] for pool in self._packed)
        t = Tensors(q, k, v, cu_seqlens_q=begin, cu_seqlens_k=begin)
        more = {"lengths_q": lengths, "lengths_k": lengths, "packed": True, "causal": "bottom_right"}
        return self._case("varlen_attention", len(lengths), max(lengths), max(lengths), **more), t
