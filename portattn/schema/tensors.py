"""What kernels see of tensors: their types by name, alignment, and the limits of 32-bit addressing."""

from __future__ import annotations

import torch

TORCH_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TRITON_DTYPE = {dtype: name for name, dtype in TORCH_DTYPE.items()} | {
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.int8: "i8",
}
# Formats of a cache's numbers (Problem.kv_format), by the dtype of its tensors.
KV_FORMAT = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.int8: "int8",
}
KV_DTYPE = {name: dtype for dtype, name in KV_FORMAT.items()}
# The format with two numbers of four bits in a byte, and the dtype of its tensors, which are half as wide.
INT4, PACKED = "int4", torch.uint8
# What the tensors of each such cache are, by the format.
CACHE_DTYPE = KV_DTYPE | {INT4: PACKED}
# The dtype of an nvfp4 cache's scales, one for each block (Problem.kv_format); its numbers are PACKED as int4's.
BLOCK_SCALES = torch.float8_e4m3fn
# The largest number that is written in each, on both sides of 0.
KV_LARGEST = {name: 127.0 if name == "int8" else torch.finfo(dtype).max for name, dtype in KV_DTYPE.items()}
# What a Call holds of each: kernels read float8 numbers as bytes, since no compiler knows all of them. They are signed,
# since triton-ascend refuses unsigned integers.
KV_STORED = torch.int8
POINTER_ALIGNMENT = 16  # bytes: what Triton's specialisation asks of pointers and divisible integers
INT32_MAX = 2**31 - 1
TWO_GIB = 2**31


def spans(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def collapse_broadcast(values: torch.Tensor) -> torch.Tensor:
    """What memory really holds of broadcast values: dimensions with a stride of 0 are 1 long."""
    return values[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in values.stride())]


def are_mapped(*gradients: torch.Tensor | None) -> bool:
    """Whether torch maps the backward pass over several gradients (`is_grads_batched`): nothing may be written to then
    that is not mapped as well."""
    return any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients)
