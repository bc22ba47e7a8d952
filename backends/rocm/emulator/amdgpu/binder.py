"""Binds an instruction's operands to registers: readers and writers, with DPP, SDWA and output modifiers.

Source: AMD MI300 ISA reference, "DPP: Data Parallel Primitives"; RDNA3 ISA reference, "DPP16" and "DPP8".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import EXEC, VECTOR, Instruction, Operand, operand
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.state import KINDS, Array, WorkGroupState, literal

# Control → function of (lanes, its number) that returns the source lane, negative if it is missing. A row is 16 lanes.
_Source = Callable[[Array, int], Array]


def _inside(lane: Array, source: Array) -> Array:
    return np.where(source // 16 == lane // 16, source, -1)


CONTROLS: dict[str, _Source] = {
    "row_shl": lambda lane, n: _inside(lane, lane + n),
    "row_shr": lambda lane, n: _inside(lane, lane - n),
    "row_ror": lambda lane, n: (lane & ~15) + ((lane - n) & 15),
    "row_mirror": lambda lane, n: (lane & ~15) + 15 - (lane & 15),
    "row_half_mirror": lambda lane, n: (lane & ~7) + 7 - (lane & 7),
    "row_newbcast": lambda lane, n: (lane & ~15) + n,
    "row_share": lambda lane, n: (lane & ~15) + n,
    "row_xmask": lambda lane, n: lane ^ n,
    "wave_shr": lambda lane, n: lane - 1,
    "wave_shl": lambda lane, n: np.where(lane + 1 < len(lane), lane + 1, -1),
    "wave_ror": lambda lane, n: (lane - 1) % len(lane),
    "wave_rol": lambda lane, n: (lane + 1) % len(lane),
}


def _broadcast(lane: Array, n: int) -> Array:
    """row_bcast:15 gives the last lane of each row to the next; row_bcast:31 gives lane 31 to the upper half."""
    if n == 15:
        return np.where(lane >= 16, (lane & ~15) - 1, -1)
    if n == 31:
        return np.where(lane >= 32, 31, -1)
    raise UnknownOperand(f"row_bcast:{n}")


CONTROLS["row_bcast"] = _broadcast


class Dpp:
    """The DPP control of one instruction on one state.

    A lane whose source is out of its row, or off, gets 0 with bound_ctrl and is not written otherwise. gfx10 and later
    read lanes that are off with fi:1."""

    def __init__(self, source: Array, enabled: Array, bound: bool, inactive: bool, state: Any) -> None:
        self.source, self.present = np.maximum(source, 0), source >= 0
        self.rows, self.bound, self.inactive, self.state = enabled, bound, inactive, state

    @classmethod
    def of(cls, instruction: Instruction, state: Any) -> Dpp | None:
        modifiers, lane = instruction.modifiers, np.arange(state.lanes)
        source = None
        for name, function in CONTROLS.items():
            if name in modifiers:
                source = function(lane, instruction.number(name))
        if "quad_perm" in modifiers:
            source = (lane & ~3) + np.array(instruction.numbers("quad_perm", []))[lane & 3]
        if "dpp8" in modifiers:
            source = (lane & ~7) + np.array(instruction.numbers("dpp8", []))[lane & 7]
        if source is None:
            if "_dpp" in instruction.mnemonic:
                raise UnknownOperand("a DPP instruction without a DPP control")
            return None
        rows, banks = instruction.number("row_mask", 15), instruction.number("bank_mask", 15)
        enabled = ((rows >> (lane >> 4)) & (banks >> ((lane >> 2) & 3)) & 1).astype(bool)
        # LLVM before 14 printed the same bit as bound_ctrl:0.
        return cls(source, enabled, "bound_ctrl" in modifiers, instruction.number("fi") == 1, state)

    def valid(self) -> Array:
        """Return the lanes that have a source lane, [waves, lanes] bool."""
        if self.inactive:
            return np.broadcast_to(self.present, self.state.mask.shape)
        return self.present & self.state.read_mask(EXEC)[:, self.source]

    def moved(self, plain: Array | Callable[[], Array]) -> Callable[[], Array]:
        """Return a function that reads the source with its lanes moved; 0 in a lane without a source lane."""
        state = self.state

        def get() -> Array:
            value = plain() if callable(plain) else plain
            full = np.broadcast_to(value, (state.waves, state.lanes))
            return np.where(self.valid(), full[:, self.source], value.dtype.type(0))

        return get

    def enabled(self) -> Array:
        """Return the lanes that are written, [waves, lanes] bool."""
        on = self.state.mask & self.rows
        return on if self.bound else on & self.valid()


Read = Callable[[], Array]
Write = Callable[[Array], None]

# SDWA selects: (first bit, bits). Source: Vega and MI200 ISA references, "SDWA".
_SELECT = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16), **{f"BYTE_{n}": (8 * n, 8) for n in range(4)}}


@dataclass(eq=False)
class BoundInstruction:
    instruction: Instruction
    run: Callable[[], int | None]  # executes it in active waves and lanes, returns the next index (None: following)
    reads: tuple[int, ...] = ()  # values go into the result, lane by lane
    masks: tuple[int, ...] = ()  # scalar registers read as a bit a lane
    writes: tuple[int, ...] = ()  # vector registers
    mask_writes: tuple[int, ...] = ()  # scalar registers written as a bit a lane
    scalar_writes: tuple[int, ...] = ()  # written as numbers, isa.SCC too
    uses: tuple[int, ...] = ()  # must be defined: addresses, stored data, conditions
    # Moves undefinedness by another rule than reads → writes (register_checks.py).
    flow: Callable[[Any], None] | None = None
    counter: str = ""  # kind of load ("load", "lds"): loads of one kind write their registers in order
    touches: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        everything = self.reads + self.masks + self.writes + self.mask_writes + self.scalar_writes + self.uses
        self.touches = frozenset(everything)


class Binder:
    def __init__(self, state: WorkGroupState, instruction: Instruction) -> None:
        self.state, self.instruction = state, instruction
        self.operands = [operand(text) for text in instruction.operands]
        self.dpp = Dpp.of(instruction, state)
        self.sdwa = instruction.mnemonic.endswith("_sdwa")

    def expect(self, *counts: int) -> None:
        """Raise UnknownInstruction unless the number of operands is one of `counts`."""
        if len(self.operands) not in counts:
            raise UnknownInstruction(f"{self.instruction.mnemonic} with {len(self.operands)} operands is not modelled")

    def allow(self, *modifiers: str) -> None:
        """Raise UnknownOperand for a modifier that this instruction's model does not read."""
        for name in self.instruction.modifiers:
            if name not in modifiers:
                raise UnknownOperand(f"modifier {name!r} is not modelled for {self.instruction.mnemonic}")

    # ---- sources

    def array(self, index: int, kind: str, slot: int | None = None) -> Array | Read:
        """Return operand `index` as a live array, or a function; `slot`: a source's number for op_sel and DPP."""
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
        """Like `array`, but always return a function."""
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
        """Return an operand without modifiers as values of a kind."""
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
        """Return a function that writes operand `index` in active lanes; `keeps`: other 16 bits stay, on gfx9 too."""
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
    """Return SDWA's field of a 32-bit source, extended to 32 bits, as a kind."""
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
    """Return a vector operand's plane. Raise UnknownOperand for any other kind."""
    if item.kind != "v":
        raise UnknownOperand("a vector register is needed")
    return item.index


def unified_registers(plane: int, count: int = 1) -> tuple[int, ...]:
    return tuple(range(VECTOR + plane, VECTOR + plane + count))


Bind = Callable[[WorkGroupState, Instruction], BoundInstruction]
_SUFFIX = re.compile(r"_(e32|e64|dpp|dpp8|sdwa|e64_dpp|e32_dpp|e64_dpp8)$")
DPP = ("quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast", "row_newbcast",
        "row_share", "row_xmask", "wave_shr", "wave_shl", "wave_ror", "wave_rol", "row_mask", "bank_mask", "bound_ctrl",
        "fi", "dpp8")  # fmt: skip
SDWA = ("src0_sel", "src1_sel", "dst_sel", "dst_unused")


def base_name(mnemonic: str) -> str:
    return _SUFFIX.sub("", _SUFFIX.sub("", mnemonic[2:])).removeprefix("dual_")


def dpp_flow(binder: Binder) -> Callable[..., None] | None:
    """Return DPP's flow of undefinedness, which moves along with source 0."""
    dpp = binder.dpp
    if dpp is None:
        return None

    def flow(defined: object) -> None:
        defined.moved(binder, dpp)  # type: ignore[attr-defined]

    return flow
