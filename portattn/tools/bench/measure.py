"""Measure calls that are no `Case`: check the contenders, time them in turns, capture graphs, take host times.

Rows have medians of rounds: `ms`, `graph_ms`, `cold_ms` (L2 overwritten), `host_us`; `of_peer`: peer's over row's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from portattn.testing.tolerance import budget, largest
from portattn.tools.bench.contenders import Contender
from portattn.tools.bench.rounds import DeviceClock, interleaved, ratio

ROUNDS = 7
Runs = dict[str, Callable[[], Any]]
Row = dict[str, Any]
Judge = Callable[[], Row]


class Absent(Exception):
    """An engine or a library is absent; the text names it."""


@dataclass
class Measure:
    device: str
    only: str = ""  # text that a case's name must hold
    check: bool = False  # check results, and time nothing
    tiny: bool = False  # small sizes
    end: float = float("inf")  # time.monotonic() after which no case begins
    rounds: int | None = None  # None for the set's own number
    against: Path | None = None  # another checkout, which takes turns with this one
    ranks: int = 2  # of the sets that use several GPUs
    folder: Path | None = None  # for the run's other files
    part: str = ""  # before the names of cases
    left: list[str] = field(default_factory=list)  # cases that the time was too short for
    absent: dict[str, str] = field(default_factory=dict)  # parts that could not run, and why
    clock: DeviceClock = field(default_factory=DeviceClock)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).bfloat16()

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def wanted(self, case: str) -> bool:
        if self.only not in self.part + case:
            return False
        if time.monotonic() < self.end:
            return True
        self.left.append(self.part + case)
        return False

    def shares(self, names: Sequence[str]) -> Iterator[tuple[str, float]]:
        """Yield each wanted name with its rounds' end time: equal parts of the time left when it begins."""
        chosen = [name for name in names if self.only in name]
        for place, name in enumerate(chosen):
            if self.wanted(name):
                now = time.monotonic()
                yield name, now + (self.end - now) / (len(chosen) - place)

    def replayed(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return the replay of `run` captured in a graph; without a GPU, `run` itself."""
        return run if self.device == "cpu" else self.clock.graphed(Contender(run))

    def replay_note(self, right: bool) -> str:
        """Return the note on the result of `replayed`; without a GPU no graph was captured."""
        done = "called again, without a graph," if self.device == "cpu" else "replayed"
        return f"{done} with other lengths: {'right' if right else 'WRONG'}"

    def rows(
        self, case: str, runs: Runs, judges: Mapping[str, Judge], host: Mapping[str, Runs] | None = None,
        graphs: bool = True, cold: bool = False, peer: str = "",
    ) -> Iterator[Row]:  # fmt: skip
        """Yield a row for each contender; one that fails or is wrong is not timed.

        judges: checks of a result (error, budget, right, path …); host: contender -> {name: call for the host's clock};
        peer: the contender that of_peer compares with"""
        found: dict[str, Row] = {name: {"case": self.part + case, "contender": name} for name in runs}
        for name, run in runs.items():
            try:
                run()
                self.synchronize()
                found[name] |= judges[name]() if name in judges else {}
            except Exception as error:  # noqa: BLE001  # the others are still measured, and this one is reported
                found[name] |= failure(error)
        able = {n: run for n, run in runs.items() if "failed" not in found[n] and found[n].get("right", True)}
        if not self.check and self.device == "cuda" and able:
            self._time(able, found, graphs, cold, peer)
            for name, run in able.items():
                expected = found[name].get("ms", 0.0)
                for what, call in {"host_us": run, **(host or {}).get(name, {})}.items() if expected else ():
                    found[name][what] = self.clock.host_us(call, expected).median
        yield from found.values()

    def _time(self, able: Runs, found: dict[str, Row], graphs: bool, cold: bool, peer: str) -> None:
        contenders, replays = {name: Contender(run) for name, run in able.items()}, {}
        for name, one in contenders.items() if graphs else ():
            try:
                replays[name] = Contender(self.clock.graphed(one))
            except Exception as error:  # noqa: BLE001  # a call that cannot be captured is timed without
                found[name]["graph_failed"] = failure(error)["failed"]
        kinds = [("", contenders, "hot"), ("graph_", replays, "hot")] + [("cold_", contenders, "cold")] * cold
        for key, taking_part, timing in kinds:
            turns = interleaved(taking_part, self.clock, timing, self.rounds or ROUNDS)  # type: ignore[arg-type]
            for name, why in turns.failed.items():
                found[name] |= {"graph_failed": why} if key == "graph_" else {"failed": why, "note": f"FAILED {why}"}
            for name, times in turns.ms.items():
                found[name][f"{key}ms"] = statistics.median(times)
                if peer in turns.ms and name != peer:
                    found[name][f"{key}of_peer"] = ratio(turns.ms[peer], times)


def failure(error: Exception) -> Row:
    text = f"{type(error).__name__}: {error}"[:600]
    return {"failed": text, "note": f"FAILED {text}"[:200]}


def judge_result(out: torch.Tensor, exact: torch.Tensor, same: torch.Tensor) -> Row:
    """Judge a result. same: torch's own, in the result's dtype."""
    error, most = largest(out.double() - exact), budget(out.dtype, exact, same)
    right = out.shape == exact.shape and bool(torch.isfinite(out).all()) and error <= most
    return {"error": error, "budget": most, "right": right}


def judge_attention(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: Any) -> Row:
    """Judge one sequence's result, (Sq, Hq, D), by `attend`."""
    return judge_result(out, *(attend(q, k, v, dtype, **mask) for dtype in (torch.float64, torch.bfloat16)))


def worst(all_of: list[Row]) -> Row:
    return max(all_of, key=lambda one: (not one["right"], one["error"] / max(one["budget"], 1e-30)))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, causal: bool = True,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return attention, bottom-right aligned: q (Sq, Hq, D), k and v (Sk, Hk, D), mask `seen` bool (Sq, Sk)."""
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
