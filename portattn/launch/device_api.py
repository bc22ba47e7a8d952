"""Torch's device functions that a cached launch calls, by the shortest way that this torch has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from portattn.schema.symbolic_int import most

# Torch's own allocators: they give memory by address wherever they give tensors. Others may not.
ALLOCATORS = ("native", "cudaMallocAsync", "pluggable")


@dataclass(slots=True, frozen=True)
class Runtime:
    current: Callable[[], int | None]
    stream: Callable[[Any], int]  # the driver's handle of the current stream
    empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]  # (shape, strides, dtype)
    take: Callable[[int, int], int] | None = None  # (bytes, stream) -> address; cheaper than a tensor
    give: Callable[[int], None] | None = None  # free it; work already on the stream may still use it


@functools.lru_cache(maxsize=8)
def runtime(device_type: str) -> Runtime:
    module: Any = getattr(torch, device_type)  # torch.cuda, torch.npu, …
    empty = functools.partial(torch.empty_strided, device=device_type)
    plain = Runtime(
        current=lambda: module.current_device(),
        stream=lambda index: getattr(module.current_stream(index), f"{device_type}_stream"),
        empty=lambda shape, strides, dtype: empty(shape, strides, dtype=dtype),
    )
    if device_type != "cuda" or not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return plain
    # What torch.cuda.caching_allocator_alloc and …_delete call.
    take = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
    give = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)
    backend = getattr(torch._C, "_cuda_getAllocatorBackend", None)
    known = None not in (take, give, backend) and backend() in ALLOCATORS  # type: ignore[misc]
    return Runtime(
        current=torch._C._cuda_getDevice, stream=torch._C._cuda_getCurrentRawStream, empty=_shortest(plain.empty),
        take=take if known else None, give=give if known else None,
    )  # fmt: skip


def _shortest(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch.compile's allocator, 1 µs faster, if this torch has it."""
    try:
        from torch._C._dynamo import guards
    except ImportError:
        return plain
    return getattr(guards, "_empty_strided_cuda", plain)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * most(size, 1)
    return tuple(reversed(strides))


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def current_accelerator() -> torch.device:
    """Return torch's current device of a backend's type, or the CPU if it sees none."""
    from portattn.planning.registry import Registry

    for kind in dict.fromkeys(b.device_type for b in Registry.load().backends.values() if b.device_type != "cpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.device(kind, module.current_device())
    return torch.device("cpu")
