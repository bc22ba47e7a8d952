"""Bind an instruction to a work-group's registers: operands become arrays or short functions.

Binding decides all that precedes execution: each operand's register view, and its modifiers. The closures that
`BoundInstruction.run` holds do the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.dpp import Dpp
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.isa import VECTOR
from portattn.backends.rocm.emulator.amdgpu.operands import Operand, operand
from portattn.backends.rocm.emulator.amdgpu.state import KINDS, Array, WorkGroupState, literal

Read = Callable[[], Array]
Write = Callable[[Array], None]

# SDWA selects: (first bit, bits). Source: Vega and MI200 ISA references, "SDWA".
_SELECT = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16), **{f"BYTE_{n}": (8 * n, 8) for n in range(4)}}


@dataclass(eq=False)
class BoundInstruction:
    """An instruction ready to run.

    run     executes it for the waves and lanes that are on; returns the index to go on from, None for the next
    reads   registers (unified numbers) whose values go into the result, lane by lane
    masks   scalar registers read as a bit a lane
    writes  vector registers written in the lanes that are on
    mask_writes    scalar registers written as a bit a lane
    scalar_writes  scalar registers (isa.SCC too) written as numbers
    uses    registers that must be defined: addresses, stored data, conditions
    counter what a load counts as ("load", "lds"): loads of one kind write their registers in order
    flow    moves undefinedness from reads to writes where the general rule does not hold (see definedness.py)
    """

    instruction: Instruction
    run: Callable[[], int | None]
    reads: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    mask_writes: tuple[int, ...] = ()
    scalar_writes: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()
    flow: Callable[[Any], None] | None = None
    counter: str = ""
    touches: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        everything = self.reads + self.masks + self.writes + self.mask_writes + self.scalar_writes + self.uses
        self.touches = frozenset(everything)


class Binder:
    """Operands of one instruction on one State."""

    def __init__(self, state: WorkGroupState, instruction: Instruction) -> None:
        self.state, self.instruction = state, instruction
        self.operands = [operand(text) for text in instruction.operands]
        self.dpp = Dpp.of(instruction, state)
        self.sdwa = instruction.mnemonic.endswith("_sdwa")

    def expect(self, *counts: int) -> None:
        """Raise UnknownInstruction unless there are as many operands as one of `counts`."""
        if len(self.operands) not in counts:
            raise UnknownInstruction(f"{self.instruction.mnemonic} with {len(self.operands)} operands is not modelled")

    def allow(self, *modifiers: str) -> None:
        """Raise UnknownOperand for a modifier that this instruction's model does not read."""
        for name in self.instruction.modifiers:
            if name not in modifiers:
                raise UnknownOperand(f"modifier {name!r} is not modelled for {self.instruction.mnemonic}")

    # ---- sources

    def array(self, index: int, kind: str, slot: int | None = None) -> Array | Read:
        """Operand `index` as values of a kind: an array that is always up to date, or a function that makes one.

        `slot` numbers sources for op_sel, src0_sel and DPP; None for an operand that has no modifiers.
        """
        item = self.operands[index]
        plain = self._selected(item, kind, slot)
        if self.dpp is not None and slot == 0:
            if KINDS[kind][1] == 64:
                raise UnknownOperand("DPP on 64-bit operands is not modelled")
            plain = self.dpp.moved(plain)
        if not (item.negative or item.absolute):
            return plain
        if not KINDS[kind][2]:
            raise UnknownOperand(f"a sign modifier on an integer operand ({self.instruction.operands[index]})")
        return _signed(plain, item)

    def read(self, index: int, kind: str, slot: int | None = None) -> Read:
        """The same, always as a function."""
        found = self.array(index, kind, slot)
        return found if callable(found) else lambda: found

    def _selected(self, item: Operand, kind: str, slot: int | None) -> Array | Read:
        if self.sdwa and slot is not None and slot < 2:
            first, bits = _SELECT[self.instruction.modifiers.get(f"src{slot}_sel", "DWORD")]
            if bits < 32 or KINDS[kind][1] < 32 or item.extend:
                return _field(self.plain(item, "u" if item.kind != "literal" else kind), first, bits, item.extend, kind)
        half = item.half
        if half is None and slot is not None and KINDS[kind][1] == 16:
            selects = self.instruction.numbers("op_sel", [])
            half = selects[slot] if slot < len(selects) else 0
        return self.plain(item, kind, half or 0)

    def plain(self, item: Operand, kind: str, half: int = 0) -> Array | Read:
        """An operand without modifiers as values of a kind."""
        state, (dtype, width, _) = self.state, KINDS[kind]
        if item.kind == "literal":
            value = literal(item, kind)
            # Inline constants have no upper half; an integer literal of 32 bits has.
            if half and not isinstance(item.value, float):
                value = np.array([[(item.value >> 16) & 0xFFFF]], np.uint16).view(dtype)
            return value
        if item.kind == "null":
            return np.zeros((1, 1), dtype)
        if item.kind == "scc":
            return lambda: state.scc[:, None].astype(dtype)
        if item.kind == "v":
            if width == 16:
                return state.halves[kind][half][item.index]
            if width == 32:
                return state.planes[kind][item.index]
            index = item.index
            return lambda: state.pair(index).view(dtype)
        if item.kind == "s":
            if width == 16:
                columns = state.S.view(np.uint16)[:, 2 * item.index + half : 2 * item.index + half + 1]
                return columns.view(dtype)
            if width == 32:
                return state.S[:, item.index : item.index + 1].view(dtype)
            if item.count == 1 and item.index != 126 and item.index != 106:
                raise UnknownOperand("a 64-bit source in one scalar register")
            if item.index % 2 == 0:
                return state.S64[:, item.index // 2 : item.index // 2 + 1].view(dtype)
            index = item.index
            return lambda: state.scalar(index, 64)[:, None].view(dtype)
        raise UnknownOperand(f"operand kind {item.kind} is not modelled here")

    # ---- destinations

    def write(self, index: int, kind: str, keeps: bool = False) -> Write:
        """A function that writes values of a kind to operand `index`, in the lanes that are on.

        `keeps`: a 16-bit instruction that leaves the other half of its destination alone on gfx9 too.
        """
        item, state = self.operands[index], self.state
        if item.kind == "null":
            return lambda value: None
        if item.kind != "v":
            raise UnknownOperand(f"{self.instruction.operands[index]} as a vector destination")
        width = KINDS[kind][1]
        narrowed = self.dpp.enabled if self.dpp is not None else None
        if self.sdwa:
            return self._write_field(item, kind)
        if width == 64:
            return lambda value: state.set_pair(item.index, value)
        if width == 32:
            target = state.planes[kind][item.index]
            return _writer(state, target, narrowed)
        selects = self.instruction.numbers("op_sel", [])
        upper = item.half if item.half is not None else (selects[-1] if len(selects) == len(self.operands) else 0)
        target = state.halves[kind][upper or 0][item.index]
        part = _writer(state, target, narrowed)
        if state.arch.family != 9 or keeps or upper or item.half is not None:
            return part
        other = _writer(state, state.halves[kind][1][item.index], narrowed)
        zero = np.zeros((1, 1), KINDS[kind][0])

        def both(value: Array) -> None:
            part(value)
            other(zero)

        return both

    def _write_field(self, item: Operand, kind: str) -> Write:
        state = self.state
        first, bits = _SELECT[self.instruction.modifiers.get("dst_sel", "DWORD")]
        unused = self.instruction.modifiers.get("dst_unused", "UNUSED_PAD")
        field_mask = np.uint32(((1 << bits) - 1) << first)
        plane = state.planes["u"][item.index]

        def put(value: Array) -> None:
            raw = _as_u32(value)
            if bits == 32:
                state.whole(item.index, raw)
                return
            placed = (raw << np.uint32(first)) & field_mask
            if unused == "UNUSED_PRESERVE":
                placed = placed | (plane & ~field_mask)
            elif unused == "UNUSED_SEXT":
                above = np.uint32(0xFFFFFFFF & ~((1 << (first + bits)) - 1))
                placed = placed | np.where((raw >> np.uint32(bits - 1)) & np.uint32(1), above, np.uint32(0))
            elif unused != "UNUSED_PAD":
                raise UnknownOperand(f"dst_unused:{unused}")
            state.whole(item.index, placed)

        return put

    # ---- registers, for the checks

    def registers(self, *indices: int) -> tuple[int, ...]:
        return tuple(number for index in indices for number in self.operands[index].registers)


def _as_u32(value: Array) -> Array:
    if value.dtype.itemsize == 4:
        return value.view(np.uint32)
    return np.ascontiguousarray(value).view(np.uint16).astype(np.uint32)


def _writer(state: WorkGroupState, target: Array, narrowed: Callable[[], Array] | None) -> Write:
    if narrowed is not None:
        return lambda value: np.copyto(target, value, where=narrowed())

    def put(value: Array) -> None:
        if state.full:
            target[...] = value
        else:
            np.copyto(target, value, where=state.mask)

    return put


def _signed(plain: Array | Read, item: Operand) -> Read:
    get: Read = plain if callable(plain) else lambda: plain
    if item.negative and item.absolute:
        return lambda: np.negative(np.abs(get()))
    return (lambda: np.negative(get())) if item.negative else (lambda: np.abs(get()))


def _field(plain: Array | Read, first: int, bits: int, extend: bool, kind: str) -> Read:
    """SDWA: a field of a 32-bit source, extended to 32 bits, as a kind."""
    get: Read = plain if callable(plain) else lambda: plain
    dtype, width, _ = KINDS[kind]
    mask = np.uint32((1 << bits) - 1)

    def select() -> Array:
        value = get()
        if value.dtype.itemsize == 2:  # a constant in the operation's own format
            return value
        part = (value.view(np.uint32) >> np.uint32(first)) & mask
        if extend and bits < 32:
            up = np.int32(32 - bits)
            part = ((part.view(np.int32) << up) >> up).view(np.uint32)
        return part.view(dtype) if width == 32 else part.astype(np.uint16).view(dtype)

    return select


def compute(function: Callable[..., Array], sources: list[Array | Read]) -> Read:
    """The function of its sources, with no more indirection than they need."""
    if any(callable(source) for source in sources):
        reads: list[Read] = [source if callable(source) else (lambda s=source: s) for source in sources]  # type: ignore[misc]
        if len(reads) == 1:
            (r,) = reads
            return lambda: function(r())
        if len(reads) == 2:
            r, s = reads
            return lambda: function(r(), s())
        return lambda: function(*[read() for read in reads])
    if len(sources) == 1:
        (a,) = sources
        return lambda: function(a)
    if len(sources) == 2:
        a, b = sources
        return lambda: function(a, b)
    if len(sources) == 3:
        a, b, c = sources
        return lambda: function(a, b, c)
    return lambda: function(*sources)


def vector_plane(item: Operand) -> int:
    """Plane of a vector operand. Raises UnknownOperand for any other kind."""
    if item.kind != "v":
        raise UnknownOperand("a vector register is needed")
    return item.index


def unified_registers(plane: int, count: int = 1) -> tuple[int, ...]:
    return tuple(range(VECTOR + plane, VECTOR + plane + count))
