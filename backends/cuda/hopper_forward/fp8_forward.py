"""Small pieces of the Hopper forward for e4m3 operands: probabilities of 8 bits, transposed values, scales.

Products of 8 bits read both operands along their depth. Keys and queries lie so. Values are transposed by a kernel
before this one (transposed.py), which also puts the keys of each 16 into the order in which a lane holds their
probabilities: of a row of scores, lane t of four has the columns 2t, 2t + 1, 8 + 2t, 9 + 2t of each 16. As an operand
these are the numbers 4t to 4t + 3 of its depth. So no probability leaves its lane.

Probabilities are e4m3 times 2^SHIFT, which e4m3 holds, and so are their sums.

The chip's sums of such products lose what is 13 bits below their largest part. So each tile's values are summed apart,
and these sums in float32: over 16,384 keys whose values have a mean, a sum in place came out 7 per cent too small.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from portattn.backends.cuda.gluon_names import reinterpreted
from portattn.backends.cuda.sizes import GROUP_ROWS

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
    """Probabilities as four bytes in 32 bits [64, KEYS / 16, 4], in the order of an operand."""
    x = gl.permute(gl.reshape(p, [_ROWS, form.KEYS // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    even, odd = gl.split(x)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return gl.inline_asm_elementwise(
        PACK, "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def operand_bytes(held, form):
    """Those as an operand in registers [64, KEYS]."""
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
    """Bytes of shared memory as e4m3 numbers."""
    return reinterpreted(place, gl.float8e4nv, shape, place.type.layout)


@gluon.jit
def narrow_values(held, shared, slot, form):
    """P V of a tile, begun: apart from that of other tiles."""
    v = as_e4m3(shared.v.index(slot).reshape([form.DIM, form.KEYS]), [form.DIM, form.KEYS]).permute((1, 0))
    zeros = gl.zeros([_ROWS, form.DIM], gl.float32, form.OUTPUT)
    return warpgroup_mma(operand_bytes(held, form), v, zeros, use_acc=False, is_async=True)


@gluon.jit
def sequence_of(work, form):
    """Which sequence a tile is of."""
    if form.PACKED:
        sequence = work.split
    else:
        sequence = work.slot
    return sequence


@gluon.jit
def transposed_first(work, form):
    """Where the sequence's keys begin among the transposed values: packed ones each begin at a tile's edge."""
    if form.PACKED:
        first = (work.k_first // form.KEYS + work.split) * form.KEYS
    else:
        first = work.k_first
    return first


@gluon.jit
def score_factor(scale, scales, sizes, work, form):
    """The factor on a tile's scores. scales: of q, k and v each a pointer, and strides of sequences and heads."""
    if form.SCALED:
        b, h = sequence_of(work, form), work.head // sizes.share
        there = work.k_length > 0  # a sequence without keys may have any scale, and -inf times NaN, 0 or -1 is not -inf
        q = gl.load(scales[0] + b * scales[1] + h * scales[2], mask=there, other=1.0)
        scale *= q * gl.load(scales[3] + b * scales[4] + h * scales[5], mask=there, other=1.0)
    return scale


@gluon.jit
def result_factor(scales, sizes, work, form):
    """The factor on a tile's results."""
    factor = 1.0
    if form.SCALED:
        factor = gl.load(scales[6] + sequence_of(work, form) * scales[7] + work.head // sizes.share * scales[8])
    return factor
