"""Contenders of a case: checked, timed in turns, captured, and what they cost the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from portattn.testing.tolerance import budget, largest
from portattn.tools.bench.clock import DeviceClock
from portattn.tools.bench.contenders import Contender

ROUNDS, TURN_MS = 7, 12.0
OURS = "portattn"


class Absent(Exception):
    """An engine or a library is not here. The text says which."""


class Measure:
    """How cases are measured: which of them, until when, and whether they are timed."""

    def __init__(self, only: str, check: bool, end: float, tiny: bool, device: str) -> None:
        self.only, self.check, self.end, self.tiny, self.device = only, check, end, tiny, device
        self.clock = DeviceClock()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).bfloat16()

    def replayed(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """run, captured in a graph: what repeats it. Without a GPU, what runs it again."""
        if self.device == "cpu":
            return run
        return self.clock.graphed(Contender(run))

    def replay_note(self, right: bool) -> str:
        """What is said of the result of `replayed`: without a GPU no graph was captured."""
        done = "called again, without a graph," if self.device == "cpu" else "replayed"
        return f"{done} with other lengths: {'right' if right else 'WRONG'}"

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def wanted(self, case: str) -> bool:
        return self.only in case and time.monotonic() < self.end

    def rows(
        self,
        case: str,
        runs: dict[str, Callable[[], Any]],
        judges: dict[str, Callable[[], dict[str, Any]]],
        host: dict[str, dict[str, Callable[[], Any]]] | None = None,
        graphs: bool = True,
        peer: str = "",
    ) -> Iterator[dict[str, Any]]:
        """A row for each contender.

        runs    its call
        judges  what is said of its result: error, budget, right, path, and more
        host    further calls that the host's clock is held to: contender -> {name: call}
        peer    the contender that others are compared with: of_peer is its time over theirs
        """
        found: dict[str, dict[str, Any]] = {}
        for name, run in runs.items():
            row: dict[str, Any] = {"case": case, "contender": name}
            found[name] = row
            try:
                run()
                self.synchronize()
                row |= judges[name]() if name in judges else {}
            except Exception as error:  # noqa: BLE001  # the others are still measured, and this one is reported
                row |= _failure(error)
        able = {name: run for name, run in runs.items() if "failed" not in found[name]}
        if not self.check and able:
            replays = self._captured(able, found) if graphs else {}
            for key, calls in (("ms", able), ("graph_ms", replays)):
                for name, (median, ratio) in self._turns(calls, peer).items():
                    found[name][key] = median
                    if ratio is not None:
                        found[name]["of_peer" if key == "ms" else "graph_of_peer"] = ratio
            for name, run in able.items():
                expected = found[name]["ms"]
                found[name]["host_us"] = self.clock.host_us(run, expected).median
                for what, call in (host or {}).get(name, {}).items():
                    found[name][what] = self.clock.host_us(call, expected).median
        yield from found.values()

    def _captured(self, runs: dict[str, Callable[[], Any]], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
        replays = {}
        for name, run in runs.items():
            try:
                replays[name] = self.clock.graphed(Contender(run))
            except Exception as error:  # noqa: BLE001  # a call that cannot be captured is timed without
                found[name]["graph_failed"] = f"{type(error).__name__}: {error}"[:300]
        return replays

    def _turns(self, runs: dict[str, Callable[[], Any]], peer: str) -> dict[str, tuple[float, float | None]]:
        """Milliseconds of each, the median of the rounds, and the median of the rounds' ratios of the peer's to it."""
        if not runs:
            return {}
        calls = {}
        for name, run in runs.items():
            self.clock.turn_ms(run, "hot", 2, 1.0)
            calls[name] = max(2, min(400, round(TURN_MS / self.clock.turn_ms(run, "hot", 3, 1.0))))
        turns: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                turns[name].append(self.clock.turn_ms(run, "hot", calls[name], TURN_MS / calls[name]))
        against = turns.get(peer)
        return {
            name: (
                statistics.median(times),
                None if against is None or name == peer
                else statistics.median(a / b for a, b in zip(against, times, strict=True)),
            )
            for name, times in turns.items()
        }  # fmt: skip


def _failure(error: Exception) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}"[:600]
    return {"failed": text, "note": f"FAILED {text}"[:200]}


def judged(out: torch.Tensor, exact: torch.Tensor, same: torch.Tensor) -> dict[str, Any]:
    """Whether a result is right. same: torch's own, in the result's dtype."""
    error, most = largest(out.double() - exact), budget(out.dtype, exact, same)
    right = out.shape == exact.shape and bool(torch.isfinite(out).all()) and error <= most
    return {"error": error, "budget": most, "right": right}


def worst(all_of: list[dict[str, Any]]) -> dict[str, Any]:
    """What is farthest from right of several."""
    return max(all_of, key=lambda one: (not one["right"], one["error"] / max(one["budget"], 1e-30)))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, causal: bool = True,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """One sequence's attention in a dtype, by definition: q (Sq, Hq, D), k and v (Sk, Hk, D) -> (Sq, Hq, D). The last
    query is the last key's; seen: bools (Sq, Sk) of what a query sees."""
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    found = []
    for head in range(k.shape[0]):
        scores = q[head * group : (head + 1) * group] @ k[head].mT * q.shape[-1] ** -0.5
        rows, keys = scores.shape[-2:]
        if causal and rows > 1:
            hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        found.append(scores.softmax(-1) @ v[head])
    return torch.cat(found).transpose(0, 1)
