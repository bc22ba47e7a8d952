"""LDS instructions (ds_…), among them atomics and gfx950's transposing loads; and scratch (each lane's private memory).

gfx90a's scratch instructions are buffer instructions with a descriptor.
Source: AMD "Instinct MI300" ISA reference, "Local data share", "Scratch"; "CDNA4" ISA reference (DS_READ_B64_TR_…);
"RDNA3"; LLVM AMDGPU guide, "Private Segment Buffer".
"""

from __future__ import annotations

import re

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction, Operand
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction, unified_registers, vector_plane
from portattn.backends.rocm.emulator.amdgpu.errors import OutOfBounds, UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.lds import Context, flat_waves
from portattn.backends.rocm.emulator.amdgpu.memory import (
    ATOMICS,
    COMPARE_AND_SWAP,
    Element,
    apply_atomic,
    element,
    get,
    put,
)
from portattn.backends.rocm.emulator.amdgpu.state import SCRATCH_MAGIC, Array

_ONE = re.compile(r"ds_(read|load|write|store)_((?:[ui](?:8|16)|b(?:8|16|32|64|96|128))(?:_d16|_d16_hi)?)")
_TWO = re.compile(r"ds_(read|load|write|store)_?2(?:addr)?(st64|_stride64)?_(b32|b64)")
_TRANSPOSED = re.compile(r"ds_read_b64_tr_b(8|16)")


def is_lds_modelled(mnemonic: str) -> bool:
    return bool(
        _ONE.fullmatch(mnemonic)
        or _TWO.fullmatch(mnemonic)
        or _TRANSPOSED.fullmatch(mnemonic)
        or _atomic_name(mnemonic) is not None
    )


def _atomic_name(mnemonic: str) -> str | None:
    name = mnemonic[3:].replace("_rtn", "")
    return name if name in ATOMICS or name in COMPARE_AND_SWAP else None


def bind_lds(machine: Context, instruction: Instruction) -> BoundInstruction:
    one, two = _ONE.fullmatch(instruction.mnemonic), _TWO.fullmatch(instruction.mnemonic)
    transposed = _TRANSPOSED.fullmatch(instruction.mnemonic)
    binder = Binder(machine.state, instruction)
    if one:
        binder.allow("offset")
        kind = element(one[2])
        places = [(instruction.number("offset"), 0)]
        make = _lds_load if one[1] in ("read", "load") else _lds_store
        return make(machine, binder, kind, places)
    if two:
        binder.allow("offset0", "offset1")
        kind = element(two[3])
        stride = kind.size * (64 if two[2] else 1)
        places = [(instruction.number("offset0") * stride, 0), (instruction.number("offset1") * stride, kind.registers)]
        make = _lds_load if two[1] in ("read", "load") else _lds_store
        return make(machine, binder, kind, places)
    if transposed:
        binder.allow("offset")
        return _transposed(machine, binder, int(transposed[1]))
    name = _atomic_name(instruction.mnemonic)
    if name is None:
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    binder.allow("offset")
    return _lds_atomic(machine, binder, name)


def _lanes(machine: Context, plane: int, offset: int) -> tuple[Array | None, Array, Array]:
    """Return active lanes (None: all), their LDS byte offsets [n] and waves [n]."""
    state = machine.state
    address = state.planes["u"][plane]
    mask = None if state.full else state.mask
    chosen = address.reshape(-1) if mask is None else address[mask]
    # The sum is one of 32 bits: compilers fold a negative part of an address into the register.
    return mask, (chosen.astype(np.int64) + offset) & 0xFFFFFFFF, flat_waves(mask, state.waves, state.lanes)


def _lds_load(machine: Context, binder: Binder, kind: Element, places: list[tuple[int, int]]) -> BoundInstruction:
    binder.expect(2)
    state, instruction, lds = machine.state, binder.instruction, machine.lds
    plane, address = vector_plane(binder.operands[0]), vector_plane(binder.operands[1])
    half = binder.operands[0].half
    if half is not None:
        kind = Element(kind.size, kind.signed, half)
    count = kind.registers * len(places)
    registers = unified_registers(plane, count)

    def run() -> None:
        results = []
        for offset, first in places:
            mask, offsets, waves = _lanes(machine, address, offset)
            inside = lds.inside(offsets, kind.size, instruction.place)
            if inside is None:
                data, unset = lds.load(offsets, kind.size, waves, instruction.place)
            else:
                data, unset = np.zeros((len(offsets), kind.size), np.uint8), None
                data[inside], _ = lds.load(offsets[inside], kind.size, waves[inside], instruction.place)
            results.append((first, mask, data, unset))
        # Both places are read before either is written: the address may be among the destinations.
        for first, mask, data, unset in results:
            put(state, plane + first, kind, data, mask)
            if unset is not None and machine.defined is not None:
                machine.mark(registers[first : first + kind.registers], mask, unset)
        machine.issue("lds", registers, half=kind.half)

    return BoundInstruction(instruction, run, (), (), registers, uses=binder.registers(1), counter="lds")


