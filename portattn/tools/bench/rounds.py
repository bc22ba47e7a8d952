"""The clock of a device (events; on CUDA and ROCm graphs; host time to enqueue), and contenders timed in turns.

A power-capped card is slower after a long call than after a rest: only times of one round compare."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from portattn.tools.bench.cases import Timing
from portattn.tools.bench.contenders import Contender
from portattn.tools.bench.gate import FAILURES, DeviceLost, reason

Run = Callable[[], Any]
HOST_CALLS = 200
HOST_MS, FEW_HOST_CALLS = 100.0, 3  # of device time: fewer calls will do where they take longer, but so many
QUEUE = 20  # calls enqueued before the host waits for the device
SLEEP_CYCLES = 100_000  # a call: about 50 µs by which the host gets ahead of the device
HEAD_START_MS = 0.2  # calls that take the device less than this begin behind a sleep: else the host would be timed
FLUSH_BYTES = 1 << 28  # more than any L2, as do_bench's


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Median, and the quintiles that leave a fifth of the values below `low` and a fifth above `high`."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(
            median=statistics.median(ordered), low=ordered[round(0.2 * last)], high=ordered[round(0.8 * last)],
            count=len(ordered),
        )  # fmt: skip


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """A card's own limits in one run."""

    gemm_tflops: float  # bf16 matrix product of 8192³, TFLOP/s
    copy_tbs: float  # device copy, TB/s, read plus written

    def floor_ms(self, flops: int, read_bytes: int) -> tuple[float, str]:
        """Return the least milliseconds for the work, and the limit's name: "gemm" or "copy"."""
        gemm, copy = flops / self.gemm_tflops / 1e9, read_bytes / self.copy_tbs / 1e9
        return (gemm, "gemm") if gemm > copy else (copy, "copy")


