"""Checks of registers: results that no wait covers, and undefined values, a bit a register and lane.

A counter's accesses finish in order, except scalar loads: with one of them outstanding only a wait for 0 counts. A
full counter delays the next access: LLVM omits a wait behind 63 later ones. Not tracked: single bits and halves of
vector registers; a write to a half defines the whole.
Source: LLVM AMDGPU guide, "Memory Model"; AMD MI300 ISA reference, "Manually inserted wait states" and S_WAITCNT; RDNA4
ISA reference, S_WAIT_*; full counters: AMD's own checker, ROCm/rocm-systems PR #10926."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import EXEC, SCALARS, SCC, VECTOR, Operand, operand
from portattn.backends.rocm.emulator.amdgpu.errors import Place, UninitialisedValue, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
    from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction, Dpp

COUNTERS = ("vmcnt", "lgkmcnt", "vscnt", "loadcnt", "storecnt", "dscnt", "kmcnt")
# Counted things that the model has none of: exports, image samples, ray tracing.
IGNORED = ("expcnt", "samplecnt", "bvhcnt", "xcnt")


@dataclass(eq=False)
class PendingAccess:
    registers: frozenset[int]  # written later; empty for stores
    waves: int  # bit mask of the issuing waves
    place: Place
    unordered: bool = False
    writes_lds: bool = False  # other waves may rely on it only after a wait before a barrier
    half: int | None = None  # 0 or 1: the written half of its register
    payload: Any = field(default=None)  # of a global store: its bytes for global_memory_ops.check_order


class Waits:
    """The outstanding accesses of one work-group; a counter counts at most `most`."""

    def __init__(self, counters: dict[str, str], most: dict[str, int]) -> None:
        self.names, self.most = counters, most
        self.queues: dict[str, list[PendingAccess]] = {name: [] for name in dict.fromkeys(counters.values())}
        self.pending: dict[int, int] = {}  # register → how many accesses will write it

    def reset(self) -> None:
        for queue in self.queues.values():
            queue.clear()
        self.pending.clear()

    def order_stores(self) -> None:
        """Order the outstanding global stores before what the work-group's waves load from now on."""
        for entry in self.queues[self.names["store"]]:
            entry.payload = None

    def issue(self, kind: str, entry: PendingAccess) -> None:
        """Record an access of a kind ("load", "store", "atomic", "lds", "scalar")."""
        counter = self.names[kind]
        queue = self.queues[counter]
        queue.append(entry)
        pending = self.pending
        for register in entry.registers:
            pending[register] = pending.get(register, 0) + 1
        if len(queue) > self.most[counter]:
            self.wait(counter, self.most[counter], entry.waves)

    def wait(self, counter: str, limit: int, waves: int) -> None:
        """Wait until at most `limit` accesses of a bit mask's waves are outstanding."""
        queue = self.queues.get(counter)
        if not queue or len(queue) <= limit:
            return
        if limit == 0:
            for entry in queue:
                entry.waves &= ~waves
        else:
            self._wait_for_all_but(queue, limit, waves)
        for entry in queue:
            if not entry.waves:
                self._arrived(entry)
        queue[:] = [entry for entry in queue if entry.waves]

    def _arrived(self, entry: PendingAccess) -> None:
        pending = self.pending
        for register in entry.registers:
            if pending[register] == 1:
                del pending[register]
            else:
                pending[register] -= 1

    @staticmethod
    def _wait_for_all_but(queue: list[PendingAccess], limit: int, waves: int) -> None:
        # Waves that took different ways have different accesses outstanding: each wave for itself, unless all agree.
        together = all(entry.waves & waves in (0, waves) for entry in queue)
        for bits in [waves] if together else [1 << i for i in range(waves.bit_length()) if waves >> i & 1]:
            own = [entry for entry in queue if entry.waves & bits]
            if any(entry.unordered for entry in own):
                continue  # they may finish in any order
            for entry in own[: max(len(own) - limit, 0)]:
                entry.waves &= ~bits

    def culprit(self, bound: BoundInstruction, waves: int) -> tuple[PendingAccess, int] | None:
        """Return an outstanding access whose result an instruction of these waves touches, and the register."""
        for counter, queue in self.queues.items():
            touches = bound.touches
            if bound.counter and self.names[bound.counter] == counter:
                touches = frozenset(bound.reads + bound.uses)  # its result comes after the earlier access's
            for entry in queue:
                hit = entry.registers & touches
                if hit and entry.waves & waves:
                    touched = [r for r in hit if entry.half is None or _touches(bound.instruction, r, entry.half)]
                    if touched:
                        return entry, min(touched)
        return None

    def outstanding(self) -> list[PendingAccess]:
        return [entry for queue in self.queues.values() for entry in queue]


def _touches(instruction: Instruction, register: int, half: int) -> bool:
    """Return whether an instruction touches this half of a register, by name (v1.l, gfx11 on) or as a d16 access."""
    for part in (instruction, instruction.second):
        for text in part.operands if part is not None else ():
            item = operand(text)
            if register not in item.registers:
                continue
            named = item.half
            if named is None and "_d16" in instruction.mnemonic:
                named = 1 if "_hi" in instruction.mnemonic else 0
            if named is None or named == half:
                return True
    return False


def register_name(register: int) -> str:
    if register < VECTOR:
        return f"s{register}" if register < 106 else f"scalar register {register}"
    plane = register - VECTOR
    return f"v{plane}" if plane < 256 else f"a{plane - 256}"


