"""What AMD's ISA documents say that vector instructions compute, lane by lane, on bit patterns. Written from the
pseudocode of the CDNA, RDNA3 and RDNA4 ISA references, and from nothing of the model. Kinds of operands: u16, u32, u64
integers (signed ones too: bits are bits); f16, bf16, f32 floats; f16x2, bf16x2, f32x2, fp8x2, bf8x2 two, low first."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import isa_extremes
import isa_numbers as number
from isa_numbers import BF16, F16, F32, M16, M32, M64, NAN, Format, extended, field, signed

# (kind written, kinds read, definition). The definition gives bits, isa_numbers.NAN, or two of them for x2 kinds.
Entry = tuple[str, str, Callable[..., Any]]

INTEGER: dict[str, Entry] = {
    "mov_b32": ("u32", "u32", lambda a: a), "mov_b64": ("u64", "u64", lambda a: a),
    "accvgpr_read_b32": ("u32", "u32", lambda a: a), "accvgpr_write_b32": ("u32", "u32", lambda a: a),
    "accvgpr_mov_b32": ("u32", "u32", lambda a: a),
    "not_b32": ("u32", "u32", lambda a: ~a), "bfrev_b32": ("u32", "u32", lambda a: int(f"{a:032b}"[::-1], 2)),
    "add_u32": ("u32", "u32 u32", lambda a, b: a + b), "sub_u32": ("u32", "u32 u32", lambda a, b: a - b),
    "subrev_u32": ("u32", "u32 u32", lambda a, b: b - a), "mul_lo_u32": ("u32", "u32 u32", lambda a, b: a * b),
    "and_b32": ("u32", "u32 u32", lambda a, b: a & b), "or_b32": ("u32", "u32 u32", lambda a, b: a | b),
    "xor_b32": ("u32", "u32 u32", lambda a, b: a ^ b), "lshlrev_b32": ("u32", "u32 u32", lambda a, b: b << (a & 31)),
    "lshrrev_b32": ("u32", "u32 u32", lambda a, b: b >> (a & 31)),
    "ashrrev_i32": ("u32", "u32 u32", lambda a, b: signed(b) >> (a & 31)),
    "lshlrev_b16": ("u16", "u16 u16", lambda a, b: b << (a & 15)),
    "lshrrev_b16": ("u16", "u16 u16", lambda a, b: b >> (a & 15)),
    "ashrrev_i16": ("u16", "u16 u16", lambda a, b: signed(b, 16) >> (a & 15)),
    "pk_lshlrev_b16": ("u32", "u32 u32", lambda a, b: (b << (a & 15)) & 0xFFFF | ((b >> 16) << (a >> 16 & 15)) << 16),
    "pk_mul_f16": ("f16x2", "u32 u32", lambda a, b: tuple(
        number.multiply(F16, field(a, n, 16), field(b, n, 16)) for n in (0, 16))),
    "lshrrev_b64": ("u64", "u32 u64", lambda a, b: b >> (a & 63)),
    "lshlrev_b64": ("u64", "u32 u64", lambda a, b: b << (a & 63)), "min_u32": ("u32", "u32 u32", min),
    "mul_hi_u32": ("u32", "u32 u32", lambda a, b: a * b >> 32),
    "ashrrev_i64": ("u64", "u32 u64", lambda a, b: (b - ((b >> 63) << 64)) >> (a & 63)),
    "lshl_add_u64": ("u64", "u64 u32 u64", lambda a, b, c: (a << (b & 7)) + c),
    "mul_i32_i24": ("u32", "u32 u32", lambda a, b: signed(a, 24) * signed(b, 24)),
    "mul_u32_u24": ("u32", "u32 u32", lambda a, b: field(a, 0, 24) * field(b, 0, 24)),
    "mad_i32_i24": ("u32", "u32 u32 u32", lambda a, b, c: signed(a, 24) * signed(b, 24) + signed(c)),
    "mad_u32_u24": ("u32", "u32 u32 u32", lambda a, b, c: field(a, 0, 24) * field(b, 0, 24) + c),
    "add3_u32": ("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
    "add_lshl_u32": ("u32", "u32 u32 u32", lambda a, b, c: field(a + b, 0, 32) << (c & 31)),
    "lshl_add_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a << (b & 31)) + c),
    "lshl_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: a << (b & 31) | c),
    "and_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: a & b | c),
    "or3_b32": ("u32", "u32 u32 u32", lambda a, b, c: a | b | c),
    "xor3_b32": ("u32", "u32 u32 u32", lambda a, b, c: a ^ b ^ c),
    "xad_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "bfi_b32": ("u32", "u32 u32 u32", lambda a, b, c: a & b | ~a & c),
    "bfe_u32": ("u32", "u32 u32 u32", lambda a, b, c: field(a, b & 31, c & 31)),
    "bfe_i32": ("u32", "u32 u32 u32", lambda a, b, c: extended(signed(a) >> (b & 31), c & 31)),
    "alignbit_b32": ("u32", "u32 u32 u32", lambda a, b, c: field(a << 32 | b, c & 31, 32)),
    "max_u32": ("u32", "u32 u32", max), "max_i32": ("u32", "u32 u32", lambda a, b: max(signed(a), signed(b))),
    "min_i32": ("u32", "u32 u32", lambda a, b: min(signed(a), signed(b))),
    "min3_i32": ("u32", "u32 u32 u32", lambda a, b, c: min(signed(a), signed(b), signed(c))),
    "maxmin_i32": ("u32", "u32 u32 u32", lambda a, b, c: min(max(signed(a), signed(b)), signed(c))),
    "minmax_i32": ("u32", "u32 u32 u32", lambda a, b, c: max(min(signed(a), signed(b)), signed(c))),
    "pack_b32_f16": ("u32", "u16 u16", lambda a, b: a | b << 16), "xnor_b32": ("u32", "u32 u32", lambda a, b: ~(a ^ b)),
    "mul_hi_i32": ("u32", "u32 u32", lambda a, b: signed(a) * signed(b) >> 32),
    "alignbyte_b32": ("u32", "u32 u32 u32", lambda a, b, c: field(a << 32 | b, 8 * (c & 3), 32)),
    "bfm_b32": ("u32", "u32 u32", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "bcnt_u32_b32": ("u32", "u32 u32", lambda a, b: a.bit_count() + b),
    "max3_u32": ("u32", "u32 u32 u32", max), "min3_u32": ("u32", "u32 u32 u32", min),
    "max3_i32": ("u32", "u32 u32 u32", lambda *x: max(map(signed, x))),
    "med3_u32": ("u32", "u32 u32 u32", lambda *x: sorted(x)[1]),
    "med3_i32": ("u32", "u32 u32 u32", lambda *x: sorted(map(signed, x))[1]),
    "clz_i32_u32": ("u32", "u32", lambda a: 32 - a.bit_length() if a else M32),
    "ctz_i32_b32": ("u32", "u32", lambda a: (a & -a).bit_length() - 1 if a else M32),
    "ffbh_i32": ("u32", "u32", lambda a: 32 - (a ^ -(a >> 31) & M32).bit_length() if a not in (0, M32) else M32),
}  # fmt: skip


def perm_b32(a: int, b: int, selector: int) -> int:
    """Each byte of the selector names one of {a, b}'s bytes, or a constant."""
    both, result = a << 32 | b, 0
    for n in range(4):
        chosen = field(selector, 8 * n, 8)
        if chosen <= 7:
            byte = field(both, 8 * chosen, 8)
        elif chosen <= 11:  # the signs of bytes 1, 3, 5 and 7
            byte = 255 * field(both, 16 * (chosen - 8) + 15, 1)
        else:
            byte = 0 if chosen == 12 else 255
        result |= byte << 8 * n
    return result


