"""Instructions that move values between lanes: readlane, writelane, permutes, swizzles.

Sources: AMD "Instinct MI300" ISA reference (V_READLANE, DS_BPERMUTE, DS_SWIZZLE); "CDNA4" (V_PERMLANE16/32_SWAP);
"RDNA3" (V_PERMLANE16, V_PERMLANEX16, V_PERMLANE64). The symbolic forms of swizzle: LLVM, "Syntax of AMDGPU Modifiers".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import scalar
from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction, vector_plane
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.isa import EXEC
from portattn.backends.rocm.emulator.amdgpu.state import Array
from portattn.backends.rocm.emulator.amdgpu.vector_forms import base_name

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.context import Context

Bind = Callable[["Context", Instruction], BoundInstruction]


def _first_lane(state: Any) -> Array:
    """The lowest lane that is on, of each wave; 0 where none is."""
    return np.argmax(state.read_mask(EXEC), axis=1)


def _read_lane(machine: Context, instruction: Instruction) -> BoundInstruction:
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow()
    first = "first" in instruction.mnemonic
    binder.expect(2 if first else 3)
    source, target = binder.operands[1], binder.operands[0]
    wave = np.arange(state.waves)
    chosen = None if first else scalar.reader(state, binder.operands[2], "u")
    if source.kind != "v":  # the compiler sometimes reads "lane n" of a scalar
        value = scalar.reader(state, source, "u")
        return BoundInstruction(
            instruction, lambda: state.set_scalar(target.index, value()), source.registers,
            scalar_writes=target.registers,
        )  # fmt: skip
    plane = state.planes["u"][source.index]

    def lane() -> Array:
        return _first_lane(state) if chosen is None else chosen().astype(np.int64) & (state.lanes - 1)

    def run() -> None:
        state.set_scalar(target.index, plane[wave, lane()])

    def flow(defined: Any) -> None:
        defined.set_scalars(target.registers, defined.vectors[source.index][wave, lane()])

    uses = () if first else binder.registers(2)
    return BoundInstruction(instruction, run, source.registers, scalar_writes=target.registers, uses=uses, flow=flow)


def _write_lane(machine: Context, instruction: Instruction) -> BoundInstruction:
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow()
    binder.expect(3)
    target = vector_plane(binder.operands[0])
    value = scalar.reader(state, binder.operands[1], "u")
    chosen = scalar.reader(state, binder.operands[2], "u")

    def where() -> Array:
        lane = chosen().astype(np.int64) & (state.lanes - 1)
        return (state.lane == lane[:, None]) & state.group[:, None]

    def run() -> None:
        np.copyto(state.planes["u"][target], value()[:, None], where=where())

    def flow(defined: Any) -> None:
        undefined = np.zeros(state.waves, bool)
        for register in binder.registers(1):
            undefined |= defined.scalars[:, register] != 0
        defined.set_lanes(binder.registers(0), np.broadcast_to(undefined[:, None], state.mask.shape), where())

    return BoundInstruction(
        instruction, run, binder.registers(1), (), binder.registers(0), uses=binder.registers(2), flow=flow
    )


def _gathered(
    machine: Context, binder: Binder, value: int, address: int | None, select: Callable[[], tuple[Array, Array | None]]
) -> BoundInstruction:
    """dst lane = source lane `select()[0]` of operand `value`, 0 (or kept: see callers) where select()[1] is False."""
    state = machine.state
    source, target = vector_plane(binder.operands[value]), vector_plane(binder.operands[0])
    uses = binder.registers(address) if address is not None else ()

    def run() -> None:
        index, valid = select()
        moved = np.take_along_axis(state.planes["u"][source], index, 1)
        state.whole(target, moved if valid is None else np.where(valid, moved, np.uint32(0)))
        if binder.instruction.mnemonic.startswith("ds_"):
            machine.issue("lds", binder.registers(0))

    def flow(defined: Any) -> None:
        index, valid = select()
        everywhere = np.ones(state.mask.shape, bool) if valid is None else valid
        defined.permuted(binder.registers(0), binder.registers(value), index, everywhere)

    return BoundInstruction(
        binder.instruction, run, binder.registers(value), (), binder.registers(0), uses=uses, flow=flow
    )


def _bpermute(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Each lane takes the value of the lane that its address / 4 names; 0 from a lane that is off."""
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow("offset")
    binder.expect(3)
    address = state.planes["u"][vector_plane(binder.operands[1])]
    offset = np.uint32(instruction.number("offset"))

    def select() -> tuple[Array, Array | None]:
        index = ((address + offset) >> np.uint32(2)).astype(np.int64) & (state.lanes - 1)
        return index, None if state.full else np.take_along_axis(state.read_mask(EXEC), index, 1)

    return _gathered(machine, binder, 2, 1, select)


