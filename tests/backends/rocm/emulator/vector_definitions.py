"""Vector instructions in Python's own integers, fractions and numpy's scalar types, and numbers to try them on."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

M32 = 0xFFFFFFFF
INTERESTING = [0, 1, 2, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, M32, 0xAAAAAAAA]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 3.25, -7.75, 1e-40, -1e-45, 3e38, -3e38, math.inf, -math.inf, math.nan, 1e10, 2.5]


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def f32(x: int) -> np.float32:
    return np.uint32(x).view(np.float32)


def b32(x: Any) -> int:
    return int(np.float32(x).view(np.uint32))


def exact_fma(a: np.floating, b: np.floating, c: np.floating, dtype: Any) -> Any:
    """One rounding of a·b + c, by fractions: the nearest of the neighbours, ties to even."""
    if not all(np.isfinite(v) for v in (a, b, c)):
        return dtype(np.float64(a) * np.float64(b) + np.float64(c))
    total = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if total == 0:
        return dtype(np.float64(a) * np.float64(b) + np.float64(c))
    guess = dtype(float(total))
    if np.isinf(guess):
        return guess
    near = [guess, np.nextafter(guess, dtype(np.inf)), np.nextafter(guess, dtype(-np.inf))]
    near = [v for v in near if np.isfinite(v)]
    width = {np.float32: np.uint32, np.float16: np.uint16, np.float64: np.uint64}[dtype]
    return min(near, key=lambda v: (abs(Fraction(float(v)) - total), int(v.view(width)) & 1))


def med3(a: Any, b: Any, c: Any) -> Any:
    return sorted([a, b, c])[1]


def perm(a: int, b: int, s: int) -> int:
    data, out = (a << 32) | b, 0
    for i in range(4):
        sel = s >> 8 * i & 255
        if sel >= 13:
            byte = 255
        elif sel == 12:
            byte = 0
        elif sel >= 8:
            byte = 255 if data >> (16 * (sel - 8) + 15) & 1 else 0
        else:
            byte = data >> 8 * sel & 255
        out |= byte << 8 * i
    return out


def bfe(a: int, o: int, w: int, sign: bool) -> int:
    o, w = o & 31, w & 31
    field = (signed(a) if sign else a) >> o & ((1 << w) - 1)
    return signed(field, w) & M32 if sign and w else field


def clz(x: int) -> int:
    return 32 - x.bit_length() if x else M32


INTEGER: dict[str, Callable[..., int]] = {
    "v_mov_b32_e32": lambda a: a, "v_not_b32_e32": lambda a: ~a, "v_bfrev_b32_e32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_lshlrev_b32_e32": lambda a, b: b << (a & 31), "v_lshrrev_b32_e32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32_e32": lambda a, b: signed(b) >> (a & 31), "v_and_b32_e32": lambda a, b: a & b,
    "v_or_b32_e32": lambda a, b: a | b, "v_xor_b32_e32": lambda a, b: a ^ b, "v_xnor_b32_e32": lambda a, b: ~(a ^ b),
    "v_mul_lo_u32": lambda a, b: a * b, "v_mul_hi_u32": lambda a, b: (a * b) >> 32,
    "v_mul_hi_i32": lambda a, b: (signed(a) * signed(b)) >> 32,
    "v_mul_u32_u24_e32": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_i32_i24_e32": lambda a, b: signed(a, 24) * signed(b, 24),
    "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24": lambda a, b, c: signed(a, 24) * signed(b, 24) + c,
    "v_max_u32_e32": max, "v_min_u32_e32": min, "v_max_i32_e32": lambda a, b: max(signed(a), signed(b)),
    "v_min_i32_e32": lambda a, b: min(signed(a), signed(b)), "v_and_or_b32": lambda a, b, c: (a & b) | c,
    "v_or3_b32": lambda a, b, c: a | b | c, "v_lshl_or_b32": lambda a, b, c: (a << (b & 31)) | c,
    "v_add3_u32": lambda a, b, c: a + b + c, "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32": lambda a, b, c: ((a + b) & M32) << (c & 31), "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfe_u32": lambda a, o, w: bfe(a, o, w, False), "v_bfe_i32": lambda a, o, w: bfe(a, o, w, True),
    "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c), "v_perm_b32": perm,
    "v_alignbit_b32": lambda a, b, c: ((a << 32) | b) >> (c & 31),
    "v_alignbyte_b32": lambda a, b, c: ((a << 32) | b) >> 8 * (c & 3),
    "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "v_bcnt_u32_b32": lambda a, b: bin(a).count("1") + b,
    "v_max3_u32": max, "v_min3_u32": min, "v_med3_u32": med3,
    "v_max3_i32": lambda *x: max(map(signed, x)), "v_min3_i32": lambda *x: min(map(signed, x)),
    "v_med3_i32": lambda *x: med3(*map(signed, x)),
    "v_cvt_f32_u32_e32": lambda a: b32(np.float32(np.uint32(a))),
    "v_cvt_f32_i32_e32": lambda a: b32(np.float32(signed(a))),
    **{f"v_cvt_f32_ubyte{n}_e32": lambda a, n=n: b32(a >> 8 * n & 255) for n in range(4)},
}  # fmt: skip
GFX9_ONLY = {
    "v_add_u32_e32": lambda a, b: a + b, "v_sub_u32_e32": lambda a, b: a - b, "v_subrev_u32_e32": lambda a, b: b - a,
    "v_ffbh_u32_e32": clz, "v_ffbl_b32_e32": lambda a: (a & -a).bit_length() - 1 if a else M32,
    "v_ffbh_i32_e32": lambda a: clz(a ^ M32 if a >> 31 else a),
}  # fmt: skip
GFX11_ONLY = {
    "v_add_nc_u32_e32": lambda a, b: a + b, "v_sub_nc_u32_e32": lambda a, b: a - b,
    "v_subrev_nc_u32_e32": lambda a, b: b - a, "v_clz_i32_u32_e32": clz,
    "v_ctz_i32_b32_e32": lambda a: (a & -a).bit_length() - 1 if a else M32,
    "v_xor3_b32": lambda a, b, c: a ^ b ^ c,
}  # fmt: skip


def arity(function: Callable[..., int]) -> int:
    if function in (max, min, med3):
        return 3
    code = function.__code__
    return 3 if code.co_flags & 4 else code.co_argcount - len(function.__defaults__ or ())


def unary_to_ternary(name: str, function: Callable[..., int]) -> int:
    return 2 if name in ("v_max_u32_e32", "v_min_u32_e32") else arity(function)


def integer_inputs(count: int, lanes: int, seed: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    columns = []
    for _ in range(count):
        values = rng.integers(0, 2**32, lanes, dtype=np.uint32)
        few = rng.integers(0, lanes, lanes // 2)
        values[few] = rng.choice(np.array(INTERESTING, np.uint32), len(few))
        columns.append(values)
    return columns


FLOAT: dict[str, Callable[..., Any]] = {
    "v_add_f32_e32": lambda a, b: a + b, "v_sub_f32_e32": lambda a, b: a - b, "v_subrev_f32_e32": lambda a, b: b - a,
    "v_mul_f32_e32": lambda a, b: a * b, "v_max_f32_e32": np.fmax, "v_min_f32_e32": np.fmin,
    "v_fma_f32": lambda a, b, c: exact_fma(a, b, c, np.float32),
    "v_max3_f32": lambda a, b, c: np.fmax(np.fmax(a, b), c), "v_min3_f32": lambda a, b, c: np.fmin(np.fmin(a, b), c),
    "v_rndne_f32_e32": np.rint, "v_floor_f32_e32": np.floor, "v_ceil_f32_e32": np.ceil, "v_trunc_f32_e32": np.trunc,
    "v_sqrt_f32_e32": lambda a: np.float32(np.sqrt(np.float64(a))), "v_rcp_f32_e32": lambda a: np.float32(1) / a,
    "v_rsq_f32_e32": lambda a: np.float32(1 / np.sqrt(np.float64(a))),
    "v_exp_f32_e32": lambda a: np.float32(np.exp2(np.float64(a))),
    "v_log_f32_e32": lambda a: np.float32(np.log2(np.float64(a))),
}  # fmt: skip


def float_columns(count: int, lanes: int, seed: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    columns = []
    for _ in range(count):
        values = (rng.standard_normal(lanes) * 10.0 ** rng.integers(-20, 20, lanes)).astype(np.float32)
        few = rng.integers(0, lanes, lanes // 3)
        values[few] = rng.choice(np.array(FLOATS, np.float32), len(few))
        columns.append(values)
    return columns


def same_floats(ours: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Equal bits, but for NaN's payload and the sign of a zero that is a maximum or minimum."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours[~nan], expected[~nan])
