"""The clock of a search, and when a challenger is faster: without a device."""

import pytest

from portattn.tools.tune.race import TRIMMED, DeviceSampleClock, Times, against, replaces
from portattn.tools.tune.run import TuneOptions


class SlowHost:
    """A device clock with which a launch seems to take `launched_ms`, and a replay `device_ms`."""

    has_graphs = True

    def __init__(self, launched_ms: float, device_ms: float) -> None:
        self.launched_ms, self.device_ms, self.captured = launched_ms, device_ms, 0

    def turn_ms(self, run, timing, calls, expected_ms):
        run()
        return self.device_ms if getattr(run, "replays", False) else self.launched_ms

    def graphed(self, contender):
        self.captured += 1

        def replay():
            return None

        replay.replays = True
        return replay


def clock_of(inner: SlowHost) -> DeviceSampleClock:
    clock = DeviceSampleClock()
    clock._clock = inner
    return clock


@pytest.mark.parametrize("launched", [0.09, 0.8, 1.9])
def test_what_the_host_takes_to_launch_is_not_what_is_timed(launched: float) -> None:
    inner = SlowHost(launched, 0.09)
    clock = clock_of(inner)

    def run() -> None:
        return None

    for thorough in (False, True, True):
        assert clock.samples(run, "hot", thorough) == [pytest.approx(90.0)] * (3 if thorough else 2)
    assert inner.captured == 1, "a graph is kept for its turns"
    long = SlowHost(12.0, 0.09)
    assert clock_of(long).samples(lambda: None, "hot", True) == [pytest.approx(12000.0)] * 3
    assert long.captured == 0, "long calls are launched"


def times(*rounds: float) -> Times:
    return Times.of(rounds, rounds)


@pytest.mark.parametrize(
    ("rounds", "chosen"),
    [
        ((90.0, 90.1, 90.0, 90.2, 90.1, 90.0), True),
        ((90.0, 90.1, 300.0, 90.2, 90.1, 90.0), True),  # one disturbed round does not decide
        ((30.0, 90.1, 300.0, 90.2, 90.1, 90.0), False),  # two do
        ((90.0, 90.1, 300.0, 280.0, 90.1, 90.0), False),  # two do
        ((90.0, 90.1, 300.0, 90.2), False),  # of fewer than five rounds none is left out
        ((99.5, 99.4, 99.5, 99.5, 99.6, 99.5), False),
    ],
)
def test_one_disturbed_round_does_not_keep_todays_choice(rounds: tuple[float, ...], chosen: bool) -> None:
    ratio, noise = against([times(*rounds)], [times(*[100.0] * len(rounds))])
    assert replaces(ratio, noise) is chosen


def test_the_noise_is_half_of_the_spread_without_the_farthest() -> None:
    assert TuneOptions().rounds >= TRIMMED, "by default there are enough to leave one out"
    ratio, noise = against([times(97.0, 97.0, 97.0, 95.0, 99.0, 80.0)], [times(*[100.0] * 6)])
    assert (ratio, noise) == (pytest.approx(0.97), pytest.approx(0.02))
