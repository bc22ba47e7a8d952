"""Kernels with records, for tests/kernels/test_kernel_sources.py: lines matter there."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from portattn.kernels import records


class Scale(NamedTuple):
    factor: Any = None
    ABOVE: tl.constexpr = 0


class Rows(NamedTuple):
    base: Any
    stride: Any
    WIDTH: tl.constexpr
    scale: Scale = Scale()


@triton.jit
def plain(x, y):
    return x + y


@records.jit
def load(rows: Rows, row, more):
    """A row times its scale: «rows» is no name in here, nor is it in a string."""
    columns = tl.arange(0, rows.WIDTH)
    found = tl.load(
        rows.base  # with a comment
        + row * rows.stride
        + columns
    )
    if rows.scale.factor is not None:
        found = found * rows.scale.factor + rows.scale.ABOVE
    return plain(found, more)


@records.jit
def both(
    first: Rows,
    second: Rows, row,
):  # fmt: skip
    changed = second._replace(
        stride=second.stride
        * 1,
        scale=Scale(
            2.0,
            ABOVE=first.WIDTH
            - first.WIDTH + 1,
        ),
    )  # fmt: skip
    return load(first, row, 0.0) + load(changed, row, 1.0)


@records.jit(do_not_specialize=["count"])
def add_rows(x, y, out, stride, count, WIDTH: tl.constexpr):
    for row in range(count):
        x_rows = Rows(
            x, stride, WIDTH,
        )  # fmt: skip
        total = both(x_rows, Rows(y, stride, WIDTH), row)
        tl.store(out + row * WIDTH + tl.arange(0, WIDTH), total)
