"""Kernel arguments from torch's tensors and Python's numbers. Needs torch, and nothing of Triton."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from portattn.emulate.amdgpu.memory import Memory

_FLOATS = ("fp16", "bf16", "fp32", "f32", "fp64")


def value_of(kind: str, argument: Any, memory: Memory) -> int | float:
    """A kernel argument: the address of a tensor's first element, or a number."""
    if argument is None:
        return 0
    if isinstance(argument, torch.Tensor):
        return address_of(argument, memory)
    if hasattr(argument, "data_ptr"):  # triton.testing's and TMA's wrappers
        return address_of(argument.base, memory)
    return float(argument) if kind in _FLOATS else int(argument)


def address_of(tensor: torch.Tensor, memory: Memory) -> int:
    """Tensors that share storage share memory here too; all of a storage may be accessed, as on the chip."""
    storage = tensor.untyped_storage()
    start, size = storage.data_ptr(), storage.nbytes()
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor on {tensor.device}; the model runs kernels on tensors of the CPU")
    for region in memory.regions:
        if region.array is not None and region.size and region.array.ctypes.data == start:
            return memory.address(region) + tensor.data_ptr() - start
    if size == 0:
        return memory.add(np.zeros(0, np.uint8))
    raw = np.frombuffer(memoryview((ctypes.c_char * size).from_address(start)), np.uint8)
    return memory.add(raw, f"tensor {len(memory.regions)}") + tensor.data_ptr() - start
