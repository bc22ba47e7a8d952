"""Taking turns. A card that is capped in power is slower after a long call than after a rest, so that only figures of
contenders that took turns without a pause can be compared: a ratio is that of two times of one round."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from portattn.tools.bench.cases import Timing
from portattn.tools.bench.clock import HEAD_START_MS, Clock
from portattn.tools.bench.contenders import Contender
from portattn.tools.bench.gate import FAILURES, DeviceLost, reason

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
    """Milliseconds of each contender, round by round, or why it has no time. By name."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def interleaved(contenders: Mapping[str, Contender], clock: Clock, timing: Timing, rounds: int) -> Turns:
    """Time contenders in at least so many rounds; each round begins with another contender.

    The first rounds do not count: one finds how many calls fill a turn, and if calls are long enough to heat the card,
    others bring its clocks down. A contender far behind takes part in one round that counts. Raises DeviceLost.
    """
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
                lost = clock.lost()
                if lost:
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
    """Whether the ratios of who is about as fast as the fastest are known to KNOWN, as far as their own rounds can say
    (of few rounds that happen to agree, too much).
    """
    rounds = max(map(len, ms.values()), default=0)
    there = {name: times for name, times in ms.items() if len(times) == rounds}
    fastest = min(there, key=lambda name: statistics.median(there[name]), default="")
    near = (name for name in there if name != fastest and ratio(there[name], there[fastest]) <= NEAR)
    return all(within(there[name], there[fastest]) <= KNOWN for name in near)


def calls(timing: Timing, expected_ms: float) -> int:
    """How many calls a turn has. do_bench counts its own."""
    if timing == "do_bench":
        return 1
    return max(1, min(MOST_CALLS[timing], round(TURN_MS[timing] / max(expected_ms, 1e-4))))


def turn_order(names: Sequence[str], round_: int) -> list[str]:
    """Each round begins with another one, and every other one goes backwards: who comes after whom is not always the
    same, and a card that a light call has rested runs the next one faster.
    """
    turned = rotate_names(names, round_ + round_ % 2)
    return turned[::-1] if round_ % 2 else turned


def rotate_names(names: Sequence[str], by: int) -> list[str]:
    by %= max(len(names), 1)
    return [*names[by:], *names[:by]]


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How many times as fast we are: the median over rounds of their time over ours in the same round."""
    pairs = list(zip(theirs, ours, strict=False))
    return statistics.median(a / b for a, b in pairs)


def within(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Half the width of the ratio's confidence interval (95 %), if the rounds' ratios are normal; inf of one round."""
    ratios = [a / b for a, b in zip(theirs, ours, strict=False)]
    free = len(ratios) - 1
    if free < 1:
        return math.inf
    student = STUDENT[free] if free < len(STUDENT) else 2.1
    return student * MEDIAN * statistics.stdev(ratios) / math.sqrt(len(ratios))
