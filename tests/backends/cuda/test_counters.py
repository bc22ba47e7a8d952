"""Counters that launches draw their work from: which launches may share one, and how long its memory stays."""

from __future__ import annotations

import threading

import pytest
import torch

from portattn.backends.cuda.counters import APART, CAPTURED, TURNS, Counters


class Memory:
    """Zeros on the CPU, which remember what was made."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, count: int) -> torch.Tensor:
        made = torch.zeros(count, dtype=torch.int32)
        self.sizes.append(count)
        return made


def test_a_stream_has_counters_of_its_own_in_turns() -> None:
    memory = Memory()
    counters = Counters(memory)
    first = [counters.take(7).data_ptr() for _ in range(TURNS)]
    assert len(set(first)) == TURNS
    for stream in range(100, 100 + 3 * TURNS):  # however many launches other streams make meanwhile
        assert counters.take(stream).data_ptr() not in first
    assert [counters.take(7).data_ptr() for _ in range(TURNS)] == first
    assert all(address % 16 == 0 for address in first)
    assert memory.sizes == [CAPTURED * APART] + [TURNS * APART] * (1 + 3 * TURNS)


def test_the_default_stream_is_a_stream() -> None:
    memory = Memory()
    counters = Counters(memory)
    assert counters.take(0).data_ptr() != counters.take(None).data_ptr()
    assert memory.sizes == [CAPTURED * APART, TURNS * APART]


def test_captured_launches_share_with_nobody_and_their_memory_stays() -> None:
    memory = Memory()
    counters = Counters(memory)
    lowest = counters.take(None).data_ptr() - 16 * (CAPTURED - 1)
    taken = {counters.take(None).data_ptr() for _ in range(CAPTURED - 1)} | {lowest + 16 * (CAPTURED - 1)}
    assert taken == {lowest + 16 * i for i in range(CAPTURED)}
    # Nobody holds what was taken, and all are taken: graphs still have their addresses.
    others = [torch.ones(CAPTURED * APART, dtype=torch.int32) for _ in range(50)]
    assert all(t.data_ptr() != lowest for t in others)
    assert memory.sizes == [CAPTURED * APART]
    counters.take(None)
    assert memory.sizes == [CAPTURED * APART, 1]  # of the graph's own memory


@pytest.mark.parametrize("stream", [3, None])
def test_threads_never_get_one_counter_twice_at_a_time(stream: int | None) -> None:
    counters, seen = Counters(Memory()), []
    share = TURNS // 4

    def work() -> None:
        seen.extend([counters.take(stream).data_ptr() for _ in range(share)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == len(seen) == 4 * share
