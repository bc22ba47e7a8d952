"""Clocks: device time by events with the cache flushed, host time by the clock, and what the card can do at all."""

from __future__ import annotations

import statistics
import time

import msgspec
import torch

from portattn.bench.contenders import Run

HOST_CALLS = 200
HOST_SECONDS = 0.5  # after which fewer calls will do
QUEUE = 20  # calls enqueued before the host waits for the device


def device_ms(run: Run, warmup_ms: int = 10, repeat_ms: int = 60) -> float:
    """Median device time of one call in milliseconds, cold L2 (triton.testing.do_bench)."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=warmup_ms, rep=repeat_ms, return_mode="median"))


def interleaved_ms(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median device time of each contender over rounds in which all take turns, so that a drifting clock hits all."""
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seen[name].append(device_ms(run))
    return {name: statistics.median(times) for name, times in seen.items()}


def host_us(run: Run) -> float:
    """Median time that enqueuing one call takes the host, in microseconds. The device's queue is kept short."""
    times: list[float] = []
    end = time.perf_counter() + HOST_SECONDS
    while len(times) < HOST_CALLS and (len(times) < QUEUE or time.perf_counter() < end):
        if len(times) % QUEUE == 0:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        times.append((time.perf_counter() - begun) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def graph_ms(run: Run) -> float:
    """Device time of one call replayed from a CUDA graph, cold L2: what launching costs is gone."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return device_ms(lambda: graph.replay())  # type: ignore[arg-type, return-value]


def peak_extra_bytes(run: Run) -> int:
    """Bytes that one call allocates at its peak beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


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


def ceilings() -> Ceilings:
    """Measured on a card that is warm: a rested one is faster than any long run is."""
    found = Ceilings(gemm_tflops=_gemm_tflops(), copy_tbs=_copy_tbs())
    torch.cuda.empty_cache()
    return found


def _gemm_tflops(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / device_ms(lambda: a @ b, warmup_ms=500, repeat_ms=200) / 1e9


def _copy_tbs(elements: int = 2**30) -> float:
    source = torch.empty(elements, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * elements * source.itemsize / device_ms(lambda: target.copy_(source)) / 1e9
