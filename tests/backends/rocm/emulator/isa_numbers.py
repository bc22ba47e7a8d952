"""Floats as bit patterns, computed exactly: the arithmetic under the definitions of isa_vector.py and isa_scalar.py.
Numbers are Python integers (the bits) and fractions; nothing here uses numpy. Every operation rounds once, to nearest
even, keeps denormals and overflows to infinity. What NaN an operation gives, the documents do not say: it is NAN here,
which stands for every quiet NaN."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

NAN = -1  # no bit pattern: "some quiet NaN"
M16, M32, M64 = 2**16 - 1, 2**32 - 1, 2**64 - 1
_DIGITS = Context(prec=60, Emax=10**6, Emin=-(10**6))


@dataclass(frozen=True)
class Format:
    """A binary float format of IEEE 754: `width` bits, `mantissa` of them after the point."""

    width: int
    mantissa: int

    @property
    def bias(self) -> int:
        return (1 << (self.width - self.mantissa - 2)) - 1

    @property
    def infinity(self) -> int:
        return ((1 << (self.width - 1 - self.mantissa)) - 1) << self.mantissa

    @property
    def sign(self) -> int:
        return 1 << (self.width - 1)

    @property
    def quiet(self) -> int:
        return 1 << (self.mantissa - 1)

    @property
    def lowest(self) -> int:
        """Exponent of the lowest bit of a denormal."""
        return 1 - self.bias - self.mantissa


F16, BF16, F32, F64 = Format(16, 10), Format(16, 7), Format(32, 23), Format(64, 52)


def negative(f: Format, x: int) -> bool:
    return bool(x & f.sign)


def magnitude(f: Format, x: int) -> int:
    return x & (f.sign - 1)


def is_nan(f: Format, x: int) -> bool:
    return x == NAN or magnitude(f, x) > f.infinity


def is_signalling(f: Format, x: int) -> bool:
    return x != NAN and is_nan(f, x) and not x & f.quiet


def is_infinite(f: Format, x: int) -> bool:
    return magnitude(f, x) == f.infinity


def is_zero(f: Format, x: int) -> bool:
    return magnitude(f, x) == 0


def is_denormal(f: Format, x: int) -> bool:
    return 0 < magnitude(f, x) < 1 << f.mantissa


def exponent(f: Format, x: int) -> int:
    """The exponent's field."""
    return magnitude(f, x) >> f.mantissa


def exact(f: Format, x: int) -> Fraction:
    """The value of a finite number."""
    field, mantissa = exponent(f, x), x & ((1 << f.mantissa) - 1)
    if field:
        mantissa |= 1 << f.mantissa
    value = Fraction(mantissa) * Fraction(2) ** (max(field, 1) - 1 + f.lowest)
    return -value if negative(f, x) else value


def rounded(f: Format, value: Fraction, zero: int = 0) -> int:
    """The bits of a value, to nearest even; `zero` where it is 0, and a zero of its sign where it rounds to 0."""
    if value == 0:
        return zero
    sign, value = (f.sign, -value) if value < 0 else (0, value)
    top = value.numerator.bit_length() - value.denominator.bit_length()
    if value < Fraction(2) ** top:
        top -= 1
    unit = max(top - f.mantissa, f.lowest)  # exponent of the result's last bit
    scaled = value / Fraction(2) ** unit
    count, rest = divmod(scaled.numerator, scaled.denominator)
    if 2 * rest > scaled.denominator or (2 * rest == scaled.denominator and count & 1):
        count += 1
    # The mantissa's hidden bit adds one to the exponent's field; so does a mantissa that rounded up to a power of two.
    bits = ((unit - f.lowest) << f.mantissa) + count
    return sign | min(bits, f.infinity)


def fma(f: Format, a: int, b: int, c: int) -> int:
    """a·b + c, rounded once."""
    if is_nan(f, a) or is_nan(f, b) or is_nan(f, c):
        return NAN
    sign = (a ^ b) & f.sign
    if is_infinite(f, a) or is_infinite(f, b):
        if is_zero(f, a) or is_zero(f, b) or (is_infinite(f, c) and (c & f.sign) != sign):
            return NAN
        return sign | f.infinity
    if is_infinite(f, c):
        return c
    product, addend = exact(f, a) * exact(f, b), exact(f, c)
    zero = sign if product == 0 and addend == 0 and sign == c & f.sign else 0
    return rounded(f, product + addend, zero)


