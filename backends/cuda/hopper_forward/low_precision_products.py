"""8-bit operands of the Hopper forward: e4m3 probabilities, transposed values, scales, and exact products of int8.

Products of 8 bits read both operands along their depth. Keys and queries lie so. Values are transposed by a kernel
before this one (../auxiliary_kernels.py), which also puts the keys of each 16 into the order in which a lane holds
their probabilities: of a row of scores, lane t of four has the columns 2t, 2t + 1, 8 + 2t, 9 + 2t of each 16. As an
operand these are the numbers 4t to 4t + 3 of its depth. So no probability leaves its lane.

Probabilities are e4m3 times 2^SHIFT, which e4m3 holds, and so are their sums.

The chip's sums of such products lose what is 13 bits below their largest part. So each tile's values are summed apart,
and these sums in float32: over 16,384 keys whose values have a mean, a sum in place came out 7 per cent too small.

weights_around_values computes a tile's probabilities by halves of its columns, with the values of the tile before added
between them: the second half's powers of two leave the multipliers idle two thirds of the time, and so the accumulator
is rescaled and added to meanwhile. By then the product of values has been complete for long.

A row's scale of int8 queries is a factor on all its scores, as the softmax scale is; a key's scale is a factor on a
column of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from portattn.backends.cuda.gluon_names import CARRIES_ADDRESSES, arrive, hide, reinterpreted
from portattn.backends.cuda.hopper_forward import GROUP_ROWS
from portattn.backends.cuda.hopper_forward.fragments import (
    lane_maximum,
    lane_sum,
    line_numbers,
    row_maximum,
    split_columns,
    whole,
)

SHIFT: gl.constexpr = gl.constexpr(8.0)
UNSHIFTED: gl.constexpr = gl.constexpr(2.0**-8)
_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)

# Four numbers of a lane to four bytes, the first lowest. Each instruction rounds two, the second operand lower.
_PACK = """{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}"""
PACK: gl.constexpr = gl.constexpr(_PACK)

_ARRIVE = """{
.reg .f32 x; .reg .b32 i;
add.f32 x, $1, $2;
mov.b32 i, x;
shr.u32 i, i, 31;
add.u32 i, i, $3;
bar.arrive i, $4;
mov.b32 $0, 0;
}"""
ARRIVE: gl.constexpr = gl.constexpr(_ARRIVE)


@gluon.jit
def hold_bytes(p, form):
    """Return probabilities as four bytes in 32 bits [64, KEYS / 16, 4], in the order of an operand."""
    x = gl.permute(gl.reshape(p, [_ROWS, form.KEYS // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    even, odd = gl.split(x)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return gl.inline_asm_elementwise(
        PACK, "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def operand_bytes(held, form):
    """Return held bytes as an operand in registers [64, KEYS]."""
    # Each of the four numbers gets the whole word, and the word of four such numbers is one of them: a lane's registers
    # are the operand as they are.
    words = gl.expand_dims(held, 3).broadcast_to([_ROWS, form.KEYS // 16, 4, 4])
    words = gl.convert_layout(gl.reshape(words, [_ROWS, form.KEYS]), form.PROBS)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


@gluon.jit
def arrive_after_exponentials(barrier, sums, form):
    """Arrive at a barrier after the exponentials: `sums` [64, 4], which are not negative, are of all of them.

    ptxas moves the wait for the product of values up to the barrier before it, over what is only computed. So where it
    finds this one is where it waits. The barrier's number depends on the sums' sign, of which it knows nothing.
    """
    x = gl.permute(gl.reshape(sums, [4, 2, 8, 4]), (0, 2, 3, 1))
    first, second = gl.split(x)
    gl.inline_asm_elementwise(
        ARRIVE, "=r,f,f,r,r", [first, second, barrier, form.PARTY], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def as_e4m3(place, shape: gl.constexpr):
    return reinterpreted(place, gl.float8e4nv, shape, place.type.layout)


@gluon.jit
def narrow_values(held, shared, slot, form):
    """Begin P V of a tile, apart from that of other tiles."""
    v = as_e4m3(shared.v.index(slot).reshape([form.DIM, form.KEYS]), [form.DIM, form.KEYS]).permute((1, 0))
    zeros = gl.zeros([_ROWS, form.DIM], gl.float32, form.OUTPUT)
    return warpgroup_mma(operand_bytes(held, form), v, zeros, use_acc=False, is_async=True)


@gluon.jit
def sequence_of(work, form):
    if form.PAGE:
        sequence = work.k_first
    elif form.PACKED:
        sequence = work.split
    else:
        sequence = work.slot
    return sequence


@gluon.jit
def transposed_first(work, form):
    """Return the first of the sequence's keys among the transposed values: packed ones begin at a tile's edge."""
    if form.PACKED:
        first = (work.k_first // form.KEYS + work.split) * form.KEYS
    else:
        first = work.k_first
    return first


@gluon.jit
def score_factor(scale, scales, sizes, work, form):
    """Return the factor on a tile's scores. scales: of q, k and v a pointer, and strides of sequences and heads."""
    if form.SCALED:
        b, h = sequence_of(work, form), work.head // sizes.share
        there = work.k_length > 0  # a sequence without keys may have any scale, and -inf times NaN, 0 or -1 is not -inf
        factor = gl.load(scales[3] + b * scales[4] + h * scales[5], mask=there, other=1.0)
        if form.FP8:
            factor = gl.load(scales[0] + b * scales[1] + h * scales[2], mask=there, other=1.0) * factor
        scale *= factor
    return scale


