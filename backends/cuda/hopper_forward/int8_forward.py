"""Small pieces of the Hopper forward for int8 queries and keys, whose products are exact: scales of rows and of keys.

A row's scale is a factor on all its scores, as the softmax scale is. A key's is one on a column of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.gluon_names import CARRIES_ADDRESSES
from portattn.backends.cuda.hopper_forward.fragments import (
    lane_maximum,
    line_numbers,
    row_maximum,
    split_columns,
    whole,
)
from portattn.backends.cuda.sizes import GROUP_ROWS

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)

# Each lane's four of a tile's 128 scales.
_LOADED = """{
.reg .u32 lane; .reg .u64 at;
mov.u32 lane, %laneid;
mad.wide.u32 at, lane, 4, $4;
ld.global.nc.f32 $0, [at];
ld.global.nc.f32 $1, [at+128];
ld.global.nc.f32 $2, [at+256];
ld.global.nc.f32 $3, [at+384];
}"""
# The first scale of each 64, and whether all 64 are that.
_BLOCKS = """{
.reg .pred same; .reg .b32 a, b;
shfl.sync.idx.b32 a, $3, 0, 31, 0xffffffff;
shfl.sync.idx.b32 b, $5, 0, 31, 0xffffffff;
setp.eq.f32 same, $3, a;
setp.eq.and.f32 same, $4, a, same;
setp.eq.and.f32 same, $5, b, same;
setp.eq.and.f32 same, $6, b, same;
vote.sync.all.pred same, same, 0xffffffff;
selp.b32 $2, 1, 0, same;
mov.b32 $0, a;
mov.b32 $1, b;
}"""
LOADED: gl.constexpr = gl.constexpr(_LOADED)
BLOCKS: gl.constexpr = gl.constexpr(_BLOCKS)


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
def lane_scales(scale, n, form):
    """Four numbers of each lane: the scales of its keys of a tile of 128."""
    place = (scale[1] + n * form.KEYS).to(gl.int64)
    return gl.inline_asm_elementwise(
        LOADED, "=f,=f,=f,=f,l", [place], dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False, pack=1
    )


@gluon.jit
def hide_from_llvm(n):
    """A loop's number, which LLVM does not know to be one: else a tile's addresses take 60 registers of a thread."""
    if CARRIES_ADDRESSES:
        n = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)
    return n


@gluon.jit
def scores_by_blocks(s, lanes, scale, n, form):
    """Scores as float32 but for the factors on the rows of their first and second half, which come with them, and each
    row's largest but for scale[0]."""
    first, second, same = gl.inline_asm_elementwise(
        BLOCKS, "=f,=f,=r,f,f,f,f", [lanes[0], lanes[1], lanes[2], lanes[3]],
        dtype=(gl.float32, gl.float32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    if same != 0:
        a, b = split_columns(s, form.KEYS)
        half: gl.constexpr = form.KEYS // 2
        largest = gl.maximum(
            lane_maximum(a, half).to(gl.float32) * first, lane_maximum(b, half).to(gl.float32) * second
        )
        largest = gl.convert_layout(gl.max(largest, 1), form.ROW)
        found = s.to(gl.float32)
    else:
        key = hide_from_llvm(n) * form.KEYS + gl.arange(0, form.KEYS, gl.SliceLayout(0, form.SCORES))
        found = s.to(gl.float32) * gl.expand_dims(gl.load(scale[1] + key), 0)
        largest = row_maximum(found, form)
        first = first - first + 1.0
        second = first
    return found, scale[0] * first, scale[0] * second, largest


@gluon.jit
def weights_by_blocks(s, first, second, base, form):
    a, b = split_columns(s, form.KEYS)
    layout: gl.constexpr = gl.SliceLayout(1, a.type.layout)
    base = gl.expand_dims(gl.convert_layout(base, layout), 1)
    a = gl.exp2(a * gl.expand_dims(gl.convert_layout(first, layout), 1) - base)
    b = gl.exp2(b * gl.expand_dims(gl.convert_layout(second, layout), 1) - base)
    return whole(a, b, form)


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