def dot2_f32_f16(a: int, b: int, c: int) -> int:
    """Two products of halves: the lower is added to the addend, then the higher; each operation rounds to float32."""
    total = c
    for n in (0, 16):
        x, y = (number.convert(F16, F32, field(s, n, 16)) for s in (a, b))
        total = number.add(F32, total, number.multiply(F32, x, y))
    return total


def dot2_bf16_bf16(a: int, b: int, c: int) -> int:
    """As dot2_f32_f16, of bf16: `tmp` is one too, so that each operation rounds to it."""
    total = c
    for n in (0, 16):
        total = number.add(BF16, total, number.multiply(BF16, field(a, n, 16), field(b, n, 16)))
    return total


class _E4M3(Format):
    """OCP's fp8: its highest exponent holds numbers too, up to 448, and one NaN; no infinity."""

    infinity = 0x7E  # type: ignore[assignment] # the largest number


FP8, BF8 = _E4M3(8, 3), Format(8, 2)
NARROW = {"fp8": FP8, "bf8": BF8, "f16": F16, "bf16": BF16, "f32": F32}


def narrowed(name: str, scale: int, x: int, source: Format) -> int:
    """f32_to_fp8_scale and its like: x / 2^(exponent of the scale − 127), rounded once."""
    f = NARROW[name]
    if number.is_nan(source, x):
        return NAN
    sign = f.sign if number.negative(source, x) else 0
    if number.is_infinite(source, x):
        return NAN if f is FP8 else sign | f.infinity
    value = number.exact(source, x) / Fraction(2) ** (number.exponent(F32, scale) - 127)
    return NAN if f is FP8 and abs(value) > 464 else number.rounded(f, value, sign)  # 464: half way beyond 448


