"""Vector instructions lane by lane: name (without "v_" and encoding) → (type written, types read, function).

Types are letters of state.KINDS. Transcendental functions are rounded correctly; the chips' differ by up to 1 ulp.
Sources: AMD "Instinct MI300" ISA reference, "Instructions" (VOP1, VOP2, VOP3), "RDNA3" and "RDNA4" likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import softfloat
from portattn.backends.rocm.emulator.amdgpu.softfloat import Array

Entry = tuple[str, str, Callable[..., Array]]
_u8, _u16, _u32, _u64 = np.uint8, np.uint16, np.uint32, np.uint64
_i32, _i64, _f16, _f32, _f64 = np.int32, np.int64, np.float16, np.float32, np.float64
_31, _63, _16 = _u32(31), _u64(63), _u32(16)


def _wide(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Compute a float32 function in float64, so that it is rounded once."""
    return lambda a: function(a.astype(_f64)).astype(_f32)


def _through32(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda a: function(a.astype(_f64)).astype(_f16)


def to_integer(x: Array, low: int, high: int) -> Array:
    """Round towards zero, clamped to the range; NaN gives 0."""
    return np.clip(np.where(np.isnan(x), 0.0, np.trunc(x.astype(_f64))), low, high).astype(_i64)


def bit_length(x: Array) -> Array:
    return np.frexp(x.astype(_f64))[1].astype(_u32)


def leading_zeros(x: Array) -> Array:
    return np.where(x == 0, _u32(0xFFFFFFFF), _u32(32) - bit_length(x)).astype(_u32)


def leading_sign_bits(x: Array) -> Array:
    folded = np.where(x >> _31, ~x, x)
    return np.where(folded == 0, _u32(0xFFFFFFFF), _u32(32) - bit_length(folded)).astype(_u32)


def trailing_zeros(x: Array) -> Array:
    lowest = x & (~x + _u32(1))
    return np.where(x == 0, _u32(0xFFFFFFFF), bit_length(lowest) - _u32(1)).astype(_u32)


_REVERSED = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], _u8)
_SET_BITS = np.array([i.bit_count() for i in range(256)], _u8)


def reverse_bits(x: Array) -> Array:
    return _REVERSED[np.ascontiguousarray(x).view(_u8)].view(_u32).byteswap().reshape(x.shape)


