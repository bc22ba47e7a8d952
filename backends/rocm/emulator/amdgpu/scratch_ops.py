"""Scratch instructions: loads and stores of each lane's private memory.

scratch_… instructions address it directly; gfx90a uses buffer instructions with a descriptor that the dispatcher gives.
Source: LLVM AMDGPU guide, "Private Segment Buffer"; AMD "Instinct MI300" ISA reference, "Scratch".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction, unified_registers, vector_plane
from portattn.backends.rocm.emulator.amdgpu.errors import OutOfBounds, UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.operands import Operand
from portattn.backends.rocm.emulator.amdgpu.scratch import MAGIC
from portattn.backends.rocm.emulator.amdgpu.state import Array
from portattn.backends.rocm.emulator.amdgpu.transfer import Element, element, get, put

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.context import Context

_NAME = re.compile(r"scratch_(load|store)_(\w+)")


def is_modelled(mnemonic: str) -> bool:
    found = _NAME.fullmatch(mnemonic)
    if not found:
        return False
    try:
        element(found[2])
    except UnknownInstruction:
        return False
    return True


def is_buffer_scratch(machine: Context, resource: Operand) -> bool:
    """Is this the descriptor that the dispatcher gave (gfx90a), wherever it was moved? Asked when first executed."""
    if not machine.has_scratch_descriptor or resource.kind != "s":
        return False
    state = machine.state
    return bool((state.S[state.group, resource.index + 1] == MAGIC).all())


def bind(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Bind one scratch_… instruction. Raises UnknownInstruction."""
    found = _NAME.fullmatch(instruction.mnemonic)
    if not found:
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    binder = Binder(machine.state, instruction)
    binder.allow("offset", "th", "scope", "nt", "sc0", "sc1", "glc", "slc", "dlc")
    binder.expect(3)
    first, second, scalar = binder.operands
    data, vector = (first, second) if found[1] == "load" else (second, first)
    return _bind(machine, binder, element(found[2]), found[1], data, vector, scalar)


def bind_buffer(machine: Context, binder: Binder, kind: Element, action: str) -> BoundInstruction:
    """Bind a buffer instruction whose descriptor is that of scratch."""
    data, vector, _, scalar = binder.operands
    offen = "offen" in binder.instruction.modifiers
    return _bind(machine, binder, kind, action, data, vector if offen else Operand("off"), scalar)


def _bind(
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
        """The row of whole registers that all lanes access; None when lanes differ, or are off, or bytes are cut."""
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
        """Lanes that are on (None: all), their rows, and byte offsets."""
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
