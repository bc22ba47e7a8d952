"""What atomic instructions compute: name → (bytes, function of (old, operand) → new). cmpswap is apart.

Source: AMD "Instinct MI300" ISA reference, "MUBUF", "FLAT, GLOBAL" and "DS" atomics; "RDNA4" for the new names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import floats

Array = np.ndarray[Any, Any]
Function = Callable[[Array, Array], Array]
_CODES = {"u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64, "f64": np.float64}


def _typed(kind: str, function: Function) -> tuple[int, Function]:
    dtype = _CODES[kind]
    return np.dtype(dtype).itemsize, lambda old, new: function(old.view(dtype), new.view(dtype))


def _packed_f16(old: Array, new: Array) -> Array:
    return (old.view(np.float16) + new.view(np.float16)).view(np.uint32)


def _packed_bf16(old: Array, new: Array) -> Array:
    def wide(x: Array) -> Array:
        return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)

    return floats.bf16_bits(wide(old) + wide(new)).astype(np.uint16).view(np.uint32)


def _wrapping_increment(old: Array, limit: Array) -> Array:
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def _wrapping_decrement(old: Array, limit: Array) -> Array:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


_INTEGER: dict[str, tuple[str, Function]] = {
    "add": ("u", np.add), "sub": ("u", np.subtract), "smin": ("i", np.minimum), "umin": ("u", np.minimum),
    "smax": ("i", np.maximum), "umax": ("u", np.maximum), "and": ("u", np.bitwise_and), "or": ("u", np.bitwise_or),
    "xor": ("u", np.bitwise_xor), "swap": ("u", lambda old, new: new), "inc": ("u", _wrapping_increment),
    "dec": ("u", _wrapping_decrement),
}  # fmt: skip
_MODERN = {  # names of gfx11 and later, and of LDS instructions: (operation, types)
    "add": ("add", ("u",)), "sub": ("sub", ("u",)), "min_i": ("smin", ("i",)), "min_u": ("umin", ("u",)),
    "max_i": ("smax", ("i",)), "max_u": ("umax", ("u",)), "and_b": ("and", ()), "or_b": ("or", ()), "xor_b": ("xor",
    ()),
    "swap_b": ("swap", ()), "wrxchg_b": ("swap", ()), "storexchg_b": ("swap", ()), "inc_u": ("inc", ()),
    "dec_u": ("dec", ()),
}  # fmt: skip

TABLE: dict[str, tuple[int, Function]] = {
    "add_f32": _typed("f32", np.add), "add_f64": _typed("f64", np.add), "min_f64": _typed("f64", np.fmin),
    "max_f64": _typed("f64", np.fmax), "pk_add_f16": (4, _packed_f16), "pk_add_bf16": (4, _packed_bf16),
    "min_f32": _typed("f32", np.fmin), "max_f32": _typed("f32", np.fmax), "fmin": _typed("f32", np.fmin),
    "fmax": _typed("f32", np.fmax), "min_num_f32": _typed("f32", np.fmin), "max_num_f32": _typed("f32", np.fmax),
}  # fmt: skip
for _name, (_sign, _function) in _INTEGER.items():
    TABLE[_name] = _typed(_sign + "32", _function)
    TABLE[_name + "_x2"] = _typed(_sign + "64", _function)
for _name, (_old, _types) in _MODERN.items():
    _sign, _function = _INTEGER[_old]
    for _bits in ("32", "64"):
        _full = _name + _bits if _name[-2:] in ("_i", "_u", "_b") else f"{_name}_u{_bits}"
        TABLE[_full] = _typed(_sign + _bits, _function)
COMPARE = {"cmpswap": 4, "cmpswap_x2": 8, "cmpswap_b32": 4, "cmpswap_b64": 8, "cmpst_b32": 4, "cmpst_b64": 8,
           "cmpstore_b32": 4, "cmpstore_b64": 8}  # fmt: skip


def apply(store: Array, offsets: Array, name: str, operand: Array, compare: Array | None) -> Array:
    """Apply an atomic at byte offsets, lane after lane; the old values come back.

    operand  [n] uint32 or uint64 bits; `compare` likewise, for a compare-and-swap
    """
    size = COMPARE.get(name) or TABLE[name][0]
    word = np.dtype(np.uint32 if size == 4 else np.uint64)
    cells, index = store.view(word), offsets >> (2 if size == 4 else 3)
    function: Function = (lambda old, new: new) if compare is not None else TABLE[name][1]
    if len(np.unique(index)) == len(index):
        old = cells[index]
        new = function(old, operand).view(word)
        cells[index] = np.where(old == compare, new, old) if compare is not None else new
        return old
    old = np.empty(len(index), word)
    for lane, at in enumerate(index):
        before = cells[at : at + 1].copy()
        old[lane] = before[0]
        if compare is None or before[0] == compare[lane]:
            cells[at : at + 1] = function(before, operand[lane : lane + 1]).view(word)
    return old
