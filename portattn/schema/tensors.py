"""Tensors as kernels see them: dtypes by name, alignment, and the limits of 32-bit addressing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from portattn.schema.problem_limits import FORMATS, ONE_SCALE

TORCH_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TRITON_DTYPE = {dtype: name for name, dtype in TORCH_DTYPE.items()} | {
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.int8: "i8",
}
# The dtype of a quantised cache's tensors, by the format (Problem.kv_format).
CACHE_DTYPE: dict[str, torch.dtype] = {name: getattr(torch, row.dtype) for name, row in FORMATS.items()}
# The formats of one byte a number, which torch has, and the other way round.
KV_DTYPE = {name: CACHE_DTYPE[name] for name in ONE_SCALE if FORMATS[name].per_byte == 1}
KV_FORMAT = {dtype: name for name, dtype in KV_DTYPE.items()}
PACKED = torch.uint8  # of several numbers a byte, and of latent rows
BLOCK_SCALES = torch.float8_e4m3fn  # of the scales of blocks
# A Call's dtype of each: kernels read float8 numbers as bytes, since no compiler knows all of them. They are signed,
# since triton-ascend refuses unsigned integers.
KV_STORED = torch.int8
POINTER_ALIGNMENT = 16  # bytes: Triton specialises on pointers and integers that are divisible by it
INT32_MAX = 2**31 - 1
TWO_GIB = 2**31


def spans(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def collapse_broadcast(values: torch.Tensor) -> torch.Tensor:
    """Return the values with broadcast dimensions (stride 0) cut to a length of 1."""
    return values[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in values.stride())]


_is_batched = torch._C._functorch.is_legacy_batchedtensor


def are_mapped(*gradients: torch.Tensor | None) -> bool:
    """Return whether torch maps the backward pass over several gradients (`is_grads_batched`).
    Memory that is not mapped must not be written to then."""
    return True in [_is_batched(g) for g in gradients if g is not None]


class TensorSpec(msgspec.Struct, frozen=True):
    """A described tensor.

    offset  elements before its first one, in memory whose alignment is an allocator's
    kept    it is allocated outside of inference mode, as are buffers that an engine keeps
    """

    shape: tuple[int | str, ...]  # sizes, or names of sizes that vary, also as "name+1"
    strides: tuple[int, ...] | None  # in elements; None: contiguous
    dtype: torch.dtype
    offset: int = 0
    kept: bool = False

    def layout(self, sizes: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return shape and strides at these sizes: numbers, or tensors of a number for each of several calls."""
        shape: list[Any] = []
        strides: list[Any] = []
        step: Any = 1
        for size in self.shape:
            name, _, more = str(size).partition("+")
            shape.append(size if isinstance(size, int) else sizes[name] + int(more or 0))
        for size in reversed(shape):
            strides.append(step)
            step = step * (size.clamp(min=1) if isinstance(size, torch.Tensor) else max(size, 1))
        return shape, strides[::-1] if self.strides is None else list(self.strides)

    def allocate(self, device: torch.device, sizes: Mapping[str, int], fill: float = 0.0) -> torch.Tensor:
        shape, strides = self.layout(sizes)
        with torch.inference_mode(False) if self.kept else contextlib.nullcontext():
            if self.strides is None and not self.offset:
                return torch.full(shape, fill, dtype=self.dtype, device=device)
            reached = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            elements = self.offset + (0 if 0 in shape else reached + 1)
            memory = torch.full((elements,), fill, dtype=self.dtype, device=device)
            return memory.as_strided(shape, strides, self.offset)

    @property
    def names(self) -> set[str]:
        return {size.partition("+")[0] for size in self.shape if isinstance(size, str)}
