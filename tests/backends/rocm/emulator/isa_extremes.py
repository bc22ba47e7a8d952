"""Maxima and minima of floats as AMD's documents define them, each chip with its order of questions about NaN."""

from collections.abc import Callable

from isa_numbers import Format, is_nan, is_signalling, is_zero, negative, order

Pick = Callable[[int, int], int]


def above(f: Format, a: int, b: int, largest: bool) -> bool:
    """Is a the one to take of two numbers? +0 is above −0."""
    if is_zero(f, a) and is_zero(f, b):
        return (negative(f, b) and not negative(f, a)) if largest else (negative(f, a) and not negative(f, b))
    return order(f, a, b) == (1 if largest else -1)


def extreme(f: Format, family: int, largest: bool, ieee: bool) -> Pick:
    """V_MAX and V_MIN of gfx9 and gfx11, V_MAX_NUM and V_MIN_NUM of gfx12."""

    def older(swapped: bool) -> Pick:
        def pick(a: int, b: int) -> int:
            for x in (a, b):
                if ieee and is_signalling(f, x):
                    return x | f.quiet
            for asked, other in ((b, a), (a, b)) if swapped else ((a, b), (b, a)):
                if is_nan(f, asked):
                    return other
            return a if above(f, a, b, largest) or (not swapped and a == b) else b

        return pick

    def gfx12(a: int, b: int) -> int:
        if is_nan(f, a) and is_nan(f, b):
            return a | f.quiet
        if is_nan(f, a):
            return b
        if is_nan(f, b):
            return a
        return a if above(f, a, b, largest) else b

    return {9: older(False), 11: older(True), 12: gfx12}[family]


def propagating(f: Format, largest: bool) -> Pick:
    """V_MAXIMUM and V_MINIMUM of gfx12: NaN wins."""

    def pick(a: int, b: int) -> int:
        for asked in (lambda x: is_signalling(f, x), lambda x: is_nan(f, x)):
            for x in (a, b):
                if asked(x):
                    return x | f.quiet
        return a if above(f, a, b, largest) else b

    return pick


def median(f: Format, high: Pick, low: Pick) -> Callable[[int, int, int], int]:
    """V_MED3: the smallest where one is NaN; else the largest two's smaller one."""

    def pick(a: int, b: int, c: int) -> int:
        if is_nan(f, a) or is_nan(f, b) or is_nan(f, c):
            return low(low(a, b), c)
        top = high(high(a, b), c)
        if order(f, top, a) == 0:
            return high(b, c)
        if order(f, top, b) == 0:
            return high(a, c)
        return high(a, b)

    return pick
