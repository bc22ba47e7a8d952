"""Scalar loads: s_load_… and s_buffer_load_…

Source: AMD "Instinct MI300" ISA reference, "Scalar memory"; "RDNA4" for the sizes below 32 bits.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import BoundInstruction
from portattn.backends.rocm.emulator.amdgpu.errors import OutOfBounds, UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.memory import BASE, gather
from portattn.backends.rocm.emulator.amdgpu.operands import operand
from portattn.backends.rocm.emulator.amdgpu.scalar import reader

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.context import Context

_NAME = re.compile(r"s_(buffer_)?load_(dword(?:x\d+)?|b\d+|[ui](?:8|16))")
_WORDS = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16, "b32": 1, "b64": 2,
          "b96": 3, "b128": 4, "b256": 8, "b512": 16}  # fmt: skip
_NARROW = {"u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16}


def is_modelled(mnemonic: str) -> bool:
    found = _NAME.fullmatch(mnemonic)
    return found is not None and (found[2] in _WORDS or found[2] in _NARROW)


def bind(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Bind one scalar load. Raises UnknownInstruction."""
    found = _NAME.fullmatch(instruction.mnemonic)
    if not found or (found[2] not in _WORDS and found[2] not in _NARROW):
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    state = machine.state
    for name in instruction.modifiers:
        if name not in ("offset", "glc", "dlc", "th", "scope", "sc0", "sc1", "nt"):
            raise UnknownOperand(f"modifier {name!r} is not modelled for {instruction.mnemonic}")
    items = [operand(text) for text in instruction.operands]
    if len(items) != 3:
        raise UnknownInstruction(f"{instruction.mnemonic} with {len(items)} operands is not modelled")
    target, base, offset = items
    words, immediate = _WORDS.get(found[2], 1), instruction.number("offset")
    narrow = _NARROW.get(found[2])
    size = np.dtype(narrow).itemsize if narrow else 4 * words
    added = reader(state, offset, "i" if offset.kind == "literal" else "u")

    def run() -> None:
        start = state.scalar(base.index, 64).view(np.int64)
        shift = added().astype(np.int64) + immediate
        if found[1]:
            start = start & 0xFFFFFFFFFFFF
        where = start + shift - BASE
        if not narrow:
            where = where & ~3  # the low bits of a scalar address are ignored
        group = np.nonzero(state.group)[0]
        offsets = where[group]
        ok = np.ones(len(group), bool)
        if found[1]:
            ok = shift[group] + size <= state.S[group, base.index + 2].astype(np.int64)
        data = np.zeros((len(group), size), np.uint8)
        if ok.any():
            bad = machine.memory.outside(offsets[ok], size)
            if bad is None:
                if machine.group_races is not None:
                    machine.group_races.load(offsets[ok], size)
                data[ok] = gather(machine.memory.bytes, offsets[ok], size)
            elif machine.checks.memory:
                first = int(offsets[ok][bad][0])
                machine.report(OutOfBounds, f"scalar load outside: {machine.memory.describe(first, size)}")
        if narrow:
            state.S[group, target.index] = data.view(narrow)[:, 0].astype(np.int64).astype(np.uint32)
        else:
            state.S[group, target.index : target.index + words] = data.view(np.uint32)
        machine.issue("scalar", written, unordered=True)

    written = tuple(range(target.index, target.index + words))
    uses = base.registers + offset.registers
    return BoundInstruction(instruction, run, scalar_writes=written, uses=uses)
