"""What AMD's ISA documents say of vector instructions that read or write a bit a lane, or depend on a modifier:
comparisons, selects, carries, divisions, mixed precision, truth tables, packed pairs. Written like isa_vector.py."""

from collections.abc import Callable

import isa_numbers as number
from isa_numbers import F16, F32, M32, field, signed

QUIET_NAN = 0xFFC00000  # of 0/0 and inf/inf


def _ordered(test: Callable[[int], bool]) -> Callable[[int | None], bool]:
    return lambda order: order is not None and test(order)


# Of the order of two operands (−1, 0, 1), None where one is NaN.
PREDICATES: dict[str, Callable[[int | None], bool]] = {
    "lt": _ordered(lambda o: o < 0), "eq": _ordered(lambda o: o == 0), "le": _ordered(lambda o: o <= 0),
    "gt": _ordered(lambda o: o > 0), "ge": _ordered(lambda o: o >= 0), "lg": _ordered(lambda o: o != 0),
    "ne": _ordered(lambda o: o != 0), "o": lambda o: o is not None, "u": lambda o: o is None,
}  # fmt: skip
PREDICATES |= {f"n{name}": (lambda o, p=PREDICATES[name]: not p(o)) for name in ("lt", "eq", "le", "gt", "ge", "lg")}


def compare(predicate: str, kind: str, a: int, b: int) -> bool:
    """V_CMP, S_CMP: kind is i16 … u64, f32."""
    if kind == "f32":
        return PREDICATES[predicate](number.order(F32, a, b))
    width = int(kind[1:])
    x, y = (signed(n, width) if kind[0] == "i" else field(n, 0, width) for n in (a, b))
    return PREDICATES[predicate]((x > y) - (x < y))


def cmp_class_f32(a: int, wanted: int) -> bool:
    """V_CMP_CLASS_F32: is the operand of a class whose bit is set?"""
    down = number.negative(F32, a)
    if number.is_nan(F32, a):
        bit = 0 if number.is_signalling(F32, a) else 1
    elif number.is_infinite(F32, a):
        bit = 2 if down else 9
    elif number.exponent(F32, a) > 0:
        bit = 3 if down else 8
    elif not number.is_zero(F32, a):
        bit = 4 if down else 7
    else:
        bit = 5 if down else 6
    return bool(wanted >> bit & 1)


# name → definition of (result, carry out); the carry in comes third. Of a difference the carry is the borrow.
CARRIES: dict[str, Callable[[int, int, int], tuple[int, int]]] = {
    "add_co_u32": lambda a, b, _: (a + b, a + b > M32), "addc_co_u32": lambda a, b, c: (a + b + c, a + b + c > M32),
    "sub_co_u32": lambda a, b, _: (a - b, b > a), "add_co_ci_u32": lambda a, b, c: (a + b + c, a + b + c > M32),
    "subb_co_u32": lambda a, b, c: (a - b - c, b + c > a), "sub_co_ci_u32": lambda a, b, c: (a - b - c, b + c > a),
}  # fmt: skip


def mad_u64_u32(a: int, b: int, c: int) -> tuple[int, int]:
    total = a * b + c
    return field(total, 0, 64), total >> 64


def mad_i64_i32(a: int, b: int, c: int) -> tuple[int, int]:
    """The mask's bit is bit 64 of a sum of 65 bits, its sign; the prose beside the pseudocode names an overflow."""
    total = signed(a) * signed(b) + signed(c, 64)
    return field(total, 0, 64), field(total, 64, 1)


def bitop3(table: int, a: int, b: int, c: int) -> int:
    """Bit n of the result is the table's bit that the three inputs' bits n choose."""
    return sum((table >> (4 * field(a, n, 1) + 2 * field(b, n, 1) + field(c, n, 1)) & 1) << n for n in range(32))


def mixed(value: int, narrow: int, high: int) -> int:
    """A source of V_FMA_MIX as float32 bits."""
    return number.convert(F16, F32, field(value, 16 * high, 16)) if narrow else value


def div_scale_f32(s0: int, s1: int, s2: int) -> tuple[int, int]:
    """V_DIV_SCALE_F32: (the operand, scaled or not; whether V_DIV_FMAS is to scale the quotient). s0 is the denominator
    s1 or the numerator s2. The documents ask whether 1 / S1 is a denormal float64, which it never is for a float32:
    read as of float32, and after the case of a denormal quotient. test_isa_masks.py shows that quotients are then
    correctly rounded."""
    up = number.scale(F32, s0, 64)
    if number.is_zero(F32, s1) or number.is_zero(F32, s2):
        return number.NAN, 0
    if number.exponent(F32, s2) - number.exponent(F32, s1) >= 96:
        return (up if s0 == s1 else s0), 1
    if number.is_denormal(F32, s1):
        return up, 0
    if _denormal_quotient(s2, s1):
        return (up if s0 == s2 else s0), 1
    if not number.is_infinite(F32, s1) and not number.is_nan(F32, s1) and _tiny_inverse(s1):
        return number.scale(F32, s0, -64), 0
    if number.exponent(F32, s2) <= 23:
        return up, 0
    return s0, 0


def _denormal_quotient(n: int, d: int) -> bool:
    """Is n / d below the smallest normal number, before it is rounded?"""
    if any(number.is_nan(F32, x) or number.is_infinite(F32, x) for x in (n, d)):
        return False
    return abs(number.exact(F32, n) / number.exact(F32, d)) < number.Fraction(1, 2**126)


def _tiny_inverse(d: int) -> bool:
    return 1 / abs(number.exact(F32, d)) < number.Fraction(1, 2**126)


def div_fmas_f32(a: int, b: int, c: int, flag: int) -> int:
    """V_DIV_FMAS_F32: a multiply-add, scaled by 2^±64 where the lane's bit of vcc is set. The documents write 2^32,
    which does not undo V_DIV_SCALE's 2^64. Rounded once, after scaling: only then are denormal quotients correctly
    rounded."""
    plain = number.fma(F32, a, b, c)
    if not flag or plain == number.NAN or number.is_infinite(F32, plain) or number.is_infinite(F32, c):
        return plain
    power = 64 if number.exponent(F32, c) > 127 else -64
    value = number.exact(F32, a) * number.exact(F32, b) + number.exact(F32, c)
    return number.rounded(F32, value * number.Fraction(2) ** power, plain) if value else plain


def div_fixup_f32(quotient: int, denominator: int, numerator: int) -> int:
    """V_DIV_FIXUP_F32, but for a quotient that is NaN while both operands are finite: test_isa_masks.py."""
    sign = (denominator ^ numerator) & F32.sign
    for operand in (numerator, denominator):
        if number.is_nan(F32, operand):
            return operand | F32.quiet
    zeros = number.is_zero(F32, denominator), number.is_zero(F32, numerator)
    infinite = number.is_infinite(F32, denominator), number.is_infinite(F32, numerator)
    if all(zeros) or all(infinite):
        return QUIET_NAN
    if zeros[0] or infinite[1]:
        return sign | F32.infinity
    if infinite[0] or zeros[1]:
        return sign
    if number.exponent(F32, numerator) - number.exponent(F32, denominator) < -150:
        return sign
    return sign | number.magnitude(F32, quotient)
