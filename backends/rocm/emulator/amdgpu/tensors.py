"""Kernel arguments from torch's tensors and Python's numbers. Needs torch, and nothing of Triton."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from portattn.backends.rocm.emulator.amdgpu.errors import BadLaunch
from portattn.backends.rocm.emulator.amdgpu.memory import Memory, Region

_FLOATS = ("fp16", "bf16", "fp32", "f32", "fp64")


def value_of(kind: str, argument: Any, memory: Memory) -> int | float:
    """A kernel argument: the address of a tensor's first element, or a number. Raises BadLaunch on anything else."""
    if argument is None:
        return 0
    tensor = _tensor(argument)
    if tensor is not None:
        return address_of(tensor, memory)
    if not isinstance(argument, (bool, int, float, np.number)):
        raise BadLaunch(f"an argument of type {kind} is {argument!r}; a tensor, a number or None is needed")
    return float(argument) if kind in _FLOATS else int(argument)


def share(arguments: Iterable[Any], memory: Memory) -> None:
    """Map the storages of all tensors among the arguments, those that overlap (views of one numpy array) as one.

    Each would else be copied in and out by itself, and the last one copied out would win.
    """
    spans: list[tuple[int, int]] = []
    for tensor in map(_tensor, arguments):
        if tensor is not None:
            start, size = _span(tensor)
            spans.append((start, start + size))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    for start, end in merged:
        _map(start, end - start, memory)


def address_of(tensor: torch.Tensor, memory: Memory) -> int:
    """Tensors that share storage share memory here too; all of a storage may be accessed, as on the chip."""
    start, size = _span(tensor)
    for region in memory.regions:
        if region.array is not None and size:
            first = region.array.ctypes.data
            if first <= start and start + size <= first + region.size:
                return memory.address(region) + tensor.data_ptr() - first
    if size == 0:
        return memory.add(np.zeros(0, np.uint8))
    return memory.address(_map(start, size, memory)) + tensor.data_ptr() - start


def _tensor(argument: Any) -> torch.Tensor | None:
    if isinstance(argument, torch.Tensor):
        return argument
    if hasattr(argument, "data_ptr"):  # triton.testing's and TMA's wrappers
        return argument.base
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor's storage in this process."""
    if tensor.device.type != "cpu":
        raise BadLaunch(f"a tensor on {tensor.device}; the model runs kernels on tensors of the CPU")
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _map(start: int, size: int, memory: Memory) -> Region:
    raw = np.frombuffer(memoryview((ctypes.c_char * size).from_address(start)), np.uint8)
    memory.add(raw, f"tensor {len(memory.regions)}")
    return memory.regions[-1]
