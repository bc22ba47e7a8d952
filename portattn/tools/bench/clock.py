"""The clock of a CUDA or ROCm device: device time by events, from graphs, and the host's time to enqueue a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from portattn.tools.bench.cases import Timing
from portattn.tools.bench.contenders import Contender

Run = Callable[[], Any]
HOST_CALLS = 200
HOST_MS, FEW_HOST_CALLS = 100.0, 3  # of device time: fewer calls will do where they take longer, but so many
QUEUE = 20  # calls enqueued before the host waits for the device
SLEEP_CYCLES = 100_000  # a call: about 50 µs by which the host gets ahead of the device
HEAD_START_MS = 0.2  # calls that take the device less than this begin behind a sleep: else the host would be timed
FLUSH_BYTES = 1 << 28  # more than any L2, as do_bench's


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Median, and the fifth and the four fifths of the values that lie below low and high."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(
            median=statistics.median(ordered), low=ordered[round(0.2 * last)], high=ordered[round(0.8 * last)],
            count=len(ordered),
        )  # fmt: skip


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """A card's own limits in one run.

    gemm_tflops  bf16 matrix product of 8192³, TFLOP/s
    copy_tbs     device copy, TB/s, read plus written
    """

    gemm_tflops: float
    copy_tbs: float

    def floor_ms(self, flops: int, read_bytes: int) -> tuple[float, str]:
        """The least time that so much takes, and which limit that is: "gemm" or "copy"."""
        gemm, copy = flops / self.gemm_tflops / 1e9, read_bytes / self.copy_tbs / 1e9
        return (gemm, "gemm") if gemm > copy else (copy, "copy")


class Clock(Protocol):
    """What timing asks of a device. Tests have one that needs none."""

    def turn_ms(self, run: Run, timing: Timing, calls: int, expected_ms: float) -> float:
        """Device time of one call, in milliseconds, over so many calls."""
        ...

    def host_us(self, run: Run, expected_ms: float = 0.0) -> Spread:
        """Time that enqueuing one call takes the host, in microseconds. expected_ms: that it takes the device."""
        ...

    def graphed(self, contender: Contender) -> Run:
        """A call that replays one of the contender's from a graph."""
        ...

    def peak_extra_bytes(self, run: Run) -> int:
        """Bytes that one call allocates at its peak beyond what was allocated before it."""
        ...

    def ceilings(self) -> Ceilings:
        """Measured on a card that is warm: a rested one is faster than any long run is."""
        ...

    def lost(self) -> str:
        """Why the device takes no more work, or an empty text: an error such as an illegal address stays for good."""
        ...


class DeviceClock:
    """The clock of torch's current CUDA or ROCm device."""

    def __init__(self) -> None:
        self._flush: torch.Tensor | None = None

    def turn_ms(self, run: Run, timing: Timing, calls: int, expected_ms: float) -> float:
        if timing == "do_bench":
            from triton.testing import do_bench

            return float(do_bench(run, warmup=5, rep=25, return_mode="median"))
        torch.cuda.synchronize()
        if expected_ms < HEAD_START_MS or timing == "cold":
            torch.cuda._sleep(SLEEP_CYCLES * calls)
        if timing == "cold":
            return statistics.median(self._each_cold(run, calls))
        begin, end = _event(), _event()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / calls

    def _each_cold(self, run: Run, calls: int) -> list[float]:
        """Each call by itself, after the L2 was written over."""
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        events = [(_event(), _event()) for _ in range(calls)]
        for begin, end in events:
            self._flush.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    def host_us(self, run: Run, expected_ms: float = 0.0) -> Spread:
        times: list[float] = []
        calls = max(FEW_HOST_CALLS, min(HOST_CALLS, round(HOST_MS / max(expected_ms, 1e-4))))
        while len(times) < calls:
            if len(times) % QUEUE == 0:
                torch.cuda.synchronize()  # the queue stays short: a full one would make the host wait
            begun = time.perf_counter()
            run()
            times.append((time.perf_counter() - begun) * 1e6)
        torch.cuda.synchronize()
        return Spread.of(times)

    def graphed(self, contender: Contender) -> Run:
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

    def peak_extra_bytes(self, run: Run) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def ceilings(self) -> Ceilings:
        found = Ceilings(gemm_tflops=self._gemm_tflops(), copy_tbs=self._copy_tbs())
        torch.cuda.empty_cache()
        return found

    def _warm_ms(self, run: Run, warm_seconds: float, calls: int) -> float:
        stop = time.perf_counter() + warm_seconds
        while time.perf_counter() < stop:
            run()
            torch.cuda.synchronize()
        return statistics.median(self.turn_ms(run, "hot", calls, 1.0) for _ in range(5))

    def _gemm_tflops(self, size: int = 8192) -> float:
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / self._warm_ms(lambda: a @ b, 1.0, 20) / 1e9

    def _copy_tbs(self, elements: int = 2**30) -> float:
        source = torch.empty(elements, dtype=torch.int32, device="cuda").random_()
        target = torch.empty_like(source)
        return 2 * elements * source.itemsize / self._warm_ms(lambda: target.copy_(source), 0.2, 10) / 1e9

    def lost(self) -> str:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).strip().splitlines()[0]
        return ""


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
