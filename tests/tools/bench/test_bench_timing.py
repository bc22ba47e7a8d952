"""Turns: their order, what counts, what a ratio is, and the limits of a turn."""

import itertools
from unittest.mock import Mock

import pytest
from benchfakes import FakeClock

from portattn.tools.bench import rounds
from portattn.tools.bench.contenders import Contender
from portattn.tools.bench.gate import DeviceLost
from portattn.tools.bench.rounds import Ceilings, Spread


class Drifting(FakeClock):
    """A card that is slower with each turn: every call takes 1 % longer than the one before."""

    def turn_ms(self, run, timing, calls, expected_ms):
        name = run()
        self.turns.append((name, timing, calls))
        return (2.0 if name == "slow" else 1.0) * 1.01 ** len(self.turns)


def contenders(*names):
    return {name: Contender(lambda name=name: name) for name in names}


def test_each_round_begins_with_another(monkeypatch):
    monkeypatch.setattr(rounds, "HEAT_MS", 0.0)
    clock = Drifting()
    rounds.interleaved(contenders("a", "b", "c"), clock, "hot", 3)
    names = [name for name, _, _ in clock.turns]
    # The first round has a single call of each before its turn.
    assert names[:6] == ["a", "a", "b", "b", "c", "c"]
    assert names[6:15] == ["b", "a", "c", "c", "a", "b", "a", "c", "b"]


def test_who_comes_after_whom_changes():
    names = list("abcde")
    for first in range(4):
        one, other = (rounds.turn_order(names, first + more) for more in range(2))
        assert sorted(one) == sorted(other) == names
        assert not set(itertools.pairwise(one)) & set(itertools.pairwise(other))


