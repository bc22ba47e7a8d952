"""Values of the pseudocode that isa_pseudocode.py interprets: bits with a width and a kind, and the functions that
texts call by name."""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import isa_numbers as number
from isa_numbers import BF16, F16, F32, F64, NAN, Format

FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
BY_WIDTH = {16: F16, 32: F32, 64: F64}


class NotUnderstood(Exception):
    """The text has something that this interpreter does not know."""


@dataclass(frozen=True)
class Value:
    """Bits of a width; kind "u", "i", "b" or "f" ("h" is bfloat16). `signed_zero`: a literal +0.0 or −0.0."""

    bits: int
    width: int
    kind: str
    signed_zero: bool = False

    @property
    def integer(self) -> int:
        return number.signed(self.bits, self.width) if self.kind == "i" else self.bits

    @property
    def format(self) -> Format:
        return BF16 if self.kind == "h" else BY_WIDTH[self.width]

    @property
    def true(self) -> bool:
        return self.bits != 0


def of(value: int, width: int, kind: str) -> Value:
    return Value(value if value == NAN and kind in "fh" else value & ((1 << width) - 1), width, kind)


def boolean(x: object) -> Value:
    return Value(int(bool(x)), 1, "u")


def view(value: Value, suffix: str) -> Value:
    """value.f32 and the like: the low bits as another kind."""
    kind, width = ("h", 16) if suffix == "bf16" else (suffix[0], int(suffix[1:]))
    if value.bits == NAN:
        return Value(NAN, width, kind)
    bits = value.integer if value.kind == "i" and kind == "i" else value.bits
    return of(bits, width, kind)


def resized(value: Value, f: Format) -> Value:
    """A float in another format; NaN keeps its payload, and a signalling one stays so."""
    source = value.format
    if value.bits == NAN or not number.is_nan(source, value.bits):
        return Value(number.convert(source, f, value.bits), f.width, "f")
    mantissa, shift = value.bits & ((1 << source.mantissa) - 1), f.mantissa - source.mantissa
    mantissa = mantissa << shift if shift >= 0 else mantissa >> -shift
    return Value((f.sign if number.negative(source, value.bits) else 0) | f.infinity | mantissa, f.width, "f")


# Rounding is to nearest even: what underflows is 0, what overflows infinite.
CONSTANTS = {"UNDERFLOW_F32": Value(0, 32, "f"), "OVERFLOW_F32": Value(F32.infinity, 32, "f")}


def literal(token: str) -> Value:
    if re.fullmatch(r"\d+\.\d+F?", token):
        if token.endswith("F"):
            return Value(int.from_bytes(struct.pack("<f", float(token[:-1])), "little"), 32, "f")
        return Value(int.from_bytes(struct.pack("<d", float(token)), "little"), 64, "f")
    width = 64 if token.endswith("LL") else 32
    value = int(token.rstrip("UL"), 0)
    return of(value, max(width, value.bit_length()), "u" if "U" in token or token.startswith("0x") else "i")


def _from(source: Format, target: Format) -> Callable[[Value], Value]:
    return lambda x: Value(number.convert(source, target, x.bits), target.width, "h" if target is BF16 else "f")


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "signext": lambda x: of(number.signed(x.bits, x.width), 64, "i"),
    "signext_from_bit": lambda x, n: of(number.extended(x.bits, n.integer), x.width, "i"),
    "isNAN": lambda x: boolean(number.is_nan(x.format, x.bits)),
    "isSignalNAN": lambda x: boolean(number.is_signalling(x.format, x.bits)),
    "isQuietNAN": lambda x: boolean(number.is_nan(x.format, x.bits) and not number.is_signalling(x.format, x.bits)),
    "cvtToQuietNAN": lambda x: Value(x.bits | x.format.quiet, x.width, "f"),
    "sign": lambda x: Value(int(number.negative(x.format, x.bits)), 1, "u"),
    "abs": lambda x: Value(number.magnitude(x.format, x.bits), x.width, "f"),
    "exponent": lambda x: of(number.exponent(x.format, x.bits), 32, "i"),
    "fma": lambda a, b, c: Value(number.fma(F32, a.bits, b.bits, c.bits), 32, "f"),
    "ldexp": lambda x, n: Value(number.scale(x.format, x.bits, n.integer), x.width, "f"),
    "pow": lambda a, b: Value(number.power_of_two(F32, b.bits), 32, "f"),
    "log2": lambda x: Value(number.logarithm(F32, x.bits), 32, "f"), "floor": lambda x: Value(_floor(x.bits), 32, "f"),
    "f32_to_f16": _from(F32, F16), "f16_to_f32": _from(F16, F32), "f32_to_bf16": _from(F32, BF16),
    "u32_to_f32": lambda x: Value(number.rounded(F32, number.Fraction(x.bits)), 32, "f"),
    "i32_to_f32": lambda x: Value(number.rounded(F32, number.Fraction(x.integer)), 32, "f"),
    "f32_to_u32": lambda x: of(number.to_integer(F32, x.bits, 0, number.M32), 32, "u"),
}  # fmt: skip


def _floor(bits: int) -> int:
    if number.is_nan(F32, bits) or number.is_infinite(F32, bits):
        return NAN if number.is_nan(F32, bits) else bits
    value = number.exact(F32, bits)
    return number.rounded(F32, number.Fraction(value.numerator // value.denominator), bits & F32.sign)
