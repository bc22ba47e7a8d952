"""The set `host-cost`: host time of a call in a serving loop (repeated calls, new lengths, shape classes) and training.

Each call is timed alone until it returns; the device's queue is emptied every few calls, outside of the times."""

import contextlib
import functools
import gc
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

import portattn
from portattn.api import dispatch
from portattn.errors import CompileWarning
from portattn.tools.bench import peers
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import OURS, PREPARED, Contender, arguments
from portattn.tools.bench.gate import FAILURES, reason
from portattn.tools.bench.tensors import Tensors
from portattn.tools.bench.workloads import Measure, Row

# Parts of the sequences: a, the same call again; b, a length never seen before; c, n shapes in turn; d, two classes of
# shapes in turn, each call of another length; e, first calls of a class, kernels loaded; f, as a, with gradients.
SECONDS = 150.0  # for all, compiles included, without --budget
GROWING, RANDOM = "one key more each call", "a random length"
WARM = 40  # calls of other lengths before the first that is timed: they compile what lengths of all kinds need
NEEDED = 8  # of those, however little time there is
CALLS = 400  # timed calls of a line at most
LEAST_S = 0.3  # of a line, however little time is left
QUEUE = 16  # calls until the host waits for the device: fewer than its queue takes
# Peers that are compared: torch's choice and its cuDNN and FlashAttention-2, FlashAttention's packages, vllm's build.
PEERS = ("sdpa", "torch", "fa3", "flash_attn", "flash_attn_interface")
LEFT_OUT = ("sdpa-math", "sdpa-efficient")
Made = tuple[Case, Tensors]
Make = Callable[[int], Made]
Prepare = Callable[[int], Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class CallSizes:
    """Batch, heads and width of the calls, as models have them."""

    heads: tuple[int, int] = (32, 8)
    width: int = 128
    prefill: int = 1024
    keys: int = 4096
    most: int = 8192  # keys that a cache has room for
    batch: int = 8
    page: int = 16
    turns: tuple[int, ...] = (4, 8, 9, 64, 1000)


TINY = CallSizes(heads=(4, 2), width=16, prefill=64, keys=80, most=192, batch=2, turns=(4, 9))


@dataclass(frozen=True, slots=True)
class CallSequence:
    """A sequence of calls; a negative index is a warm-up call, whose length no timed call has."""

    part: str
    name: str
    make: Make  # the case and tensors of the call with an index
    most: int = CALLS  # timed calls at most
    forgets: bool = False  # the launch cache and all plans are dropped before each call
    # warm_calls, needed: warm-up calls, and the least number of them
    warm_calls: int = WARM
    needed: int = NEEDED
    trains: bool = False  # a call is a forward of tensors that require gradients, and then their torch.autograd.grad


def sequences(device: str, sizes: CallSizes) -> list[CallSequence]:
    made, prefill, keys, last = Maker(device, sizes), sizes.prefill, sizes.keys, sizes.most - 1
    usual: dict[str, tuple[Callable[[int], Made], int]] = {
        "attention": (made.dense, prefill), "decode": (made.decode, keys), "paged decode": (made.paged, keys),
        "varlen": (made.packed, prefill),
    }  # fmt: skip
    same = {name: CallSequence("a", name, _always(make(length))) for name, (make, length) in usual.items()}
    view, anew = (f"decode, {kind}, " for kind in ("a view of a larger cache", "caches of that length"))
    lengths: list[tuple[str, str, Callable[[int], Made], Callable[[int], int]]] = [
        ("b", f"attention, {GROWING}", made.dense, _growing(prefill)),
        ("b", f"attention, {RANDOM}", made.dense, _jumping(prefill // 2, prefill * 2)),
        ("b", view + GROWING, made.decode, _growing(keys)),
        ("b", anew + GROWING, made.decode_anew, _growing(keys)),
        ("b", view + RANDOM, made.decode, _jumping(keys // 2, last)),
        ("b", anew + RANDOM, made.decode_anew, _jumping(keys // 2, last)),
        ("b", "paged decode, a wider table", made.paged, _jumping(keys // 2, last)),
        ("b", "varlen, other totals", made.packed, _jumping(prefill // 2, prefill * 2)),
        ("d", "attention, short and long", made.dense, _alternating(prefill // 8, prefill * 3 // 2)),
        ("d", "decode, short and long", made.decode, _alternating(keys // 8, keys)),
    ]
    by_length = [CallSequence(part, name, _of_length(make, length)) for part, name, make, length in lengths]
    in_turn = [
        CallSequence(
            "c", f"{name}, {count} lengths", _in_turn(*usual[name], count), warm_calls=max(count, WARM), needed=count
        )
        for name in ("attention", "decode")
        for count in sizes.turns
    ]
    first = [replace(one, part="e", most=60, forgets=True, warm_calls=3, needed=3) for one in same.values()]
    trained = [replace(same[name], part="f", trains=True) for name in ("attention", "varlen")]
    return sorted([*same.values(), *by_length, *in_turn, *first, *trained], key=lambda one: one.part)


def _always(made: Made) -> Make:
    return lambda index: made


def _of_length(make: Make, length: Callable[[int], int]) -> Make:
    return functools.lru_cache(maxsize=2)(lambda index: make(length(index)))


def _in_turn(make: Make, length: int, count: int) -> Make:
    made = functools.cache(lambda place: make(length // 2 + place))
    return lambda index: made(index % count)


def _growing(length: int) -> Callable[[int], int]:
    return lambda index: length + 1 + index


def _jumping(low: int, high: int) -> Callable[[int], int]:
    """Return every length in between once, in random order; the last WARM of them are warm-up."""
    order = list(range(low, high))
    random.Random(low).shuffle(order)
    return lambda index: order[index % len(order)]


def _alternating(short: int, long: int) -> Callable[[int], int]:
    return lambda index: (long if index % 2 else short) + WARM + index // 2


class Maker:
    """Cases of a length and their tensors: views of existing memory, or memory of their own."""

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
        (hq, hk), width = self.sizes.heads, self.sizes.width
        sized = zip(self._dense, (hq, hk, hk), strict=True)
        q, k, v = (pool[: heads * length * width].view(1, heads, length, width) for pool, heads in sized)
        return self._case("attention", 1, length, length, causal="bottom_right"), Tensors(q, k, v)

    def decode(self, length: int) -> Made:
        k, v = (cache[:, :, :length] for cache in self._caches)
        return self._decode(length, k, v)

    def decode_anew(self, length: int) -> Made:
        """Return decode_attention of one row over caches of exactly that length."""
        k, v = (torch.empty(*c.shape[:2], length, c.shape[3], dtype=c.dtype, device=c.device) for c in self._caches)
        return self._decode(length, k.zero_(), v.zero_())

    def _decode(self, length: int, k: torch.Tensor, v: torch.Tensor) -> Made:
        return self._case("decode_attention", self.sizes.batch, 1, length), Tensors(self._step, k, v)

    def paged(self, length: int) -> Made:
        """Return paged_attention of one row; the table has no column more than the length needs."""
        batch, page = self.sizes.batch, self.sizes.page
        columns = -(-length // page)
        table = torch.arange(batch * columns, dtype=torch.int32, device=self.device).view(batch, columns)
        k, v = self._pages
        t = Tensors(self._step, k, v, seqlens_k=self._int32([length] * batch), page_table=table)
        return self._case("paged_attention", batch, 1, length, page_size=page, lengths_k=(length,) * batch), t

    def packed(self, total: int) -> Made:
        cuts = [total // 8, total // 4, total // 4]
        lengths = (*cuts, total - sum(cuts))
        begin = self._int32([0, *accumulate(lengths)])
        q, k, v = (pool[:total] for pool in self._packed)
        t = Tensors(q, k, v, cu_seqlens_q=begin, cu_seqlens_k=begin)
        more = {"lengths_q": lengths, "lengths_k": lengths, "packed": True, "causal": "bottom_right"}
        return self._case("varlen_attention", len(lengths), max(lengths), max(lengths), **more), t


def host_cost(measure: Measure) -> Iterator[Row]:
    """Host time of a call: the same call again, new lengths, many lengths in turn, first calls of a class, training.

    A time is `perf_counter_ns` from before a call to its return; every 16 calls the set waits for the device outside of
    the times, and the garbage collector is off. `compiled` counts kernels that were compiled or loaded inside the
    times: a valid row has 0. portattn's rows of all parts come first: a run that is short of time leaves out peers."""
    begun, end = time.monotonic(), measure.end
    end = begun + SECONDS if math.isinf(end) else end
    made = sequences(measure.device, TINY if measure.tiny else CallSizes())
    todo = [(one, OURS) for one in made] + [(one, name) for one in made for name in _others(one)]
    with collected_once():
        for index, (one, contender) in enumerate(todo):
            case = f"{one.part} {one.name}"
            if measure.only not in case:
                continue
            if (left := end - time.monotonic()) <= 0:
                measure.left.append(f"{case}: {contender}")
                continue
            row = {"case": case, "contender": contender, "part": one.part, "name": one.name}
            yield row | timed(one, contender, 1 if measure.check else CALLS, max(left / (len(todo) - index), LEAST_S))


def measured(prepare: Prepare, calls: int, seconds: float) -> Row:
    """Time calls, `prepare(i)` making the i-th untimed: at least one, until `seconds` are over."""
    times: list[float] = []
    end = time.monotonic() + seconds
    gc.collect()
    with _compiles() as compiled:
        while len(times) < calls and (not times or time.monotonic() < end):
            call = prepare(len(times))
            if len(times) % QUEUE == 0:
                _wait()
            begun = time.perf_counter_ns()
            result = call()
            times.append((time.perf_counter_ns() - begun) / 1e3)
            del result, call
        _wait()
    ordered = sorted(times)
    found = {
        "median_us": statistics.median(times), "p99_us": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "most_us": ordered[-1], "first_us": times[0],
    }  # fmt: skip
    return {"calls": len(times)} | {n: round(us, 2) for n, us in found.items()} | {"compiled": len(compiled)}


@contextlib.contextmanager
def _compiles() -> Iterator[list[str]]:
    """Collect the monitor's warnings of kernels that are compiled inside the block."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        portattn.monitor()  # no setting: calls under another setting are other calls
        try:
            yield found
        finally:
            portattn.monitor(False)
    found += [str(one.message) for one in caught if issubclass(one.category, CompileWarning)]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def collected_once() -> Iterator[None]:
    """Rest the collector, and freeze existing objects: each line collects its own garbage alone, before its times."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _others(one: CallSequence) -> list[str]:
    """Return the other contenders: a prepared handle in part a, peers (with gradients in part f), none in e."""
    if one.part == "e":
        return []
    wanted = [name for name in PEERS if peers.PEERS[name].differentiable or not one.trains]
    names = [name for name in peers.contenders(*one.make(0), wanted) if name not in LEFT_OUT]
    if one.part in "cd":
        names = [name for name in names if name == "sdpa" or "fa3" in name]
    return [PREPARED] * (one.part == "a") + names


def timed(one: CallSequence, contender: str, calls: int, seconds: float) -> Row:
    """Time one contender's calls. A failure is recorded in its row, and the others are still timed."""
    begun, mine = time.monotonic(), contender.startswith(OURS)
    try:
        prepare = _ours(one) if contender == OURS else _handle(one) if mine else _peer(one, contender)
        around = contextlib.nullcontext() if mine else _built(one, contender, 0).around()
        with around, torch.set_grad_enabled(one.trains):
            for index in range(max(one.needed, min(one.warm_calls, WARM))):
                if time.monotonic() - begun > seconds and index >= one.needed:
                    break
                prepare(-1 - index)()
            _wait()
            found = measured(prepare, min(calls, one.most), max(seconds - (time.monotonic() - begun), LEAST_S))
    except FAILURES as failure:
        said = reason(failure)
        return {"failed" if mine else "refused": said, "note": said}
    plan = portattn.last_plan()
    return found | {"path": plan.path if mine and plan is not None else ""}


def _ours(one: CallSequence) -> Prepare:
    def prepare(index: int) -> Callable[[], Any]:
        case, t = one.make(index)
        if one.trains:
            t = t.leaves()
        op, (args, options) = getattr(portattn, case.op), arguments(case, t)
        if one.forgets:
            dispatch.forget_plans()

        def forward() -> Any:
            return op(*args, **options)

        return _training(t, forward) if one.trains else forward

    return prepare


def _handle(one: CallSequence) -> Prepare:
    case, t = one.make(0)
    args, options = arguments(case, t)
    handle = portattn.prepare(case.op, *args, **options)
    out = torch.empty_like(getattr(portattn, case.op)(*args, **options))
    return lambda index: lambda: handle.run(*args, out=out, **options)


def _peer(one: CallSequence, contender: str) -> Prepare:
    def prepare(index: int) -> Callable[[], Any]:
        case, t = one.make(index)
        t = t.leaves()
        built = peers.contenders(case, t, PEERS)[contender]()
        return _training(t, lambda: built.shaped(built.run()))

    return prepare if one.trains else lambda index: _built(one, contender, index).run


def _training(t: Tensors, forward: Callable[[], Any]) -> Callable[[], Any]:
    grad_out = torch.ones_like(t.q)
    return lambda: torch.autograd.grad(forward(), (t.q, t.k, t.v), grad_out)


def _built(one: CallSequence, contender: str, index: int) -> Contender:
    return peers.contenders(*one.make(index), PEERS)[contender]()
