"""Number formats and roundings that numpy lacks: fused multiply-add, bf16, fp8 (OCP and FNUZ), xf32.

Sources: IEEE 754-2019; "OCP 8-bit Floating Point Specification" (E4M3, E5M2); AMD Instinct MI300 ISA reference,
    "FP8 and
BF8" (FNUZ) and XF32; Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (2008), for round-to-odd.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_LOW = np.uint64((1 << 28) - 1)
_BELOW = np.uint64((1 << 29) - 1)  # the bits of a float64 that a float32 lacks …
_TIE = np.uint64(1 << 28)  # … and what they are half way between two normal float32
_NORMAL = 2.0**-126
_ONE = np.uint64(1)


def sum_to_odd(a: Array, b: Array) -> Array:
    """a + b in float64, rounded to odd: an inexact sum has its last bit set, so that a second rounding is right."""
    total = a + b
    back = total - a
    rest = (a - (total - back)) + (b - back)
    bits = np.ascontiguousarray(total).view(np.uint64)
    inexact = (rest != 0) & ((bits & _ONE) == 0) & np.isfinite(total)
    # One step towards the rest: away from zero when the rest has the total's sign.
    up = (rest > 0) == (total > 0)
    return np.where(inexact, np.where(up, bits + _ONE, bits - _ONE), bits).view(np.float64)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a·b + c in float32 with one rounding."""
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    # Rounding twice goes wrong only where the first result lies on a tie of the second: its low bits are zero there.
    bits = total.view(np.uint64)
    if np.count_nonzero(bits & _LOW) == bits.size:
        return total.astype(np.float32)
    # Low bits of zero are common (zeros, products of short numbers); ties are not. Ties of denormals lie higher.
    tie = (bits & _BELOW) == _TIE
    tie |= np.abs(total) < _NORMAL
    if not (tie & (total != 0)).any():
        return total.astype(np.float32)
    return sum_to_odd(product, c.astype(np.float64)).astype(np.float32)


def fma16(a: Array, b: Array, c: Array) -> Array:
    """a·b + c in float16 with one rounding."""
    return sum_to_odd(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float16)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    split = 134217729.0  # 2^27 + 1, Veltkamp's constant for float64
    ha = a * split - (a * split - a)
    hb = b * split - (b * split - b)
    la, lb = a - ha, b - hb
    product = a * b
    return product, ((ha * hb - product) + ha * lb + la * hb) + la * lb


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a·b + c in float64 with one rounding, where no intermediate overflows or underflows."""
    a, b, c = np.broadcast_arrays(a, b, c)
    high, low = _two_product(a, b)
    first, rest = _two_sum(c, low)
    total, last = _two_sum(high, first)
    exact = total + sum_to_odd(rest, last)
    plain = a * b + c
    return np.where(np.isfinite(exact), exact, plain)


def bf16_bits(x: Array) -> Array:
    """float32 → bfloat16 bits (uint32, low half), to nearest even; NaN stays NaN and becomes quiet."""
    bits = x.view(np.uint32)
    rounded = (bits.astype(np.uint64) + np.uint64(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint64(16)
    return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded.astype(np.uint32))


def to_half(x: Array) -> Array:
    """float32 → float16, to nearest even; NaN becomes quiet, which numpy leaves as it is."""
    half, nan = np.ascontiguousarray(x.astype(np.float16)), np.isnan(x)
    if nan.any():
        half = np.where(nan, half.view(np.uint16) | np.uint16(0x200), half.view(np.uint16)).view(np.float16)
    return half


def from_half(x: Array) -> Array:
    """float16 → float32; NaN becomes quiet."""
    single, nan = np.ascontiguousarray(x.astype(np.float32)), np.isnan(x)
    if nan.any():
        single = np.where(nan, single.view(np.uint32) | np.uint32(0x400000), single.view(np.uint32)).view(np.float32)
    return single


def f16_bits(x: Array) -> Array:
    """float32 → float16 bits (uint32, low half), to nearest even."""
    return to_half(x).view(np.uint16).astype(np.uint32)


def f16_bits_to_zero(x: Array) -> Array:
    """float32 → float16 bits (uint32), towards zero; what is finite stays finite."""
    half = to_half(x)
    bits = half.view(np.uint16).astype(np.uint32)
    beyond = np.abs(half.astype(np.float32)) > np.abs(x)
    return bits - beyond.astype(np.uint32)


def xf32(x: Array) -> Array:
    """float32 as the xf32 matrix instructions read it: 10 bits of mantissa, rounded to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0xFFF) + ((bits >> np.uint64(13)) & _ONE)) & np.uint64(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.astype(np.uint32), x.view(np.uint32)).astype(np.uint32).view(np.float32)


@cache
def fp8_table(kind: str, fnuz: bool) -> Array:
    """The 256 values of an 8-bit format as float32: "fp8" (E4M3) or "bf8" (E5M2), OCP or FNUZ.

    FNUZ has a bias one larger, no infinities, no negative zero, and one NaN (0x80).
    """
    codes = np.arange(256)
    mantissa_bits, bias = (3, 7) if kind == "fp8" else (2, 15)
    bias += fnuz
    exponent = (codes & 0x7F) >> mantissa_bits
    mantissa = codes & ((1 << mantissa_bits) - 1)
    scale = 1 << mantissa_bits
    normal = (1 + mantissa / scale) * 2.0 ** (exponent - bias)
    value = np.where(exponent == 0, mantissa / scale * 2.0 ** (1 - bias), normal)
    if fnuz:
        value = np.where(codes == 0x80, np.nan, np.where(codes > 0x80, -value, value))
    else:
        if kind == "fp8":
            value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
        else:
            top = (1 << (7 - mantissa_bits)) - 1
            value = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), value)
        value = np.where(codes >= 0x80, -value, value)
    return value.astype(np.float32)


def fp8_bits(x: Array, kind: str, fnuz: bool, saturate: Array | bool = False) -> Array:
    """float32 → 8-bit codes (uint32), to nearest even.

    Overflow gives infinity where the format has one, else NaN; with `saturate` (MODE.FP16_OVFL) the largest finite
    value, for infinities too. Source: MI300 ISA reference, V_CVT_PK_FP8_F32; LLVM AMDGPU guide, FP16_OVFL.
    """
    table = fp8_table(kind, fnuz)[:128].astype(np.float64)
    finite = np.nonzero(np.isfinite(table))[0]
    values = table[finite]
    magnitude = np.abs(x.astype(np.float64))
    upper = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    low, high = values[upper - 1], values[upper]
    tie_low = (magnitude - low == high - magnitude) & (finite[upper - 1] % 2 == 0)
    code = np.where((magnitude - low < high - magnitude) | tie_low, finite[upper - 1], finite[upper])
    # The largest finite value is all that rounds to it: from half a step above on, to nearest even, it overflows.
    step = (values[-1] - values[-2]) / 2
    odd_top = finite[-1] % 2 == 1
    over = magnitude >= values[-1] + step if odd_top else magnitude > values[-1] + step
    nan = 0x80 if fnuz else 0x7F
    overflow = 0x7C if kind == "bf8" and not fnuz else nan
    code = np.where(over, np.where(saturate, finite[-1], overflow), code)
    unsigned = fnuz & ((code == 0) | (code == nan))
    return np.where(np.isnan(x), nan, code | np.where(np.signbit(x) & ~unsigned, 0x80, 0)).astype(np.uint32)
