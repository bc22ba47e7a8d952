"""What kernels with programs that draw their work need: how many multiprocessors there are, and a counter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portattn.backends.detection import torch_device_properties

if TYPE_CHECKING:
    import torch


def multiprocessors(device: torch.device) -> int:
    """Of a device; of an H100 or H200 where none is to be asked."""
    found = torch_device_properties("cuda", device.index)
    return int(getattr(found, "multi_processor_count", 132))


def counter(device: torch.device) -> torch.Tensor:
    """A counter for one launch on the device's current stream: portattn/launch/counters.py."""
    from portattn.launch.counters import LEAST, counters  # torch: not where backends are only imported

    return counters(device, LEAST)
