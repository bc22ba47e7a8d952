"""Counters in device memory, each 0 between launches, for kernels whose blocks draw their work.

A kernel leaves its counter at 0. What must not happen is that two launches that may overlap have the same one: they
would draw from each other's tiles, and leave it at another number for ever. So a stream has counters of its own, whose
launches come one after the other, however long one of them has to wait for other streams. A launch that is captured in
a graph keeps its counter for ever, as the graph may be replayed at any time, on any stream.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from portattn.backends.detection import torch_device_properties

if TYPE_CHECKING:
    import torch

# Counters that the launches of one stream take in turns. One would do; but a stream may be destroyed while its last
# kernels run, and its handle given to a new one.
TURNS = 64
CAPTURED = 4_096  # counters made beforehand for captured launches
# Numbers from one counter to the next: 16 bytes. For an address that is aligned otherwise Triton compiles anew.
APART = 4


class Counters:
    """The counters of one device.

    zeros     makes so many int32 of 0, that last
    in_graph  makes one for a launch that is captured: in the graph itself, which sets it to 0 at each replay. None:
              `zeros` does
    """

    def __init__(
        self, zeros: Callable[[int], torch.Tensor], in_graph: Callable[[], torch.Tensor] | None = None
    ) -> None:
        from portattn.launch import device_api  # torch: not where backends are only imported

        self._zeros, self._in_graph, self._lock = zeros, in_graph, threading.Lock()
        self.stream = device_api.runtime("cuda").stream
        self._of_stream: dict[int, Iterator[torch.Tensor]] = {}
        self._captured = zeros(CAPTURED * APART)  # held for ever: graphs have addresses in it
        self._left = list(self._captured.split(APART))

    def take(self, stream: int | None) -> torch.Tensor:
        """A counter for one launch on the current stream, whose handle is given: None when the launch is captured.

        It is 0 when the launches before on that stream are over.
        """
        if stream is not None:
            turns = self._of_stream.get(stream)
            if turns is None:
                made = itertools.cycle(self._zeros(TURNS * APART).split(APART))
                turns = self._of_stream.setdefault(stream, made)
            return next(turns)
        with self._lock:
            if self._left:
                return self._left.pop()
        return self._zeros(1) if self._in_graph is None else self._in_graph()


def lasting_zeros(device: torch.device, count: int) -> torch.Tensor:
    """So many int32, set to 0 by the time that this returns, in memory that is no graph's.

    Made by a thread of its own: while torch warms up a graph (torch.compile's mode="reduce-overhead"), it takes what
    the calling thread allocates for the graph's, and refuses what lasts.
    """
    import torch

    made: list[torch.Tensor] = []

    def make() -> None:
        with torch.cuda.device(device):
            made.append(torch.zeros(count, dtype=torch.int32, device=device))
            torch.cuda.current_stream(device).synchronize()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise RuntimeError(f"no memory for {count} counters on {device}")
    return made[0]


_of_device: dict[int, Counters] = {}
_making = threading.Lock()


def multiprocessors(device: torch.device) -> int:
    """Of a device; of an H100 or H200 where none is to be asked."""
    found = torch_device_properties("cuda", device.index)
    return int(getattr(found, "multi_processor_count", 132))


def counter(device: torch.device) -> torch.Tensor:
    """A counter for one launch on the device's current stream; of a device without memory, one that says its type.

    The device is the current one.
    """
    import torch

    if device.type == "meta":
        return torch.empty(1, dtype=torch.int32, device=device)
    index = device.index
    found = _of_device.get(index)
    capturing = torch.cuda.is_current_stream_capturing()
    in_graph = functools.partial(torch.zeros, 1, dtype=torch.int32, device=device)
    if found is None:
        if capturing:
            return in_graph()
        with _making:
            found = _of_device.get(index)
            if found is None:
                found = _of_device[index] = Counters(functools.partial(lasting_zeros, device), in_graph)
    return found.take(None if capturing else found.stream(index))
