"""Timing candidates: when one is abandoned, and when an incumbent is replaced.

The rules, in the order in which they act. Times are medians unless they say otherwise.

1. Probe. Each candidate is timed once, briefly. It is abandoned when its fastest turn is slower than ABANDON times the
   best median seen so far on that problem: even its luckiest turn would lose.
2. Final. The FINALISTS with the best geometric mean over the class's problems take turns with the incumbent for some
   rounds, after a round that does not count: a power-capped card is slower after a long call than after a rest.
3. The best of them replaces the incumbent if it is faster by more than the noise; otherwise the incumbent stays. The
   comparison is round by round, since neighbours in time share a clock: the median over rounds of one time over the
   other. The noise is half the spread of these ratios, or NOISE if that is more. With TRIMMED rounds or more the spread
   leaves out the ratio farthest from the median: one disturbed round does not decide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from portattn.tools.bench import clock as device_clock
from portattn.tools.bench.cases import Timing
from portattn.tools.bench.contenders import Contender

ABANDON = 1.25
FINALISTS = 5
NOISE = 0.01
# With so many rounds or more the ratio that is farthest from the median is left out of the noise.
TRIMMED = 5
Run = Callable[[], Any]


class SampleClock(Protocol):
    """How long calls take on a device."""

    def samples(self, run: Run, timing: Timing, thorough: bool) -> list[float]:
        """Device time of a call in microseconds, turn by turn; more of them where it is to be thorough."""
        ...


class DeviceSampleClock:
    """The clock of the benchmarks, on torch's current device: a sample is a turn of several calls.

    Short calls are replayed from a graph: a candidate is launched by way of its plan, which takes the host longer than
    a call that is kept, and longer than such a kernel runs. So what one launch seems to take tells a long call only
    where it is far longer than the host's part.
    """

    PROBE_MS, THOROUGH_MS = 3.0, 8.0  # device time of a turn
    PROBE_TURNS, THOROUGH_TURNS = 2, 3
    MOST_CALLS = 100
    SHORT_MS = 2.0
    MOST_GRAPHS = 2 * FINALISTS  # kept: each holds the memory that its launches want

    def __init__(self) -> None:
        self._clock = device_clock.DeviceClock()
        self._graphs: dict[int, tuple[Run, Run]] = {}  # by id of the replayed call, which is kept alive

    def samples(self, run: Run, timing: Timing, thorough: bool) -> list[float]:
        guess = self._clock.turn_ms(run, timing, 1, 0.0)
        if guess < self.SHORT_MS:
            run = self._replayed(run)
            guess = self._clock.turn_ms(run, timing, 1, 0.0)
        turn, turns = (self.THOROUGH_MS, self.THOROUGH_TURNS) if thorough else (self.PROBE_MS, self.PROBE_TURNS)
        calls = max(1, min(self.MOST_CALLS, round(turn / max(guess, 1e-4))))
        return [self._clock.turn_ms(run, timing, calls, guess) * 1e3 for _ in range(turns)]

    def _replayed(self, run: Run) -> Run:
        if id(run) not in self._graphs:
            if len(self._graphs) >= self.MOST_GRAPHS:
                self._graphs.clear()
            self._graphs[id(run)] = run, self._clock.graphed(Contender(run))
        return self._graphs[id(run)][1]


class Times(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one candidate on one problem, microseconds. rounds: the median of each round."""

    least: float
    median: float
    most: float
    rounds: tuple[float, ...] = ()

    @classmethod
    def of(cls, samples: Iterable[float], rounds: Iterable[float] = ()) -> Times:
        seen = sorted(samples)
        return cls(least=seen[0], median=statistics.median(seen), most=seen[-1], rounds=tuple(rounds))


def should_abandon(times: Times, best: float) -> bool:
    """Whether a probed candidate is clearly slower than the best median."""
    return times.least > ABANDON * best


def take_turns(runs: Mapping[str, Run], clock: SampleClock, timing: Timing, rounds: int) -> dict[str, Times]:
    """Time all of them in turn, `rounds` times and once before; each round goes the other way round."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    medians: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in list(runs) if turn % 2 == 0 else list(reversed(list(runs))):
            seen = clock.samples(runs[name], timing, thorough=True)
            if turn:
                samples[name] += seen
                medians[name].append(statistics.median(seen))
    return {name: Times.of(samples[name], medians[name]) for name in runs}


def mean_ratio(times: Iterable[float], against: Iterable[float]) -> float:
    """Geometric mean of times over those they are compared with: below 1 is faster."""
    return _mean(ours / theirs for ours, theirs in zip(times, against, strict=True))


def against(challenger: Sequence[Times], incumbent: Sequence[Times]) -> tuple[float, float]:
    """(mean ratio of a challenger's time to the incumbent's over problems, the noise that it has to beat)."""
    ratios = [
        [ours / theirs for ours, theirs in zip(one.rounds, other.rounds, strict=True)]
        for one, other in zip(challenger, incumbent, strict=True)
    ]
    noise = max([NOISE, *(_spread(some) / 2 for some in ratios)])
    return _mean(map(statistics.median, ratios)), noise


def replaces(ratio: float, noise: float) -> bool:
    """Whether a challenger with this mean ratio to the incumbent takes its place."""
    return ratio < 1.0 - noise


def _spread(ratios: Sequence[float]) -> float:
    """How far ratios lie apart; of TRIMMED or more without the one that is farthest from the median."""
    some = list(ratios)
    if len(some) >= TRIMMED:
        middle = statistics.median(some)
        some.remove(max(some, key=lambda ratio: abs(ratio - middle)))
    return max(some) - min(some)


def _mean(ratios: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))
