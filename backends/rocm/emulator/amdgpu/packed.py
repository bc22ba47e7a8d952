"""Packed instructions (two halves, or two float32, at once), dot products of bytes, and dual issue.

Sources: AMD "Instinct MI300" ISA reference, "VOP3P" and packed float32; "RDNA3" ISA reference, "Dual issue VALU".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import extremes, floats
from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import (
    Binder,
    BoundInstruction,
    Read,
    unified_registers,
    vector_plane,
)
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.operands import Operand
from portattn.backends.rocm.emulator.amdgpu.state import KINDS, Array, WorkGroupState

_NAME = re.compile(r"v_pk_(\w+)_(f32|f16|u16|i16|b16|b32)(?:_e64)?")
_FLOATS: dict[str, Callable[..., Array]] = {
    "add": np.add, "mul": np.multiply,
}  # fmt: skip
# name → (kind, function) for halves.
_HALVES: dict[str, tuple[str, Callable[..., Array]]] = {
    **{f"{name}_f16": ("h", function) for name, function in _FLOATS.items()}, "fma_f16": ("h", floats.fma16),
    "add_u16": ("w", np.add), "sub_u16": ("w", np.subtract), "add_i16": ("s", np.add), "sub_i16": ("s", np.subtract),
    "mul_lo_u16": ("w", np.multiply), "max_u16": ("w", np.maximum), "min_u16": ("w", np.minimum),
    "max_i16": ("s", np.maximum), "min_i16": ("s", np.minimum),
    "lshlrev_b16": ("w", lambda a, b: b << (a & np.uint16(15))),
    "lshrrev_b16": ("w", lambda a, b: b >> (a & np.uint16(15))),
    "ashrrev_i16": ("s", lambda a, b: b >> (a & np.int16(15))),
    "mad_u16": ("w", lambda a, b, c: a * b + c), "mad_i16": ("s", lambda a, b, c: a * b + c),
}  # fmt: skip
_SINGLES: dict[str, Callable[..., Array]] = {**_FLOATS, "fma": floats.fma32}


def is_modelled(mnemonic: str) -> bool:
    found = _NAME.fullmatch(mnemonic)
    if not found:
        return mnemonic in _DOTS
    if found[2] == "f32":
        return found[1] in _SINGLES
    name = f"{found[1]}_{found[2]}"
    return name in _HALVES or (found[2] == "f16" and extremes.is_modelled(name)) or mnemonic.startswith("v_pk_mov_b32")


def bind(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    """Bind one packed instruction or byte dot product. Raises UnknownInstruction."""
    if instruction.mnemonic in _DOTS:
        return _dot(state, instruction, *_DOTS[instruction.mnemonic])
    found = _NAME.fullmatch(instruction.mnemonic)
    if not found or not is_modelled(instruction.mnemonic):
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
    kind, _, function = extremes.entry(state, name)
    return _half(binder, kind, function)


def _selects(binder: Binder, count: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """op_sel and op_sel_hi (which half feeds the low and the high result), neg_lo and neg_hi."""
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
    """One half of a source.

    Inline constants have 32 bits: integers are sign-extended; floats are a float16 below 16 zeros for float16
    instructions, and a float32 for integer instructions. Source: LLVM, AMDGPUBaseInfo.cpp, getInlineEncodingV216.
    """
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
    """One float32 of a packed source: of two registers, or a constant, which both get."""
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

    # A register that no select chooses is not read, whatever the text names.
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
    """Sum of four products of bytes and a 32-bit addend. iu8: neg_lo says which source is signed."""
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
    """Two halves of a dual-issue pair: both read their sources before either writes."""
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
