"""Vector instructions that read or write one bit a lane beside numbers: selects, carries, 64-bit multiply-adds.

Sources: as in vector.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction, Read
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.isa import VCC
from portattn.backends.rocm.emulator.amdgpu.state import KINDS, Array, WorkGroupState
from portattn.backends.rocm.emulator.amdgpu.vector_forms import DPP, SDWA, Bind, dpp_flow

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.definedness import Definedness

_u32, _u64, _i64 = np.uint32, np.uint64, np.int64


def mask_read(state: WorkGroupState, binder: Binder, index: int) -> tuple[Read, tuple[int, ...]]:
    """A scalar operand as a bit a lane, and the registers it is in."""
    item = binder.operands[index]
    if item.kind == "s":
        return lambda: state.read_mask(item.index), tuple(range(item.index, item.index + state.lanes // 32))
    if item.kind == "literal":
        bits = item.bits(64)
        constant = np.array([[bool(bits >> lane & 1) for lane in range(state.lanes)]])
        whole = np.broadcast_to(constant, (state.waves, state.lanes))
        return lambda: whole, ()
    raise UnknownOperand(f"{binder.instruction.operands[index]} as a mask")


def mask_write(state: WorkGroupState, binder: Binder, index: int) -> tuple[Callable[[Array], None], tuple[int, ...]]:
    item = binder.operands[index]
    if item.kind == "null":
        return lambda bits: None, ()
    if item.kind != "s":
        raise UnknownOperand(f"{binder.instruction.operands[index]} as a mask")

    def put(bits: Array) -> None:
        state.write_mask(item.index, np.broadcast_to(bits, state.mask.shape) & state.mask)

    return put, tuple(range(item.index, item.index + state.lanes // 32))


def cndmask(kind: str) -> Bind:
    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
        binder = Binder(state, instruction)
        binder.allow("op_sel", *DPP, *SDWA)
        binder.expect(3, 4)
        if len(binder.operands) == 3:  # dual-issue halves leave vcc out
            mask, masks = (lambda: state.read_mask(VCC)), tuple(range(VCC, VCC + state.lanes // 32))
        else:
            mask, masks = mask_read(state, binder, 3)
        signs = any(item.negative or item.absolute for item in binder.operands[1:3])
        typed = {"u": "f", "w": "h"}[kind] if signs else kind
        no, yes = binder.read(1, typed, 0), binder.read(2, typed, 1)
        write = binder.write(0, typed)

        def run() -> None:
            write(np.where(mask(), yes(), no()))

        def flow(defined: object) -> None:
            defined.selected(binder, mask(), masks)  # type: ignore[attr-defined]

        own = None if binder.dpp is not None else flow
        return BoundInstruction(
            instruction, run, binder.registers(1, 2), masks, binder.registers(0), flow=own or dpp_flow(binder)
        )

    return make


def carry(minus: str, with_carry: bool) -> Bind:
    """Adds ("") and subtracts ("ab": a − b, "ba": b − a) with a carry out, and in where `with_carry`."""

    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
        binder = Binder(state, instruction)
        binder.allow(*DPP, *SDWA)
        binder.expect(5 if with_carry else 4)
        a, b = binder.read(2, "u", 0), binder.read(3, "u", 1)
        write = binder.write(0, "u")
        carry_out, masks_out = mask_write(state, binder, 1)
        carry_in, masks_in = mask_read(state, binder, 4) if with_carry else ((lambda: np.zeros((1, 1), bool)), ())

        def run() -> None:
            x, y, c = a().astype(_i64), b().astype(_i64), carry_in().astype(_i64)
            total = x + y + c if not minus else (x - y - c if minus == "ab" else y - x - c)
            write((total & 0xFFFFFFFF).astype(_u32))
            carry_out((total < 0) | (total > 0xFFFFFFFF))

        return BoundInstruction(instruction, run, binder.registers(2, 3), masks_in, binder.registers(0), masks_out)

    return make


def mad64(signed: bool) -> Bind:
    """64-bit sum of a 32×32-bit product and an addend, with the carry out."""

    def make(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
        binder = Binder(state, instruction)
        binder.allow()
        binder.expect(5)
        narrow, wide = ("i", "I") if signed else ("u", "U")
        a, b, c = binder.read(2, narrow, 0), binder.read(3, narrow, 1), binder.read(4, wide, 2)
        write = binder.write(0, "U")
        carry_out, masks_out = mask_write(state, binder, 1)
        dtype = KINDS[wide][0]

        def run() -> None:
            product = a().astype(dtype) * b().astype(dtype)
            addend = c()
            total = product + addend
            # Unsigned: a sum that wrapped is below its part. Signed: the operands agree in sign and the sum does not.
            over = ((product ^ total) & (addend ^ total)) < 0 if signed else total < product
            write(total.view(_u64))
            carry_out(over)

        factors, addend_words, (low, high) = binder.registers(2, 3), binder.registers(4), binder.registers(0)

        def flow(defined: Definedness) -> None:
            # A sum's low word depends on low words alone: compilers leave the addend's high word to chance where they
            # want no more.
            some = defined.lanes((*factors, *addend_words[:1]))
            every = some | defined.lanes(addend_words[1:])
            defined.set_lanes((low,), some)
            defined.set_lanes((high,), every)
            defined.set_masks(masks_out, every & defined.state.mask)

        reads = (*factors, *addend_words)
        return BoundInstruction(instruction, run, reads, (), (low, high), masks_out, flow=flow)

    return make