def _lds_store(machine: Context, binder: Binder, kind: Element, places: list[tuple[int, int]]) -> BoundInstruction:
    binder.expect(1 + len(places))
    state, instruction, lds = machine.state, binder.instruction, machine.lds
    address = vector_plane(binder.operands[0])
    sources = [vector_plane(item) for item in binder.operands[1:]]
    half = binder.operands[1].half
    if half is not None:
        kind = Element(kind.size, kind.signed, half)

    def run() -> None:
        entry = machine.issue("lds", (), writes_lds=True)
        for (offset, _), plane in zip(places, sources, strict=True):
            mask, offsets, waves = _lanes(machine, address, offset)
            data = get(state, plane, kind, mask)
            undefined = machine.undefined(unified_registers(plane, kind.registers), mask)
            inside = lds.inside(offsets, kind.size, instruction.place)
            if inside is not None:
                offsets, data, waves = offsets[inside], data[inside], waves[inside]
                undefined = None if undefined is None else undefined[inside]
            lds.store(offsets, data, waves, instruction.place, undefined, entry)

    stored = tuple(n for plane in sources for n in unified_registers(plane, kind.registers))
    return BoundInstruction(instruction, run, stored, uses=binder.registers(0))


def _lds_atomic(machine: Context, binder: Binder, name: str) -> BoundInstruction:
    state, instruction, lds = machine.state, binder.instruction, machine.lds
    returns = "_rtn" in instruction.mnemonic or "xchg" in name
    compares = name in COMPARE_AND_SWAP
    binder.expect(2 + returns + compares)
    items = binder.operands[1:] if returns else binder.operands
    address, planes = vector_plane(items[0]), [vector_plane(item) for item in items[1:]]
    size = COMPARE_AND_SWAP.get(name) or ATOMICS[name][0]
    kind = Element(size, False, None)
    # cmpst (gfx9) has the comparand first, cmpstore (gfx11 and later) the new value.
    order = planes[::-1] if name.startswith("cmpst_") else planes
    written = binder.registers(0) if returns else ()

    def run() -> None:
        mask, offsets, waves = _lanes(machine, address, instruction.number("offset"))
        word = np.uint32 if size == 4 else np.uint64
        values = [get(state, plane, kind, mask).view(word)[:, 0] for plane in order]
        if lds.inside(offsets, size, instruction.place) is not None:
            return
        lds.note_atomic(offsets, size, waves, instruction.place)
        old = apply_atomic(lds.bytes, offsets, name, values[0], values[1] if compares else None)
        if returns:
            put(state, vector_plane(binder.operands[0]), kind, old[:, None].view(np.uint8), mask)
        machine.issue("lds", written, writes_lds=True)

    used = tuple(n for item in items for n in item.registers)
    return BoundInstruction(instruction, run, (), (), written, uses=used)


def _transposed(machine: Context, binder: Binder, bits: int) -> BoundInstruction:
    """DS_READ_B64_TR: 16 lanes read 64 bits each as rows of a matrix of 16 columns, and each gets one column."""
    binder.expect(2)
    state, instruction, lds = machine.state, binder.instruction, machine.lds
    plane, address = vector_plane(binder.operands[0]), vector_plane(binder.operands[1])
    rows = 64 // bits
    dtype = {8: np.uint8, 16: np.uint16}[bits]
    kind = Element(8, False, None)

    def run() -> None:
        if not state.mask[state.group].all():
            raise UnknownInstruction(f"{instruction.mnemonic} with lanes off is not modelled")
        mask, offsets, waves = _lanes(machine, address, instruction.number("offset"))
        if lds.inside(offsets, 8, instruction.place) is not None:
            return
        data, unset = lds.load(offsets, 8, waves, instruction.place)
        groups = np.ascontiguousarray(data).view(dtype).reshape(-1, rows, 16)
        turned = np.ascontiguousarray(groups.transpose(0, 2, 1)).reshape(-1, rows)
        put(state, plane, kind, turned.view(np.uint8), mask)
        if unset is not None and machine.defined is not None:
            anywhere = np.repeat(unset.reshape(-1, 16 * 8).any(1), 16)[:, None].repeat(8, 1)
            machine.mark(unified_registers(plane, 2), mask, anywhere)
        machine.issue("lds", unified_registers(plane, 2))

    return BoundInstruction(instruction, run, (), (), unified_registers(plane, 2), uses=binder.registers(1))


_SCRATCH_NAME = re.compile(r"scratch_(load|store)_(\w+)")


