"""What AMD's ISA documents say of scalar instructions: the result and scc. Written like isa_vector.py."""

from collections.abc import Callable
from functools import cache
from typing import Any

import isa_extremes
import isa_numbers as number
from isa_numbers import F16, F32, M32, M64, extended, field, signed

KEEPS = None  # scc is left alone
# (kind written, kinds read, definition of (result, scc) from the sources, scc and the destination's old value)
Entry = tuple[str, str, Callable[..., tuple[int, Any]]]


def fits(x: int) -> bool:
    return -(2**31) <= x < 2**31


def nonzero(mask: int, value: int) -> tuple[int, bool]:
    return value & mask, value & mask != 0


def two(kind: str, definition: Callable[[int, int], tuple[int, Any]], second: str = "") -> Entry:
    return kind, f"{kind} {second or kind}", lambda a, b, scc, old: definition(a, b)


def wrapped_difference(a: int, b: int) -> tuple[int, bool]:
    """S_ABSDIFF_I32: the difference wraps before its sign is looked at."""
    return nonzero(M32, abs(signed(a - b)))


INTEGER: dict[str, Entry] = {
    "mov_b32": ("u32", "u32", lambda a, scc, old: (a, KEEPS)),
    "mov_b64": ("u64", "u64", lambda a, scc, old: (a, KEEPS)),
    "not_b32": ("u32", "u32", lambda a, scc, old: nonzero(M32, ~a)),
    "not_b64": ("u64", "u64", lambda a, scc, old: nonzero(M64, ~a)),
    "abs_i32": ("u32", "u32", lambda a, scc, old: nonzero(M32, abs(signed(a)))),
    "add_u32": two("u32", lambda a, b: (a + b, a + b > M32)),
    "addc_u32": ("u32", "u32 u32", lambda a, b, scc, old: (a + b + scc, a + b + scc > M32)),
    "add_i32": two("u32", lambda a, b: (a + b, not fits(signed(a) + signed(b)))),
    "sub_i32": two("u32", lambda a, b: (a - b, not fits(signed(a) - signed(b)))),
    "add_nc_u64": two("u64", lambda a, b: (a + b, KEEPS)), "mul_u64": two("u64", lambda a, b: (a * b, KEEPS)),
    "mul_i32": two("u32", lambda a, b: (a * b, KEEPS)), "mul_hi_u32": two("u32", lambda a, b: (a * b >> 32, KEEPS)),
    "and_b32": two("u32", lambda a, b: nonzero(M32, a & b)), "and_b64": two("u64", lambda a, b: nonzero(M64, a & b)),
    "or_b32": two("u32", lambda a, b: nonzero(M32, a | b)), "or_b64": two("u64", lambda a, b: nonzero(M64, a | b)),
    "xor_b32": two("u32", lambda a, b: nonzero(M32, a ^ b)), "andn2_b32": two("u32", lambda a, b: nonzero(M32, a & ~b)),
    "andn2_b64": two("u64", lambda a, b: nonzero(M64, a & ~b)),
    "lshl_b32": two("u32", lambda a, b: nonzero(M32, a << (b & 31))),
    "lshl_b64": two("u64", lambda a, b: nonzero(M64, a << (b & 63)), "u32"),
    "lshr_b32": two("u32", lambda a, b: nonzero(M32, a >> (b & 31))),
    "ashr_i32": two("u32", lambda a, b: nonzero(M32, signed(a) >> (b & 31))),
    "bfe_u32": two("u32", lambda a, b: nonzero(M32, field(a, b & 31, field(b, 16, 7)))),
    "bfe_i32": two("u32", lambda a, b: nonzero(M32, extended(signed(a) >> (b & 31), field(b, 16, 7)))),
    "bfe_i64": two("u64", lambda a, b: nonzero(M64, extended(signed(a, 64) >> (b & 63), field(b, 16, 7))), "u32"),
    "max_i32": two("u32", lambda a, b: (max(signed(a), signed(b)), signed(a) >= signed(b))),
    "max_u32": two("u32", lambda a, b: (max(a, b), a >= b)),
    "min_i32": two("u32", lambda a, b: (min(signed(a), signed(b)), signed(a) < signed(b))),
    "min_u32": two("u32", lambda a, b: (min(a, b), a < b)), "absdiff_i32": two("u32", wrapped_difference),
    "cselect_b32": ("u32", "u32 u32", lambda a, b, scc, old: (a if scc else b, KEEPS)),
    "cselect_b64": ("u64", "u64 u64", lambda a, b, scc, old: (a if scc else b, KEEPS)),
    "sub_u32": two("u32", lambda a, b: (a - b, b > a)),
    "subb_u32": ("u32", "u32 u32", lambda a, b, scc, old: (a - b - scc, b + scc > a)),
    "mul_hi_i32": two("u32", lambda a, b: (signed(a) * signed(b) >> 32, KEEPS)),
    "lshl2_add_u32": two("u32", lambda a, b: ((a << 2) + b, (a << 2) + b > M32)),
    "pack_ll_b32_b16": two("u32", lambda a, b: (field(a, 0, 16) | b << 16, KEEPS)),
    "pack_hh_b32_b16": two("u32", lambda a, b: (a >> 16 | b >> 16 << 16, KEEPS)),
    "bfm_b32": two("u32", lambda a, b: (((1 << (a & 31)) - 1) << (b & 31), KEEPS)),
    "xor_b64": two("u64", lambda a, b: nonzero(M64, a ^ b)),
    "lshr_b64": two("u64", lambda a, b: nonzero(M64, a >> (b & 63)), "u32"),
    "ashr_i64": two("u64", lambda a, b: nonzero(M64, signed(a, 64) >> (b & 63)), "u32"),
    "brev_b32": ("u32", "u32", lambda a, scc, old: (int(f"{a:032b}"[::-1], 2), KEEPS)),
    "bcnt1_i32_b32": ("u32", "u32", lambda a, scc, old: (a.bit_count(), a != 0)),
    "ff1_i32_b32": ("u32", "u32", lambda a, scc, old: ((a & -a).bit_length() - 1, KEEPS)),
    "flbit_i32_b32": ("u32", "u32", lambda a, scc, old: (32 - a.bit_length() if a else -1, KEEPS)),
    "sext_i32_i8": ("u32", "u32", lambda a, scc, old: (signed(a, 8), KEEPS)),
    "sext_i32_i16": ("u32", "u32", lambda a, scc, old: (signed(a, 16), KEEPS)),
    "cmov_b32": ("u32", "u32", lambda a, scc, old: (a if scc else old, KEEPS)),
    "bitset0_b32": ("u32", "u32", lambda a, scc, old: (old & ~(1 << (a & 31)), KEEPS)),
}  # fmt: skip
# With a 16-bit immediate in place of the source.
IMMEDIATE: dict[str, Callable[[int, int], tuple[int, Any]]] = {
    "mulk_i32": lambda k, old: (signed(old) * signed(k, 16), KEEPS), "movk_i32": lambda k, old: (signed(k, 16), KEEPS),
    "addk_i32": lambda k, old: (signed(old) + signed(k, 16), not fits(signed(old) + signed(k, 16))),
}  # fmt: skip
FLOAT: dict[str, Entry] = {
    "add_f32": two("f32", lambda a, b: (number.add(F32, a, b), KEEPS)),
    "sub_f32": two("f32", lambda a, b: (number.subtract(F32, a, b), KEEPS)),
    "mul_f32": two("f32", lambda a, b: (number.multiply(F32, a, b), KEEPS)),
    "cvt_f32_u32": ("f32", "u32", lambda a, scc, old: (number.rounded(F32, number.Fraction(a)), KEEPS)),
    "cvt_u32_f32": ("u32", "f32", lambda a, scc, old: (number.to_integer(F32, a, 0, M32), KEEPS)),
    "cvt_f32_f16": ("f32", "f16", lambda a, scc, old: (number.convert(F16, F32, a), KEEPS)),
    "exp_f32": ("f32", "f32", lambda a, scc, old: (number.power_of_two(F32, a), KEEPS)),
}  # fmt: skip
RENAMED = {"add_co_i32": "add_i32", "sub_co_i32": "sub_i32", "and_not1_b32": "andn2_b32",
           "and_not1_b64": "andn2_b64", "addk_co_i32": "addk_i32"}  # fmt: skip


@cache
def defined(family: int) -> dict[str, Entry]:
    """name (without "s_" or "v_s_") → definition, on chips of a family."""
    found = INTEGER | FLOAT
    for largest, name in ((True, "max"), (False, "min")):
        pick = isa_extremes.extreme(F32, family, largest, ieee=True)
        tag = "_num" if family == 12 else ""
        found[f"{name}{tag}_f32"] = two("f32", lambda a, b, pick=pick: (pick(a, b), KEEPS))  # type: ignore[misc]
    return found | {new: found[old] for new, old in RENAMED.items() if old in found}


def immediate(name: str) -> Callable[[int, int], tuple[int, Any]] | None:
    return IMMEDIATE.get(RENAMED.get(name, name))
