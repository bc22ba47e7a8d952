"""Counters of launches: which launches may share them, and how long their memory stays."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from portattn.backends.cuda.counters import counter
from portattn.launch.counters import CAPTURED, LEAST, MOST, TURNS, Counters, counters, enough


class Memory:
    """Zeros on the CPU, which remember what was made."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, count: int) -> torch.Tensor:
        made = torch.zeros(count, dtype=torch.int32)
        self.sizes.append(count)
        return made


@pytest.mark.parametrize("count", [LEAST, 64])
def test_a_stream_has_counters_of_its_own_in_turns(count: int) -> None:
    memory = Memory()
    made = Counters(memory)
    first = [made.take(7, count).data_ptr() for _ in range(TURNS)]
    assert len(set(first)) == TURNS
    places = {address + 4 * i for address in first for i in range(count)}
    for stream in range(100, 100 + 3 * TURNS):  # however many launches other streams make meanwhile
        assert made.take(stream, count).data_ptr() not in places
    for _ in range(TURNS):  # or launches of another size
        assert made.take(7, 2 * count).data_ptr() not in places
    assert [made.take(7, count).data_ptr() for _ in range(TURNS)] == first
    assert memory.sizes == [CAPTURED, TURNS * count] + [TURNS * count] * (3 * TURNS) + [TURNS * 2 * count]


def test_many_counters_take_fewer_turns_and_never_overlap() -> None:
    memory = Memory()
    made = Counters(memory)
    for count in (MOST // 8, 4 * MOST):
        turns = max(MOST // count, 2)
        taken = [made.take(7, count) for _ in range(turns + 1)]
        assert all(t.numel() == count for t in taken)
        addresses = [t.data_ptr() for t in taken]
        assert addresses[-1] == addresses[0]
        assert [b - a for a, b in itertools.pairwise(addresses[:-1])] == [4 * count] * (turns - 1)
    assert memory.sizes == [CAPTURED, MOST, 8 * MOST]


def test_the_default_stream_is_a_stream() -> None:
    memory = Memory()
    made = Counters(memory)
    assert made.take(0, LEAST).data_ptr() != made.take(None, LEAST).data_ptr()
    assert memory.sizes == [CAPTURED, TURNS * LEAST]


def test_captured_launches_share_with_nobody_and_their_memory_stays() -> None:
    memory = Memory()
    made = Counters(memory)
    lowest, taken = made._captured.data_ptr(), set()
    for count in (LEAST, 128) * (CAPTURED // (128 + LEAST)):
        address = made.take(None, count).data_ptr()
        assert address % 16 == lowest % 16
        own = {address + 4 * i for i in range(count)}
        assert not own & taken
        taken |= own
    assert taken <= {lowest + 4 * i for i in range(CAPTURED)}
    # Nobody holds what was taken: graphs still have their addresses.
    others = [torch.ones(CAPTURED, dtype=torch.int32) for _ in range(50)]
    assert all(t.data_ptr() != lowest for t in others)
    assert memory.sizes == [CAPTURED]
    made.take(None, 128)
    assert memory.sizes == [CAPTURED, 128]  # of the graph's own memory


@pytest.mark.parametrize("stream", [3, None])
def test_threads_never_get_the_same_ones_twice_at_a_time(stream: int | None) -> None:
    made, seen = Counters(Memory()), []
    share = TURNS // 4

    def work() -> None:
        seen.extend([made.take(stream, LEAST).data_ptr() for _ in range(share)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == len(seen) == 4 * share


def test_where_nothing_overlaps_they_are_new() -> None:
    """On a CPU programs and launches run one after the other; a device without memory is asked for the type."""
    assert [enough(count) for count in (0, 1, 5, 64)] == [LEAST, LEAST, 8, 64]
    assert counters(torch.device("cpu"), 8).tolist() == [0] * 8
    assert counters(torch.device("meta"), LEAST).dtype is torch.int32
    assert counter(torch.device("meta")).is_meta
