"""The device's clock: what it asks of torch.cuda, with stand-ins for its events; and on a device, what it measures."""

import pytest
import torch

from portattn.tools.bench import results, rounds
from portattn.tools.bench.contenders import Contender

did: list[str] = []


class Event:
    """Reads a clock that goes 1 ms forward with every call of `run`."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        self.at = Event.now
        did.append("record")

    def elapsed_time(self, end):
        return end.at - self.at


class Flushed:
    def zero_(self):
        did.append("flush")
        Event.now += 100.0  # is not to be counted


def run():
    did.append("run")
    Event.now += 1.0


@pytest.fixture
def device(monkeypatch):
    did.clear()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: did.append("sync"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: did.append(f"sleep {cycles}"))
    made = rounds.DeviceClock()
    made._flush = Flushed()
    return made


SLEEP = f"sleep {2 * rounds.SLEEP_CYCLES}"


@pytest.mark.parametrize(
    ("timing", "calls", "ms", "expected"),
    [
        ("hot", 3, 5.0, ["sync", "record", "run", "run", "run", "record", "sync"]),  # back to back
        ("hot", 2, 0.01, ["sync", SLEEP, "record", "run", "run", "record", "sync"]),  # short ones behind a sleep
        ("cold", 2, 5.0, ["sync", SLEEP, *["flush", "record", "run", "record"] * 2, "sync"]),  # flushed, one by one
    ],
)
def test_calls_of_a_turn(device, timing, calls, ms, expected):
    assert device.turn_ms(run, timing, calls, ms) == pytest.approx(1.0)
    assert did == expected


def test_host_times_keep_the_queue_short(device, monkeypatch):
    monkeypatch.setattr(rounds, "HOST_CALLS", 45)
    spread = device.host_us(run)
    assert spread.count == 45
    assert 0 < spread.low <= spread.median <= spread.high
    assert [i for i, what in enumerate(did) if what == "sync"] == [0, 21, 42, 48]
    assert [device.host_us(run, ms).count for ms in (10.0, 1e4)] == [10, rounds.FEW_HOST_CALLS]


def test_a_device_that_takes_no_more(device, monkeypatch):
    assert device.lost() == ""

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert device.lost() == "CUDA error: an illegal memory access was encountered"


@pytest.mark.gpu
def test_on_a_device():
    """Figures that any card has, hot and cold, eager and from a graph, of as many calls as were asked for. How large
    they are is not looked at: others may use the card meanwhile."""
    real = rounds.DeviceClock()
    count = torch.zeros(1 << 20, device="cuda", dtype=torch.int32)

    def work() -> torch.Tensor:
        return count.add_(1)

    replay = real.graphed(Contender(work))
    calls = 1  # before the graph is captured
    for run_ in (work, replay):
        for timing in ("hot", "cold"):
            assert 0 < real.turn_ms(run_, timing, 5, 1.0) < float("inf")
            calls += 5
        host = real.host_us(run_)
        assert 0 < host.low <= host.median <= host.high
        calls += host.count
    assert host.count == rounds.HOST_CALLS
    assert (count == calls).all()
    assert real.peak_extra_bytes(lambda: torch.empty(1 << 20, device="cuda")) >= 4 << 20
    limits = real.ceilings()
    assert 0 < limits.gemm_tflops < float("inf")
    assert 0 < limits.copy_tbs < float("inf")
    assert real.lost() == ""
    state, _ = results.DeviceProbe().read()
    assert state is None or state.sm_mhz is None or state.sm_mhz > 0