def add(f: Format, a: int, b: int) -> int:
    return fma(f, a, f.bias << f.mantissa, b)


def subtract(f: Format, a: int, b: int) -> int:
    return add(f, a, b ^ f.sign if b != NAN else b)


def multiply(f: Format, a: int, b: int) -> int:
    return fma(f, a, b, (a ^ b) & f.sign)


def divide(f: Format, a: int, b: int) -> int:
    sign = (a ^ b) & f.sign
    if is_nan(f, a) or is_nan(f, b) or (is_zero(f, a) and is_zero(f, b)) or (is_infinite(f, a) and is_infinite(f, b)):
        return NAN
    if is_infinite(f, a) or is_zero(f, b):
        return sign | f.infinity
    if is_zero(f, a) or is_infinite(f, b):
        return sign
    return rounded(f, exact(f, a) / exact(f, b))


def scale(f: Format, x: int, power: int) -> int:
    """x·2^power, rounded once."""
    if is_nan(f, x):
        return NAN
    if is_infinite(f, x) or is_zero(f, x):
        return x
    return rounded(f, exact(f, x) * Fraction(2) ** max(-2000, min(2000, power)))


def convert(source: Format, target: Format, x: int) -> int:
    if is_nan(source, x):
        return NAN
    sign = target.sign if negative(source, x) else 0
    if is_infinite(source, x):
        return sign | target.infinity
    return rounded(target, exact(source, x), sign)


def to_integer(f: Format, x: int, low: int, high: int) -> int:
    """Towards zero, clamped; NaN gives 0."""
    if is_nan(f, x):
        return 0
    if is_infinite(f, x):
        return low if negative(f, x) else high
    return max(low, min(high, int(exact(f, x))))


def order(f: Format, a: int, b: int) -> int | None:
    """−1, 0 or 1 as a is below, equal to or above b; None with NaN."""
    if is_nan(f, a) or is_nan(f, b):
        return None
    x, y = (-magnitude(f, n) if negative(f, n) else magnitude(f, n) for n in (a, b))
    return (x > y) - (x < y)


def power_of_two(f: Format, x: int) -> int:
    """2^x, rounded from 60 digits."""
    if is_nan(f, x):
        return NAN
    if is_infinite(f, x):
        return 0 if negative(f, x) else x
    value = exact(f, x)
    if abs(value) > 2000:
        return f.infinity if value > 0 else 0
    digits = _DIGITS.divide(Decimal(value.numerator), Decimal(value.denominator))
    return rounded(f, Fraction(_DIGITS.power(Decimal(2), digits)))


def root(f: Format, x: int, inverse: bool = False) -> int:
    """√x or 1/√x, rounded from 60 digits."""
    if is_nan(f, x) or (negative(f, x) and not is_zero(f, x)):
        return NAN
    if is_zero(f, x) or is_infinite(f, x):
        return (x ^ f.infinity) if inverse else x
    value = exact(f, x)
    digits = _DIGITS.sqrt(_DIGITS.divide(Decimal(value.numerator), Decimal(value.denominator)))
    return rounded(f, Fraction(_DIGITS.divide(Decimal(1), digits) if inverse else digits))


def whole(f: Format, x: int, rounding: Callable[[Fraction], int]) -> int:
    """A whole number near x, with the sign of x where it is zero."""
    if is_nan(f, x):
        return NAN
    return x if is_infinite(f, x) else rounded(f, Fraction(rounding(exact(f, x))), x & f.sign)


def logarithm(f: Format, x: int) -> int:
    """log₂ x, rounded from 60 digits."""
    if is_nan(f, x) or (negative(f, x) and not is_zero(f, x)):
        return NAN
    if is_zero(f, x):
        return f.sign | f.infinity
    if is_infinite(f, x):
        return x
    value = exact(f, x)
    digits = _DIGITS.divide(Decimal(value.numerator), Decimal(value.denominator))
    return rounded(f, Fraction(_DIGITS.divide(_DIGITS.ln(digits), _DIGITS.ln(Decimal(2)))))


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def field(x: int, first: int, bits: int) -> int:
    """Bits of a signed or unsigned integer from `first` on."""
    return (x >> first) & ((1 << bits) - 1)


def extended(x: int, bits: int) -> int:
    """The low bits of x as a signed number; 0 for no bits."""
    return signed(x, bits) if bits else 0
