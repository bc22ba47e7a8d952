"""Powers of two of a tile of scores, a quarter of them by the multipliers in place of the exponential unit.

That unit gives a quarter of a multiprocessor 4 powers a cycle: of a tile of 64 rows and 128 keys 512 cycles, as many as
its e4m3 products take of heads of 128. Probabilities of 8 bits need few digits. So 2^x is 2^i times a polynomial of
the fraction f = x - i in [-1/2, 1/2], two numbers of float16 at a time: its error is 0.1 % (root mean square), and
1/16 is what e4m3 rounds by at most.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.sizes import GROUP_ROWS

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)


def _twice(number: float) -> str:
    """A float16 in both halves of a word, as PTX writes it."""
    (bits,) = struct.unpack("<H", struct.pack("<e", number))
    return f"0x{bits:04X}{bits:04X}"


# Of the Taylor series 1 + ln2·f + ln2²/2·f² + ln2³/6·f³: at f = 0 it is 1, so that the largest weight is exact.
COEFFICIENTS = (1.0, 0.69336, 0.24023, 0.05551)
# Below it e4m3 has no number; its power is 2^-15, whose exponent's bits are 0.
LEAST = -15.0
# Float16 numbers from 1024 to 2048 are whole: added to x it leaves i, and i + 15, float16's bits of 2^i, stands lowest.
WHOLE = 1536.0 + 15.0
_POWERS = f"""{{
.reg .b32 x, r, f, p, e; .reg .b16 low, high;
cvt.rn.f16x2.f32 x, $3, $2;
mov.b32 e, {_twice(LEAST)};
max.NaN.f16x2 x, x, e;
mov.b32 e, {_twice(WHOLE)};
add.rn.f16x2 r, x, e;
mov.b32 e, {_twice(-WHOLE)};
add.rn.f16x2 f, r, e;
sub.rn.f16x2 f, x, f;
mov.b32 e, {_twice(COEFFICIENTS[3])};
mov.b32 p, {_twice(COEFFICIENTS[2])};
fma.rn.f16x2 p, f, e, p;
mov.b32 e, {_twice(COEFFICIENTS[1])};
fma.rn.f16x2 p, p, f, e;
mov.b32 e, {_twice(COEFFICIENTS[0])};
fma.rn.f16x2 p, p, f, e;
shl.b32 e, r, 10;
and.b32 e, e, 0xFC00FC00;
mul.rn.f16x2 p, p, e;
mov.b32 {{low, high}}, p;
cvt.f32.f16 $0, low;
cvt.f32.f16 $1, high;
}}"""
POWERS: gl.constexpr = gl.constexpr(_POWERS)


@gluon.jit
def powers(x, keys: gl.constexpr, form):
    """2^x of scores [64, keys], x at most 8."""
    if form.SPARED:
        # Columns: which 32, which 16 of these, which 8 of these, lane, which of its two. No register moves.
        parts = gl.permute(gl.reshape(x, [_ROWS, keys // 32, 2, 2, 4, 2]), (0, 1, 4, 5, 3, 2))
        first, second = gl.split(parts)
        third, fourth = gl.split(second)
        fourth = gl.inline_asm_elementwise(POWERS, "=f,=f,f,f", [fourth], dtype=gl.float32, is_pure=True, pack=2)
        parts = gl.join(gl.exp2(first), gl.join(gl.exp2(third), fourth))
        whole = gl.reshape(gl.permute(parts, (0, 1, 5, 4, 2, 3)), [_ROWS, keys])
        found = gl.convert_layout(whole, x.type.layout, assert_trivial=True)
    else:
        found = gl.exp2(x)
    return found
