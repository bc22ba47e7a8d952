"""What the Hopper forward does about its exponentials and what follows from them, where a schedule asks for it.

The rescaling that is left out (LAZY). A row's weights may have any reference, since the last division removes it: only
where a row's maximum has grown by more than 2^LAZIEST is it taken as the reference and the accumulator rescaled. Weights
are then at most 2^8, far from what fp16 holds, and a row's LSE is that of its reference and its sum, as before. Whether
any row of a warp has a new reference is a vote of its lanes, and the products of the accumulator a branch of the warp's
own: no other warp waits. The idea is FlashAttention-4's.

Exponentials on the units of products (FMA). A multiprocessor does 16 exponentials a cycle and 128 products. One of FMA
weights is 2^x = 2^n * 2^f with n the nearest whole number, which is added to the exponent, and 2^f a polynomial of degree
3 (relative error 7.5e-5, where bf16 has 2e-3 and fp16 2.4e-4).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LAZIEST: gl.constexpr = gl.constexpr(8.0)

_POLYNOMIAL = (0.99992807, 0.69326099, 0.24261115, 0.05517167)  # of 2^f for |f| <= 1/2: least largest relative error


def _rescaling(numbers: int) -> str:
    """Of a thread's numbers, two rows by turns of two: all by their row's factor, unless all of the warp's are 1."""
    moved = "".join(f"mov.b32 ${i}, ${numbers + i};" for i in range(numbers))
    scaled = "".join(f"mul.f32 ${i}, ${i}, ${2 * numbers + i};" for i in range(numbers))
    return f"""{{
.reg .pred any, other;
setp.neu.f32 any, ${2 * numbers}, 1.0;
setp.neu.f32 other, ${2 * numbers + 2}, 1.0;
or.pred any, any, other;
vote.sync.any.pred any, any, 0xffffffff;
{moved}
@!any bra.uni DONE;
{scaled}
DONE:
}}"""


def _operands(results: int, operands: int) -> str:
    return ",".join(["=f"] * results + ["f"] * operands)


_RESCALING = {dim: _rescaling(dim // 2) for dim in (64, 128, 256)}
_RESCALING_OPERANDS = {dim: _operands(dim // 2, dim) for dim in (64, 128, 256)}


def _weights(count: int) -> str:
    """2^x of `count` numbers, the last by a polynomial."""
    last = 2 * count - 1
    c0, c1, c2, c3 = _POLYNOMIAL
    plain = "".join(f"ex2.approx.ftz.f32 ${i}, ${count + i};" for i in range(count - 1))
    return f"""{{
.reg .f32 x, n, f, p; .reg .b32 i, j;
max.f32 x, ${last}, -126.0;
add.rn.f32 n, x, 12582912.0;
mov.b32 i, n;
sub.rn.f32 n, n, 12582912.0;
sub.rn.f32 f, x, n;
fma.rn.f32 p, f, {c3!r}, {c2!r};
fma.rn.f32 p, p, f, {c1!r};
fma.rn.f32 p, p, f, {c0!r};
mov.b32 j, p;
mad.lo.s32 j, i, 8388608, j;
{plain}
mov.b32 ${count - 1}, j;
}}"""


_WEIGHTS = {count: _weights(count) for count in (2, 4, 8, 16)}
_WEIGHTS_OPERANDS = {count: _operands(count, count) for count in (2, 4, 8, 16)}


@gluon.constexpr_function
def rescaling(dim):
    return _RESCALING[dim]


@gluon.constexpr_function
def rescaling_operands(dim):
    return _RESCALING_OPERANDS[dim]


@gluon.constexpr_function
def weighing(count):
    return _WEIGHTS[count]


@gluon.constexpr_function
def weighing_operands(count):
    return _WEIGHTS_OPERANDS[count]


@gluon.jit
def rescaled_where_needed(acc, factor, form):
    text: gl.constexpr = rescaling(form.DIM)
    operands: gl.constexpr = rescaling_operands(form.DIM)
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, form.OUTPUT)), 1)
    return gl.inline_asm_elementwise(
        text, operands, [acc, factor], dtype=gl.float32, is_pure=False, pack=form.DIM // 2
    )


@gluon.jit
def reference(before, found):
    """What a row's weights are relative to, in powers of 2, with the maximum that a tile has."""
    return gl.where(found > before + LAZIEST, found, before)


@gluon.jit
def powers(x, form):
    """2^x, some of them by a polynomial."""
    text: gl.constexpr = weighing(form.FMA)
    operands: gl.constexpr = weighing_operands(form.FMA)
    return gl.inline_asm_elementwise(text, operands, [x], dtype=gl.float32, is_pure=True, pack=form.FMA)
