"""Which registers hold something: a bit a register and lane, moved along with every instruction.

A value that nothing defined is no error until it matters: when it is stored, addresses memory, decides a branch or goes
into exec. Almost always everything an instruction touches is defined; `bad`, the set of registers that are not defined
in some lane, tells so at the cost of one set operation. Only else the bits are moved, by the rules here.

Not tracked: single bits and halves of vector registers. A write to half a register makes the whole of it defined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.errors import Uninitialised
from portattn.backends.rocm.emulator.amdgpu.isa import EXEC, SCALARS, SCC, VECTOR
from portattn.backends.rocm.emulator.amdgpu.operands import Operand
from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState
from portattn.backends.rocm.emulator.amdgpu.waits import register_name

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction
    from portattn.backends.rocm.emulator.amdgpu.dpp import Dpp

_WORD = np.uint32(0xFFFFFFFF)


class Definedness:
    """Undefined registers of one work-group.

    vectors  [planes, waves, lanes] bool; scalars [waves, SCALARS] uint32, bit by bit; scc [waves] bool
    bad      unified numbers of registers that are undefined somewhere
    report   called with (error type, problem); place() says which instruction is executed
    """

    def __init__(self, state: WorkGroupState, report: Any, place: Any) -> None:
        self.state, self.report, self.place = state, report, place
        self.vectors: Array = np.zeros(state.V.shape, bool)
        self.scalars: Array = np.zeros(state.S.shape, np.uint32)
        self.scc: Array = np.zeros(state.waves, bool)
        self.bad: set[int] = set()
        self.origin: dict[int, str] = {}  # register → where it last became undefined by an instruction
        self._every = set(range(EXEC)) | {SCC} | set(range(VECTOR, VECTOR + len(state.V)))

    def reset(self, defined: set[int]) -> None:
        """Before a work-group: everything is undefined but what the dispatcher sets."""
        self.vectors[...] = True
        self.scalars[...] = _WORD
        self.scc[...] = True
        self.scalars[:, EXEC:] = 0
        for register in defined:
            if register >= VECTOR:
                self.vectors[register - VECTOR] = False
            else:
                self.scalars[:, register] = 0
        self.bad = self._every - defined
        self.origin.clear()

    # ---- reading

    def lanes(self, registers: tuple[int, ...]) -> Array:
        """[waves, lanes] bool: is any of these registers undefined there?"""
        found = np.zeros(self.state.mask.shape, bool)
        for register in registers:
            if register not in self.bad:
                continue
            if register >= VECTOR:
                found |= self.vectors[register - VECTOR]
            elif register == SCC:
                found |= self.scc[:, None]
            else:
                found |= (self.scalars[:, register] != 0)[:, None]
        return found

    def mask(self, registers: tuple[int, ...]) -> Array:
        """Return the [waves, lanes] bool of scalar registers that hold a bit a lane."""
        if not registers or self.bad.isdisjoint(registers):
            return np.zeros(self.state.mask.shape, bool)
        words = np.ascontiguousarray(self.scalars[:, list(registers)])
        return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)

    # ---- writing

    def set_lanes(self, registers: tuple[int, ...], undefined: Array, where: Array | None = None) -> None:
        """Mark vector registers as undefined or defined, in the active lanes or the lanes of `where`."""
        where = self.state.mask if where is None else where
        for register in registers:
            plane = self.vectors[register - VECTOR]
            np.copyto(plane, undefined, where=where)
            self._note(register, bool(plane.any()))

    def set_scalars(self, registers: tuple[int, ...], undefined: Array) -> None:
        """Mark scalar registers as undefined ([waves] bool, or bits as uint32), in the running waves."""
        bits = np.where(undefined, _WORD, np.uint32(0)) if undefined.dtype == bool else undefined
        for register in registers:
            if register == SCC:
                np.copyto(self.scc, bits != 0, where=self.state.group)
                self._note(SCC, bool(self.scc.any()))
                continue
            if register >= EXEC:
                if register < SCALARS and (bits[self.state.group] != 0).any():
                    self.report(Uninitialised, "an undefined value goes into exec")
                continue
            np.copyto(self.scalars[:, register], bits, where=self.state.group)
            self._note(register, bool(self.scalars[:, register].any()))

    def clear_scalars(self, registers: tuple[int, ...]) -> None:
        self.set_scalars(registers, np.zeros(self.state.waves, bool))

    def _note(self, register: int, is_bad: bool) -> None:
        if is_bad:
            if register not in self.bad:
                self.origin[register] = str(self.place())
            self.bad.add(register)
        else:
            self.bad.discard(register)

    # ---- rules

    def move(self, bound: BoundInstruction) -> None:
        """Apply an instruction that touches an undefined register, before it runs."""
        self.require(bound.uses)
        if bound.flow is not None:
            bound.flow(self)
            return
        undefined = self.lanes(bound.reads)
        if bound.masks:
            undefined |= self.mask(bound.masks)
        self.set_lanes(bound.writes, undefined)
        if bound.mask_writes:
            self.set_masks(bound.mask_writes, undefined & self.state.mask)
        if bound.scalar_writes:
            self.set_scalars(bound.scalar_writes, np.asarray(undefined.any(1)))

    def set_masks(self, registers: tuple[int, ...], undefined: Array) -> None:
        """Scalar registers that hold a bit a lane become undefined or defined."""
        words = np.packbits(undefined, axis=1, bitorder="little").view(np.uint32)
        for n, register in enumerate(registers):
            self.set_scalars((register,), words[:, n % words.shape[1]])

    def require(self, registers: tuple[int, ...]) -> None:
        """Report registers that are undefined in a lane that is on, or a wave that runs."""
        for register in registers:
            if register not in self.bad:
                continue
            if register >= VECTOR:
                where = self.vectors[register - VECTOR] & self.state.mask
            elif register == SCC:
                where = (self.scc & self.state.group)[:, None]
            else:
                where = ((self.scalars[:, register] != 0) & self.state.group)[:, None]
            if where.any():
                wave, lane = (int(x) for x in np.argwhere(where)[0])
                at = f" in lane {lane} of wave {wave}" if register >= VECTOR else f" in wave {wave}"
                name = "scc" if register == SCC else register_name(register)
                self.report(Uninitialised, f"{name} is undefined{at}, and is used; {self.since(register)}")

    def since(self, register: int) -> str:
        """Words for where an undefined register comes from."""
        origin = self.origin.get(register)
        return f"it is since {origin}" if origin else "nothing wrote it"

    def selected(self, binder: Binder, mask: Array, masks: tuple[int, ...]) -> None:
        """v_cndmask: only the source that is taken counts."""
        first, second = self.lanes(binder.registers(1)), self.lanes(binder.registers(2))
        self.set_lanes(binder.registers(0), np.where(mask, second, first) | self.mask(masks))

    def moved(self, binder: Binder, dpp: Dpp) -> None:
        """DPP: source 0 comes from another lane."""
        first = self.lanes(binder.registers(1))[:, dpp.source] & dpp.valid()
        rest = binder.registers(*range(2, len(binder.operands)))
        self.set_lanes(binder.registers(0), first | self.lanes(rest), dpp.enabled())

    def permuted(self, written: tuple[int, ...], read: tuple[int, ...], source: Array, valid: Array) -> None:
        """A register whose lanes come from other lanes: source [waves, lanes], where valid."""
        undefined = np.take_along_axis(self.lanes(read), source, 1) & valid
        self.set_lanes(written, undefined)

    def whole_waves(self, written: tuple[int, ...], read: tuple[int, ...], where: Array | None = None) -> None:
        """Every lane of the result depends on every lane of the sources (matrix instructions)."""
        undefined = np.broadcast_to(np.any(self.lanes(read), axis=1, keepdims=True), self.state.mask.shape)
        self.set_lanes(written, undefined, where)

    def bitwise(self, name: str, items: list[Operand], words: int) -> None:
        """s_and and its like: a bit is defined where the defined operand alone decides it."""
        results = []
        for word in range(words):
            bits = [self._bits(item, word) for item in items[1:]]
            if len(bits) == 1:
                results.append(bits[0][1])
                continue
            (a, ua), (b, ub) = bits
            if name in ("andn2", "and_not1", "orn2", "or_not1"):
                b = ~b
            if name.startswith(("and", "nand")):
                results.append((ua & ub) | (ua & b) | (ub & a))
            elif name.startswith(("or", "nor")):
                results.append((ua & ub) | (ua & ~b) | (ub & ~a))
            else:
                results.append(ua | ub)
        for register, undefined in zip(items[0].registers, results, strict=False):
            self.set_scalars((register,), undefined)
        if name != "mov":
            self.set_scalars((SCC,), np.array(results).any(0) != 0)

    def _bits(self, item: Operand, word: int) -> tuple[Array, Array]:
        if item.kind == "s":
            return self.state.S[:, item.index + word], self.scalars[:, item.index + word]
        value = np.uint32((item.bits(64) if item.kind == "literal" else 0) >> 32 * word & 0xFFFFFFFF)
        return np.full(self.state.waves, value), np.zeros(self.state.waves, np.uint32)

    def into_exec(self, item: Operand, words: int, only_on: bool) -> None:
        """A value that goes into exec must be defined; `only_on`: in the lanes that are on now."""
        if item.kind != "s":
            return
        for word in range(words):
            undefined = self.scalars[:, item.index + word]
            if only_on:
                undefined = undefined & self.state.S[:, EXEC + word]
            if (undefined[self.state.group] != 0).any():
                self.report(Uninitialised, f"{register_name(item.index + word)} is undefined and goes into exec")
