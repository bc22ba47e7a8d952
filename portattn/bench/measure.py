"""Timing and the correctness gate. Device time by events with the cache flushed, host time by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import portattn
from portattn.bench.cases import Case
from portattn.bench.contenders import Run, Tensors
from portattn.call import Call
from portattn.config import Settings
from portattn.reference.check import budget, same_dtype
from portattn.reference.oracle import allowed, oracle
from portattn.validate import attention_call

CHECKED_ROWS = 64  # query rows compared with the float64 oracle
HOST_CALLS = 200


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
    times = []
    for i in range(HOST_CALLS):
        if i % 20 == 0:
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


def as_call(case: Case, t: Tensors) -> Call:
    return attention_call(
        case.op,
        t.q,
        t.k,
        t.v,
        names=("q", "k", "v"),
        settings=Settings(validate="never"),
        scale=None,
        causal=False if case.causal == "none" else case.causal,
        return_lse=False,
        layout="bhsd",
        seqlens_q=t.seqlens_q,
        seqlens_k=t.seqlens_k,
    )


class Gate:
    """Compares contenders with the float64 oracle on a sample of query rows, under the budget of reference/check."""

    def __init__(self, case: Case, t: Tensors) -> None:
        call = as_call(case, t)
        generator = torch.Generator().manual_seed(1)
        rows = torch.randperm(case.seq_q, generator=generator)[:CHECKED_ROWS].sort().values.to(t.q.device)
        self.rows = rows
        self.valid = allowed(call, rows).any(-1)[:, None, :, None]
        self.expected, _ = oracle(call, rows)
        self.budget = budget(t.q.dtype, self.expected, same_dtype(call, rows=rows)[0])

    def error(self, out: torch.Tensor) -> float:
        """Largest difference on rows that attend something; NaN counts as infinite."""
        difference = torch.where(self.valid, (out.double() - self.expected).abs(), 0.0)
        return float(torch.nan_to_num(difference, nan=float("inf")).max())

    def check(self, run: Run) -> float:
        """The contender's error on the sampled rows."""
        return self.error(run()[:, :, self.rows])


def ceilings() -> dict[str, float]:
    """This card's own limits in this run: bf16 GEMM in TFLOP/s, device copy in TB/s (read plus written)."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gemm = 2 * size**3 / device_ms(lambda: a @ b) / 1e9
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    copied: Callable[[], torch.Tensor] = lambda: target.copy_(source)  # noqa: E731
    copy = 2 * source.numel() * 4 / device_ms(copied) / 1e9
    return {"gemm_tflops": gemm, "copy_tbs": copy}


def plan_of(case: Case, t: Tensors) -> portattn.Plan:
    causal: bool | str = False if case.causal == "none" else case.causal
    if case.op == "attention":
        return portattn.plan("attention", t.q, t.k, t.v, causal=causal, seqlens_q=t.seqlens_q, seqlens_k=t.seqlens_k)
    return portattn.plan("decode_attention", t.q, t.k, t.v, t.seqlens_k, causal=causal)
