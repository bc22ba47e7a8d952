"""Vector instructions: the table of functions, and instructions that need more than a function of their lanes.

Sources: AMD "Instinct MI300" ISA reference, chapters "VALU" and "Instructions"; "RDNA3", "RDNA4" likewise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import softfloat
from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
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
    unified_registers,
    vector_plane,
)
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.state import KINDS, Array, WorkGroupState
from portattn.backends.rocm.emulator.amdgpu.vcc_ops import carry, cndmask, div_fixup, div_fmas, div_scale, mad64
from portattn.backends.rocm.emulator.amdgpu.vector_tables import ACCUMULATING, KEEPS_UPPER_HALF, TABLE, count_bits

_u32, _u64, _i64, _f32 = np.uint32, np.uint64, np.int64, np.float32


def bind(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    name = base_name(instruction.mnemonic)
    if name in SPECIAL:
        return SPECIAL[name](state, instruction)
    if name in TABLE or name in ACCUMULATING or softfloat.is_extreme(name):
        return _table(state, instruction, name)
    raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")


def is_modelled(name: str) -> bool:
    return name in SPECIAL or name in TABLE or name in ACCUMULATING or softfloat.is_extreme(name)


def _table(state: WorkGroupState, instruction: Instruction, name: str) -> BoundInstruction:
    binder = Binder(state, instruction)
    accumulates = name in ACCUMULATING
    entry = softfloat.extreme_entry(state, name) if softfloat.is_extreme(name) else TABLE[ACCUMULATING.get(name, name)]
    kind, kinds, function = entry
    binder.allow("clamp", "mul", "div", "op_sel", *DPP, *SDWA)
    binder.expect(len(kinds) + (0 if accumulates else 1))
    sources = [binder.array(i + 1, k, i) for i, k in enumerate(kinds) if not accumulates or i + 1 < len(kinds)]
    if accumulates:
        sources.append(binder.plain(binder.operands[0], kinds[-1]))
    value = apply_output_modifiers(instruction, kind, name, compute(function, sources))
    write = binder.write(0, kind, keeps=name in KEEPS_UPPER_HALF)

    def run() -> None:
        write(value())

    reads = binder.registers(*range(0 if accumulates else 1, len(binder.operands)))
    flow = _word_by_word(binder) if name == "mov_b64" else dpp_flow(binder)
    return BoundInstruction(instruction, run, reads, (), binder.registers(0), flow=flow)


def _word_by_word(binder: Binder) -> Callable[..., None]:
    """Move undefinedness of a 64-bit move word by word: compilers move pairs of which only one is defined."""
    sources, targets = binder.operands[1].registers, binder.registers(0)

    def flow(defined: object) -> None:
        undefined = [defined.lanes(sources[n : n + 1]) for n in range(2)]  # type: ignore[attr-defined]
        for target, lanes in zip(targets, undefined, strict=True):
            defined.set_lanes((target,), lanes)  # type: ignore[attr-defined]

    return flow


def apply_output_modifiers(instruction: Instruction, kind: str, name: str, value: Read) -> Read:
    """Apply mul:2, mul:4, div:2, then clamp."""
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

    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
        if "clamp" not in instruction.modifiers:
            return _table(state, instruction, name)
        binder = Binder(state, instruction)
        binder.allow("clamp", "op_sel", *DPP, *SDWA)
        value = compute(saturated, [binder.array(1, kind, 0), binder.array(2, kind, 1)])
        write = binder.write(0, kind)

        def run() -> None:
            write(value())

        return BoundInstruction(
            instruction, run, binder.registers(1, 2), (), binder.registers(0), flow=dpp_flow(binder)
        )

    return make


# ---------------------------------------------------------------- mixed precision, bit operations, fp8


def _fma_mix(into: str) -> Bind:
    """V_FMA_MIX…: op_sel_hi chooses float16 sources (op_sel which half), else float32."""

    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
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
            single = softfloat.fma32(*(np.ascontiguousarray(read()) for read in reads))
            # Rounded twice, as the documents say: to float32 by the multiply-add, then to float16.
            return single if into == "f" else softfloat.to_half(single)

        value = apply_output_modifiers(instruction, "f" if into == "f" else "h", "fma_mix", exact)

        def run() -> None:
            write(value())

        return BoundInstruction(instruction, run, binder.registers(1, 2, 3), (), binder.registers(0))

    return make


def _mixed(plain: Array | Read, negative: bool, absolute: bool) -> Read:
    def read() -> Array:
        value = (plain() if callable(plain) else plain).astype(_f32)
        value = np.abs(value) if absolute else value
        return -value if negative else value

    return read


def _bitop3(kind: str) -> Bind:
    """V_BITOP3: any boolean function of three inputs, as a truth table of 8 bits (index 4a + 2b + c)."""

    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
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

        return BoundInstruction(instruction, run, binder.registers(1, 2, 3), (), binder.registers(0))

    return make


def _mbcnt(upper: bool) -> Bind:
    """V_MBCNT: set bits of the mask below this lane (of its low or upper 32 lanes), plus the second source."""

    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
        binder = Binder(state, instruction)
        binder.allow()
        binder.expect(3)
        lane = np.clip(state.lane - 32 if upper else state.lane, 0, 32).astype(_u64)
        below = ((_u64(1) << lane) - _u64(1)).astype(_u32)

        value = compute(lambda m, n: count_bits(m & below) + n, [binder.array(1, "u", 0), binder.array(2, "u", 1)])
        write = binder.write(0, "u")

        def run() -> None:
            write(value())

        return BoundInstruction(instruction, run, binder.registers(1, 2), (), binder.registers(0))

    return make


def _scale(operand: Array) -> Array:
    """Return the scale of V_CVT_SCALEF32_… in float64: the exponent of a float32 alone, 2^(e − 127)."""
    return np.exp2((np.ascontiguousarray(operand).view(_u32) >> _u32(23) & _u32(255)).astype(np.float64) - 127)


def _from_fp8(kind: str, both: bool) -> Bind:
    """fp8 → float32: one byte, or the two of a half (op_sel picks the half or byte)."""

    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
        binder = Binder(state, instruction)
        binder.allow("op_sel", *SDWA, "byte_sel")
        binder.expect(2)
        table = softfloat.fp8_table(kind, state.arch.fnuz)
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
        plane = vector_plane(binder.operands[0])

        def run() -> None:
            bits = source() if callable(source) else source
            for j in range(2 if both else 1):
                state.whole(plane + j, table[(bits >> _u32(shift + 8 * j)) & _u32(255)].view(_u32))

        written = unified_registers(plane, 2 if both else 1)
        return BoundInstruction(instruction, run, binder.registers(1), (), written)

    return make


def _from_scaled(kind: str, into: str) -> Bind:
    """Two fp8 or fp4 of a source's half or byte (op_sel), times a scale → two float32, or two packed halves."""
    width = 4 if kind == "fp4" else 8

    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
        binder = Binder(state, instruction)
        binder.allow("op_sel")
        binder.expect(3)
        table = softfloat.FP4 if kind == "fp4" else softfloat.fp8_table(kind, state.arch.fnuz)
        low, high, *_ = instruction.numbers("op_sel", [0, 0])
        first = 8 * (low + 2 * high) if kind == "fp4" else 16 * low
        source, scale = binder.read(1, "u"), binder.read(2, "f")
        plane = vector_plane(binder.operands[0])

        def run() -> None:
            bits, factor = source(), _scale(scale())
            codes = [bits >> _u32(first + width * j) & _u32((1 << width) - 1) for j in range(2)]
            values = [table[code] * factor for code in codes]  # float64: rounded below, once
            if into == "f32":
                for j, value in enumerate(values):
                    state.whole(plane + j, value.astype(_f32).view(_u32))
                return
            if into == "f16":
                parts = [value.astype(np.float16).view(np.uint16).astype(_u32) for value in values]
            else:
                parts = [softfloat.bf16_bits_of_double(value) for value in values]
            state.whole(plane, parts[0] | parts[1] << _u32(16))

        written = unified_registers(plane, 2 if into == "f32" else 1)
        return BoundInstruction(instruction, run, binder.registers(1, 2), (), written)

    return make


