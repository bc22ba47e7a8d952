"""Rows of a tile between shared and global memory, and rows of shared memory that must hold zeros."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from portattn.backends.cuda.gluon_names import store


@gluon.jit
def rows_stored(place, desc, pointer, stride_h, stride_s, slot, head, first, rows, ROWS: gl.constexpr,
                DIM: gl.constexpr, VARYING: gl.constexpr):  # fmt: skip
    """Store rows of shared memory to global memory, with 8 warps.

    The last rows of a packed sequence are stored through pointers, so that the next sequence's rows keep their values.

    place    [1, 1, ROWS, DIM], written and fenced
    pointer  the tensor of `desc`, with its strides in steps of 8 elements
    rows     rows that are left in the sequence
    """
    if VARYING != "packed" or rows >= ROWS:
        store(desc, [slot, head, first, 0], place)
        tma.store_wait(0)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [8, 1], [1, 0])
        flat = place.reshape([ROWS, DIM])
        # In steps of 8 columns, which heads and strides have too, so that 16 bytes are stored at a time.
        start = pointer + (first.to(gl.int64) * stride_s + head.to(gl.int64) * stride_h) * 8
        row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column = gl.arange(0, 16, gl.SliceLayout(0, layout))
        offsets = gl.expand_dims(row * stride_s * 8, 1) + gl.expand_dims(column, 0)
        inside = gl.expand_dims(row < rows, 1)
        for j in gl.static_range(DIM // 16):
            there = inside & gl.expand_dims(column // 8 < desc.shape[3] // 8 - j * 2, 0)
            gl.store(start + (offsets + j * 16), flat.slice(j * 16, 16, dim=1).load(layout), mask=there)


@gluon.jit
def clear_rows_outside(place, first, end, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Zeros in the rows of shared memory before `first` and from `end` on, by 8 warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    flat = place.reshape([ROWS, DIM])
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    there = (row >= first) & (row < end)
    for j in gl.static_range(DIM // 64):  # few registers at a time: accumulators have most of them
        part = flat.slice(j * 64, 64, dim=1)
        part.store(gl.where(there, part.load(layout), 0.0).to(place.dtype))
