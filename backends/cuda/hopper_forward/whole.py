"""Small pieces of the Hopper forward for int8 queries and keys: scales of each row and of each key."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.hopper_forward.parts import line_numbers
from portattn.backends.cuda.sizes import GROUP_ROWS

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)


@gluon.jit
def whole_factor(scale, scales, sizes, work, group: gl.constexpr, form):
    """With INT8: a factor for each row, and where the keys' scales lie. Otherwise `scale`."""
    if form.INT8:
        slot = work.slot.to(gl.int64)
        row = work.row + group * form.LINES + line_numbers(form.ROW, form)
        q = scales[0] + slot * scales[1] + work.head.to(gl.int64) * scales[2]
        rows = gl.load(q + (work.q_first + row).to(gl.int64) * scales[9], mask=row < work.q_length, other=1.0)
        k = scales[3] + slot * scales[4] + (work.head // sizes.share).to(gl.int64) * scales[5]
        scale = (rows * scale, k + work.k_first.to(gl.int64) * scales[10], scales[10], work.k_length)
    return scale


@gluon.jit
def key_scales(scale, n, whole: gl.constexpr, form):
    """With INT8: the scales of a tile's keys."""
    if form.INT8:
        key = n * form.KEYS + gl.arange(0, form.KEYS, gl.SliceLayout(0, form.SCORES))
        if form.STEP > 1:
            key_at = key * scale[2]
        else:
            key_at = key
        if whole:
            found = gl.load(scale[1] + key_at)
        else:
            found = gl.load(scale[1] + key_at, mask=key < scale[3], other=1.0)
    else:
        found = 1.0
    return found


@gluon.jit
def scores_of(s, keys, scale, form):
    """Scores as float32, and the factor on them."""
    if form.INT8:
        s = s.to(gl.float32) * gl.expand_dims(keys, 0)
        factor = scale[0]
    else:
        factor = scale
    return s, factor
