"""What a consumer of the Hopper forward does last: results, normalised, to memory."""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from portattn.backends.cuda.gluon_names import store
from portattn.backends.cuda.hopper_forward.fp8_forward import UNSHIFTED, result_factor
from portattn.backends.cuda.hopper_forward.fragments import line_numbers, rescale_rows
from portattn.backends.cuda.hopper_forward.tile_queue import read
from portattn.backends.cuda.sizes import GROUP_ROWS

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)
_LN2: gl.constexpr = gl.constexpr(math.log(2))
_LARGEST: gl.constexpr = gl.constexpr(3.4028234663852886e38)


@gluon.jit
def _normalised(acc, row_max, row_sum, sink, valid, value_factor, form):
    """Output rows and the natural LSE of each. `sink`: one more score, natural, without a value; `valid`: 0 for padding
    rows; value_factor: with FP8 a factor on the output."""
    total = gl.convert_layout(gl.sum(row_sum, 1), form.ROW)
    if form.FP8:
        total = total * UNSHIFTED
    factor = 1.0
    largest = row_max * _LN2
    if sink is not None:
        # One that base 2 cannot hold stays as it is: both numbers are beyond every score.
        score = sink * (1.0 / _LN2)
        score = gl.where(gl.abs(score) == float("inf"), sink, score)
        score = gl.where(score == float("inf"), _LARGEST, score)  # inf - inf is NaN
        new_max = gl.maximum(row_max, score)
        factor = gl.where(row_max == -float("inf"), 0.0, gl.exp2(row_max - new_max))
        total = total * factor + gl.where(score == -float("inf"), 0.0, gl.exp2(score - new_max))
        largest = gl.where(new_max == score, sink, new_max * _LN2)
    empty = total == 0.0  # a NaN total stays NaN
    if form.VARYING != "none":
        empty = empty | (valid == 0)
    lse = gl.where(empty, -float("inf"), largest + gl.log2(gl.where(empty, 1.0, total)) * _LN2)
    factor = gl.where(empty, 0.0, factor / gl.where(empty, 1.0, total))
    if form.FP8:
        factor = factor * (value_factor * UNSHIFTED)
    acc = rescale_rows(acc, factor, form)
    if form.VARYING != "none":  # padding rows may hold anything
        nothing = gl.convert_layout(empty.to(gl.int32), gl.SliceLayout(1, form.OUTPUT))
        acc = gl.where(gl.expand_dims(nothing, 1) != 0, 0.0, acc)
    return acc, lse


@gluon.jit
def _stored(acc, o_desc, out, stride_h, stride_s, work, row, place, form):
    """Rows of the output by way of shared memory, one part of the columns after the other."""
    if form.PARTS == 1:
        _part_stored(acc, 0, o_desc, out, stride_h, stride_s, work, row, place, form)
    else:
        gl.static_assert(form.PARTS == 2)
        halves = gl.permute(gl.reshape(acc, [_ROWS, 2, form.DIM // 2]), (0, 2, 1))
        first, second = gl.split(halves)
        _part_stored(first, 0, o_desc, out, stride_h, stride_s, work, row, place, form)
        tma.store_wait(0)
        _part_stored(second, form.DIM // 2, o_desc, out, stride_h, stride_s, work, row, place, form)


@gluon.jit
def _part_stored(acc, column: gl.constexpr, o_desc, out, stride_h, stride_s, work, row, place, form):
    flat = place.reshape([_ROWS, form.DIM // form.PARTS])
    flat.store(acc.to(place.dtype))
    at = work.q_first + row
    whole = row + form.LINES <= work.q_length  # else a packed tile would overwrite the next sequence's rows
    if not form.PACKED or whole:
        fence_async_shared()
        if form.PAGE:
            store(o_desc, [work.slot, at, work.head * form.HEADS, column], place)
        else:
            store(o_desc, [work.slot, work.head, at, column], place)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        # In steps of 8 columns, which heads and strides have too, so that 16 bytes are stored at a time.
        first = out + (at.to(gl.int64) * stride_s + (work.head * form.HEADS).to(gl.int64) * stride_h) * 8
        rows = line_numbers(gl.SliceLayout(1, layout), form)
        columns = gl.arange(0, 16, gl.SliceLayout(0, layout))
        strides = rows * stride_s
        if form.HEADS > 1:
            strides += gl.arange(0, _ROWS, gl.SliceLayout(1, layout)) % form.HEADS * stride_h
        offsets = gl.expand_dims(strides * 8, 1) + gl.expand_dims(columns, 0)
        inside = gl.expand_dims(rows < work.q_length - row, 1)
        for j in gl.static_range(form.DIM // form.PARTS // 16):
            there = inside & gl.expand_dims(columns // 8 < (o_desc.shape[3] - column) // 8 - j * 2, 0)
            gl.store(first + (offsets + column + j * 16), flat.slice(j * 16, 16, dim=1).load(layout), mask=there)
        if not form.OWN_OUT:  # TMA brings the next queries there, whose writes are not ordered after those above
            fence_async_shared()


@gluon.jit
def write(acc, state, box, place, o_desc, out, lse, sinks, stride_h, stride_s, scales, sizes, shared,
           group: gl.constexpr, form):  # fmt: skip
    """The tile's results, normalised, to memory. place: where its queries were, which have been read."""
    work = read(box, shared)
    row = work.row + group * form.LINES
    rows = row + line_numbers(form.ROW, form)
    sink = None
    if sinks is not None:
        if form.HEADS > 1:
            sink = gl.load(sinks + work.head * form.HEADS + gl.arange(0, _ROWS, form.ROW) % form.HEADS).to(gl.float32)
        else:
            sink = gl.load(sinks + work.head).to(gl.float32)
    valid = ((rows < work.q_length) & (work.k_length >= 0)).to(gl.int32)
    value_factor = 1.0
    if form.FP8:
        value_factor = result_factor(scales, sizes, work, form)
    acc, row_lse = _normalised(acc, state.row_max, state.row_sum, sink, valid, value_factor, form)
    split = work.split
    if form.FP8 and form.PACKED:  # there it is the sequence
        split = work.split - work.split
    first = ((split * sizes.batches + work.slot) * sizes.heads + work.head).to(gl.int64) * sizes.seq_q
    if form.HEADS > 1:
        first = first * form.HEADS + (gl.arange(0, _ROWS, form.ROW) % form.HEADS).to(gl.int64) * sizes.seq_q
    if lse is not None:
        if form.PACKED:
            gl.store(lse + first + work.q_first + rows, row_lse, mask=rows < work.q_length)
        else:
            gl.store(lse + first + rows, row_lse, mask=rows < sizes.seq_q)
    if form.SPLIT:
        inside = gl.convert_layout(sizes.seq_q - rows, gl.SliceLayout(1, form.OUTPUT))
        columns = gl.arange(0, form.DIM, gl.SliceLayout(0, form.OUTPUT))
        lines = gl.arange(0, _ROWS, gl.SliceLayout(1, form.OUTPUT)) * form.DIM
        offsets = gl.expand_dims(lines, 1) + gl.expand_dims(columns, 0)
        there = gl.expand_dims(inside > 0, 1)
        gl.store(out + (first + row) * form.DIM + offsets, acc, mask=there)
    else:
        if form.OWN_OUT:
            tma.store_wait(0)
            place = group
        _stored(acc, o_desc, out, stride_h, stride_s, work, row, shared.out.index(place), form)
