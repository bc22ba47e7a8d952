"""Time candidates, by medians: a probe abandons one whose fastest turn is slower than ABANDON times the best median.

FINALISTS then take turns with the incumbent, as a capped card is slower after a long call than after a rest. The best
replaces it by more than the noise: half the spread of the rounds' ratios, at least NOISE, an outlier trimmed."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from portattn.tools.bench import rounds
from portattn.tools.bench.cases import Timing
from portattn.tools.bench.contenders import Contender
from portattn.tools.bench.report import geomean

ABANDON = 1.25
FINALISTS = 5
NOISE = 0.01
# With so many rounds or more the ratio that is farthest from the median is left out of the noise.
TRIMMED = 5
Run = Callable[[], Any]


class SampleClock(Protocol):
    def samples(self, run: Run, timing: Timing, thorough: bool) -> list[float]:
        """Return a call's device time in microseconds, turn by turn; more turns if thorough."""
        ...


class DeviceSampleClock:
    """The benchmarks' clock; short calls are replayed from a graph, if any: a plan's launch takes the host longer."""

    PROBE_MS, THOROUGH_MS = 3.0, 8.0  # device time of a turn
    PROBE_TURNS, THOROUGH_TURNS = 2, 3
    MOST_CALLS = 100
    SHORT_MS = 2.0
    MOST_GRAPHS = 2 * FINALISTS  # kept: each holds the memory that its launches want

    def __init__(self, device_type: str = "cuda") -> None:
        self._clock = rounds.DeviceClock(device_type)
        self._graphs: dict[int, tuple[Run, Run]] = {}  # by id of the replayed call, which is kept alive

    def samples(self, run: Run, timing: Timing, thorough: bool) -> list[float]:
        guess = self._clock.turn_ms(run, timing, 1, 0.0)
        if guess < self.SHORT_MS and self._clock.has_graphs:
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
    """One candidate's microseconds on one problem; rounds: the median of each round."""

    least: float
    median: float
    most: float
    rounds: tuple[float, ...] = ()

    @classmethod
    def of(cls, samples: Iterable[float], rounds: Iterable[float] = ()) -> "Times":
        seen = sorted(samples)
        return cls(least=seen[0], median=statistics.median(seen), most=seen[-1], rounds=tuple(rounds))


def take_turns(runs: Mapping[str, Run], clock: SampleClock, timing: Timing, rounds: int) -> dict[str, Times]:
    """Time all runs in turn, `rounds` times after one untimed round, alternating the direction."""
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
    """Return the geometric mean of times over their counterparts: below 1 is faster."""
    return geomean(ours / theirs for ours, theirs in zip(times, against, strict=True))


def against(challenger: Sequence[Times], incumbent: Sequence[Times]) -> tuple[float, float]:
    """Return a challenger's mean time ratio to the incumbent over problems, and the noise to beat."""
    ratios = [
        [ours / theirs for ours, theirs in zip(one.rounds, other.rounds, strict=True)]
        for one, other in zip(challenger, incumbent, strict=True)
    ]
    noise = max([NOISE, *(_spread(some) / 2 for some in ratios)])
    return geomean(map(statistics.median, ratios)), noise


def replaces(ratio: float, noise: float) -> bool:
    return ratio < 1.0 - noise


def _spread(ratios: Sequence[float]) -> float:
    some = list(ratios)
    if len(some) >= TRIMMED:
        middle = statistics.median(some)
        some.remove(max(some, key=lambda ratio: abs(ratio - middle)))
    return max(some) - min(some)
