"""Counters in device memory, each 0 between launches, for kernels whose blocks draw their work.

A kernel leaves its counter at 0. What must not happen is that two launches that may overlap have the same one. Launches
outside graphs take turns through a long row of counters: one is used again after so many launches that the first is
over (a stream holds about a thousand). A launch that is captured in a graph keeps its counter for ever, as the graph
may be replayed at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from portattn.backends.detection import torch_device_properties

if TYPE_CHECKING:
    import torch

TURNS = 16_384  # counters that launches outside graphs share
CAPTURED = 4_096  # counters made at a time for captured launches


class Counters:
    """The counters of one device.

    zeros  makes so many of them: int32, 0, on the device
    """

    def __init__(self, zeros: Callable[[int], torch.Tensor]) -> None:
        self._zeros, self._lock = zeros, threading.Lock()
        self._shared = list(zeros(TURNS).split(1))
        self._kept = list(zeros(CAPTURED).split(1))
        self._turn = 0

    def take(self, capturing: bool) -> torch.Tensor:
        """One counter, 0 when the launches before are over."""
        with self._lock:
            if not capturing:
                self._turn = (self._turn + 1) % TURNS
                return self._shared[self._turn]
            if self._kept:
                return self._kept.pop()
        return self._zeros(1)  # in the graph itself, which then sets it to 0 at each replay


_of_device: dict[int, Counters] = {}
_making = threading.Lock()


def multiprocessors(device: torch.device) -> int:
    """Of a device; of an H100 or H200 where none is to be asked."""
    found = torch_device_properties("cuda", device.index)
    return int(getattr(found, "multi_processor_count", 132))


def counter(device: torch.device) -> torch.Tensor:
    """A counter for one launch on the device's current stream; of a device without memory, one that says its type."""
    import torch

    if device.type == "meta":
        return torch.empty(1, dtype=torch.int32, device=device)
    index = device.index
    found = _of_device.get(index)
    if found is None:
        with _making:
            found = _of_device.get(index)
            if found is None:
                if torch.cuda.is_current_stream_capturing():
                    return torch.zeros(1, dtype=torch.int32, device=device)
                made = Counters(lambda count: torch.zeros(count, dtype=torch.int32, device=device))
                torch.cuda.current_stream(device).synchronize()  # once: other streams must find them at 0
                found = _of_device[index] = made
    return found.take(torch.cuda.is_current_stream_capturing())