def _permute(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Each lane sends its value to the lane that its address / 4 names; the highest sender wins, 0 where none does."""
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow("offset")
    binder.expect(3)
    address = state.planes["u"][vector_plane(binder.operands[1])]
    offset = np.uint32(instruction.number("offset"))

    def select() -> tuple[Array, Array | None]:
        to = ((address + offset) >> np.uint32(2)).astype(np.int64) & (state.lanes - 1)
        index, valid = np.zeros(state.mask.shape, np.int64), np.zeros(state.mask.shape, bool)
        on = state.read_mask(EXEC)
        for wave in range(state.waves):
            senders = state.lane[on[wave]]
            index[wave, to[wave, senders]] = senders
            valid[wave, to[wave, senders]] = True
        return index, valid

    return _gathered(machine, binder, 2, 1, select)


def swizzle_pattern(text: str) -> int:
    """The 16 bits of a ds_swizzle offset, from a number or its symbolic form."""
    if not text.startswith("swizzle("):
        return int(text, 0)
    name, *parts = [part.strip().strip('"') for part in text[8:-1].split(",")]
    if name == "QUAD_PERM":
        return 0x8000 | sum(int(part) << 2 * n for n, part in enumerate(parts))
    if name == "SWAP":
        return int(parts[0]) << 10 | 31
    if name == "REVERSE":
        return (int(parts[0]) - 1) << 10 | 31
    if name == "BROADCAST":
        return int(parts[1]) << 5 | (32 - int(parts[0]))
    if name == "BITMASK_PERM":
        # One letter a bit of the lane's number, highest first: 0, 1, p(reserve), i(nvert).
        masks = {"0": 0, "1": 1 << 5, "p": 1, "i": 1 | 1 << 10}
        return sum(masks[letter] << 4 - n for n, letter in enumerate(parts[0]))
    raise UnknownOperand(f"swizzle {text!r} is not known")


def _swizzle(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Within groups of 32 lanes: (lane & and) | or, xor; or within groups of four."""
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow("offset")
    binder.expect(2)
    pattern, lane = swizzle_pattern(instruction.modifiers.get("offset", "0")), state.lane
    if pattern & 0xE000 == 0xC000 or pattern & 0xE000 == 0xE000:
        raise UnknownOperand("rotating and FFT swizzles are not modelled")
    if pattern & 0x8000:
        source = (lane & ~3) + (pattern >> 2 * (lane & 3) & 3)
    else:
        source = (lane & ~31) + (((lane & 31 & pattern) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31))
    index = np.broadcast_to(source, state.mask.shape)

    def select() -> tuple[Array, Array | None]:
        return index, None if state.full else np.take_along_axis(state.read_mask(EXEC), index, 1)

    return _gathered(machine, binder, 1, None, select)


def _permlane16(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Any lane of the same row (16), or of the other row of a pair (x16), by 4-bit selectors in two scalars.

    op_sel:[fi, bound_ctrl]: read lanes that are off; give 0 instead of leaving the destination alone. LLVM has the two
    bits. AMD's pseudocode of RDNA3 and RDNA4 has none of them and reads every lane, which is what fi:1 does.
    """
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow("op_sel")
    binder.expect(4)
    low, high = scalar.reader(state, binder.operands[2], "u"), scalar.reader(state, binder.operands[3], "u")
    source, target = vector_plane(binder.operands[1]), vector_plane(binder.operands[0])
    inactive, bound = (bool(x) for x in instruction.numbers("op_sel", [0, 0])[:2])
    across, lane = 16 if "x16" in instruction.mnemonic else 0, state.lane

    def select() -> tuple[Array, Array]:
        both = low().astype(np.uint64) | high().astype(np.uint64) << np.uint64(32)
        chosen = (both[:, None] >> (4 * (lane & 15)).astype(np.uint64)).astype(np.int64) & 15
        index = ((lane & ~15) ^ across) + chosen
        valid = np.ones(state.mask.shape, bool) if inactive else np.take_along_axis(state.read_mask(EXEC), index, 1)
        return index, valid

    def run() -> None:
        index, valid = select()
        moved = np.take_along_axis(state.planes["u"][source], index, 1)
        other = np.uint32(0) if bound else state.planes["u"][target]
        state.whole(target, np.where(valid, moved, other))

    def flow(defined: Any) -> None:
        index, valid = select()
        moved = np.take_along_axis(defined.lanes(binder.registers(1)), index, 1)
        kept = np.zeros(state.mask.shape, bool) if bound else defined.lanes(binder.registers(0))
        defined.set_lanes(binder.registers(0), np.where(valid, moved, kept))

    reads = binder.registers(0, 1) if not bound else binder.registers(1)
    return BoundInstruction(instruction, run, reads, (), binder.registers(0), uses=binder.registers(2, 3), flow=flow)


def _permlane64(machine: Context, instruction: Instruction) -> BoundInstruction:
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow()
    binder.expect(2)
    index = np.broadcast_to(state.lane ^ (state.lanes // 2), state.mask.shape)
    return _gathered(machine, binder, 1, None, lambda: (index, None))


def _permlane_swap(size: int) -> Bind:
    """The odd rows (of `size` lanes) of the first register change places with the even rows of the second."""

    def make(machine: Context, instruction: Instruction) -> BoundInstruction:
        state = machine.state
        binder = Binder(state, instruction)
        binder.allow("bound_ctrl", "fi")
        binder.expect(2)
        first, second = (vector_plane(item) for item in binder.operands)
        odd = (state.lane // size) % 2 == 1
        from_other = np.where(odd, state.lane - size, state.lane + size)

        def swapped(a: Array, b: Array) -> tuple[Array, Array]:
            return np.where(odd, b[:, from_other], a), np.where(odd, b, a[:, from_other])

        def run() -> None:
            on = state.read_mask(EXEC)
            if (on[:, from_other] != on)[state.group].any():
                raise UnknownInstruction(f"{instruction.mnemonic} with a lane on whose partner is off is not modelled")
            a, b = swapped(state.planes["u"][first], state.planes["u"][second])
            state.whole(first, a)
            state.whole(second, b)

        def flow(defined: Any) -> None:
            a, b = swapped(defined.vectors[first], defined.vectors[second])
            defined.set_lanes(binder.registers(0), a)
            defined.set_lanes(binder.registers(1), b)

        both = binder.registers(0, 1)
        return BoundInstruction(instruction, run, both, (), both, flow=flow)

    return make


TABLE: dict[str, Bind] = {
    "v_readlane_b32": _read_lane, "v_readfirstlane_b32": _read_lane, "v_writelane_b32": _write_lane,
    "ds_bpermute_b32": _bpermute, "ds_permute_b32": _permute, "ds_swizzle_b32": _swizzle,
    "v_permlane16_b32": _permlane16, "v_permlanex16_b32": _permlane16, "v_permlane64_b32": _permlane64,
    "v_permlane16_swap_b32": _permlane_swap(16), "v_permlane32_swap_b32": _permlane_swap(32),
}  # fmt: skip


def table_name(mnemonic: str) -> str:
    return "v_" + base_name(mnemonic) if mnemonic.startswith("v_") else mnemonic