class Failing(FakeClock):
    """`tiny` is ten times as fast as the others, until it fails."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def turn_ms(self, run, timing, calls, expected_ms):
        self.turns.append((run, timing, calls))
        if run() == "tiny" and len(self.turns) > self.after:
            raise RuntimeError("no more")
        return 0.1 if run() == "tiny" else 1.0


def test_who_fails_is_no_measure_for_the_others():
    """Only who is right there after the first round that counts says who is far behind."""
    for after, count in ((1, 5), (7, 5), (12, 1)):
        turns = rounds.interleaved(contenders("tiny", "a", "b"), Failing(after), "cold", 5)
        assert turns.failed == {"tiny": "no more"}
        assert {name: len(ms) for name, ms in turns.ms.items()} == {"a": count, "b": count}


def test_who_is_far_behind_stays_out():
    """A ratio pairs the rounds from the first one on: nobody comes back later."""

    class Wavering(FakeClock):
        def turn_ms(self, run, timing, calls, expected_ms):
            self.turns.append((run, timing, calls))
            return 1.0 if run() == "fast" else (3.5 if len(self.turns) < 9 else 2.0)

    turns = rounds.interleaved(contenders("fast", "slow"), Wavering(), "cold", 4)
    assert {name: len(ms) for name, ms in turns.ms.items()} == {"fast": 4, "slow": 1}


def test_a_call_that_heats_the_card_is_timed_after_one_of_its_own():
    clock = FakeClock(2 * rounds.HEATING_MS)
    rounds.interleaved(contenders("a", "b"), clock, "hot", 2)
    names = [run() for run, _, _ in clock.turns]
    assert names[:4] == ["a"] * 2 + ["b"] * 2  # once to see how long it takes
    assert all(one == other for one, other in zip(names[4::2], names[5::2], strict=True))
    assert len(names[4:]) == 2 * 2 * len(set(names)) + 2 * 2 * int(rounds.HEAT_MS // (2 * clock.ms))


def test_the_first_round_does_not_count_and_a_ratio_is_of_one_round():
    turns = rounds.interleaved(contenders("fast", "slow"), Drifting(), "cold", 4)
    assert {name: len(ms) for name, ms in turns.ms.items()} == {"fast": 4, "slow": 4}
    # Of a card that drifts by tens of percent the ratio is right to one.
    assert max(turns.ms["fast"]) / min(turns.ms["fast"]) > 1.05
    assert rounds.ratio(turns.ms["slow"], turns.ms["fast"]) == pytest.approx(2.0, rel=0.011)


def test_long_calls_heat_the_card_first():
    clock = FakeClock(1.0)
    turns = rounds.interleaved(contenders("a", "b"), clock, "hot", 3)
    # Twelve calls of 1 ms a turn: 24 ms a round, of which 400 ms have 16 on top of the first.
    assert [calls for _, _, calls in clock.turns] == [1, 12] * 2 + [12] * 2 * (16 + 3)
    assert {len(ms) for ms in turns.ms.values()} == {3}
    for clock, timing in ((FakeClock(0.01), "hot"), (FakeClock(1.0), "cold")):
        rounds.interleaved(contenders("a"), clock, timing, 3)
        assert len(clock.turns) == 2 + 3


def test_slow_calls_have_few_rounds():
    for longer, enough in rounds.SLOW:
        assert len(rounds.interleaved(contenders("a"), FakeClock(longer * 1.5), "hot", 20).ms["a"]) == enough
    assert len(rounds.interleaved(contenders("a"), FakeClock(1.0), "hot", 20).ms["a"]) == 20


class Restless(FakeClock):
    """`a` is as fast as `b`, and moves by a tenth from round to round; a turn takes `seconds`."""

    def __init__(self, ms: float, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        super().__init__(ms)
        self.seconds = seconds
        monkeypatch.setattr(rounds.time, "monotonic", lambda: len(self.turns) * self.seconds)

    def turn_ms(self, run, timing, calls, expected_ms):
        self.turns.append((run, timing, calls))
        return self.ms * (1.0 if run() == "b" else (0.95, 1.05, 1.0)[len(self.turns) % 3])


def test_there_are_rounds_until_a_ratio_is_known(monkeypatch):
    turns = rounds.interleaved(contenders("a", "b"), Restless(0.1, monkeypatch, 0.0), "cold", 3)
    assert {len(ms) for ms in turns.ms.values()} == {rounds.MORE * 3}
    for clock in (FakeClock(0.1), Restless(0.01, monkeypatch, 9.0)):  # what is asked for is timed however long it takes
        turns = rounds.interleaved(contenders("a", "b"), clock, "cold", 3)
        assert {len(ms) for ms in turns.ms.values()} == {3}


@pytest.mark.parametrize("kind", ["hot", "cold", "do_bench"])
def test_no_more_rounds_than_there_is_time(monkeypatch, kind):
    """Of whatever kind the turns are: what counts is what a round takes in all."""
    count = len(rounds.interleaved(contenders("a", "b"), Restless(0.01, monkeypatch, 0.2), kind, 3).ms["a"])
    assert (count - 1) * 2 * 0.2 <= rounds.MORE_S < count * 2 * 0.2 + 1e-9


def test_a_confidence_interval():
    """Of 1.0 and 1.02 in turn, eight times each: 2.131 (Student, 15 degrees) times 1.253 times 0.01033 / 4."""
    assert rounds.within([1.0, 1.02] * 8, [1.0] * 16) == pytest.approx(2.131 * 1.253 * 0.010328 / 4, rel=0.02)
    assert rounds.within([1.0, 1.1], [1.0, 1.0]) == pytest.approx(12.71 * 1.253 * 0.0707107 / 2**0.5, rel=1e-3)
    assert rounds.within([1.0], [1.0]) == float("inf")
    assert rounds.within([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == 0.0  # the card drifts, the ratio does not


def test_when_a_ratio_is_known():
    ratios = [1.0, 1.02] * 8
    for times, precise in (
        ({}, True), ({"a": [1.0, 1.0, 1.0]}, True), ({"a": [1.0, 1.3, 1.1], "b": [1.0, 1.3, 1.1]}, True),
        ({"a": [1.0, 1.0, 1.0], "b": [1.0, 1.1, 1.05]}, False), ({"a": [1.0], "b": [1.0]}, False),
        ({"a": [1.0, 1.0, 1.0], "b": [1.4, 1.5, 1.6]}, True),  # far enough behind
        ({"a": [1.0, 1.0, 1.0], "b": [1.1]}, True),  # no longer there
        ({"a": [1.0] * 16, "b": ratios}, True), ({"a": [1.0] * 4, "b": ratios[:4]}, False),
    ):  # fmt: skip
        assert rounds.is_precise(times) is precise, times


@pytest.mark.parametrize(
    ("kind", "ms", "count"),
    [
        ("hot", 1.0, 12), ("hot", 1e-3, 50), ("hot", 400.0, 1), ("cold", 0.5, 12), ("cold", 0.0, 20),
        ("do_bench", 1e-3, 1),
    ],
)  # fmt: skip
def test_calls_of_a_turn(kind, ms, count):
    assert rounds.calls(kind, ms) == count


def test_who_fails_drops_out_alone():
    found = contenders("a", "b") | {"bad": Contender(Mock(side_effect=RuntimeError("no more")))}
    turns = rounds.interleaved(found, FakeClock(), "hot", 2)
    assert (turns.failed, set(turns.ms)) == ({"bad": "no more"}, {"a", "b"})
    clock = FakeClock()
    clock.gone = "an illegal address"
    with pytest.raises(DeviceLost, match="bad: no more; the device is lost to this process: an illegal address"):
        rounds.interleaved(found, clock, "hot", 2)


def test_spread_and_floor():
    spread = Spread.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert (spread.median, spread.low, spread.high, spread.count) == (3.5, 2.0, 5.0, 6)
    limits = Ceilings(gemm_tflops=800.0, copy_tbs=4.0)
    assert limits.floor_ms(int(8e11), int(4e9)) == (pytest.approx(1.0), "copy")
    assert limits.floor_ms(int(1.6e12), int(4e9)) == (pytest.approx(2.0), "gemm")