@gluon.jit
def result_factor(scales, sizes, work, form):
    factor = 1.0
    if form.SCALED:
        place = scales[6] + sequence_of(work, form) * scales[7] + work.head // sizes.share * scales[8]
        factor = gl.load(place, mask=work.k_length > 0, other=1.0)  # with a sink a sum without keys is not 0
    return factor


_THREADS = 128  # of a warp group


def _after(numbers: int) -> str:
    """Return PTX of numbers * factor - base that depends on `fresh`.

    A thread's numbers are of two rows, by turns two of one and two of the other. ptxas does not know that the minimum
    of a magnitude and 0 is 0.
    """
    lines = ["{", ".reg .f32 z, a, b;", f"abs.f32 z, ${4 * numbers};", "min.f32 z, z, 0f00000000;"]
    lines += [f"neg.f32 a, ${3 * numbers};", f"neg.f32 b, ${3 * numbers + 2};", "sub.f32 a, a, z;", "sub.f32 b, b, z;"]
    lines += [f"fma.rn.f32 ${i}, ${numbers + i}, ${2 * numbers}, {'ab'[i % 4 // 2]};" for i in range(numbers)]
    return "\n".join([*lines, "}"])


_NUMBERS = {columns: GROUP_ROWS * columns // _THREADS for columns in (32, 64)}
_CODE = {columns: _after(numbers) for columns, numbers in _NUMBERS.items()}
_OPERANDS = {columns: ",".join(["=f"] * numbers + ["f"] * 4 * numbers) for columns, numbers in _NUMBERS.items()}


@gluon.constexpr_function
def _code(columns):
    return _CODE[columns]


@gluon.constexpr_function
def _constraints(columns):
    return _OPERANDS[columns]


@gluon.constexpr_function
def _pack(columns):
    return _NUMBERS[columns]


@gluon.constexpr_function
def _times(columns, part):
    """Return the number of halvings from `columns` to `part`."""
    return (columns // part).bit_length() - 1


@gluon.jit
def _scaled_after(s, factor, base, fresh, columns: gl.constexpr, form):
    """Return s * factor - base of [64, columns] after `fresh` [64, DIM]: ptxas would move it before the wait."""
    code: gl.constexpr = _code(columns)
    constraints: gl.constexpr = _constraints(columns)
    pack: gl.constexpr = _pack(columns)
    for j in gl.static_range(_times(form.DIM, columns)):
        fresh, _other = split_columns(fresh, form.DIM // 2**j)
    fresh = gl.convert_layout(fresh, s.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        code, constraints, [s, factor, base, fresh], dtype=gl.float32, is_pure=False, pack=pack
    )


@gluon.jit
def weights_around_values(s, factor, base, acc, alpha, fresh, slot, v_slot, free, form):
    """Probabilities of a tile; a lane's sums of them; and the accumulator with the values of the tile before.

    fresh      the product of those values, under way; alpha: its factor on acc
    slot, v_slot  buffers of keys and of values that are returned on the way, at the barriers from `free` on
    """
    half: gl.constexpr = form.KEYS // 2
    a, b = split_columns(s, form.KEYS)
    base = gl.expand_dims(gl.convert_layout(base, gl.SliceLayout(1, a.type.layout)) - SHIFT, 1)
    a = gl.exp2(a * factor - base)
    sums = lane_sum(a, half)
    arrive_after_exponentials(free + slot, sums, form)
    fresh = warpgroup_mma_wait(0, deps=[fresh])
    arrive(free + form.STAGES + v_slot, form.PARTY)
    alpha = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, form.OUTPUT)), 1)
    # Not pure: it stays between the two waits.
    acc = gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [acc, alpha, fresh], dtype=gl.float32, is_pure=False, pack=1
    )
    b = gl.exp2(_scaled_after(b, factor, base, fresh, half, form))
    sums = sums + lane_sum(b, half)
    return whole(a, b, form), sums, acc


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
    """Load four numbers of each lane: the scales of its keys of a tile of 128."""
    place = (scale[1] + n * form.KEYS).to(gl.int64)
    return gl.inline_asm_elementwise(
        LOADED, "=f,=f,=f,=f,l", [place], dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False, pack=1
    )


@gluon.jit
def hide_from_llvm(n):
    """Return a loop's number as unknown to LLVM: else a tile's addresses take 60 registers of a thread."""
    if CARRIES_ADDRESSES:
        n = hide(n)
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
    """Load the scales of a tile's keys [KEYS] with INT8. ragged: there may be fewer keys."""
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
    """Return scores as float32, but for the factor that comes with them."""
    if form.INT8:
        s = s.to(gl.float32) * gl.expand_dims(keys, 0)
        factor = scale[0]
    else:
        factor = scale
    return s, factor
