"""Small pieces of the Hopper forward for int8 queries and keys, whose products are exact: scales of rows and of keys.

A row's scale is a factor on all its scores, as the softmax scale is. A key's is one on a column of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.hopper_forward.parts import line_numbers
from portattn.backends.cuda.sizes import GROUP_ROWS

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)


@gluon.jit
def row_factors(scale, scales, sizes, work, group: gl.constexpr, form):
    """In the place of the softmax scale: the factor on each row [64]; where the keys' scales lie, their stride, and how
    many there are."""
    slot = work.slot.to(gl.int64)
    row = work.row + group * form.LINES + line_numbers(form.ROW, form)
    first = scales[0] + slot * scales[1] + work.head.to(gl.int64) * scales[2]
    rows = gl.load(first + (work.q_first + row).to(gl.int64) * scales[9], mask=row < work.q_length, other=1.0)
    keys = scales[3] + slot * scales[4] + (work.head // sizes.share).to(gl.int64) * scales[5]
    return rows * scale, keys + work.k_first.to(gl.int64) * scales[10], scales[10], work.k_length


@gluon.jit
def key_scales(scale, n, ragged: gl.constexpr, form):
    """With INT8: the scales of a tile's keys [KEYS]. ragged: there may be fewer keys."""
    if form.INT8:
        key = n * form.KEYS + gl.arange(0, form.KEYS, gl.SliceLayout(0, form.SCORES))
        place = key
        if not form.SIDE:
            place = key * scale[2]
        if ragged:
            found = gl.load(scale[1] + place, mask=key < scale[3], other=1.0)
        else:
            found = gl.load(scale[1] + place)
    else:
        found = 1.0
    return found


@gluon.jit
def scores_of(s, keys, scale, form):
    """Scores as float32, but for the factor that comes with them."""
    if form.INT8:
        s = s.to(gl.float32) * gl.expand_dims(keys, 0)
        factor = scale[0]
    else:
        factor = scale
    return s, factor
