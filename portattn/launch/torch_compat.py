"""Torch's own functions that calls and cached launches use; private ones have a fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
        stream=lambda index: _handle(module.current_stream(index), device_type),
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


def _handle(stream: Any, device_type: str) -> int:
    """Return the driver's handle of a stream: some makers' streams name it, newer torch has it of any device's."""
    named = getattr(stream, f"{device_type}_stream", None)
    return int(stream.native_handle if named is None else named)


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
    """Return torch's current device of a backend's type, or the CPU if no backend sees one."""
    from portattn.planning.registry import Registry, this_target

    kind = Registry.load().backends[this_target().backend].device_type
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, getattr(torch, kind).current_device())


def timed_device() -> torch.device | None:
    """Return the current device if its events keep time; None without an accelerator."""
    if torch.cuda.is_available():  # whether a backend knows the chip or not
        return torch.device("cuda", torch.cuda.current_device())
    device = current_accelerator()
    return device if device.type != "cpu" and hasattr(getattr(torch, device.type), "Event") else None


def chip_name(device: torch.device) -> str:
    """Return the name by which a device's module knows it, or its type."""
    return str(getattr(getattr(torch, device.type), "get_device_name", lambda: device.type)())


# Torch's guards (as in torch.compile) compare tensors in all but data and sizes, 0.1 µs each, 0.7 µs in Python. The
# interface is private, so it is tested once before use. A strided nested tensor ends the process (torch 2.13): callers
# read sizes first, at which it raises.
def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that tells whether as many values are tensors like these, of any sizes and strides."""
    make = _made if _usable() else _plain
    return make(tensors)


def recording(tensors: Sequence[torch.Tensor]) -> bool | None:
    """Return whether gradients are recorded, None if no tensor requires any: guards see only `requires_grad`."""
    return torch.is_grad_enabled() if any(t.requires_grad for t in tensors) else None


def in_mode() -> bool:
    """Return whether a dispatch mode (fake tensors, tracers) is active: guards ignore it, launches bypass it."""
    return bool(mode_depth())


# A torch that has no such function has no such modes that could be asked about.
mode_depth: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)


def _made(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    from torch._C._dynamo.guards import TensorGuards

    any_size: Any = [[None] * t.ndim for t in tensors]
    check: Callable[..., bool] = TensorGuards(
        *tensors, dynamic_dims_sizes=any_size, dynamic_dims_strides=any_size
    ).check
    return check


def _plain(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    known = [_facts(t) for t in tensors]
    modes = _modes()

    def check(*values: Any) -> bool:
        return (
            _modes() == modes
            and not _transformed()
            and all(isinstance(value, torch.Tensor) for value in values)
            and [_facts(value) for value in values] == known
        )

    return check


def _modes() -> tuple[bool, bool]:
    return torch.is_inference_mode_enabled(), torch._C._is_any_autocast_enabled()


def _transformed() -> bool:
    """Return whether a functorch transform or a tracer has the tensors."""
    interpreter = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)()
    return interpreter is not None or torch._C._get_tracing_state() is not None


def _facts(t: torch.Tensor) -> tuple[Any, ...]:
    return (type(t), t.dtype, t.device, t.ndim, t.requires_grad, t.is_neg(), t.layout, t.is_nested)


@functools.lru_cache(maxsize=1)
def _usable() -> bool:
    """Return whether torch's guards exist and distinguish what they must."""
    try:
        with torch.device("cpu"):  # not the caller's default device: the answer is the process's
            x = torch.zeros(2, 4, 6, dtype=torch.float32)
            asking = torch.zeros(2, 4, 6, dtype=torch.float32, requires_grad=True)
            alike = [torch.ones(3, 1, 7, dtype=torch.float32), x[:, :, :4], x.transpose(0, 1)]
            others: list[Any] = [
                x[0], x.half(), x.to("meta"), x.view(2, 4, 3, 2),
                torch.nn.Parameter(x, requires_grad=False), asking, torch._neg_view(x), x.to_sparse(), None,
            ]  # fmt: skip
        check = _made([x, x])
        return all(check(x, one) is True for one in alike) and not any(check(x, other) for other in others)
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError):
        return False
