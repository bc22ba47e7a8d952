"""Packed instructions (two halves or two float32 at once), dot products of bytes, dual issue, and matrix instructions:
MFMA (gfx9) and WMMA (gfx11, gfx12), by the lane layouts of the ISA documents.

MFMA of M×N×K, one block, 64 lanes: with G = 64 / M groups of lanes,
    A[m, k]   lane m + M·(k // p), element k % p of its registers, p = K / G elements a lane; B[k, n] likewise
    D[i, j]   lane j + N·((i // 4) % G), register 4·(i // (4 G)) + i % 4
of float64 16×16×4: D's rows lie i = group + 4·register, two registers each.
WMMA 16×16×16 of gfx11, wave32: A[m, k] is element k of lane m and of lane m + 16 (the same again); B likewise;
    D[i, j]   lane j + 16·(i % 2), register i // 2
of gfx12: A[m, k] is lane m + 16·(k // 8), element k % 8; D[i, j] lane j + 16·(i // 8), register i % 8.

Products are summed in float64 and rounded once to the result's type; the chips round after groups of products.
Sources: AMD "Instinct MI200", "MI300", "CDNA4" ISA references, "Matrix arithmetic instructions" (and AMD's matrix
instruction calculator); "RDNA3" and "RDNA4" ISA references, "WMMA".
Of packed instructions: AMD "Instinct MI300" ISA reference, "VOP3P" and packed float32; "RDNA3", "Dual issue VALU"."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import softfloat
from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction, Operand
from portattn.backends.rocm.emulator.amdgpu.binder import (
    Binder,
    BoundInstruction,
    Read,
    unified_registers,
    vector_plane,
)
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.state import KINDS, Array, WorkGroupState, literal

_NAME = re.compile(r"v_pk_(\w+)_(f32|f16|u16|i16|b16|b32)(?:_e64)?")
_FLOATS: dict[str, Callable[..., Array]] = {
    "add": np.add, "mul": np.multiply,
}  # fmt: skip
# name → (kind, function) for halves.
_HALVES: dict[str, tuple[str, Callable[..., Array]]] = {
    **{f"{name}_f16": ("h", function) for name, function in _FLOATS.items()}, "fma_f16": ("h", softfloat.fma16),
    "add_u16": ("w", np.add), "sub_u16": ("w", np.subtract), "add_i16": ("s", np.add), "sub_i16": ("s", np.subtract),
    "mul_lo_u16": ("w", np.multiply), "max_u16": ("w", np.maximum), "min_u16": ("w", np.minimum),
    "max_i16": ("s", np.maximum), "min_i16": ("s", np.minimum),
    "lshlrev_b16": ("w", lambda a, b: b << (a & np.uint16(15))),
    "lshrrev_b16": ("w", lambda a, b: b >> (a & np.uint16(15))),
    "ashrrev_i16": ("s", lambda a, b: b >> (a & np.int16(15))),
    "mad_u16": ("w", lambda a, b, c: a * b + c), "mad_i16": ("s", lambda a, b, c: a * b + c),
}  # fmt: skip
_SINGLES: dict[str, Callable[..., Array]] = {**_FLOATS, "fma": softfloat.fma32}


def is_packed_modelled(mnemonic: str) -> bool:
    found = _NAME.fullmatch(mnemonic)
    if not found:
        return mnemonic in _DOTS
    if found[2] == "f32":
        return found[1] in _SINGLES
    name = f"{found[1]}_{found[2]}"
    return name in _HALVES or (found[2] == "f16" and softfloat.is_extreme(name)) or mnemonic.startswith("v_pk_mov_b32")


def bind_packed(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    if instruction.mnemonic in _DOTS:
        return _dot(state, instruction, *_DOTS[instruction.mnemonic])
    found = _NAME.fullmatch(instruction.mnemonic)
    if not found or not is_packed_modelled(instruction.mnemonic):
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    binder = Binder(state, instruction)
    binder.allow("op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp")
    if found[2] == "f32":
        return _pair(binder, _SINGLES[found[1]])
    if found[1] == "mov":
        return _move(binder)
    name = f"{found[1]}_{found[2]}"
    if name in _HALVES:
        return _half(binder, *_HALVES[name])
    kind, _, function = softfloat.extreme_entry(state, name)
    return _half(binder, kind, function)


def _selects(binder: Binder, count: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return op_sel and op_sel_hi (the halves that feed the low and high result), neg_lo and neg_hi."""
    numbers = binder.instruction.numbers
    zero = [0] * count
    return numbers("op_sel", zero), numbers("op_sel_hi", [1] * count), numbers("neg_lo", zero), numbers("neg_hi", zero)


