"""Instructions of a compiled float32 division: scaling, the last multiply-add, special cases.

Sources: as in vector.py.
"""

from __future__ import annotations

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import floats
from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction
from portattn.backends.rocm.emulator.amdgpu.carries import mask_write
from portattn.backends.rocm.emulator.amdgpu.isa import VCC
from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState

_u32, _i64, _f32, _f64 = np.uint32, np.int64, np.float32, np.float64


def _exponent(x: Array) -> Array:
    return ((x.view(_u32) >> _u32(23)) & _u32(255)).astype(_i64)


def _denormal(x: Array) -> Array:
    return (x != 0) & (np.abs(x) < _f32(2.0**-126))


_QUIET_NAN, _INVALID = _u32(0x400000), _u32(0xFFC00000)


def div_scale(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    """V_DIV_SCALE_F32: scale a division's operand by 2^64, and say whether the quotient must be scaled back.

    "1 / S1 denormal" is read as of float32: the documents write float64, which the inverse of a float32 never is, and
    without that case quotients of large denominators are not rounded correctly. Where the quotient is denormal as well,
    the documents would scale such a denominator up, beyond float32; only the numerator is scaled here.
    """
    binder = Binder(state, instruction)
    binder.allow()
    binder.expect(5)
    reads = [binder.read(i, "f", i - 2) for i in (2, 3, 4)]
    write = binder.write(0, "f")
    flag, masks_out = mask_write(state, binder, 1)

    def run() -> None:
        s0, s1, s2 = (np.ascontiguousarray(np.broadcast_to(read(), state.mask.shape)) for read in reads)
        up = s0 * _f32(2.0**64)
        quotient = s2.astype(_f64) / s1.astype(_f64)
        down, tiny = s0 * _f32(2.0**-64), 2.0**-126
        inverse_denormal = 1.0 / np.abs(s1.astype(_f64)) < tiny
        quotient_denormal = (np.abs(quotient) < tiny) & (quotient != 0)
        up_denominator = np.where(s0 == s1, up, s0)
        up_numerator = np.where(s0 == s2, up, s0)
        cases = [
            ((s2 == 0) | (s1 == 0), np.full_like(s0, np.nan), False),
            (_exponent(s2) - _exponent(s1) >= 96, up_denominator, True),
            (_denormal(s1), up, False),
            (inverse_denormal & np.isfinite(s1) & ~quotient_denormal, down, False),
            (quotient_denormal, up_numerator, True),
            (_exponent(s2) <= 23, up, False),
        ]
        write(np.select([c for c, _, _ in cases], [v for _, v, _ in cases], s0))
        flag(np.select([c for c, _, _ in cases], [np.full(s0.shape, f) for _, _, f in cases], False))

    return BoundInstruction(instruction, run, binder.registers(2, 3, 4), (), binder.registers(0), masks_out)


def div_fmas(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    """V_DIV_FMAS_F32: a fused multiply-add whose result vcc scales by 2^±64."""
    binder = Binder(state, instruction)
    binder.allow()
    binder.expect(4)
    a, b, c = (binder.read(i, "f", i - 1) for i in (1, 2, 3))
    write = binder.write(0, "f")

    def run() -> None:
        addend = np.ascontiguousarray(np.broadcast_to(c(), state.mask.shape))
        # Rounded once, after scaling: rounding before it too would double-round denormal quotients.
        exact = floats.sum_to_odd(a().astype(_f64) * b(), addend.astype(_f64))
        scale = np.where(_exponent(addend) > 127, 2.0**64, 2.0**-64)
        # What overflows before it is scaled is infinite: the multiply-add is one of float32.
        scale = np.where(np.isinf(exact.astype(_f32)), 1.0, scale)
        write(np.where(state.read_mask(VCC), exact * scale, exact).astype(_f32))

    masks = tuple(range(VCC, VCC + state.lanes // 32))
    return BoundInstruction(instruction, run, binder.registers(1, 2, 3), masks, binder.registers(0))


def div_fixup(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    """V_DIV_FIXUP_F32: quotient, denominator, numerator → the quotient with IEEE's special cases put right."""
    binder = Binder(state, instruction)
    binder.allow()
    binder.expect(4)
    q, d, n = (binder.read(i, "f", i - 1) for i in (1, 2, 3))
    write = binder.write(0, "f")

    def run() -> None:
        quotient, denominator, numerator = np.broadcast_arrays(q(), d(), n())
        sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), _f32(-1), _f32(1))
        nan = np.isnan(denominator) | np.isnan(numerator)
        nan |= (denominator == 0) & (numerator == 0)
        nan |= np.isinf(denominator) & np.isinf(numerator)
        infinite = (denominator == 0) | np.isinf(numerator)
        zero = np.isinf(denominator) | (numerator == 0)
        # Far below the smallest denormal: the scaled sequence before this has no quotient to give.
        far = _exponent(np.ascontiguousarray(numerator)) - _exponent(np.ascontiguousarray(denominator)) < -150
        zero |= far & ~infinite
        # Operands of no special kind whose scaled quotient overflowed on the way: the refinement made a NaN of it.
        infinite |= np.isnan(quotient) & ~nan & ~zero
        result = np.where(zero, _f32(0), np.abs(quotient)) * sign
        result = np.where(infinite, _f32(np.inf) * sign, result).astype(_f32)
        # The numerator's NaN before the denominator's, made quiet; 0/0 and inf/inf have one of their own.
        bits = [np.ascontiguousarray(x).view(_u32) for x in (numerator, denominator)]
        own = np.where(np.isnan(denominator), bits[1] | _QUIET_NAN, _INVALID)
        own = np.where(np.isnan(numerator), bits[0] | _QUIET_NAN, own)
        write(np.where(nan, own.view(_f32), result))

    return BoundInstruction(instruction, run, binder.registers(1, 2, 3), (), binder.registers(0))