def count_bits(x: Array) -> Array:
    return _SET_BITS[np.ascontiguousarray(x).view(_u8)].reshape(*x.shape, -1).sum(-1).astype(_u32)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """V_PERM_B32: each byte of the selector picks a byte of {a, b}; 8–11 a sign, 12 is 0, 13 and more 0xff."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    source = np.empty((*a.shape, 14), _u8)
    source[..., 0:4] = np.ascontiguousarray(b)[..., None].view(_u8)
    source[..., 4:8] = np.ascontiguousarray(a)[..., None].view(_u8)
    source[..., 8:12] = np.where(source[..., 1:8:2] & 0x80, 0xFF, 0)
    source[..., 12], source[..., 13] = 0, 0xFF
    choice = np.minimum(np.ascontiguousarray(selector)[..., None].view(_u8), 13)
    return np.take_along_axis(source, choice, -1).view(_u32)[..., 0]


def field_unsigned(a: Array, offset: Array, width: Array) -> Array:
    mask = (_u64(1) << (width & _31).astype(_u64)) - _u64(1)
    return ((a >> (offset & _31)) & mask).astype(_u32)


def field_signed(a: Array, offset: Array, width: Array) -> Array:
    size = (width & _31).astype(_i64)
    # Signed before the shift: beyond bit 31 lie copies of the sign.
    value = (a.view(_i32) >> (offset & _31).astype(_i32)).astype(_i64) & ((_i64(1) << size) - 1)
    sign = np.where(size > 0, _i64(1) << np.maximum(size - 1, 0), 0)
    return ((value ^ sign) - sign).astype(_u32)


def align_bits(a: Array, b: Array, shift: Array) -> Array:
    return (((a.astype(_u64) << _u64(32)) | b) >> (shift & _31).astype(_u64)).astype(_u32)


def median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _signed24(x: Array) -> Array:
    return (x << _u32(8)).view(_i32) >> _i32(8)


def _u24(x: Array) -> Array:
    return x & _u32(0xFFFFFF)


def _pack(low: Array, high: Array) -> Array:
    return low | (high << _16)


def _ldexp(x: Array, exponent: Array) -> Array:
    # Two exact steps would round a denormal result twice; float64 holds every intermediate.
    return np.ldexp(x.astype(_f64), np.clip(exponent, -700, 700)).astype(_f32)


def _exponent(x: Array) -> Array:
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(_i32)


_BELOW_ONE32, _BELOW_ONE64 = np.nextafter(_f32(1), _f32(0)), np.nextafter(_f64(1), _f64(0))


def _fract(largest: np.floating[Any]) -> Callable[[Array], Array]:
    """Return the fraction above the floor, below 1 even for a tiny negative number, whose difference rounds to 1."""
    return lambda a: np.minimum(a - np.floor(a), largest)


def _sad(a: Array, b: Array, c: Array) -> Array:
    return np.where(a > b, a - b, b - a) + c


def _dot2_f16(a: Array, b: Array, c: Array) -> Array:
    """Add two products of halves to a float32, the lower first; every operation rounds, as documented."""
    x = np.ascontiguousarray(a).view(_f16).reshape(*a.shape, 2).astype(_f32)
    y = np.ascontiguousarray(b).view(_f16).reshape(*b.shape, 2).astype(_f32)
    return c + x[..., 0] * y[..., 0] + x[..., 1] * y[..., 1]


def _dot2_bf16(a: Array, b: Array, c: Array) -> Array:
    def halves(x: Array) -> tuple[Array, Array]:
        return (x << _16).view(_f32), (x & _u32(0xFFFF0000)).view(_f32)

    (a0, a1), (b0, b1) = halves(a), halves(b)
    return c + a0 * b0 + a1 * b1


def _dot2_bf16_bf16(a: Array, b: Array, c: Array) -> Array:
    """Add two products of bf16 to a bf16, the lower first; every operation rounds to bf16, as documented."""

    def wide(x: Array) -> Array:
        return (x.astype(_u32) << _16).view(_f32).astype(_f64)

    total = c
    for shift in (_u32(0), _16):
        product = softfloat.bf16_bits_of_double(wide(a >> shift & _u32(0xFFFF)) * wide(b >> shift & _u32(0xFFFF)))
        total = softfloat.bf16_bits_of_double(wide(total) + wide(product)).astype(_u16)
    return total


FLOAT32: dict[str, Entry] = {
    "add_f32": ("f", "ff", np.add), "sub_f32": ("f", "ff", np.subtract), "mul_f32": ("f", "ff", np.multiply),
    "subrev_f32": ("f", "ff", lambda a, b: b - a),
    "mul_legacy_f32": ("f", "ff", lambda a, b: np.where((a == 0) | (b == 0), _f32(0), a * b)),
    "mul_dx9_zero_f32": ("f", "ff", lambda a, b: np.where((a == 0) | (b == 0), _f32(0), a * b)),
    "fma_f32": ("f", "fff", softfloat.fma32),
    "mad_f32": ("f", "fff", lambda a, b, c: a * b + c),
    "rcp_f32": ("f", "f", lambda a: _f32(1) / a), "rcp_iflag_f32": ("f", "f", lambda a: _f32(1) / a),
    "rsq_f32": ("f", "f", _wide(lambda a: 1.0 / np.sqrt(a))), "sqrt_f32": ("f", "f", np.sqrt),
    "exp_f32": ("f", "f", _wide(np.exp2)), "log_f32": ("f", "f", _wide(np.log2)),
    "sin_f32": ("f", "f", _wide(lambda a: np.sin(2 * np.pi * a))),
    "cos_f32": ("f", "f", _wide(lambda a: np.cos(2 * np.pi * a))),
    "rndne_f32": ("f", "f", np.rint), "floor_f32": ("f", "f", np.floor), "ceil_f32": ("f", "f", np.ceil),
    "trunc_f32": ("f", "f", np.trunc), "fract_f32": ("f", "f", _fract(_BELOW_ONE32)),
    "frexp_mant_f32": ("f", "f", lambda a: np.frexp(a)[0]), "frexp_exp_i32_f32": ("i", "f", _exponent),
    "ldexp_f32": ("f", "fi", _ldexp),
    "dot2c_f32_f16": ("f", "uuf", _dot2_f16), "dot2_f32_f16": ("f", "uuf", _dot2_f16),
    "dot2_f32_bf16": ("f", "uuf", _dot2_bf16), "dot2c_f32_bf16": ("f", "uuf", _dot2_bf16),
    "dot2_bf16_bf16": ("w", "uuw", _dot2_bf16_bf16),
}  # fmt: skip

FLOAT64: dict[str, Entry] = {
    "add_f64": ("d", "dd", np.add), "mul_f64": ("d", "dd", np.multiply), "fma_f64": ("d", "ddd", softfloat.fma64),
    "rcp_f64": ("d", "d", lambda a: 1.0 / a),
    "rsq_f64": ("d", "d", lambda a: 1.0 / np.sqrt(a)), "sqrt_f64": ("d", "d", np.sqrt),
    "floor_f64": ("d", "d", np.floor), "ceil_f64": ("d", "d", np.ceil), "trunc_f64": ("d", "d", np.trunc),
    "rndne_f64": ("d", "d", np.rint), "fract_f64": ("d", "d", _fract(_BELOW_ONE64)),
    "ldexp_f64": ("d", "di", lambda a, b: np.ldexp(a, np.clip(b, -3000, 3000))),
    "frexp_mant_f64": ("d", "d", lambda a: np.frexp(a)[0]), "frexp_exp_i32_f64": ("i", "d", _exponent),
}  # fmt: skip

FLOAT16: dict[str, Entry] = {
    "add_f16": ("h", "hh", np.add), "sub_f16": ("h", "hh", np.subtract), "mul_f16": ("h", "hh", np.multiply),
    "subrev_f16": ("h", "hh", lambda a, b: b - a), "fma_f16": ("h", "hhh", softfloat.fma16),
    "mad_f16": ("h", "hhh", lambda a, b, c: a * b + c),
    "rcp_f16": ("h", "h", _through32(lambda a: 1.0 / a)), "rsq_f16": ("h", "h", _through32(lambda a: 1 / np.sqrt(a))),
    "sqrt_f16": ("h", "h", np.sqrt), "exp_f16": ("h", "h", _through32(np.exp2)), "log_f16": ("h", "h",
    _through32(np.log2)),
    "rndne_f16": ("h", "h", np.rint), "floor_f16": ("h", "h", np.floor), "ceil_f16": ("h", "h", np.ceil),
    "trunc_f16": ("h", "h", np.trunc), "ldexp_f16": ("h", "hs", lambda a, b: np.ldexp(a.astype(_f64), b).astype(_f16)),
}  # fmt: skip

INTEGER16: dict[str, Entry] = {
    "add_u16": ("w", "ww", np.add), "sub_u16": ("w", "ww", np.subtract), "subrev_u16": ("w", "ww", lambda a, b: b - a),
    "mul_lo_u16": ("w", "ww", np.multiply), "mad_u16": ("w", "www", lambda a, b, c: a * b + c),
    "mad_legacy_u16": ("w", "www", lambda a, b, c: a * b + c), "mad_i16": ("w", "www", lambda a, b, c: a * b + c),
    "add_i16": ("s", "ss", np.add), "sub_i16": ("s", "ss", np.subtract),
    "lshlrev_b16": ("w", "ww", lambda a, b: b << (a & _u16(15))),
    "lshrrev_b16": ("w", "ww", lambda a, b: b >> (a & _u16(15))),
    "ashrrev_i16": ("s", "ss", lambda a, b: b >> (a & np.int16(15))),
    "and_b16": ("w", "ww", np.bitwise_and), "or_b16": ("w", "ww", np.bitwise_or), "xor_b16": ("w", "ww",
    np.bitwise_xor),
    "not_b16": ("w", "w", np.invert), "mov_b16": ("w", "w", lambda a: a),
    "max_u16": ("w", "ww", np.maximum), "min_u16": ("w", "ww", np.minimum),
    "max_i16": ("s", "ss", np.maximum), "min_i16": ("s", "ss", np.minimum),
    "max3_i16": ("s", "sss", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3_i16": ("s", "sss", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "max3_u16": ("w", "www", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3_u16": ("w", "www", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "med3_i16": ("s", "sss", median), "med3_u16": ("w", "www", median),
}  # fmt: skip

INTEGER32: dict[str, Entry] = {
    "mov_b32": ("u", "u", lambda a: a), "not_b32": ("u", "u", np.invert), "bfrev_b32": ("u", "u", reverse_bits),
    "ffbh_u32": ("u", "u", leading_zeros), "ffbh_i32": ("u", "u", leading_sign_bits),
    "ffbl_b32": ("u", "u", trailing_zeros), "bcnt_u32_b32": ("u", "uu", lambda a, b: count_bits(a) + b),
    "add_u32": ("u", "uu", np.add), "sub_u32": ("u", "uu", np.subtract), "subrev_u32": ("u", "uu", lambda a, b: b - a),
    "add_i32": ("i", "ii", np.add), "sub_i32": ("i", "ii", np.subtract),
    "mul_lo_u32": ("u", "uu", np.multiply),
    "mul_hi_u32": ("u", "uu", lambda a, b: ((a.astype(_u64) * b) >> _u64(32)).astype(_u32)),
    "mul_hi_i32": ("i", "ii", lambda a, b: ((a.astype(_i64) * b) >> 32).astype(_i32)),
    "mul_u32_u24": ("u", "uu", lambda a, b: _u24(a) * _u24(b)),
    "mul_i32_i24": ("i", "uu", lambda a, b: _signed24(a) * _signed24(b)),
    "mul_hi_u32_u24": ("u", "uu", lambda a, b: ((_u24(a).astype(_u64) * _u24(b)) >> _u64(32)).astype(_u32)),
    "mad_u32_u24": ("u", "uuu", lambda a, b, c: _u24(a) * _u24(b) + c),
    "mad_i32_i24": ("i", "uui", lambda a, b, c: _signed24(a) * _signed24(b) + c),
    "mad_u32_u16": ("u", "wwu", lambda a, b, c: a.astype(_u32) * b + c),
    "mad_i32_i16": ("i", "ssi", lambda a, b, c: a.astype(_i32) * b + c),
    "lshlrev_b32": ("u", "uu", lambda a, b: b << (a & _31)), "lshrrev_b32": ("u", "uu", lambda a, b: b >> (a & _31)),
    "ashrrev_i32": ("i", "ii", lambda a, b: b >> (a & _i32(31))),
    "and_b32": ("u", "uu", np.bitwise_and), "or_b32": ("u", "uu", np.bitwise_or), "xor_b32": ("u", "uu",
    np.bitwise_xor),
    "xnor_b32": ("u", "uu", lambda a, b: ~(a ^ b)), "and_or_b32": ("u", "uuu", lambda a, b, c: (a & b) | c),
    "or3_b32": ("u", "uuu", lambda a, b, c: a | b | c), "xor3_b32": ("u", "uuu", lambda a, b, c: a ^ b ^ c),
    "lshl_or_b32": ("u", "uuu", lambda a, b, c: (a << (b & _31)) | c), "add3_u32": ("u", "uuu", lambda a, b,
    c: a + b + c),
    "lshl_add_u32": ("u", "uuu", lambda a, b, c: (a << (b & _31)) + c),
    "add_lshl_u32": ("u", "uuu", lambda a, b, c: (a + b) << (c & _31)),
    "xad_u32": ("u", "uuu", lambda a, b, c: (a ^ b) + c),
    "bfe_u32": ("u", "uuu", field_unsigned), "bfe_i32": ("u", "uuu", field_signed),
    "bfi_b32": ("u", "uuu", lambda a, b, c: (a & b) | (~a & c)),
    "bfm_b32": ("u", "uu", lambda a, b: ((_u32(1) << (a & _31)) - _u32(1)) << (b & _31)),
    "alignbit_b32": ("u", "uuu", align_bits),
    "alignbyte_b32": ("u", "uuu", lambda a, b, c: align_bits(a, b, (c & _u32(3)) * _u32(8))),
    "perm_b32": ("u", "uuu", permute_bytes), "sad_u32": ("u", "uuu", _sad),
    "max_u32": ("u", "uu", np.maximum), "min_u32": ("u", "uu", np.minimum),
    "max_i32": ("i", "ii", np.maximum), "min_i32": ("i", "ii", np.minimum),
    "max3_u32": ("u", "uuu", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3_u32": ("u", "uuu", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "max3_i32": ("i", "iii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3_i32": ("i", "iii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "med3_i32": ("i", "iii", median), "med3_u32": ("u", "uuu", median),
    "maxmin_u32": ("u", "uuu", lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    "minmax_u32": ("u", "uuu", lambda a, b, c: np.maximum(np.minimum(a, b), c)),
    "maxmin_i32": ("i", "iii", lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    "minmax_i32": ("i", "iii", lambda a, b, c: np.maximum(np.minimum(a, b), c)),
    "pack_b32_f16": ("u", "ww", lambda a, b: _pack(a.astype(_u32), b.astype(_u32))),
}  # fmt: skip

INTEGER64: dict[str, Entry] = {
    "mov_b64": ("U", "U", lambda a: a), "lshlrev_b64": ("U", "uU", lambda a, b: b << (a.astype(_u64) & _63)),
    "lshrrev_b64": ("U", "uU", lambda a, b: b >> (a.astype(_u64) & _63)),
    "ashrrev_i64": ("I", "uI", lambda a, b: b >> (a.astype(_i64) & _i64(63))),
    "lshl_add_u64": ("U", "UuU", lambda a, b, c: (a << (b.astype(_u64) & _u64(7))) + c),
    "add_u64": ("U", "UU", np.add), "sub_u64": ("U", "UU", np.subtract),
}  # fmt: skip

CONVERSIONS: dict[str, Entry] = {
    "cvt_f32_f16": ("f", "h", softfloat.from_half), "cvt_f16_f32": ("h", "f", softfloat.to_half),
    "cvt_f32_u32": ("f", "u", lambda a: a.astype(_f32)), "cvt_f32_i32": ("f", "i", lambda a: a.astype(_f32)),
    "cvt_u32_f32": ("u", "f", lambda a: to_integer(a, 0, 2**32 - 1).astype(_u32)),
    "cvt_i32_f32": ("i", "f", lambda a: to_integer(a, -(2**31), 2**31 - 1).astype(_i32)),
    "cvt_rpi_i32_f32": ("i", "f", lambda a: to_integer(np.floor(a.astype(_f64) + 0.5), -(2**31),
    2**31 - 1).astype(_i32)),
    "cvt_flr_i32_f32": ("i", "f", lambda a: to_integer(np.floor(a), -(2**31), 2**31 - 1).astype(_i32)),
    "cvt_f64_f32": ("d", "f", lambda a: a.astype(_f64)), "cvt_f32_f64": ("f", "d", lambda a: a.astype(_f32)),
    "cvt_f64_i32": ("d", "i", lambda a: a.astype(_f64)), "cvt_f64_u32": ("d", "u", lambda a: a.astype(_f64)),
    "cvt_i32_f64": ("i", "d", lambda a: to_integer(a, -(2**31), 2**31 - 1).astype(_i32)),
    "cvt_u32_f64": ("u", "d", lambda a: to_integer(a, 0, 2**32 - 1).astype(_u32)),
    "cvt_f16_u16": ("h", "w", lambda a: a.astype(_f16)), "cvt_f16_i16": ("h", "s", lambda a: a.astype(_f16)),
    "cvt_u16_f16": ("w", "h", lambda a: to_integer(a, 0, 65535).astype(_u16)),
    "cvt_i16_f16": ("s", "h", lambda a: to_integer(a, -32768, 32767).astype(np.int16)),
    "cvt_f32_bf16": ("f", "w", lambda a: (a.astype(_u32) << _16).view(_f32)),
    "cvt_pk_f16_f32": ("u", "ff", lambda a, b: _pack(softfloat.f16_bits(a), softfloat.f16_bits(b))),
    "cvt_pk_bf16_f32": ("u", "ff", lambda a, b: _pack(softfloat.bf16_bits(a), softfloat.bf16_bits(b))),
    "cvt_pkrtz_f16_f32": ("u", "ff", lambda a, b: _pack(softfloat.f16_bits_to_zero(a), softfloat.f16_bits_to_zero(b))),
    "cvt_pk_u16_u32": ("u", "uu", lambda a, b: _pack(np.minimum(a, _u32(65535)), np.minimum(b, _u32(65535)))),
    "cvt_i32_i16": ("i", "s", lambda a: a.astype(_i32)), "cvt_u32_u16": ("u", "w", lambda a: a.astype(_u32)),
    **{
        f"cvt_f32_ubyte{n}": ("f", "u", lambda a, n=n: ((a >> _u32(8 * n)) & _u32(255)).astype(_f32)) for n in range(4)
    },
}  # fmt: skip

# gfx11 and gfx12 name some instructions anew; they compute the same.
RENAMED = {
    "add_nc_u32": "add_u32", "sub_nc_u32": "sub_u32", "subrev_nc_u32": "subrev_u32", "add_nc_i32": "add_i32",
    "sub_nc_i32": "sub_i32", "add_nc_u16": "add_u16", "sub_nc_u16": "sub_u16", "add_nc_i16": "add_i16",
    "sub_nc_i16": "sub_i16", "clz_i32_u32": "ffbh_u32",
    "cls_i32": "ffbh_i32", "ctz_i32_b32": "ffbl_b32", "cvt_pk_rtz_f16_f32": "cvt_pkrtz_f16_f32",
    "dot2acc_f32_f16": "dot2c_f32_f16", "dot2acc_f32_bf16": "dot2c_f32_bf16", "cvt_floor_i32_f32": "cvt_flr_i32_f32",
    "cvt_nearest_i32_f32": "cvt_rpi_i32_f32", "accvgpr_read_b32": "mov_b32", "accvgpr_write_b32": "mov_b32",
    "accvgpr_mov_b32": "mov_b32",
    "fmaak_f32": "fma_f32", "fmamk_f32": "fma_f32", "madak_f32": "mad_f32", "madmk_f32": "mad_f32",
    "fmaak_f16": "fma_f16", "fmamk_f16": "fma_f16", "add_nc_u64": "add_u64", "sub_nc_u64": "sub_u64",
}  # fmt: skip
# Instructions whose destination is also their last source.
ACCUMULATING = {
    "fmac_f32": "fma_f32", "fmac_f16": "fma_f16", "fmac_f64": "fma_f64", "mac_f32": "mad_f32", "mac_f16": "mad_f16",
    "dot2c_f32_f16": "dot2c_f32_f16", "dot2acc_f32_f16": "dot2c_f32_f16", "dot2c_f32_bf16": "dot2c_f32_bf16",
    "dot2acc_f32_bf16": "dot2c_f32_bf16",
}  # fmt: skip

TABLE: dict[str, Entry] = FLOAT32 | FLOAT64 | FLOAT16 | INTEGER16 | INTEGER32 | INTEGER64 | CONVERSIONS
TABLE |= {new: TABLE[old] for new, old in RENAMED.items()}

# 16-bit instructions of gfx9 clear the upper half of the destination, but for these, which keep it.
# Source: LLVM, GCNSubtarget::zeroesHigh16BitsOfDest.
KEEPS_UPPER_HALF = frozenset({"mad_f16", "fma_f16", "mad_u16", "mad_i16", "fmac_f16"})