_PART = re.compile(r"(\w+)\((0x[0-9a-f]+|\d+)\)")


def wait_limits(mnemonic: str, text: str) -> dict[str, int]:
    """Return a wait instruction's counter → most outstanding accesses. Raise UnknownOperand."""
    if mnemonic == "s_waitcnt":
        parts = _PART.findall(text)
        if not parts or _PART.sub("", text).strip(" &"):
            raise UnknownOperand(f"s_waitcnt {text!r} is not in symbolic form")
        return _known({name: int(value, 0) for name, value in parts})
    if mnemonic.startswith("s_waitcnt_"):  # s_waitcnt_vscnt null, 0x0
        counter = mnemonic.removeprefix("s_waitcnt_")
        first, _, value = text.partition(",")
        if first.strip() != "null":
            raise UnknownOperand(f"{mnemonic} of a register is not modelled")
        return _known({counter: int(value, 0)})
    number = int(text, 0)
    joined = mnemonic.removeprefix("s_wait_")
    if joined in ("loadcnt_dscnt", "storecnt_dscnt"):  # two six-bit fields. RDNA4 ISA reference, SOPP.
        return {joined.split("_")[0]: number >> 8 & 63, "dscnt": number & 63}
    return _known({joined: number})


def _known(found: dict[str, int]) -> dict[str, int]:
    for name in found:
        if name not in COUNTERS + IGNORED:
            raise UnknownOperand(f"wait counter {name!r} is not known")
    return {name: value for name, value in found.items() if name in COUNTERS}


_WORD = np.uint32(0xFFFFFFFF)


class Definedness:
    """Undefined registers of one work-group.

    Attributes:
        vectors, scalars, scc: [planes, waves, lanes] bool; [waves, SCALARS] uint32, bit by bit; [waves] bool
        bad: unified numbers of registers that are undefined somewhere
    """

    def __init__(self, state: WorkGroupState, report: Any, place: Any) -> None:
        self.state, self.report, self.place = state, report, place
        self.vectors: Array = np.zeros(state.V.shape, bool)
        self.scalars: Array = np.zeros(state.S.shape, np.uint32)
        self.scc: Array = np.zeros(state.waves, bool)
        self.bad: set[int] = set()
        self.origin: dict[int, str] = {}  # register → place of the instruction that last made it undefined
        self._every = set(range(EXEC)) | {SCC} | set(range(VECTOR, VECTOR + len(state.V)))

    def reset(self, defined: set[int]) -> None:
        """Mark all but the dispatcher's registers undefined, before a work-group."""
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
        """Return the [waves, lanes] bool where any of these registers is undefined."""
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
                    self.report(UninitialisedValue, "an undefined value goes into exec")
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
        """Mark scalar registers that hold a bit a lane as undefined or defined."""
        words = np.packbits(undefined, axis=1, bitorder="little").view(np.uint32)
        for n, register in enumerate(registers):
            self.set_scalars((register,), words[:, n % words.shape[1]])

    def require(self, registers: tuple[int, ...]) -> None:
        """Report registers that are undefined in an active lane or a running wave."""
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
                self.report(UninitialisedValue, f"{name} is undefined{at}, and is used; {self.since(register)}")

    def since(self, register: int) -> str:
        origin = self.origin.get(register)
        return f"it is since {origin}" if origin else "nothing wrote it"

    def selected(self, binder: Binder, mask: Array, masks: tuple[int, ...]) -> None:
        """Apply v_cndmask: only the selected source counts."""
        first, second = self.lanes(binder.registers(1)), self.lanes(binder.registers(2))
        self.set_lanes(binder.registers(0), np.where(mask, second, first) | self.mask(masks))

    def moved(self, binder: Binder, dpp: Dpp) -> None:
        """Apply DPP: source 0 comes from another lane."""
        first = self.lanes(binder.registers(1))[:, dpp.source] & dpp.valid()
        rest = binder.registers(*range(2, len(binder.operands)))
        self.set_lanes(binder.registers(0), first | self.lanes(rest), dpp.enabled())

    def permuted(self, written: tuple[int, ...], read: tuple[int, ...], source: Array, valid: Array) -> None:
        """Apply a move from lanes `source` [waves, lanes], where valid."""
        undefined = np.take_along_axis(self.lanes(read), source, 1) & valid
        self.set_lanes(written, undefined)

    def whole_waves(self, written: tuple[int, ...], read: tuple[int, ...], where: Array | None = None) -> None:
        """Apply a matrix instruction: every lane of the result depends on every lane of the sources."""
        undefined = np.broadcast_to(np.any(self.lanes(read), axis=1, keepdims=True), self.state.mask.shape)
        self.set_lanes(written, undefined, where)

    def bitwise(self, name: str, items: list[Operand], words: int) -> None:
        """Apply s_and and the like: a bit is defined if the defined operand alone decides it."""
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
        """Require a defined value for exec; `only_on`: in the active lanes."""
        if item.kind != "s":
            return
        for word in range(words):
            undefined = self.scalars[:, item.index + word]
            if only_on:
                undefined = undefined & self.state.S[:, EXEC + word]
            if (undefined[self.state.group] != 0).any():
                self.report(UninitialisedValue, f"{register_name(item.index + word)} is undefined and goes into exec")