def _half(binder: Binder, kind: str, function: Callable[..., Array]) -> BoundInstruction:
    state, count = binder.state, len(binder.operands) - 1
    low, high, negative_low, negative_high = _selects(binder, count)
    clamp = "clamp" in binder.instruction.modifiers
    if clamp and kind != "h":
        raise UnknownOperand("clamp on packed integers is not modelled")

    def reads(select: list[int], negative: list[int]) -> list[Read]:
        return [_component(binder, binder.operands[i + 1], kind, select[i], negative[i]) for i in range(count)]

    pairs = (reads(low, negative_low), reads(high, negative_high))
    plane = vector_plane(binder.operands[0])
    targets = (state.halves[kind][0][plane], state.halves[kind][1][plane])

    def run() -> None:
        results = [function(*[read() for read in part]) for part in pairs]
        for target, result in zip(targets, results, strict=True):
            value = np.clip(np.nan_to_num(result, nan=0.0), 0, 1) if clamp else result
            np.copyto(target, value, where=state.mask)

    return BoundInstruction(binder.instruction, run, _reads(binder), (), binder.registers(0))


def _component(binder: Binder, item: Operand, kind: str, which: int, negative: int) -> Read:
    """Return one half of a source.

    Inline constants have 32 bits: integers are sign-extended; floats are a float16 below 16 zeros for float16
    instructions, and a float32 for integer instructions. Source: LLVM, AMDGPUBaseInfo.cpp, getInlineEncodingV216."""
    if item.kind == "literal" and isinstance(item.value, float) and kind != "h":
        item = Operand("literal", value=item.bits(32))
    if item.kind == "literal" and which and (isinstance(item.value, float) or -16 <= item.value <= 64):
        upper = 0xFFFF if not isinstance(item.value, float) and item.value < 0 else 0
        plain: Array | Read = np.array([[upper]], np.uint16).view(KINDS[kind][0])
    else:
        plain = binder.plain(item, kind, which)
    get: Read = plain if callable(plain) else lambda: plain
    return (lambda: np.negative(get())) if negative else get


def _single(binder: Binder, item: Operand, which: int, negative: int) -> Read:
    """Return one float32 of a packed source: of two registers, or a constant for both."""
    state = binder.state
    if item.kind == "literal":
        plain: Array = binder.plain(item, "f")  # type: ignore[assignment]
    elif item.count != 2:
        raise UnknownOperand("a packed float32 source is two registers")
    elif item.kind == "v":
        plain = state.planes["f"][item.index + which]
    else:
        plain = state.S[:, item.index + which : item.index + which + 1].view(np.float32)
    return (lambda: np.negative(plain)) if negative else (lambda: plain)


