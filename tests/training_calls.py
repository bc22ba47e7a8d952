"""Training calls of the tests: leaves, and the gradients of a fixed combination of results."""

from collections.abc import Callable
from typing import Any

import torch

KERNELS = "interpreter"  # the path of these kernels on a CPU


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def qkv(heads_k: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [
        leaf(2, 4, 9, 16, dtype=dtype), leaf(2, heads_k, 13, 16, dtype=dtype), leaf(2, heads_k, 13, 16, dtype=dtype),
    ]  # fmt: skip


def gradients(call: Callable[[str], Any], inputs: list[torch.Tensor], backend: str) -> list[torch.Tensor]:
    results = call(backend)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(3)
    towards = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in results]
    towards = [t.masked_fill(torch.isneginf(r), 0.0) for t, r in zip(towards, results, strict=True)]
    return list(torch.autograd.grad(results, inputs, towards))
