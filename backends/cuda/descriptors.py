"""Host-side descriptors of tensors that a Gluon kernel reads or writes through TMA."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def make_descriptor(x: torch.Tensor, rows: int, dim: int, before: int = 1) -> Any:
    """A descriptor of (B, H, S, D), by blocks of some rows of so many of the axis before, and a kernel's width."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # The stride of an axis of one element is anything: descriptors want a multiple of 16 bytes there too.
    strides = [stride if size > 1 else 8 * x.shape[-1] for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]
    return TensorDescriptor(
        x, list(x.shape), [*strides, 1], [1, before, rows, dim], _layout(before, rows, dim, str(x.dtype))
    )


@functools.lru_cache(maxsize=64)
def _layout(before: int, rows: int, dim: int, dtype: str) -> Any:
    from triton.experimental.gluon import language as gl

    kind = {"torch.bfloat16": gl.bfloat16, "torch.int8": gl.int8}.get(dtype, gl.float16)
    return gl.NVMMASharedLayout.get_default_for([1, before, rows, dim], kind)


def flat(x: torch.Tensor, rows: int) -> Any:
    """A descriptor of a contiguous float32 matrix by blocks of whole rows, which lie in shared memory as they are."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [rows, x.shape[1]], _unswizzled())


@functools.cache
def _unswizzled() -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(0, 32, 2)