def _pair(binder: Binder, function: Callable[..., Array]) -> BoundInstruction:
    state, count = binder.state, len(binder.operands) - 1
    low, high, negative_low, negative_high = _selects(binder, count)
    if "clamp" in binder.instruction.modifiers:
        raise UnknownOperand("clamp on packed float32 is not modelled")
    first = [_single(binder, binder.operands[i + 1], low[i], negative_low[i]) for i in range(count)]
    second = [_single(binder, binder.operands[i + 1], high[i], negative_high[i]) for i in range(count)]
    plane = vector_plane(binder.operands[0])
    targets = state.planes["f"][plane], state.planes["f"][plane + 1]

    def run() -> None:
        results = function(*[read() for read in first]), function(*[read() for read in second])
        for target, result in zip(targets, results, strict=True):
            if state.full:
                target[...] = result
            else:
                np.copyto(target, result, where=state.mask)

    used = [_chosen_registers(binder, select) for select in (low, high)]

    def flow(defined: Any) -> None:
        undefined = [defined.lanes(registers) for registers in used]
        for number, lanes in enumerate(undefined):
            defined.set_lanes(unified_registers(plane + number), lanes)

    # A register in the text that no select chooses is not read.
    return BoundInstruction(binder.instruction, run, used[0] + used[1], (), unified_registers(plane, 2), flow=flow)


def _chosen_registers(binder: Binder, select: list[int]) -> tuple[int, ...]:
    pairs = zip(binder.operands[1:], select, strict=True)
    return tuple(item.registers[which] for item, which in pairs if len(item.registers) == 2)


def _move(binder: Binder) -> BoundInstruction:
    """V_PK_MOV_B32: the low result from source 0, the high one from source 1, each by its op_sel."""
    state = binder.state
    binder.expect(3)
    low, _, _, _ = _selects(binder, 2)
    planes: list[Read] = []
    for item, which in zip(binder.operands[1:], low, strict=True):
        if item.kind == "literal":
            constant: Array = binder.plain(item, "u")  # type: ignore[assignment]
            planes.append(lambda constant=constant: constant)  # type: ignore[misc]
            continue
        single = Operand(item.kind, item.index + which)
        array: Array = binder.plain(single, "u")  # type: ignore[assignment]
        planes.append(lambda array=array: array.copy())  # type: ignore[misc]
    plane = vector_plane(binder.operands[0])
    sources = [binder.operands[n + 1].registers[which : which + 1] for n, which in enumerate(low)]

    def run() -> None:
        first, second = (read() for read in planes)
        state.whole(plane, first)
        state.whole(plane + 1, second)

    def flow(defined: Any) -> None:
        undefined = [defined.lanes(registers) for registers in sources]
        for number, lanes in enumerate(undefined):
            defined.set_lanes(unified_registers(plane + number), lanes)

    return BoundInstruction(
        binder.instruction, run, sources[0] + sources[1], (), unified_registers(plane, 2), flow=flow
    )


def _reads(binder: Binder) -> tuple[int, ...]:
    return binder.registers(*range(1, len(binder.operands)))


# Dot products of four bytes (or eight nibbles: not in use): name → (may be unsigned by neg_lo, first signed, second).
_DOTS: dict[str, tuple[bool, bool, bool]] = {
    "v_dot4_i32_iu8": (True, False, False), "v_dot4_i32_i8": (False, True, True), "v_dot4_u32_u8": (False, False,
    False),
    "v_dot4c_i32_i8": (False, True, True), "v_dot4c_i32_i8_e32": (False, True, True),
}  # fmt: skip


def _dot(state: WorkGroupState, instruction: Instruction, chosen: bool, first: bool, second: bool) -> BoundInstruction:
    """Bind a sum of four byte products and a 32-bit addend. iu8: neg_lo says which source is signed."""
    binder = Binder(state, instruction)
    binder.allow("neg_lo", "op_sel_hi", "op_sel", "neg_hi", "clamp")
    accumulates = "dot4c" in instruction.mnemonic
    binder.expect(3 if accumulates else 4)
    if "clamp" in instruction.modifiers:
        raise UnknownOperand("clamp on a dot product is not modelled")
    if chosen:
        first, second, *_ = (bool(x) for x in instruction.numbers("neg_lo", [0, 0, 0]))
    a, b = binder.read(1, "u"), binder.read(2, "u")
    c: Any = binder.plain(binder.operands[0 if accumulates else 3], "u")
    write = binder.write(0, "u")

    def parts(value: Array, signed: bool) -> Array:
        bytes_ = np.ascontiguousarray(value)[..., None].view(np.int8 if signed else np.uint8)
        return bytes_.astype(np.int64)

    def run() -> None:
        addend = c() if callable(c) else c
        total = (parts(a(), first) * parts(b(), second)).sum(-1) + addend
        write((total & 0xFFFFFFFF).astype(np.uint32))

    reads = binder.registers(*range(0 if accumulates else 1, len(binder.operands)))
    return BoundInstruction(instruction, run, reads, (), binder.registers(0))


