"""Vector instructions: the table of functions, and those that need more than a function of their lanes.

Sources: AMD "Instinct MI300" ISA reference, chapters "VALU" and "Instructions"; "RDNA3", "RDNA4" likewise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import extremes, floats
from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, Bound, Read, compute, unified, vector_plane
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.isa import VCC
from portattn.backends.rocm.emulator.amdgpu.state import KINDS, Array, State
from portattn.backends.rocm.emulator.amdgpu.vector_tables import ACCUMULATING, KEEPS_UPPER_HALF, TABLE, count_bits

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.definedness import Definedness

Bind = Callable[[State, Instruction], Bound]
_SUFFIX = re.compile(r"_(e32|e64|dpp|dpp8|sdwa|e64_dpp|e32_dpp|e64_dpp8)$")
_DPP = ("quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast", "row_newbcast",
        "row_share", "row_xmask", "wave_shr", "wave_shl", "wave_ror", "wave_rol", "row_mask", "bank_mask", "bound_ctrl",
        "fi", "dpp8")  # fmt: skip
_SDWA = ("src0_sel", "src1_sel", "dst_sel", "dst_unused")
_u32, _u64, _i64, _f32, _f64 = np.uint32, np.uint64, np.int64, np.float32, np.float64


def base_name(mnemonic: str) -> str:
    """The name without "v_", "dual_" and the encoding."""
    return _SUFFIX.sub("", _SUFFIX.sub("", mnemonic[2:])).removeprefix("dual_")


def bind(state: State, instruction: Instruction) -> Bound:
    """Bind one vector instruction. Raises UnknownInstruction."""
    name = base_name(instruction.mnemonic)
    if name in SPECIAL:
        return SPECIAL[name](state, instruction)
    if name in TABLE or name in ACCUMULATING or extremes.known(name):
        return _table(state, instruction, name)
    raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")


def known(name: str) -> bool:
    return name in SPECIAL or name in TABLE or name in ACCUMULATING or extremes.known(name)


def _table(state: State, instruction: Instruction, name: str) -> Bound:
    binder = Binder(state, instruction)
    accumulates = name in ACCUMULATING
    entry = extremes.entry(state, name) if extremes.known(name) else TABLE[ACCUMULATING.get(name, name)]
    kind, kinds, function = entry
    binder.allow("clamp", "mul", "div", "op_sel", *_DPP, *_SDWA)
    binder.expect(len(kinds) + (0 if accumulates else 1))
    sources = [binder.array(i + 1, k, i) for i, k in enumerate(kinds) if not accumulates or i + 1 < len(kinds)]
    if accumulates:
        sources.append(binder.plain(binder.operands[0], kinds[-1]))
    value = modified(instruction, kind, name, compute(function, sources))
    write = binder.write(0, kind, keeps=name in KEEPS_UPPER_HALF)

    def run() -> None:
        write(value())

    reads = binder.registers(*range(0 if accumulates else 1, len(binder.operands)))
    flow = _word_by_word(binder) if name == "mov_b64" else _moved(binder)
    return Bound(instruction, run, reads, (), binder.registers(0), flow=flow)


def _word_by_word(binder: Binder) -> Callable[..., None]:
    """A 64-bit move: compilers also move pairs of which only one is defined."""
    sources, targets = binder.operands[1].registers, binder.registers(0)

    def flow(defined: object) -> None:
        undefined = [defined.lanes(sources[n : n + 1]) for n in range(2)]  # type: ignore[attr-defined]
        for target, lanes in zip(targets, undefined, strict=True):
            defined.set_lanes((target,), lanes)  # type: ignore[attr-defined]

    return flow


def _moved(binder: Binder) -> Callable[..., None] | None:
    """With DPP, undefinedness moves along with source 0."""
    dpp = binder.dpp
    if dpp is None:
        return None

    def flow(defined: object) -> None:
        defined.moved(binder, dpp)  # type: ignore[attr-defined]

    return flow


def modified(instruction: Instruction, kind: str, name: str, value: Read) -> Read:
    """Output modifiers: mul:2, mul:4, div:2, then clamp."""
    dtype, _, is_float = KINDS[kind]
    modifiers = instruction.modifiers
    if "mul" in modifiers or "div" in modifiers:
        factor = dtype(modifiers["mul"]) if "mul" in modifiers else dtype(0.5)
        plain = value
        value = lambda: plain() * factor  # noqa: E731
    if "clamp" not in modifiers:
        return value
    exact = value
    if is_float:
        return lambda: np.clip(np.nan_to_num(exact(), nan=0.0), dtype(0), dtype(1))
    return _saturated(instruction, name)


def _saturated(instruction: Instruction, name: str) -> Read:
    raise UnknownOperand(f"clamp is not modelled for {instruction.mnemonic}")


# ---------------------------------------------------------------- saturating integers (clamp on add and subtract)

_SATURATING: dict[str, tuple[str, Callable[[Array, Array], Array]]] = {
    "add_u32": ("u", lambda a, b: a + b), "sub_u32": ("u", lambda a, b: a - b), "subrev_u32": ("u", lambda a, b: b - a),
    "add_i32": ("i", lambda a, b: a + b), "sub_i32": ("i", lambda a, b: a - b),
    "add_u16": ("w", lambda a, b: a + b), "sub_u16": ("w", lambda a, b: a - b),
    "add_i16": ("s", lambda a, b: a + b), "sub_i16": ("s", lambda a, b: a - b),
}  # fmt: skip


def _add_sub(name: str) -> Bind:
    kind, exact = _SATURATING[name.replace("_nc", "")]
    dtype = KINDS[kind][0]
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max

    def saturated(a: Array, b: Array) -> Array:
        return np.clip(exact(a.astype(_i64), b.astype(_i64)), low, high).astype(dtype)

    def make(state: State, instruction: Instruction) -> Bound:
        if "clamp" not in instruction.modifiers:
            return _table(state, instruction, name)
        binder = Binder(state, instruction)
        binder.allow("clamp", "op_sel", *_DPP, *_SDWA)
        value = compute(saturated, [binder.array(1, kind, 0), binder.array(2, kind, 1)])
        write = binder.write(0, kind)

        def run() -> None:
            write(value())

        return Bound(instruction, run, binder.registers(1, 2), (), binder.registers(0), flow=_moved(binder))

    return make


# ---------------------------------------------------------------- selects and carries


def _mask_read(state: State, binder: Binder, index: int) -> tuple[Read, tuple[int, ...]]:
    """A scalar operand as a bit a lane, and the registers it is in."""
    item = binder.operands[index]
    if item.kind == "s":
        return lambda: state.read_mask(item.index), tuple(range(item.index, item.index + state.lanes // 32))
    if item.kind == "literal":
        bits = item.bits(64)
        constant = np.array([[bool(bits >> lane & 1) for lane in range(state.lanes)]])
        whole = np.broadcast_to(constant, (state.waves, state.lanes))
        return lambda: whole, ()
    raise UnknownOperand(f"{binder.instruction.operands[index]} as a mask")


def _mask_write(state: State, binder: Binder, index: int) -> tuple[Callable[[Array], None], tuple[int, ...]]:
    item = binder.operands[index]
    if item.kind == "null":
        return lambda bits: None, ()
    if item.kind != "s":
        raise UnknownOperand(f"{binder.instruction.operands[index]} as a mask")

    def put(bits: Array) -> None:
        state.write_mask(item.index, np.broadcast_to(bits, state.mask.shape) & state.mask)

    return put, tuple(range(item.index, item.index + state.lanes // 32))


def _cndmask(kind: str) -> Bind:
    def make(state: State, instruction: Instruction) -> Bound:
        binder = Binder(state, instruction)
        binder.allow("op_sel", *_DPP, *_SDWA)
        binder.expect(3, 4)
        if len(binder.operands) == 3:  # dual-issue halves leave vcc out
            mask, masks = (lambda: state.read_mask(VCC)), tuple(range(VCC, VCC + state.lanes // 32))
        else:
            mask, masks = _mask_read(state, binder, 3)
        signs = any(item.negative or item.absolute for item in binder.operands[1:3])
        typed = {"u": "f", "w": "h"}[kind] if signs else kind
        no, yes = binder.read(1, typed, 0), binder.read(2, typed, 1)
        write = binder.write(0, typed)

        def run() -> None:
            write(np.where(mask(), yes(), no()))

        def flow(defined: object) -> None:
            defined.selected(binder, mask(), masks)  # type: ignore[attr-defined]

        own = None if binder.dpp is not None else flow
        return Bound(instruction, run, binder.registers(1, 2), masks, binder.registers(0), flow=own or _moved(binder))

    return make


def _carry(minus: str, with_carry: bool) -> Bind:
    """Adds ("") and subtracts ("ab": a − b, "ba": b − a) with a carry out, and in where `with_carry`."""

    def make(state: State, instruction: Instruction) -> Bound:
        binder = Binder(state, instruction)
        binder.allow(*_DPP, *_SDWA)
        binder.expect(5 if with_carry else 4)
        a, b = binder.read(2, "u", 0), binder.read(3, "u", 1)
        write = binder.write(0, "u")
        carry_out, masks_out = _mask_write(state, binder, 1)
        carry_in, masks_in = _mask_read(state, binder, 4) if with_carry else ((lambda: np.zeros((1, 1), bool)), ())

        def run() -> None:
            x, y, c = a().astype(_i64), b().astype(_i64), carry_in().astype(_i64)
            total = x + y + c if not minus else (x - y - c if minus == "ab" else y - x - c)
            write((total & 0xFFFFFFFF).astype(_u32))
            carry_out((total < 0) | (total > 0xFFFFFFFF))

        return Bound(instruction, run, binder.registers(2, 3), masks_in, binder.registers(0), masks_out)

    return make


def _mad64(signed: bool) -> Bind:
    """64-bit sum of a 32×32-bit product and an addend, with the carry out."""

    def make(state: State, instruction: Instruction) -> Bound:
        binder = Binder(state, instruction)
        binder.allow()
        binder.expect(5)
        narrow, wide = ("i", "I") if signed else ("u", "U")
        a, b, c = binder.read(2, narrow, 0), binder.read(3, narrow, 1), binder.read(4, wide, 2)
        write = binder.write(0, "U")
        carry_out, masks_out = _mask_write(state, binder, 1)
        dtype = KINDS[wide][0]

        def run() -> None:
            product = a().astype(dtype) * b().astype(dtype)
            addend = c()
            total = product + addend
            # Unsigned: a sum that wrapped is below its part. Signed: the operands agree in sign and the sum does not.
            over = ((product ^ total) & (addend ^ total)) < 0 if signed else total < product
            write(total.view(_u64))
            carry_out(over)

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
        return Bound(instruction, run, reads, (), (low, high), masks_out, flow=flow)

    return make


# ---------------------------------------------------------------- division helpers


def _exponent(x: Array) -> Array:
    return ((x.view(_u32) >> _u32(23)) & _u32(255)).astype(_i64)


def _denormal(x: Array) -> Array:
    return (x != 0) & (np.abs(x) < _f32(2.0**-126))


_QUIET_NAN, _INVALID = _u32(0x400000), _u32(0xFFC00000)


def _div_scale(state: State, instruction: Instruction) -> Bound:
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
    flag, masks_out = _mask_write(state, binder, 1)

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

    return Bound(instruction, run, binder.registers(2, 3, 4), (), binder.registers(0), masks_out)


def _div_fmas(state: State, instruction: Instruction) -> Bound:
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
    return Bound(instruction, run, binder.registers(1, 2, 3), masks, binder.registers(0))


def _div_fixup(state: State, instruction: Instruction) -> Bound:
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

    return Bound(instruction, run, binder.registers(1, 2, 3), (), binder.registers(0))


# ---------------------------------------------------------------- mixed precision, bit operations, fp8


def _fma_mix(into: str) -> Bind:
    """V_FMA_MIX…: op_sel_hi chooses float16 sources (op_sel which half), else float32."""

    def make(state: State, instruction: Instruction) -> Bound:
        binder = Binder(state, instruction)
        binder.allow("op_sel", "op_sel_hi", "clamp")
        binder.expect(4)
        select, narrow = instruction.numbers("op_sel", [0] * 3), instruction.numbers("op_sel_hi", [0] * 3)
        reads: list[Read] = []
        for i in range(3):
            item = binder.operands[i + 1]
            plain = binder.plain(item, "h", select[i]) if narrow[i] else binder.plain(item, "f")
            reads.append(_mixed(plain, item.negative, item.absolute))
        write: Callable[[Array], None]
        if into == "f":
            write = binder.write(0, "f")
        else:
            target = state.halves["h"][into == "high"][vector_plane(binder.operands[0])]

            def write(value: Array) -> None:
                np.copyto(target, value, where=state.mask)

        def exact() -> Array:
            single = floats.fma32(*(np.ascontiguousarray(read()) for read in reads))
            # Rounded twice, as the documents say: to float32 by the multiply-add, then to float16.
            return single if into == "f" else floats.to_half(single)

        value = modified(instruction, "f" if into == "f" else "h", "fma_mix", exact)

        def run() -> None:
            write(value())

        return Bound(instruction, run, binder.registers(1, 2, 3), (), binder.registers(0))

    return make


def _mixed(plain: Array | Read, negative: bool, absolute: bool) -> Read:
    def read() -> Array:
        value = (plain() if callable(plain) else plain).astype(_f32)
        value = np.abs(value) if absolute else value
        return -value if negative else value

    return read


def _bitop3(kind: str) -> Bind:
    """V_BITOP3: any boolean function of three inputs, as a truth table of 8 bits (index 4a + 2b + c)."""

    def make(state: State, instruction: Instruction) -> Bound:
        binder = Binder(state, instruction)
        binder.allow("bitop3", "op_sel")
        binder.expect(4)
        table = instruction.number("bitop3")

        def function(a: Array, b: Array, c: Array) -> Array:
            result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), KINDS[kind][0])
            for n in range(8):
                if table >> n & 1:
                    result |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
            return result

        value = compute(function, [binder.array(i, kind, i - 1) for i in (1, 2, 3)])
        write = binder.write(0, kind)

        def run() -> None:
            write(value())

        return Bound(instruction, run, binder.registers(1, 2, 3), (), binder.registers(0))

    return make


def _mbcnt(upper: bool) -> Bind:
    """V_MBCNT: set bits of the mask below this lane (of its low or upper 32 lanes), plus the second source."""

    def make(state: State, instruction: Instruction) -> Bound:
        binder = Binder(state, instruction)
        binder.allow()
        binder.expect(3)
        lane = np.clip(state.lane - 32 if upper else state.lane, 0, 32).astype(_u64)
        below = ((_u64(1) << lane) - _u64(1)).astype(_u32)

        value = compute(lambda m, n: count_bits(m & below) + n, [binder.array(1, "u", 0), binder.array(2, "u", 1)])
        write = binder.write(0, "u")

        def run() -> None:
            write(value())

        return Bound(instruction, run, binder.registers(1, 2), (), binder.registers(0))

    return make


def _scale(bits: Array) -> Array:
    """The scale of V_CVT_SCALEF32_…: the exponent of a float32 alone, 2^(e − 127)."""
    return np.exp2((bits >> _u32(23) & _u32(255)).astype(_f32) - _f32(127))


def _from_fp8(kind: str, into: str, both: bool = True, scaled: bool = False) -> Bind:
    """fp8 → float32 or packed float16: one byte, or the two of a half (op_sel picks the half or byte)."""

    def make(state: State, instruction: Instruction) -> Bound:
        binder = Binder(state, instruction)
        binder.allow("op_sel", *_SDWA, "byte_sel")
        binder.expect(3 if scaled else 2)
        table = floats.fp8_table(kind, state.arch.fnuz)
        selects = instruction.numbers("op_sel", [0, 0])
        chosen = instruction.modifiers.get("src0_sel", f"BYTE_{instruction.number('byte_sel')}")
        if both:
            shift = 16 * (1 if chosen == "WORD_1" else selects[0])
        elif not chosen.startswith("BYTE"):
            raise UnknownOperand(f"src0_sel:{chosen} of an fp8 conversion")
        else:
            # op_sel is [low bit, high bit] of the byte's number here.
            shift = 8 * (int(chosen[-1]) if "op_sel" not in instruction.modifiers else selects[0] + 2 * selects[1])
        source = binder.plain(binder.operands[1], "u")
        scale = binder.read(2, "u", 1) if scaled else None
        plane = vector_plane(binder.operands[0])

        def run() -> None:
            bits = source() if callable(source) else source
            values = [table[(bits >> _u32(shift + 8 * j)) & _u32(255)] for j in range(2 if both else 1)]
            if scale is not None:
                values = [value * _scale(scale()) for value in values]
            if into == "f16":
                state.whole(plane, floats.f16_bits(values[0]) | floats.f16_bits(values[1]) << _u32(16))
                return
            for j, value in enumerate(values):
                state.whole(plane + j, value.view(_u32))

        written = unified(plane, 2 if both and into == "f32" else 1)
        return Bound(instruction, run, binder.registers(*range(1, len(binder.operands))), (), written)

    return make


def _to_fp8(kind: str, scaled: bool = False) -> Bind:
    """Two float32 → two fp8 in the low or high half of the destination, the other half kept."""

    def make(state: State, instruction: Instruction) -> Bound:
        binder = Binder(state, instruction)
        binder.allow("op_sel")
        binder.expect(4 if scaled else 3)
        a, b = binder.read(1, "f", 0), binder.read(2, "f", 1)
        scale = binder.read(3, "u", 2) if scaled else None
        selects = instruction.numbers("op_sel", [0])
        target = state.halves["w"][selects[-1]][vector_plane(binder.operands[0])]

        def code(value: Array) -> Array:
            value = value / _scale(scale()) if scale is not None else value
            return floats.fp8_bits(value, kind, state.arch.fnuz, state.saturate[:, None])

        def run() -> None:
            np.copyto(target, (code(a()) | code(b()) << _u32(8)).astype(np.uint16), where=state.mask)

        reads = binder.registers(*range(1, len(binder.operands)))
        return Bound(instruction, run, reads, (), binder.registers(0))

    return make


def _swap(state: State, instruction: Instruction) -> Bound:
    binder = Binder(state, instruction)
    binder.allow()
    binder.expect(2)
    first, second = (vector_plane(item) for item in binder.operands)

    def run() -> None:
        old = state.planes["u"][first].copy()
        state.whole(first, state.planes["u"][second])
        state.whole(second, old)

    both = binder.registers(0, 1)
    return Bound(instruction, run, both, (), both)


def _nothing(state: State, instruction: Instruction) -> Bound:
    return Bound(instruction, lambda: None)


SPECIAL: dict[str, Bind] = {
    "nop": _nothing, "cndmask_b32": _cndmask("u"), "cndmask_b16": _cndmask("w"), "swap_b32": _swap,
    "div_scale_f32": _div_scale, "div_fmas_f32": _div_fmas, "div_fixup_f32": _div_fixup,
    "fma_mix_f32": _fma_mix("f"), "fma_mixlo_f16": _fma_mix("low"), "fma_mixhi_f16": _fma_mix("high"),
    "mbcnt_lo_u32_b32": _mbcnt(False), "mbcnt_hi_u32_b32": _mbcnt(True),
    "bitop3_b32": _bitop3("u"), "bitop3_b16": _bitop3("w"),
    "mad_u64_u32": _mad64(False), "mad_i64_i32": _mad64(True), "mad_co_u64_u32": _mad64(False),
    "mad_co_i64_i32": _mad64(True),
    "add_co_u32": _carry("", False), "sub_co_u32": _carry("ab", False), "subrev_co_u32": _carry("ba", False),
    "addc_co_u32": _carry("", True), "subb_co_u32": _carry("ab", True), "subbrev_co_u32": _carry("ba", True),
    "add_co_ci_u32": _carry("", True), "sub_co_ci_u32": _carry("ab", True), "subrev_co_ci_u32": _carry("ba", True),
    **{name: _add_sub(name) for plain in _SATURATING for name in (plain, plain.replace("_", "_nc_"))},
    **{f"cvt_pk_f32_{kind}": _from_fp8(kind, "f32") for kind in ("fp8", "bf8")},
    **{f"cvt_f32_{kind}": _from_fp8(kind, "f32", both=False) for kind in ("fp8", "bf8")},
    **{f"cvt_scalef32_pk_f32_{kind}": _from_fp8(kind, "f32", scaled=True) for kind in ("fp8", "bf8")},
    **{f"cvt_scalef32_pk_f16_{kind}": _from_fp8(kind, "f16", scaled=True) for kind in ("fp8", "bf8")},
    **{f"cvt_pk_{kind}_f32": _to_fp8(kind) for kind in ("fp8", "bf8")},
    **{f"cvt_scalef32_pk_{kind}_f32": _to_fp8(kind, scaled=True) for kind in ("fp8", "bf8")},
}  # fmt: skip
