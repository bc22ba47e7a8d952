"""Floating-point arithmetic that numpy lacks: fused multiply-add, bf16, fp8 (OCP, FNUZ), xf32; the chips' maximum.

In maximum and minimum +0 is greater than −0. In IEEE mode, which gfx12 lacks, a signalling NaN gives a quiet one.

Sources: IEEE 754-2019; "OCP 8-bit Floating Point Specification" (E4M3, E5M2); AMD MI300 ISA reference, "FP8 and BF8"
(FNUZ) and XF32; Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (2008), for round-to-odd; of the
maximum AMD's "Instinct MI300", "RDNA3" and "RDNA4" ISA references, V_MAX_F32, V_MAX_NUM_F32, V_MED3_F32, and LLVM's
AMDGPU guide, ".amdhsa_ieee_mode".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState

_LOW = np.uint64((1 << 28) - 1)
_BELOW = np.uint64((1 << 29) - 1)  # the bits of a float64 that a float32 lacks …
_TIE = np.uint64(1 << 28)  # … and those bits half way between two normal float32
_NORMAL = 2.0**-126
_ONE = np.uint64(1)


def sum_to_odd(a: Array, b: Array) -> Array:
    """Return a + b in float64, rounded to odd: an inexact sum has its last bit set, so a second rounding is right."""
    total = a + b
    back = total - a
    rest = (a - (total - back)) + (b - back)
    bits = np.ascontiguousarray(total).view(np.uint64)
    inexact = (rest != 0) & ((bits & _ONE) == 0) & np.isfinite(total)
    # One step towards the rest: away from zero when the rest has the total's sign.
    up = (rest > 0) == (total > 0)
    return np.where(inexact, np.where(up, bits + _ONE, bits - _ONE), bits).view(np.float64)


def fma32(a: Array, b: Array, c: Array) -> Array:
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
    """Return a·b + c in float64 with one rounding, if no intermediate overflows or underflows."""
    a, b, c = np.broadcast_arrays(a, b, c)
    high, low = _two_product(a, b)
    first, rest = _two_sum(c, low)
    total, last = _two_sum(high, first)
    exact = total + sum_to_odd(rest, last)
    plain = a * b + c
    return np.where(np.isfinite(exact), exact, plain)


def bf16_bits(x: Array) -> Array:
    """Return bfloat16 bits (uint32, low half) of float32, to nearest even; NaN becomes quiet."""
    bits = x.view(np.uint32)
    rounded = (bits.astype(np.uint64) + np.uint64(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint64(16)
    return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded.astype(np.uint32))


def bf16_bits_of_double(x: Array) -> Array:
    """Return bfloat16 bits (uint32, low half) of float64, rounded once to nearest even; NaN becomes quiet."""
    unit = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 8, -133))  # of the last of 8 bits, or of a denormal
    return bf16_bits((np.rint(x / unit) * unit).astype(np.float32))


def to_half(x: Array) -> Array:
    """Return float16 of float32, to nearest even; NaN becomes quiet, which numpy leaves as it is."""
    half, nan = np.ascontiguousarray(x.astype(np.float16)), np.isnan(x)
    if nan.any():
        half = np.where(nan, half.view(np.uint16) | np.uint16(0x200), half.view(np.uint16)).view(np.float16)
    return half


def from_half(x: Array) -> Array:
    single, nan = np.ascontiguousarray(x.astype(np.float32)), np.isnan(x)
    if nan.any():
        single = np.where(nan, single.view(np.uint32) | np.uint32(0x400000), single.view(np.uint32)).view(np.float32)
    return single


def f16_bits(x: Array) -> Array:
    return to_half(x).view(np.uint16).astype(np.uint32)


def f16_bits_to_zero(x: Array) -> Array:
    """Return float16 bits (uint32) of float32, towards zero; finite values stay finite."""
    half = to_half(x)
    bits = half.view(np.uint16).astype(np.uint32)
    beyond = np.abs(half.astype(np.float32)) > np.abs(x)
    return bits - beyond.astype(np.uint32)


def xf32(x: Array) -> Array:
    """Return float32 as the xf32 matrix instructions read it: 10 bits of mantissa, rounded to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0xFFF) + ((bits >> np.uint64(13)) & _ONE)) & np.uint64(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.astype(np.uint32), x.view(np.uint32)).astype(np.uint32).view(np.float32)


# The 16 values of fp4 (E2M1, OCP Microscaling Formats): its low three bits, then its sign.
FP4 = np.array([sign * x for sign in (1.0, -1.0) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)], np.float32)


