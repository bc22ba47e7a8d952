"""Maximum, minimum and median of floats: which zero and which NaN comes out.

They pick one of their sources, NaN included, and chips differ in which of two NaN. In IEEE mode, which gfx12 lacks, a
signalling NaN makes the result a quiet one. +0 is greater than −0.
Sources: AMD "Instinct MI300", "RDNA3" and "RDNA4" ISA references, V_MAX_F32, V_MAX_NUM_F32, V_MED3_F32; LLVM AMDGPU
guide, ".amdhsa_ieee_mode".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState

Pick = Callable[[Array, Array], Array]
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_QUIET = {2: 1 << 9, 4: 1 << 22, 8: 1 << 51}  # the highest bit of the mantissa


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(_UNSIGNED[x.dtype.itemsize])


def _quieted(bits: Array) -> Array:
    return bits | bits.dtype.type(_QUIET[bits.dtype.itemsize])


def _of_nan(a: Array, b: Array, family: int, ieee: bool) -> Array:
    """The bits that come out where a or b is NaN."""
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
    """With a NaN among them the smallest of the three, as the documents say."""

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
    """ "max3_num_f32" → ("max3", "f", whether NaN wins)."""
    word, _, kind = name.replace("_num_", "_").partition("_")
    if kind not in _KINDS or (word not in _SHAPES and word not in _MAXIMUM):
        return None
    return _MAXIMUM.get(word, word), _KINDS[kind], word in _MAXIMUM


def is_modelled(name: str) -> bool:
    return _parts(name) is not None


def entry(state: WorkGroupState, name: str) -> tuple[str, str, Callable[..., Array]]:
    """(type written, types read, function) of an instruction that is `known`, in a state's chip and mode."""
    parts = _parts(name)
    assert parts is not None, name
    shape, kind, nan_wins = parts
    count, build = _SHAPES[shape]
    if nan_wins:
        return kind, kind * count, build(_propagating(True), _propagating(False))
    family, ieee = state.arch.family, state.ieee
    return kind, kind * count, build(_pick(True, family, ieee), _pick(False, family, ieee))
