"""Vector instructions with one bit a lane: compares, selects, carries, multiply-adds, divisions. Sources: vector.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import softfloat
from portattn.backends.rocm.emulator.amdgpu.assembly import EXEC, VCC, Instruction, Operand
from portattn.backends.rocm.emulator.amdgpu.binder import (
    DPP,
    SDWA,
    Bind,
    Binder,
    BoundInstruction,
    Read,
    base_name,
    compute,
    dpp_flow,
)
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.state import KINDS, Array, WorkGroupState

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.register_checks import Definedness

_u32, _u64, _i64, _f32, _f64 = np.uint32, np.uint64, np.int64, np.float32, np.float64


def mask_read(state: WorkGroupState, binder: Binder, index: int) -> tuple[Read, tuple[int, ...]]:
    item = binder.operands[index]
    if item.kind == "s":
        return lambda: state.read_mask(item.index), tuple(range(item.index, item.index + state.lanes // 32))
    if item.kind == "literal":
        bits = item.bits(64)
        constant = np.array([[bool(bits >> lane & 1) for lane in range(state.lanes)]])
        whole = np.broadcast_to(constant, (state.waves, state.lanes))
        return lambda: whole, ()
    raise UnknownOperand(f"{binder.instruction.operands[index]} as a mask")


def mask_write(state: WorkGroupState, binder: Binder, index: int) -> tuple[Callable[[Array], None], tuple[int, ...]]:
    item = binder.operands[index]
    if item.kind == "null":
        return lambda bits: None, ()
    if item.kind != "s":
        raise UnknownOperand(f"{binder.instruction.operands[index]} as a mask")

    def put(bits: Array) -> None:
        state.write_mask(item.index, np.broadcast_to(bits, state.mask.shape) & state.mask)

    return put, tuple(range(item.index, item.index + state.lanes // 32))


def cndmask(kind: str) -> Bind:
    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
        binder = Binder(state, instruction)
        binder.allow("op_sel", *DPP, *SDWA)
        binder.expect(3, 4)
        if len(binder.operands) == 3:  # dual-issue halves leave vcc out
            mask, masks = (lambda: state.read_mask(VCC)), tuple(range(VCC, VCC + state.lanes // 32))
        else:
            mask, masks = mask_read(state, binder, 3)
        signs = any(item.negative or item.absolute for item in binder.operands[1:3])
        typed = {"u": "f", "w": "h"}[kind] if signs else kind
        no, yes = binder.read(1, typed, 0), binder.read(2, typed, 1)
        write = binder.write(0, typed)

        def run() -> None:
            write(np.where(mask(), yes(), no()))

        def flow(defined: object) -> None:
            defined.selected(binder, mask(), masks)  # type: ignore[attr-defined]

        own = None if binder.dpp is not None else flow
        return BoundInstruction(
            instruction, run, binder.registers(1, 2), masks, binder.registers(0), flow=own or dpp_flow(binder)
        )

    return make


def carry(minus: str, with_carry: bool) -> Bind:
    """Bind adds ("") and subtracts ("ab": a − b, "ba": b − a) with a carry out, and in if `with_carry`."""

    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
        binder = Binder(state, instruction)
        binder.allow(*DPP, *SDWA)
        binder.expect(5 if with_carry else 4)
        a, b = binder.read(2, "u", 0), binder.read(3, "u", 1)
        write = binder.write(0, "u")
        carry_out, masks_out = mask_write(state, binder, 1)
        carry_in, masks_in = mask_read(state, binder, 4) if with_carry else ((lambda: np.zeros((1, 1), bool)), ())

        def run() -> None:
            x, y, c = a().astype(_i64), b().astype(_i64), carry_in().astype(_i64)
            total = x + y + c if not minus else (x - y - c if minus == "ab" else y - x - c)
            write((total & 0xFFFFFFFF).astype(_u32))
            carry_out((total < 0) | (total > 0xFFFFFFFF))

        return BoundInstruction(instruction, run, binder.registers(2, 3), masks_in, binder.registers(0), masks_out)

    return make


def mad64(signed: bool) -> Bind:
    """Bind the 64-bit sum of a 32×32-bit product and an addend, with the carry out."""

    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
        binder = Binder(state, instruction)
        binder.allow()
        binder.expect(5)
        narrow, wide = ("i", "I") if signed else ("u", "U")
        a, b, c = binder.read(2, narrow, 0), binder.read(3, narrow, 1), binder.read(4, wide, 2)
        write = binder.write(0, "U")
        carry_out, masks_out = mask_write(state, binder, 1)
        dtype = KINDS[wide][0]

        def run() -> None:
            product = a().astype(dtype) * b().astype(dtype)
            addend = c()
            total = product + addend
            write(total.view(_u64))
            # Bit 64 of a sum of 65 bits. Unsigned: a sum that wrapped is below its part. Signed: the sign, which is not
            # that of 64 bits where the operands agree in sign and the sum does not.
            carry_out(((product ^ total) & (addend ^ total) ^ total) < 0 if signed else total < product)

        factors, addend_words, (low, high) = binder.registers(2, 3), binder.registers(4), binder.registers(0)

        def flow(defined: Definedness) -> None:
            # A sum's low word depends on low words alone: compilers leave the addend's high word to chance where they
            # want no more.
            some = defined.lanes((*factors, *addend_words[:1]))
            every = some | defined.lanes(addend_words[1:])
            defined.set_lanes((low,), some)
            defined.set_lanes((high,), every)
            defined.set_masks(masks_out, every & defined.state.mask)

        reads = (*factors, *addend_words)
        return BoundInstruction(instruction, run, reads, (), (low, high), masks_out, flow=flow)

    return make


_NAME = re.compile(r"cmp(x?)_(\w+)_(f16|f32|f64|i16|u16|i32|u32|i64|u64)")
_KIND = {"f16": "h", "f32": "f", "f64": "d", "i16": "s", "u16": "w", "i32": "i", "u32": "u", "i64": "I", "u64": "U"}


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


# "n…" is the negation, true for NaN; "lg" is less or greater, false for NaN.
PREDICATES: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "ne": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b), "o": lambda a, b: ~_unordered(a, b), "u": _unordered,
    "nlt": lambda a, b: ~(a < b), "neq": lambda a, b: ~(a == b), "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b), "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
    "t": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
    "tru": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
}  # fmt: skip


def _class(kind: str) -> Callable[[Array, Array], Array]:
    """V_CMP_CLASS: bit n of the second source asks for the n-th of these classes:

    signalling NaN, quiet NaN, −∞, −normal, −denormal, −0, +0, +denormal, +normal, +∞."""
    bits = KINDS[kind][1]
    unsigned = {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    mantissa = {16: 10, 32: 23, 64: 52}[bits]

    def function(value: Array, wanted: Array) -> Array:
        value, wanted = np.broadcast_arrays(value, wanted)
        raw = np.ascontiguousarray(value).view(unsigned)
        quiet = (raw >> unsigned(mantissa - 1)) & unsigned(1)
        negative = np.signbit(value)
        tiny = np.finfo(KINDS[kind][0]).tiny
        magnitude = np.abs(value)
        kinds = [np.isnan(value), np.isinf(value), magnitude >= tiny, magnitude > 0]
        codes = [quiet, np.where(negative, 2, 9), np.where(negative, 3, 8), np.where(negative, 4, 7)]
        code = np.select(kinds, codes, np.where(negative, 5, 6)).astype(np.uint32)
        return ((wanted >> code) & np.uint32(1)).astype(bool)

    return function


def bind(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    found = _NAME.fullmatch(base_name(instruction.mnemonic))
    if not found or (found[2] not in PREDICATES and found[2] != "class"):
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    kind = _KIND[found[3]]
    binder = Binder(state, instruction)
    binder.allow("op_sel", "clamp", *DPP, *SDWA)
    to_exec = bool(found[1])
    # gfx10 and later: v_cmpx has no destination but exec. Dual-issue and e32 forms may leave vcc out.
    implicit = len(binder.operands) == 2
    first = 0 if implicit else 1
    if implicit and not to_exec:
        binder.operands.insert(0, Operand("s", VCC, state.lanes // 32))
        first = 1
    binder_sources = (first, first + 1)
    if found[2] == "class":
        bits = binder.array(binder_sources[1], "u", 1)
        value = compute(_class(kind), [binder.array(binder_sources[0], kind, 0), bits])
    else:
        value = compute(PREDICATES[found[2]], [binder.array(i, kind, s) for s, i in enumerate(binder_sources)])
    destinations = [] if first == 0 else [binder.operands[0].index]
    if to_exec:
        destinations.append(EXEC)

    def run() -> None:
        bits = np.broadcast_to(value(), state.mask.shape) & state.mask
        for index in destinations:
            state.write_mask(index, bits)

    words = state.lanes // 32
    written = tuple(index + n for index in destinations for n in range(words))
    return BoundInstruction(instruction, run, binder.registers(*binder_sources), (), mask_writes=written)


def is_modelled(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and (found[2] in PREDICATES or found[2] == "class")


def _exponent(x: Array) -> Array:
    return ((x.view(_u32) >> _u32(23)) & _u32(255)).astype(_i64)


def _denormal(x: Array) -> Array:
    return (x != 0) & (np.abs(x) < _f32(2.0**-126))


_QUIET_NAN, _INVALID = _u32(0x400000), _u32(0xFFC00000)


def div_scale(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    """V_DIV_SCALE_F32: scale a division's operand by 2^64, and say whether the quotient must be scaled back.

    "1 / S1 denormal" is read as float32: the documents write float64, which a float32's inverse never is, and without
    that case quotients of large denominators are rounded wrongly. For a denormal quotient only the numerator is scaled:
    the documents would scale such a denominator up, beyond float32."""
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
        exact = softfloat.sum_to_odd(a().astype(_f64) * b(), addend.astype(_f64))
        scale = np.where(_exponent(addend) > 127, 2.0**64, 2.0**-64)
        # What overflows before it is scaled is infinite: the multiply-add is one of float32.
        scale = np.where(np.isinf(exact.astype(_f32)), 1.0, scale)
        write(np.where(state.read_mask(VCC), exact * scale, exact).astype(_f32))

    masks = tuple(range(VCC, VCC + state.lanes // 32))
    return BoundInstruction(instruction, run, binder.registers(1, 2, 3), masks, binder.registers(0))


def div_fixup(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    """V_DIV_FIXUP_F32: quotient, denominator, numerator → the quotient with IEEE's special cases."""
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
