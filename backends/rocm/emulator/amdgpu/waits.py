"""Wait counters: which results are still on their way, and who uses them too early.

An access increments a counter when it is issued. `s_waitcnt vmcnt(n)` and its like stop the wave until at most n
accesses of that counter are outstanding. Accesses of a counter finish in order, but scalar loads do not: with one of
them outstanding only a wait for 0 says anything. A wave whose counter is full does not issue another access before one
has finished, so that an old access needs no wait: LLVM leaves it out behind 63 later ones. Source: LLVM AMDGPU guide,
"Memory Model" (the waitcnt tables per architecture); AMD MI300 ISA reference, "Manually inserted wait states" and
S_WAITCNT; RDNA4 ISA reference, S_WAIT_*; of full counters AMD's own checker, ROCm/rocm-systems PR #10926.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portattn.backends.rocm.emulator.amdgpu.errors import Place, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.isa import VECTOR
from portattn.backends.rocm.emulator.amdgpu.operands import operand

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
    from portattn.backends.rocm.emulator.amdgpu.binder import BoundInstruction

COUNTERS = ("vmcnt", "lgkmcnt", "vscnt", "loadcnt", "storecnt", "dscnt", "kmcnt")
# Counted things that the model has none of: exports, image samples, ray tracing.
IGNORED = ("expcnt", "samplecnt", "bvhcnt", "xcnt")


@dataclass(eq=False)
class PendingAccess:
    """One access on its way.

    registers  what it will write; empty for stores
    waves      bit mask of the waves that issued it
    writes_lds it writes LDS: other waves may rely on it only when it was waited for before a barrier
    half       0 or 1: it writes only this half of its register
    payload    of a global store: what vmem.check_order needs to know about its bytes
    """

    registers: frozenset[int]
    waves: int
    place: Place
    unordered: bool = False
    writes_lds: bool = False
    half: int | None = None
    payload: Any = field(default=None)


class Waits:
    """The outstanding accesses of one work-group.

    counters  the counter of each kind of access
    most      how many accesses each counter can count
    """

    def __init__(self, counters: dict[str, str], most: dict[str, int]) -> None:
        self.names, self.most = counters, most
        self.queues: dict[str, list[PendingAccess]] = {name: [] for name in dict.fromkeys(counters.values())}
        self.pending: dict[int, int] = {}  # register → how many accesses will write it

    def reset(self) -> None:
        for queue in self.queues.values():
            queue.clear()
        self.pending.clear()

    def issue(self, kind: str, entry: PendingAccess) -> None:
        """An access of a kind ("load", "store", "atomic", "lds", "scalar") was issued."""
        counter = self.names[kind]
        queue = self.queues[counter]
        queue.append(entry)
        pending = self.pending
        for register in entry.registers:
            pending[register] = pending.get(register, 0) + 1
        if len(queue) > self.most[counter]:
            self.wait(counter, self.most[counter], entry.waves)

    def wait(self, counter: str, limit: int, waves: int) -> None:
        """The waves of a bit mask wait until at most `limit` of their accesses are outstanding."""
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
        """An outstanding access whose result an instruction of these waves touches, and the register."""
        for counter, queue in self.queues.items():
            touches = bound.touches
            if bound.counter and self.names[bound.counter] == counter:
                touches = frozenset(bound.reads + bound.uses)  # what it writes, it writes after the access before
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
    """Does an instruction touch this half of a register? gfx11 and later name halves (v1.l), d16 accesses imply one."""
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
    """The name that assembly has for a unified register number."""
    if register < VECTOR:
        return f"s{register}" if register < 106 else f"scalar register {register}"
    plane = register - VECTOR
    return f"v{plane}" if plane < 256 else f"a{plane - 256}"


_PART = re.compile(r"(\w+)\((0x[0-9a-f]+|\d+)\)")


def limits(mnemonic: str, text: str) -> dict[str, int]:
    """Counter → how many accesses may stay outstanding, of one wait instruction. Raises UnknownOperand."""
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