def is_scratch_modelled(mnemonic: str) -> bool:
    found = _SCRATCH_NAME.fullmatch(mnemonic)
    if not found:
        return False
    try:
        element(found[2])
    except UnknownInstruction:
        return False
    return True


def is_buffer_scratch(machine: Context, resource: Operand) -> bool:
    """Return whether this is the dispatcher's descriptor (gfx90a), wherever it was moved; known at first execution."""
    if not machine.has_scratch_descriptor or resource.kind != "s":
        return False
    state = machine.state
    return bool((state.S[state.group, resource.index + 1] == SCRATCH_MAGIC).all())


def bind_scratch(machine: Context, instruction: Instruction) -> BoundInstruction:
    found = _SCRATCH_NAME.fullmatch(instruction.mnemonic)
    if not found:
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    binder = Binder(machine.state, instruction)
    binder.allow("offset", "th", "scope", "nt", "sc0", "sc1", "glc", "slc", "dlc")
    binder.expect(3)
    first, second, scalar = binder.operands
    data, vector = (first, second) if found[1] == "load" else (second, first)
    return _bind_access(machine, binder, element(found[2]), found[1], data, vector, scalar)


def bind_buffer_scratch(machine: Context, binder: Binder, kind: Element, action: str) -> BoundInstruction:
    data, vector, _, scalar = binder.operands
    offen = "offen" in binder.instruction.modifiers
    return _bind_access(machine, binder, kind, action, data, vector if offen else Operand("off"), scalar)


def _bind_access(
    machine: Context, binder: Binder, kind: Element, action: str, data: Operand, vector: Operand, scalar: Operand
) -> BoundInstruction:
    state, instruction, scratch = machine.state, binder.instruction, machine.scratch
    offset, plane = instruction.number("offset"), vector_plane(data)
    if vector.kind not in ("v", "off", "literal") or scalar.kind not in ("s", "off", "literal", "null"):
        raise UnknownOperand("this form of a scratch address is not modelled")
    fixed = offset + (scalar.bits(32) if scalar.kind == "literal" else 0)
    registers = unified_registers(plane, kind.registers)
    planes = state.planes["u"][plane : plane + kind.registers]

    def row() -> int | None:
        """Return the row of whole registers that all lanes access; None if lanes differ or are off."""
        if vector.kind == "v" or not state.full or kind.size % 4:
            return None
        at = fixed
        if scalar.kind == "s":
            first = int(state.S[0, scalar.index])
            if (state.S[:, scalar.index] != first).any():
                return None
            at += first
        return at // 4 if at % 4 == 0 and 0 <= at <= scratch.size - kind.size else None

    def place() -> tuple[Array | None, Array, Array]:
        """Return active lanes (None: all), their rows, and byte offsets."""
        where = np.full(state.mask.shape, fixed, np.int64)
        if vector.kind == "v":
            where += state.planes["u"][vector.index]
        if scalar.kind == "s":
            where += state.S[:, scalar.index].astype(np.int64)[:, None]
        mask = None if state.full else state.mask
        rows = np.arange(state.waves * state.lanes)
        if mask is not None:
            rows, where = rows[mask.reshape(-1)], where[mask]
        where = where.reshape(-1)
        bad = (where < 0) | (where + kind.size > scratch.size)
        if bad.any():
            problem = (
                f"scratch access of {kind.size} bytes at {int(where[bad][0])}; there are {scratch.size} bytes a lane"
            )
            if machine.checks.memory:
                machine.report(OutOfBounds, problem)
            where = np.clip(where, 0, max(scratch.size - kind.size, 0))
        return mask, rows[:, None], where[:, None] + np.arange(kind.size)

    def load() -> None:
        first = row()
        if first is None:
            mask, rows, where = place()
            data, unset = scratch.gather(rows, where)
            put(state, plane, kind, data, mask)
        else:
            mask = None
            for n, target in enumerate(planes):
                target.reshape(-1)[...] = scratch.words[first + n]
            unset = scratch.unset[4 * first : 4 * first + kind.size]
        if unset.any():
            machine.mark(registers, mask, unset if first is None else unset.T)
        machine.issue("load", registers)

    def store() -> None:
        first = row()
        if first is None:
            mask, rows, where = place()
            undefined = machine.undefined(registers, mask)
            unset = False if undefined is None else undefined[:, : kind.size]
            scratch.scatter(rows, where, get(state, plane, kind, mask), unset)
        else:
            undefined = machine.undefined(registers, None)
            for n, source in enumerate(planes):
                scratch.words[first + n] = source.reshape(-1)
            scratch.unset[4 * first : 4 * first + kind.size] = False if undefined is None else undefined.T
        machine.issue("store", ())

    uses = vector.registers + scalar.registers
    if action == "load":
        return BoundInstruction(instruction, load, (), (), registers, uses=uses, counter="load")
    return BoundInstruction(instruction, store, registers, uses=uses)
