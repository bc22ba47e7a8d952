"""Counters in device memory, each 0 between launches: of programs that draw their work, or tell who is the last.

A kernel leaves its counters at 0. What must not happen is that two launches that may overlap have the same ones: they
would draw from each other's work, and leave them at another number for ever. So a stream has counters of its own, whose
launches come one after the other, however long one of them has to wait for other streams. A launch that is captured in
a graph keeps its counters for ever, as the graph may be replayed at any time, on any stream.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import torch

from portattn.core import next_power_of_two
from portattn.launch import devices

# Counters that the launches of one stream take in turns. One would do; but a stream may be destroyed while its last
# kernels run, and its handle given to a new one.
TURNS = 64
MOST = 16_384  # int32 of a stream's counters of one size, as long as that is two turns or more
# int32 made beforehand for captured launches: 1 MiB. A server captures each layer for dozens of batch sizes, and a
# graph that has to set counters to 0 itself has gained nothing.
CAPTURED = 262_144
LEAST = 4  # int32 of a launch: 16 bytes, to which kernels find every address aligned


class Counters:
    """The counters of one device.

    zeros  makes so many of them: int32, 0 for what the current stream runs afterwards, on the device
    """

    def __init__(self, zeros: Callable[[int], torch.Tensor]) -> None:
        self._zeros, self._lock = zeros, threading.Lock()
        self.stream = devices.runtime("cuda").stream
        self._of_stream: dict[tuple[int, int], Iterator[torch.Tensor]] = {}
        self._captured = zeros(CAPTURED)  # held for ever: graphs have addresses in it
        self._left = CAPTURED

    def take(self, stream: int | None, count: int) -> torch.Tensor:
        """Counters for one launch on the current stream, which are 0 when the launches before on it are over.

        stream  the stream's handle; None when the launch is captured
        count   how many, as `enough` says
        """
        if stream is not None:
            turns = self._of_stream.get((stream, count))
            if turns is None:
                number = max(min(TURNS, MOST // count), 2)
                made = itertools.cycle(self._zeros(number * count).split(count))
                turns = self._of_stream.setdefault((stream, count), made)
            return next(turns)
        with self._lock:
            if self._left >= count:
                self._left -= count
                return self._captured[self._left : self._left + count]
        return self._zeros(count)  # in the graph itself, which then sets it to 0 at each replay


_of_device: dict[int, Counters] = {}
_making = threading.Lock()


def enough(count: int) -> int:
    """How many to ask for where so many are needed: of few sizes, and a multiple of 16 bytes."""
    return max(next_power_of_two(count), LEAST)


def counters(device: torch.device, count: int) -> torch.Tensor:
    """Counters for one launch on the device's current stream: int32, as many as `enough` says.

    The device is the current one. Where launches come one after the other (the interpreter, an emulated chip), and on
    torch's `meta` device, they are new each time.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index
    found = _of_device.get(index)
    capturing = torch.cuda.is_current_stream_capturing()
    if found is None:
        if capturing:
            return torch.zeros(count, dtype=torch.int32, device=device)
        with _making:
            found = _of_device.get(index)
            if found is None:
                made = Counters(lambda number: torch.zeros(number, dtype=torch.int32, device=device))
                torch.cuda.current_stream(device).synchronize()  # once: graphs on other streams must find them at 0
                found = _of_device[index] = made
    return found.take(None if capturing else found.stream(index), count)