@cache
def fp8_table(kind: str, fnuz: bool) -> Array:
    """Return the 256 values of "fp8" (E4M3) or "bf8" (E5M2); FNUZ: bias one larger, no infinities or -0, NaN 0x80."""
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

    Overflow gives infinity if the format has one, else NaN; with `saturate` (MODE.FP16_OVFL) the largest finite value,
    for infinities too. Source: MI300 ISA reference, V_CVT_PK_FP8_F32; LLVM AMDGPU guide, FP16_OVFL."""
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


Pick = Callable[[Array, Array], Array]
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_QUIET = {2: 1 << 9, 4: 1 << 22, 8: 1 << 51}  # the highest bit of the mantissa


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(_UNSIGNED[x.dtype.itemsize])


def _quieted(bits: Array) -> Array:
    return bits | bits.dtype.type(_QUIET[bits.dtype.itemsize])


def _of_nan(a: Array, b: Array, family: int, ieee: bool) -> Array:
    x, y, nan_a, nan_b = _bits(a), _bits(b), np.isnan(a), np.isnan(b)
    if family == 12:
        return np.where(nan_a & nan_b, _quieted(x), np.where(nan_a, y, x))
    # Of two NaN, gfx9 takes the second and gfx11 the first.
    chosen = np.where(nan_a, y, x) if family == 9 else np.where(nan_b, x, y)
    if not ieee:
        return chosen
    quiet = x.dtype.type(_QUIET[x.dtype.itemsize])
    chosen = np.where(nan_b & ((y & quiet) == 0), _quieted(y), chosen)
    return np.where(nan_a & ((x & quiet) == 0), _quieted(x), chosen)


def _pick(largest: bool, family: int, ieee: bool) -> Pick:
    plain = np.fmax if largest else np.fmin

    def pick(a: Array, b: Array) -> Array:
        result = plain(a, b)
        differ = (a < b) | (a > b)
        if differ.all():
            return result
        a, b = np.broadcast_arrays(a, b)
        zeros = (a == 0) & (b == 0)
        if zeros.any():
            signs = _bits(a) & _bits(b) if largest else _bits(a) | _bits(b)
            result = np.where(zeros, signs.view(result.dtype), result)
        nan = np.isnan(a) | np.isnan(b)
        if nan.any():
            result = np.where(nan, _of_nan(a, b, family, ieee).view(result.dtype), result)
        return result

    return pick


def _propagating(largest: bool) -> Pick:
    """V_MAXIMUM, V_MINIMUM (gfx12): NaN wins, made quiet; of two, a signalling one, else the first."""
    number = _pick(largest, 12, False)

    def pick(a: Array, b: Array) -> Array:
        result = number(a, b)
        nan = np.isnan(a) | np.isnan(b)
        if nan.any():
            a, b = np.broadcast_arrays(a, b)
            x, y = _bits(a), _bits(b)
            first = np.isnan(a) & ((_quieted(x) != x) | ~(np.isnan(b) & (_quieted(y) != y)))
            result = np.where(nan, _quieted(np.where(first, x, y)).view(result.dtype), result)
        return result

    return pick


def _median(largest: Pick, smallest: Pick) -> Callable[..., Array]:
    """Return the median; with a NaN among them the smallest of the three, as documented."""

    def median(a: Array, b: Array, c: Array) -> Array:
        top = largest(largest(a, b), c)
        picked = np.where(top == a, largest(b, c), np.where(top == b, largest(a, c), largest(a, b)))
        nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
        return np.where(nan, smallest(smallest(a, b), c), picked) if nan.any() else picked

    return median


# name without its type → (sources, function of the maximum and the minimum)
_SHAPES: dict[str, tuple[int, Callable[[Pick, Pick], Callable[..., Array]]]] = {
    "max": (2, lambda high, low: high), "min": (2, lambda high, low: low),
    "max3": (3, lambda high, low: lambda a, b, c: high(high(a, b), c)),
    "min3": (3, lambda high, low: lambda a, b, c: low(low(a, b), c)),
    "maxmin": (3, lambda high, low: lambda a, b, c: low(high(a, b), c)),
    "minmax": (3, lambda high, low: lambda a, b, c: high(low(a, b), c)),
    "med3": (3, _median),
}  # fmt: skip
_MAXIMUM = {"maximum": "max", "minimum": "min", "maximum3": "max3", "minimum3": "min3", "maximumminimum": "maxmin",
            "minimummaximum": "minmax"}  # fmt: skip
_KINDS = {"f16": "h", "f32": "f", "f64": "d"}


def _parts(name: str) -> tuple[str, str, bool] | None:
    """Parse "max3_num_f32" to ("max3", "f", whether NaN wins)."""
    word, _, kind = name.replace("_num_", "_").partition("_")
    if kind not in _KINDS or (word not in _SHAPES and word not in _MAXIMUM):
        return None
    return _MAXIMUM.get(word, word), _KINDS[kind], word in _MAXIMUM


def is_extreme(name: str) -> bool:
    return _parts(name) is not None


def extreme_entry(state: WorkGroupState, name: str) -> tuple[str, str, Callable[..., Array]]:
    """Return (type written, types read, function) of an instruction that is `known`, in a state's chip and mode."""
    parts = _parts(name)
    assert parts is not None, name
    shape, kind, nan_wins = parts
    count, build = _SHAPES[shape]
    if nan_wins:
        return kind, kind * count, build(_propagating(True), _propagating(False))
    family, ieee = state.arch.family, state.ieee
    return kind, kind * count, build(_pick(True, family, ieee), _pick(False, family, ieee))