def dual(
    first: BoundInstruction, second: BoundInstruction, state: WorkGroupState, instruction: Instruction
) -> BoundInstruction:
    """Bind a dual-issue pair: both halves read their sources before either writes."""
    first_feeds_second = not set(first.writes).isdisjoint(second.reads + second.masks)
    second_feeds_first = not set(second.writes).isdisjoint(first.reads + first.masks)
    if not first_feeds_second:
        order: tuple[BoundInstruction, ...] = (first, second)
    elif not second_feeds_first:
        order = (second, first)
    else:
        order = ()
    planes = [register - 512 for register in first.writes]

    def in_order() -> None:
        order[0].run()
        order[1].run()

    def crosswise() -> None:
        before = [state.planes["u"][plane].copy() for plane in planes]
        first.run()
        after = [state.planes["u"][plane].copy() for plane in planes]
        for plane, value in zip(planes, before, strict=True):
            state.planes["u"][plane][...] = value
        second.run()
        for plane, value in zip(planes, after, strict=True):
            state.planes["u"][plane][...] = value

    def flow(defined: Any) -> None:
        # Both from the state before: the second's result is kept while the first is moved.
        if order:
            for part in order:
                defined.move(part)
            return
        before = [defined.vectors[plane].copy() for plane in planes]
        defined.move(first)
        after = [defined.vectors[plane].copy() for plane in planes]
        everywhere = np.ones(state.mask.shape, bool)
        for register, value in zip(first.writes, before, strict=True):
            defined.set_lanes((register,), value, everywhere)
        defined.move(second)
        for register, value in zip(first.writes, after, strict=True):
            defined.set_lanes((register,), value, everywhere)

    return BoundInstruction(
        instruction, in_order if order else crosswise, first.reads + second.reads, first.masks + second.masks,
        first.writes + second.writes, uses=first.uses + second.uses, flow=flow,
    )  # fmt: skip


_MFMA = re.compile(
    r"v_mfma_(f32|i32|f64)_(\d+)x(\d+)x(\d+)_?(?:(\d+)b_)?"
    r"(xf32|f32|f64|f16|bf16|i8|fp8_fp8|fp8_bf8|bf8_fp8|bf8_bf8|f8f6f4)(_1k)?"
)
_WMMA = re.compile(r"v_wmma_(f32|f16|bf16|i32)_16x16x16_(f16|bf16|iu8|fp8_fp8|fp8_bf8|bf8_fp8|bf8_bf8)(?:_w32)?")
# Elements in a 32-bit register.
_PER_REGISTER = {"f32": 1, "xf32": 1, "f16": 2, "bf16": 2, "i8": 4, "u8": 4, "fp8": 4, "bf8": 4}
# M×N×K by type, on every chip that has the type; a shape outside of this set is not modelled.
_SHAPES = {
    "f32": {(32, 2), (16, 4)}, "xf32": {(32, 4), (16, 8)}, "f64": {(16, 4)},
    "f16": {(32, 8), (16, 16), (32, 16), (16, 32)}, "bf16": {(32, 8), (16, 16), (32, 16), (16, 32)},
    "i8": {(32, 8), (16, 16), (32, 16), (16, 32), (32, 32), (16, 64)},
    "fp8": {(32, 16), (16, 32)}, "bf8": {(32, 16), (16, 32)}, "f8f6f4": {(32, 64), (16, 128)},
}  # fmt: skip