class DeviceClock:
    def __init__(self, device_type: str = "cuda") -> None:
        self._type, self._module = device_type, getattr(torch, device_type)  # torch.cuda, torch.npu, …
        self._flush: torch.Tensor | None = None
        self.has_graphs = hasattr(self._module, "CUDAGraph")

    def turn_ms(self, run: Run, timing: Timing, calls: int, expected_ms: float) -> float:
        """Return the device time of one call in milliseconds, averaged over `calls`."""
        if timing == "do_bench":
            from triton.testing import do_bench

            return float(do_bench(run, warmup=5, rep=25, return_mode="median"))
        self._module.synchronize()
        if (expected_ms < HEAD_START_MS or timing == "cold") and hasattr(self._module, "_sleep"):
            self._module._sleep(SLEEP_CYCLES * calls)  # without it, a short call's time may be the host's
        if timing == "cold":
            return statistics.median(self._each_cold(run, calls))
        begin, end = self._event(), self._event()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        self._module.synchronize()
        return float(begin.elapsed_time(end)) / calls

    def _each_cold(self, run: Run, calls: int) -> list[float]:
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self._type)
        events = [(self._event(), self._event()) for _ in range(calls)]
        for begin, end in events:
            self._flush.zero_()
            begin.record()
            run()
            end.record()
        self._module.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    def host_us(self, run: Run, expected_ms: float = 0.0) -> Spread:
        """Return the host time to enqueue one call, in microseconds; expected_ms is its device time."""
        times: list[float] = []
        calls = max(FEW_HOST_CALLS, min(HOST_CALLS, round(HOST_MS / max(expected_ms, 1e-4))))
        while len(times) < calls:
            if len(times) % QUEUE == 0:
                self._module.synchronize()  # the queue stays short: a full one would make the host wait
            begun = time.perf_counter()
            run()
            times.append((time.perf_counter() - begun) * 1e6)
        self._module.synchronize()
        return Spread.of(times)

    def _event(self) -> Any:
        return self._module.Event(enable_timing=True)

    def graphed(self, contender: Contender) -> Run:
        """Return a call that replays the contender's call from a graph. Raises RuntimeError where torch has none."""
        if not self.has_graphs:
            raise RuntimeError(f"not captured: torch.{self._type} has no CUDAGraph")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with contender.around():
            with torch.cuda.stream(stream):
                contender.run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                contender.run()
        return graph.replay

    def peak_extra_bytes(self, run: Run) -> int | None:
        """Return the bytes that one call allocates at its peak beyond the memory before it; None if uncounted."""
        if not hasattr(self._module, "reset_peak_memory_stats"):
            return None
        self._module.synchronize()
        self._module.reset_peak_memory_stats()
        before = self._module.memory_allocated()
        run()
        self._module.synchronize()
        return int(self._module.max_memory_allocated() - before)

    def ceilings(self) -> Ceilings:
        """Measure the card's limits on a warm card: a rested one is faster than in any long run."""
        found = Ceilings(gemm_tflops=self._gemm_tflops(), copy_tbs=self._copy_tbs())
        getattr(self._module, "empty_cache", lambda: None)()
        return found

    def _warm_ms(self, run: Run, warm_seconds: float, calls: int) -> float:
        stop = time.perf_counter() + warm_seconds
        while time.perf_counter() < stop:
            run()
            self._module.synchronize()
        return statistics.median(self.turn_ms(run, "hot", calls, 1.0) for _ in range(5))

    def _gemm_tflops(self, size: int = 8192) -> float:
        a, b = (torch.randn(size, size, device=self._type, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / self._warm_ms(lambda: a @ b, 1.0, 20) / 1e9

    def _copy_tbs(self, elements: int = 2**30) -> float:
        source = torch.empty(elements, dtype=torch.int32, device=self._type).random_()
        target = torch.empty_like(source)
        return 2 * elements * source.itemsize / self._warm_ms(lambda: target.copy_(source), 0.2, 10) / 1e9

    def lost(self) -> str:
        """Return why the device takes no more work, or "": an error such as an illegal address is permanent."""
        try:
            self._module.synchronize()
        except RuntimeError as error:
            return str(error).strip().splitlines()[0]
        return ""


TURN_MS = {"hot": 12.0, "cold": 6.0}  # device time of a contender's turn, of which a call has its share
MOST_CALLS = {"hot": 50, "cold": 20}  # in a turn: more would fill the device's queue
# Calls longer than so many ms need at most so many rounds.
SLOW = ((100.0, 2), (30.0, 3))
# The requested rounds are the minimum. Rounds go on, up to MORE times as many and for MORE_S seconds in all, until the
# ratios of contenders near the fastest seem known to KNOWN: a card at its power limit moves by 10 % between rounds.
MORE, MORE_S, KNOWN = 8, 1.5, 0.01
NEAR = 1.3  # times as slow as the fastest
# Student's t, two-sided 95 %, by degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2); 2.1 above 10, to 5 %.
STUDENT = (math.inf, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
MEDIAN = 1.253  # standard error of a median over that of a mean, of normal values: sqrt(pi/2)
FAR = 2.5  # times as slow as the fastest: timed in one round, as no second one would change what it says
HEATING_MS = 10.0  # where a call takes longer, each heats the card for itself first
HEAT_MS = 400.0  # of work before anything counts, after which a card that rested has come down to its lasting clocks


@dataclass(slots=True)
class Turns:
    ms: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def interleaved(contenders: Mapping[str, Contender], clock: DeviceClock, timing: Timing, rounds: int) -> Turns:
    """Time contenders in at least `rounds` rounds, each begun by another contender. Raises DeviceLost.

    Rounds before count no times: they size a turn and heat the card. A contender far behind runs in one that counts."""
    names, turns = list(contenders), Turns()
    expected: dict[str, float] = {}  # ms of contenders that still take part
    out: set[str] = set()
    settling, round_, begun = 1, 0, 0.0
    while True:
        slowest = max(expected.values(), default=0.0)
        least = min([rounds, *(few for ms, few in SLOW if slowest > ms)])
        counted = round_ - settling
        if counted == 0:
            begun = time.monotonic()
        if counted >= least and (counted >= MORE * least or time.monotonic() - begun > MORE_S or is_precise(turns.ms)):
            return turns
        heating = timing == "hot" and slowest > HEATING_MS
        for name in turn_order(names, round_):
            if name in out:
                continue
            contender, guess = contenders[name], expected.get(name, 0.0)
            try:
                with contender.around():
                    if not guess:  # compiles, and picks what it picks
                        guess = clock.turn_ms(contender.run, timing, 1, guess)
                    if heating:  # the clocks of such a call are those that it finds: its own, not another's
                        clock.turn_ms(contender.run, timing, 1, guess)
                    ms = clock.turn_ms(contender.run, timing, calls(timing, guess), guess)
            except FAILURES as failure:
                if lost := clock.lost():
                    raise DeviceLost(name, failure, lost) from None
                turns.failed[name] = reason(failure)
                turns.ms.pop(name, None)
                expected.pop(name, None)
                out.add(name)
                continue
            expected[name] = ms
            if round_ >= settling:
                turns.ms.setdefault(name, []).append(ms)
        if round_ == 0 and timing == "hot" and expected and max(expected.values()) > HEAD_START_MS:
            settling += int(HEAT_MS / sum(ms * calls(timing, ms) for ms in expected.values()))
        if round_ == settling:  # who is out stays out: a ratio pairs the rounds from the first one on
            far = {name for name, ms in expected.items() if ms > FAR * min(expected.values())}
            out |= far
            expected = {name: ms for name, ms in expected.items() if name not in far}
        round_ += 1


def is_precise(ms: Mapping[str, Sequence[float]]) -> bool:
    """Return whether ratios near the fastest are known to KNOWN; few rounds that agree by chance overstate it."""
    rounds = max(map(len, ms.values()), default=0)
    there = {name: times for name, times in ms.items() if len(times) == rounds}
    fastest = min(there, key=lambda name: statistics.median(there[name]), default="")
    near = (name for name in there if name != fastest and ratio(there[name], there[fastest]) <= NEAR)
    return all(within(there[name], there[fastest]) <= KNOWN for name in near)


def calls(timing: Timing, expected_ms: float) -> int:
    if timing == "do_bench":
        return 1
    return max(1, min(MOST_CALLS[timing], round(TURN_MS[timing] / max(expected_ms, 1e-4))))


def turn_order(names: Sequence[str], round_: int) -> list[str]:
    """Return a round's order, rotated and alternately reversed: a card that a light call has rested runs faster."""
    turned = rotate_names(names, round_ + round_ % 2)
    return turned[::-1] if round_ % 2 else turned


def rotate_names(names: Sequence[str], by: int) -> list[str]:
    by %= max(len(names), 1)
    return [*names[by:], *names[:by]]


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return our speed-up: the median over rounds of their time over ours in the same round."""
    pairs = list(zip(theirs, ours, strict=False))
    return statistics.median(a / b for a, b in pairs)


def within(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return half the ratio's 95 % confidence interval, if the rounds' ratios are normal; inf for one round."""
    ratios = [a / b for a, b in zip(theirs, ours, strict=False)]
    free = len(ratios) - 1
    if free < 1:
        return math.inf
    student = STUDENT[free] if free < len(STUDENT) else 2.1
    return student * MEDIAN * statistics.stdev(ratios) / math.sqrt(len(ratios))
