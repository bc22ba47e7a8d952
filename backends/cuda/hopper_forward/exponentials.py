"""The softmax of e4m3 operands in forms that spare the chip's exponential unit, or take it in turns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.hopper_forward.narrow import PACK, SHIFT, hold_bytes
from portattn.backends.cuda.hopper_forward.parts import lane_sum
from portattn.backends.cuda.sizes import GROUP_ROWS

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)

# 2^x of two numbers in float16: 2^f by a polynomial of f in [-1/2, 1/2], times 2^i by its exponent's bits. Below 2^-14.5
# it is 0, where e4m3 has no number.
_POWERS = """{
.reg .b32 x, r, i, f, p, e; .reg .b16 low, high;
cvt.rn.f16x2.f32 x, $3, $2;
mov.b32 e, 0xCB80CB80;
max.NaN.f16x2 x, x, e;
mov.b32 e, 0x660F660F;
add.rn.f16x2 r, x, e;
mov.b32 e, 0xE60FE60F;
add.rn.f16x2 i, r, e;
sub.rn.f16x2 f, x, i;
mov.b32 e, 0x2B1B2B1B;
mov.b32 p, 0x33B033B0;
fma.rn.f16x2 p, f, e, p;
mov.b32 e, 0x398C398C;
fma.rn.f16x2 p, p, f, e;
mov.b32 e, 0x3C003C00;
fma.rn.f16x2 p, p, f, e;
shl.b32 e, r, 10;
and.b32 e, e, 0xFC00FC00;
mul.rn.f16x2 p, p, e;
mov.b32 {low, high}, p;
cvt.f32.f16 $0, low;
cvt.f32.f16 $1, high;
}"""
POWERS: gl.constexpr = gl.constexpr(_POWERS)
_FIRST_ENTERS: gl.constexpr = gl.constexpr("bar.sync 5, 256; mov.b32 $0, $2; mov.b32 $1, $3;")
_SECOND_ENTERS: gl.constexpr = gl.constexpr("bar.sync 6, 256; mov.b32 $0, $2; mov.b32 $1, $3;")
_LEAVE = """{
.reg .f32 x; .reg .b32 i;
add.f32 x, $1, $2;
mov.b32 i, x;
shr.u32 i, i, 31;
add.u32 i, i, $3;
bar.arrive i, 256;
mov.b32 $0, 0;
}"""
LEAVE: gl.constexpr = gl.constexpr(_LEAVE)


@gluon.jit
def entered(low, group: gl.constexpr):
    if group == 0:
        low = gl.inline_asm_elementwise(
            _FIRST_ENTERS, "=f,=f,f,f", [low], dtype=gl.float32, is_pure=False, pack=2
        )
    else:
        low = gl.inline_asm_elementwise(
            _SECOND_ENTERS, "=f,=f,f,f", [low], dtype=gl.float32, is_pure=False, pack=2
        )
    return low


@gluon.jit
def left(sums, group: gl.constexpr):
    x = gl.permute(gl.reshape(sums, [4, 2, 8, 4]), (0, 2, 3, 1))
    first, second = gl.split(x)
    gl.inline_asm_elementwise(
        LEAVE, "=r,f,f,r", [first, second, gl.to_tensor(6 - group)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _powers(first, second, approximate: gl.constexpr):
    if approximate:
        # Interleaved: pairs of two tensors' elements.
        pair = gl.join(first, second)
        pair = gl.inline_asm_elementwise(POWERS, "=f,=f,f,f", [pair], dtype=gl.float32, is_pure=True, pack=2)
        first, second = gl.split(pair)
    else:
        first, second = gl.exp2(first), gl.exp2(second)
    return first, second


@gluon.jit
def _blocks(a, b, form):
    return gl.reshape(gl.permute(gl.join(a, b), (0, 1, 3, 2)), [_ROWS, form.KEYS // 16, 4])


@gluon.jit
def _many(x, form):
    # columns: KEYS // 32, block of two, half of a block, lane, of two
    x = gl.permute(gl.reshape(x, [_ROWS, form.KEYS // 32, 2, 2, 4, 2]), (0, 1, 4, 3, 2, 5))
    even, odd = gl.split(x)  # [64, KEYS/32, 4, half, block]
    e0, e1 = gl.split(even)
    o0, o1 = gl.split(odd)
    a0, c0 = gl.split(e0)
    a1, c1 = gl.split(e1)
    b0, d0 = gl.split(o0)
    b1, d1 = gl.split(o1)
    a0, b0 = _powers(a0, b0, form.POLY >= 4)
    c0, d0 = _powers(c0, d0, form.POLY >= 2)
    a1, b1 = _powers(a1, b1, form.POLY >= 3)
    c1, d1 = _powers(c1, d1, form.POLY >= 1)
    sums = gl.sum(((a0 + b0) + (c0 + d0)) + ((a1 + b1) + (c1 + d1)), 1)
    parts = (_blocks(a0, a1, form), _blocks(b0, b1, form), _blocks(c0, c1, form), _blocks(d0, d1, form))
    return parts, sums


@gluon.jit
def shares(s, factor, base, group: gl.constexpr, form):
    """The weights of scores as an operand's bytes, and a lane's sums of them."""
    low = base - SHIFT
    if form.HOT:
        low = entered(low, group)
    x = s * factor - gl.expand_dims(low, 1)
    if form.POLY == 0:
        p = gl.exp2(x)
        sums = lane_sum(p, form)
    else:
        p, sums = _many(x, form)
    if form.HOT:
        left(sums, group)
    return p, sums


@gluon.jit
def packed(p, form):
    if form.POLY == 0:
        held = hold_bytes(p, form)
    else:
        held = gl.inline_asm_elementwise(
            PACK, "=r,f,f,f,f", [p[0], p[1], p[2], p[3]], dtype=gl.int32, is_pure=True, pack=1
        )
    return held