def elements(registers: list[Array], kind: str, fnuz: bool) -> Array:
    """Convert registers, each [waves, lanes] uint32, to [waves, lanes, elements] float64."""
    words = np.stack(registers, axis=-1)
    if kind == "f32":
        return words.view(np.float32).astype(np.float64)
    if kind == "xf32":
        return softfloat.xf32(words.view(np.float32)).astype(np.float64)
    if kind == "f64":
        return words.view(np.float64)
    if kind == "f16":
        return words.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if kind in ("i8", "u8"):
        return words.view(np.int8 if kind == "i8" else np.uint8).astype(np.float64)
    return softfloat.fp8_table(kind, fnuz)[words.view(np.uint8)].astype(np.float64)


@dataclass(frozen=True)
class Layout:
    """A product's layout: `groups` of M lanes share K; row, column [registers, lanes] are D's elements."""

    size: int
    groups: int
    registers: int
    row: Array
    column: Array

    def operand(self, values: Array) -> Array:
        """[waves, lanes, p] → [waves, M, K]: K runs over the groups, then over a lane's elements."""
        waves, _, per_lane = values.shape
        grouped = values.reshape(waves, self.groups, self.size, per_lane)
        return grouped.transpose(0, 2, 1, 3).reshape(waves, self.size, self.groups * per_lane)


