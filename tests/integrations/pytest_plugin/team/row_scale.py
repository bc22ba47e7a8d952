"""A team's kernel and its caller in one file, as most are: data of test_plugin_kernels.py."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_scale(x, scale, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + places, places < columns, other=0.0)
    tl.store(out + row * columns + places, values * tl.load(scale + row), places < columns)


def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    row_scale[(x.shape[0],)](x, scale, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