def _to_fp8(kind: str, source: str = "f32", scaled: bool = False) -> Bind:
    """Two float32, or two packed halves, → two fp8 in the low or high half of the destination, the other half kept."""

    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
        binder = Binder(state, instruction)
        binder.allow("op_sel")
        count = (2 if source == "f32" else 1) + scaled
        binder.expect(1 + count)
        pair: list[Read] = [binder.read(1, "f", 0), binder.read(2, "f", 1)] if source == "f32" else []
        packed = None if source == "f32" else binder.read(1, "u")
        scale = binder.read(count, "f", count - 1) if scaled else None
        selects = instruction.numbers("op_sel", [0])
        target = state.halves["w"][selects[-1]][vector_plane(binder.operands[0])]

        def halves() -> list[Array]:
            assert packed is not None
            parts = [packed() >> _u32(16 * j) & _u32(0xFFFF) for j in range(2)]
            if source == "bf16":
                return [(part << _u32(16)).view(_f32) for part in parts]
            return [softfloat.from_half(part.astype(np.uint16).view(np.float16)) for part in parts]

        def run() -> None:
            values: list[Array] = [read() for read in pair] if packed is None else halves()
            if scale is not None:
                factor = _scale(scale())
                values = [value / factor for value in values]
            codes = [softfloat.fp8_bits(value, kind, state.arch.fnuz, state.saturate[:, None]) for value in values]
            np.copyto(target, (codes[0] | codes[1] << _u32(8)).astype(np.uint16), where=state.mask)

        reads = binder.registers(*range(1, len(binder.operands)))
        return BoundInstruction(instruction, run, reads, (), binder.registers(0))

    return make


