"""LDS instructions (ds_…): loads and stores of one or two places, atomics, and the transposing loads of gfx950.

Source: AMD "Instinct MI300" ISA reference, "Local data share"; "CDNA4" ISA reference (DS_READ_B64_TR_…); "RDNA3".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import atomics
from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction, unified_registers, vector_plane
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction
from portattn.backends.rocm.emulator.amdgpu.lds import flat_waves
from portattn.backends.rocm.emulator.amdgpu.state import Array
from portattn.backends.rocm.emulator.amdgpu.transfer import Element, element, get, put

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.context import Context

_ONE = re.compile(r"ds_(read|load|write|store)_((?:[ui](?:8|16)|b(?:8|16|32|64|96|128))(?:_d16|_d16_hi)?)")
_TWO = re.compile(r"ds_(read|load|write|store)_?2(?:addr)?(st64|_stride64)?_(b32|b64)")
_TRANSPOSED = re.compile(r"ds_read_b64_tr_b(8|16)")


def is_modelled(mnemonic: str) -> bool:
    return bool(
        _ONE.fullmatch(mnemonic)
        or _TWO.fullmatch(mnemonic)
        or _TRANSPOSED.fullmatch(mnemonic)
        or _atomic_name(mnemonic) is not None
    )


def _atomic_name(mnemonic: str) -> str | None:
    name = mnemonic[3:].replace("_rtn", "")
    return name if name in atomics.TABLE or name in atomics.COMPARE else None


def bind(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Bind one LDS instruction. Raises UnknownInstruction."""
    one, two = _ONE.fullmatch(instruction.mnemonic), _TWO.fullmatch(instruction.mnemonic)
    transposed = _TRANSPOSED.fullmatch(instruction.mnemonic)
    binder = Binder(machine.state, instruction)
    if one:
        binder.allow("offset")
        kind = element(one[2])
        places = [(instruction.number("offset"), 0)]
        make = _load if one[1] in ("read", "load") else _store
        return make(machine, binder, kind, places)
    if two:
        binder.allow("offset0", "offset1")
        kind = element(two[3])
        stride = kind.size * (64 if two[2] else 1)
        places = [(instruction.number("offset0") * stride, 0), (instruction.number("offset1") * stride, kind.registers)]
        make = _load if two[1] in ("read", "load") else _store
        return make(machine, binder, kind, places)
    if transposed:
        binder.allow("offset")
        return _transposed(machine, binder, int(transposed[1]))
    name = _atomic_name(instruction.mnemonic)
    if name is None:
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    binder.allow("offset")
    return _atomic(machine, binder, name)


def _lanes(machine: Context, plane: int, offset: int) -> tuple[Array | None, Array, Array]:
    """Lanes that are on (None: all), their LDS byte offsets [n] and waves [n]."""
    state = machine.state
    address = state.planes["u"][plane]
    mask = None if state.full else state.mask
    chosen = address.reshape(-1) if mask is None else address[mask]
    # The sum is one of 32 bits: compilers fold a negative part of an address into the register.
    return mask, (chosen.astype(np.int64) + offset) & 0xFFFFFFFF, flat_waves(mask, state.waves, state.lanes)


def _load(machine: Context, binder: Binder, kind: Element, places: list[tuple[int, int]]) -> BoundInstruction:
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


def _store(machine: Context, binder: Binder, kind: Element, places: list[tuple[int, int]]) -> BoundInstruction:
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


def _atomic(machine: Context, binder: Binder, name: str) -> BoundInstruction:
    state, instruction, lds = machine.state, binder.instruction, machine.lds
    returns = "_rtn" in instruction.mnemonic or "xchg" in name
    compares = name in atomics.COMPARE
    binder.expect(2 + returns + compares)
    items = binder.operands[1:] if returns else binder.operands
    address, planes = vector_plane(items[0]), [vector_plane(item) for item in items[1:]]
    size = atomics.COMPARE.get(name) or atomics.TABLE[name][0]
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
        old = atomics.apply(lds.bytes, offsets, name, values[0], values[1] if compares else None)
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
