"""One rank of scripts/context_parallel_times.py: how it measures, and what the parts share."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import portattn

LEAST = 120.0  # ms of a round that count
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Run:
    """One rank: its number, how many there are, its device, whether sizes are small ones, when to stop, and the file
    of what it has found so far, which counts where it fails later."""

    rank: int
    ranks: int
    device: torch.device
    small: bool
    until: float
    so_far: Path

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def late(self) -> bool:
        """Whether the time is over, on any rank: all answer alike."""
        return max(self.gather(time.monotonic() > self.until))

    def keep(self, found: dict[str, Any]) -> None:
        self.so_far.write_text(json.dumps(found), encoding="utf-8")

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def milliseconds(self, function: Callable[[], Any], repeats: int) -> float:
        """Of one call, of so many made back to back after a barrier. On a device one more comes before, which is not
        counted: so the host is ahead, as it is where a call is one of many."""
        dist.barrier()
        self.wait()
        if not self.cuda:
            begin = time.perf_counter()
            for _ in range(repeats):
                function()
            return (time.perf_counter() - begin) / repeats * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        function()
        first.record()
        for _ in range(repeats):
            function()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / repeats

    def compared(
        self, contenders: dict[str, Callable[[], Any]], least: float, rounds: int = 5, warm: int = 2
    ) -> dict[str, dict[str, Any]]:
        """By contender: ms, the largest (of "one": the mean) of the ranks' medians of the rounds, made in turns; by
        rank; and the spread, the rounds' largest by the smallest, on the slowest rank.

        least  ms that a round of a contender is to take: so many calls are made back to back
        """
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        counts = {}
        for name, function in contenders.items():
            for _ in range(warm):
                function()
            counts[name] = 1
            if least:
                counts[name] = max(1, min(200, round(least / max(self.gather(self.milliseconds(function, 1))))))
        for turn in range(rounds):
            for name in list(contenders)[:: 1 if turn % 2 else -1]:
                taken[name].append(self.milliseconds(contenders[name], counts[name]))
            if turn >= 2 and self.late():
                break
        found = {}
        for name, times in taken.items():
            medians = self.gather(statistics.median(times))
            spread = max(self.gather(max(times) / min(times)))
            joined = statistics.mean(medians) if name.startswith("one") else max(medians)
            found[name] = {"ms": joined, "by rank": medians, "spread": spread}
        return found

    def memory(self, function: Callable[[], Any]) -> int:
        """Bytes allocated at the peak of a call, beyond what was there before: its results are part of it."""
        if not self.cuda:
            return 0
        function()
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        self.wait()
        del result
        return max(self.gather(torch.cuda.max_memory_allocated() - before))


def whole_tensors(run: Run, heads: tuple[int, int], length: int, width: int = 128) -> Tensors:
    """q, k, v and grad_out of (1, H, S, D) bf16, alike on every rank."""
    generator = torch.Generator(run.device).manual_seed(7)
    counts = (heads[0], heads[1], heads[1], heads[0])
    return tuple(
        torch.randn(1, count, length, width, generator=generator, device=run.device, dtype=torch.bfloat16)
        for count in counts
    )


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def backward_call(out: torch.Tensor, own: list[torch.Tensor], grad_out: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(out, own, grad_out, retain_graph=True)


def host_milliseconds(run: Run, function: Callable[[], Any]) -> float:
    """Until a call returns, while the device has nothing else to do: the median of five."""
    taken = []
    for _ in range(5):
        run.wait()
        dist.barrier()
        run.wait()
        begin = time.perf_counter()
        function()
        taken.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(taken)


def last_path() -> str:
    plan = portattn.last_plan()
    return "" if plan is None else f"{plan.path}"


def largest_apart(run: Run, shared: Any, mine: torch.Tensor, whole: torch.Tensor) -> float:
    """||ours - one GPU's|| / ||one GPU's|| of this rank's rows, the largest of the ranks."""
    return max(run.gather(difference(mine, shared.shard(whole))))


def difference(ours: torch.Tensor, right: torch.Tensor) -> float:
    """||ours - right|| / ||right||."""
    return float((ours.detach().float() - right.float()).norm() / right.float().norm())