def _swap(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    binder = Binder(state, instruction)
    binder.allow()
    binder.expect(2)
    first, second = (vector_plane(item) for item in binder.operands)

    def run() -> None:
        old = state.planes["u"][first].copy()
        state.whole(first, state.planes["u"][second])
        state.whole(second, old)

    both = binder.registers(0, 1)
    return BoundInstruction(instruction, run, both, (), both)


def _nothing(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    return BoundInstruction(instruction, lambda: None)


SPECIAL: dict[str, Bind] = {
    "nop": _nothing, "cndmask_b32": cndmask("u"), "cndmask_b16": cndmask("w"), "swap_b32": _swap,
    "div_scale_f32": div_scale, "div_fmas_f32": div_fmas, "div_fixup_f32": div_fixup,
    "fma_mix_f32": _fma_mix("f"), "fma_mixlo_f16": _fma_mix("low"), "fma_mixhi_f16": _fma_mix("high"),
    "mbcnt_lo_u32_b32": _mbcnt(False), "mbcnt_hi_u32_b32": _mbcnt(True),
    "bitop3_b32": _bitop3("u"), "bitop3_b16": _bitop3("w"),
    "mad_u64_u32": mad64(False), "mad_i64_i32": mad64(True), "mad_co_u64_u32": mad64(False),
    "mad_co_i64_i32": mad64(True),
    "add_co_u32": carry("", False), "sub_co_u32": carry("ab", False), "subrev_co_u32": carry("ba", False),
    "addc_co_u32": carry("", True), "subb_co_u32": carry("ab", True), "subbrev_co_u32": carry("ba", True),
    "add_co_ci_u32": carry("", True), "sub_co_ci_u32": carry("ab", True), "subrev_co_ci_u32": carry("ba", True),
    **{name: _add_sub(name) for plain in _SATURATING for name in (plain, plain.replace("_", "_nc_"))},
    **{f"cvt_pk_f32_{kind}": _from_fp8(kind, True) for kind in ("fp8", "bf8")},
    **{f"cvt_f32_{kind}": _from_fp8(kind, False) for kind in ("fp8", "bf8")},
    **{f"cvt_pk_{kind}_f32": _to_fp8(kind) for kind in ("fp8", "bf8")},
    **{f"cvt_scalef32_pk_{into}_{kind}": _from_scaled(kind, into) for kind in ("fp8", "bf8", "fp4")
       for into in ("f32", "f16", "bf16")},
    **{f"cvt_scalef32_pk_{kind}_{source}": _to_fp8(kind, source, True) for kind in ("fp8", "bf8")
       for source in ("f32", "f16", "bf16")},
}  # fmt: skip