def widened(name: str, scale: int, x: int, target: Format) -> int:
    """fp8_to_f32_scale and its like."""
    power = Fraction(2) ** (number.exponent(F32, scale) - 127)
    if name == "fp4":
        value = Fraction((0, 1, 2, 3, 4, 6, 8, 12)[x & 7], 2) * (-1 if x & 8 else 1)
        return number.rounded(target, value * power, target.sign if x & 8 else 0)
    f = NARROW[name]
    if number.is_nan(f, x):
        return NAN
    sign = target.sign if number.negative(f, x) else 0
    if f is BF8 and number.is_infinite(f, x):
        return sign | target.infinity
    return number.rounded(target, number.exact(f, x) * power, sign)


def _scaled() -> dict[str, Entry]:
    """V_CVT_SCALEF32_PK_…: the low half of fp8 sources, the low byte of fp4 ones; op_sel has a test of its own."""

    def from_narrow(name: str, width: int, target: Format) -> Callable[..., Any]:
        return lambda a, s: tuple(widened(name, s, field(a, width * n, width), target) for n in range(2))

    def from_halves(name: str, source: Format) -> Callable[..., Any]:
        return lambda a, s: tuple(narrowed(name, s, field(a, 16 * n, 16), source) for n in range(2))

    def from_singles(name: str) -> Callable[..., Any]:
        return lambda a, b, s: (narrowed(name, s, a, F32), narrowed(name, s, b, F32))

    found: dict[str, Entry] = {}
    for wide in ("f32", "f16", "bf16"):
        for name, width in (("fp8", 8), ("bf8", 8), ("fp4", 4)):
            function = from_narrow(name, width, NARROW[wide])
            found[f"cvt_scalef32_pk_{wide}_{name}"] = (f"{wide}x2", "u32 f32", function)
    for name in ("fp8", "bf8"):
        found[f"cvt_scalef32_pk_{name}_f32"] = (f"{name}x2", "f32 f32 f32", from_singles(name))
        for half in ("f16", "bf16"):
            found[f"cvt_scalef32_pk_{name}_{half}"] = (f"{name}x2", "u32 f32", from_halves(name, NARROW[half]))
    return found


def _fract(a: int) -> int:
    """S0 − floor(S0), and never 1: the greatest number below 1 (the clamp that the instruction's text names)."""
    if number.is_nan(F32, a) or number.is_infinite(F32, a):
        return number.NAN
    value = number.exact(F32, a)
    whole = value.numerator // value.denominator
    return min(number.rounded(F32, value - whole), 0x3F7FFFFF)