def mfma_layout(size: int, double: bool = False) -> Layout:
    lanes, groups = np.arange(64), 64 // size
    register = np.arange(size * size // 64)[:, None]
    if double:
        row = lanes // size + groups * register
    else:
        row = (register // 4) * 4 * groups + 4 * (lanes // size) + register % 4
    return Layout(size, groups, size * size // 64, row, np.broadcast_to(lanes % size, row.shape))


def wmma_layout(family: int) -> Layout:
    lanes, register = np.arange(32), np.arange(8)[:, None]
    row = 8 * (lanes // 16) + register if family == 12 else 2 * register + lanes // 16
    return Layout(16, 2, 8, row, np.broadcast_to(lanes % 16, row.shape))


def is_matrix_modelled(mnemonic: str) -> bool:
    found = _MFMA.fullmatch(mnemonic)
    if found:
        kind = found[6].split("_")[0]
        return not found[5] and found[2] == found[3] and (int(found[2]), int(found[4])) in _SHAPES[kind]
    return bool(_WMMA.fullmatch(mnemonic))


def bind_matrix(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    if not is_matrix_modelled(instruction.mnemonic):
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    binder = Binder(state, instruction)
    binder.expect(4)
    mfma = _MFMA.fullmatch(instruction.mnemonic)
    if mfma:
        return _bind_mfma(state, binder, mfma)
    found = _WMMA.fullmatch(instruction.mnemonic)
    assert found
    return _bind_wmma(state, binder, found)


def _bind_mfma(state: WorkGroupState, binder: Binder, found: re.Match[str]) -> BoundInstruction:
    instruction, size, depth = binder.instruction, int(found[2]), int(found[4])
    first, _, second = found[6].partition("_")
    second = second or first
    if first == "f8f6f4":
        binder.allow("cbsz", "blgp")
        formats = [instruction.number("cbsz"), instruction.number("blgp")]
        if max(formats) > 1:
            raise UnknownOperand("fp6 and fp4 operands of f8f6f4 are not modelled")
        first, second = (("fp8", "bf8")[code] for code in formats)
    else:
        binder.allow()
    layout = mfma_layout(size, first == "f64")
    per_lane = depth // layout.groups
    registers = per_lane * 2 if first == "f64" else max(per_lane // _PER_REGISTER[first], 1)
    result = {"f32": np.float32, "i32": np.int32, "f64": np.float64}[found[1]]
    return _product(state, binder, layout, (first, second), registers, result, lambda values: layout.operand(values))


def _bind_wmma(state: WorkGroupState, binder: Binder, found: re.Match[str]) -> BoundInstruction:
    instruction, gfx12 = binder.instruction, state.arch.family == 12
    if state.lanes != 32:
        raise UnknownInstruction(f"{instruction.mnemonic} in waves of 64 is not modelled")
    if found[1] in ("f16", "bf16"):
        raise UnknownInstruction(f"{instruction.mnemonic}: results of 16 bits are not modelled")
    binder.allow("neg_lo")
    kinds = found[2].split("_") if "_" in found[2] else [found[2]] * 2
    if found[2] == "iu8":
        signs = instruction.numbers("neg_lo", [0, 0, 0])
        kinds = ["i8" if signs[n] else "u8" for n in (0, 1)]
    elif "neg_lo" in instruction.modifiers:
        raise UnknownOperand("neg_lo on a float matrix product is not modelled")
    layout = wmma_layout(state.arch.family)
    registers = (8 if gfx12 else 16) // _PER_REGISTER[kinds[0]]
    result = np.float32 if found[1] == "f32" else np.int32

    def operand(values: Array) -> Array:
        if gfx12:
            return layout.operand(values)
        lower, upper = values[:, :16], values[:, 16:]
        same = (lower == upper) | (np.isnan(lower) & np.isnan(upper))
        if not same[state.group].all():
            raise UnknownOperand("a WMMA source whose lanes 16 to 31 do not repeat lanes 0 to 15")
        return lower

    return _product(state, binder, layout, (kinds[0], kinds[1]), registers, result, operand)


def _product(
    state: WorkGroupState, binder: Binder, layout: Layout, kinds: tuple[str, str], registers: int, result: Any,
    arrange: Callable[[Array], Array],
) -> BoundInstruction:  # fmt: skip
    planes, fnuz = state.planes["u"], state.arch.fnuz
    sources = [vector_plane(item) for item in binder.operands[1:3]]
    for item in binder.operands[1:3]:
        if item.count != registers:
            raise UnknownOperand(
                f"{binder.instruction.mnemonic} reads {registers} registers, the text has {item.count}"
            )
    words = np.dtype(result).itemsize // 4
    count = layout.registers * words
    target = vector_plane(binder.operands[0])
    addend = _addend(state, binder.operands[3], layout.registers, words, result)
    row, column = layout.row, layout.column

    def run() -> None:
        # EXEC is ignored: every lane of the waves that run takes part.
        a, b = (
            arrange(elements(planes[plane : plane + registers], kind, fnuz))
            for plane, kind in zip(sources, kinds, strict=True)
        )
        product = np.matmul(a, b.transpose(0, 2, 1))
        total = product[:, row, column] + addend()  # [waves, registers, lanes]
        # Integers wrap; floats are rounded here, once.
        rounded = total.astype(np.int64).astype(np.uint32) if result is np.int32 else total.astype(result)
        for register in range(layout.registers):
            values = np.ascontiguousarray(rounded[:, register]).view(np.uint32).reshape(*total[:, 0].shape, words)
            for word in range(words):
                plane = planes[target + register * words + word]
                if state.together:
                    plane[...] = values[..., word]
                else:
                    np.copyto(plane, values[..., word], where=state.group[:, None])

    written = unified_registers(target, count)
    reads = binder.registers(1, 2, 3)

    def flow(defined: Any) -> None:
        defined.whole_waves(written, reads, np.broadcast_to(state.group[:, None], state.mask.shape))

    return BoundInstruction(binder.instruction, run, reads, (), written, flow=flow)


def _addend(state: WorkGroupState, item: Operand, registers: int, words: int, result: Any) -> Callable[[], Array]:
    """Return C as [waves, registers, lanes] float64, or a constant."""
    if item.kind == "literal":
        kind = {np.float32: "f", np.int32: "i", np.float64: "d"}[result]
        constant = literal(item, kind).astype(np.float64)[None]
        return lambda: constant
    plane = vector_plane(item)
    if item.count != registers * words:
        raise UnknownOperand(f"C has {item.count} registers, {registers * words} are needed")
    if words == 1:
        return lambda: state.V[plane : plane + registers].view(result).transpose(1, 0, 2).astype(np.float64)
    return lambda: np.stack([state.pair(plane + 2 * r).view(np.float64) for r in range(registers)], axis=1)