FLOAT: dict[str, Entry] = {
    "add_f32": ("f32", "f32 f32", lambda a, b: number.add(F32, a, b)),
    "sub_f32": ("f32", "f32 f32", lambda a, b: number.subtract(F32, a, b)),
    "subrev_f32": ("f32", "f32 f32", lambda a, b: number.subtract(F32, b, a)),
    "mul_f32": ("f32", "f32 f32", lambda a, b: number.multiply(F32, a, b)),
    "fma_f32": ("f32", "f32 f32 f32", lambda a, b, c: number.fma(F32, a, b, c)),
    "rcp_f32": ("f32", "f32", lambda a: number.divide(F32, 0x3F800000, a)),
    "rcp_iflag_f32": ("f32", "f32", lambda a: number.divide(F32, 0x3F800000, a)),
    "exp_f32": ("f32", "f32", lambda a: number.power_of_two(F32, a)),
    "log_f32": ("f32", "f32", lambda a: number.logarithm(F32, a)),
    "ldexp_f32": ("f32", "f32 u32", lambda a, b: number.scale(F32, a, signed(b))), "fract_f32": ("f32", "f32", _fract),
    "cvt_f16_f32": ("f16", "f32", lambda a: number.convert(F32, F16, a)),
    "cvt_f32_f16": ("f32", "f16", lambda a: number.convert(F16, F32, a)),
    "cvt_f32_u32": ("f32", "u32", lambda a: number.rounded(F32, number.Fraction(a))),
    "cvt_f32_i32": ("f32", "u32", lambda a: number.rounded(F32, number.Fraction(signed(a)))),
    "sqrt_f32": ("f32", "f32", lambda a: number.root(F32, a)),
    "rsq_f32": ("f32", "f32", lambda a: number.root(F32, a, inverse=True)),
    "rndne_f32": ("f32", "f32", lambda a: number.whole(F32, a, round)),
    "floor_f32": ("f32", "f32", lambda a: number.whole(F32, a, math.floor)),
    "ceil_f32": ("f32", "f32", lambda a: number.whole(F32, a, math.ceil)),
    "trunc_f32": ("f32", "f32", lambda a: number.whole(F32, a, math.trunc)),
    **{f"cvt_f32_ubyte{n}": ("f32", "u32", lambda a, n=n: number.rounded(F32, number.Fraction(field(a, 8 * n, 8))))
       for n in range(4)},
    "cvt_u32_f32": ("u32", "f32", lambda a: number.to_integer(F32, a, 0, M32)),
    "cvt_pk_f16_f32": ("f16x2", "f32 f32", lambda a, b: (number.convert(F32, F16, a), number.convert(F32, F16, b))),
    "cvt_pk_bf16_f32": ("bf16x2", "f32 f32", lambda a, b: (number.convert(F32, BF16, a), number.convert(F32, BF16, b))),
    "dot2_f32_f16": ("f32", "u32 u32 f32", dot2_f32_f16),
    "dot2_bf16_bf16": ("bf16", "u32 u32 bf16", dot2_bf16_bf16), **_scaled(),
}  # fmt: skip

# Instructions whose destination is also their last source.
ACCUMULATING = {"fmac_f32": "fma_f32", "dot2acc_f32_f16": "dot2_f32_f16"}
RENAMED = {"add_nc_u32": "add_u32", "sub_nc_u32": "sub_u32", "subrev_nc_u32": "subrev_u32",
           "ffbh_u32": "clz_i32_u32", "ffbl_b32": "ctz_i32_b32"}  # fmt: skip


def _extremes(family: int, ieee: bool) -> dict[str, Entry]:
    high, low = (isa_extremes.extreme(F32, family, largest, ieee) for largest in (True, False))
    tag = "_num" if family == 12 else ""
    two, three = "f32 f32", "f32 f32 f32"
    found: dict[str, Entry] = {
        f"max{tag}_f32": ("f32", two, high), f"min{tag}_f32": ("f32", two, low),
        f"max3{tag}_f32": ("f32", three, lambda a, b, c: high(high(a, b), c)),
        f"min3{tag}_f32": ("f32", three, lambda a, b, c: low(low(a, b), c)),
        f"med3{tag}_f32": ("f32", three, isa_extremes.median(F32, high, low)),
    }  # fmt: skip
    if family != 9:
        found[f"maxmin{tag}_f32"] = ("f32", three, lambda a, b, c: low(high(a, b), c))
        found[f"minmax{tag}_f32"] = ("f32", three, lambda a, b, c: high(low(a, b), c))
    if family == 12:
        found["maximum_f32"] = ("f32", two, isa_extremes.propagating(F32, True))
        found["minimum_f32"] = ("f32", two, isa_extremes.propagating(F32, False))
    return found


@cache
def defined(family: int, ieee: bool = True) -> dict[str, Entry]:
    """name (without "v_" and the encoding) → definition, on chips of a family (9, 11 or 12) in a mode."""
    found = INTEGER | FLOAT | _extremes(family, ieee) | {"perm_b32": ("u32", "u32 u32 u32", perm_b32)}
    return found | {new: found[old] for new, old in (RENAMED | ACCUMULATING).items()}


def masked(kind: str, value: Any) -> Any:
    """A definition's result with the kind's width; NAN stays what it is."""
    if isinstance(value, tuple):
        return tuple(masked(kind.removesuffix("x2"), part) for part in value)
    if kind[0] == "u":
        return value & {"u16": M16, "u32": M32, "u64": M64}[kind]
    return value


FORMATS = NARROW


def agrees(kind: str, found: int, expected: Any) -> bool:
    """Are these the bits that a definition asks for, or a quiet NaN where it asks for any?"""
    if isinstance(expected, tuple):
        part = kind.removesuffix("x2")
        width = FORMATS[part].width
        return all(agrees(part, field(found, width * n, width), value) for n, value in enumerate(expected))
    if expected == number.NAN and kind in FORMATS:
        f = FORMATS[kind]
        return number.is_nan(f, found) and not number.is_signalling(f, found)
    return bool(found == expected)
