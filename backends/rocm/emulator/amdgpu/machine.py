"""A work-group in execution: its state, memories and checks, and the order in which its waves run.

Waves at the same instruction run it together. Where they part, the group furthest behind runs first, until it
catches up with another: code that the waves come back to is then run together again. A group that loops for long while
another could run gives way, so that a wave which waits for another's store gets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import decode
from portattn.backends.rocm.emulator.amdgpu.assembly import Assembly
from portattn.backends.rocm.emulator.amdgpu.binder import BoundInstruction
from portattn.backends.rocm.emulator.amdgpu.checks import Findings
from portattn.backends.rocm.emulator.amdgpu.control import END, SPLIT, WAIT
from portattn.backends.rocm.emulator.amdgpu.definedness import Definedness
from portattn.backends.rocm.emulator.amdgpu.errors import (
    BarrierMismatch,
    EmulationError,
    Finding,
    MissingWait,
    Place,
    StepLimit,
    Uninitialised,
)
from portattn.backends.rocm.emulator.amdgpu.group_races import GroupRaces
from portattn.backends.rocm.emulator.amdgpu.isa import TTMP, VECTOR
from portattn.backends.rocm.emulator.amdgpu.lds import Lds
from portattn.backends.rocm.emulator.amdgpu.memory import Memory
from portattn.backends.rocm.emulator.amdgpu.scratch import MAGIC, Scratch
from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState
from portattn.backends.rocm.emulator.amdgpu.vmem import check_order
from portattn.backends.rocm.emulator.amdgpu.waits import PendingAccess, Waits, register_name

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.checks import Checks

RUNNING, WAITING, ENDED = 0, 1, 2
PATIENCE = 20_000  # steps a group may run while another could, before it gives way
# Words that each user scalar takes, in the order of the registers. LLVM AMDGPU guide, "Initial Kernel Execution State".
_USER_SCALARS = (
    ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2),
    ("dispatch_id", 2), ("flat_scratch_init", 2), ("private_segment_size", 1),
)  # fmt: skip


class Machine:
    """One work-group of a program; used again for each work-group of a grid, and for later launches."""

    def __init__(self, program: Assembly, waves: int, lds_bytes: int, checks: Checks) -> None:
        self.program, self.checks = program, checks
        self.memory, self.step_limit = Memory(), 0
        self.group_races: GroupRaces | None = None
        self.state = WorkGroupState(program.arch, program.wave, waves)
        self.state.ieee = bool(program.descriptor.get("ieee_mode", self.state.ieee))
        self.findings = Findings(checks)
        self.lds = Lds(lds_bytes, waves, self.findings, checks.undefined)
        self.waits = Waits(program.arch.counters, program.arch.most) if checks.waits else None
        self.defined = Definedness(self.state, self.report, self.place) if checks.undefined else None
        scratch_bytes = program.descriptor.get("private_segment_fixed_size", 0)
        self.scratch = Scratch(waves * program.wave, scratch_bytes)
        self.has_scratch_descriptor = bool(program.descriptor.get("user_sgpr_private_segment_buffer"))
        self.code: list[BoundInstruction | None] = [None] * len(program.instructions)
        self.counts = [0] * len(program.instructions)
        self.steps = 0
        self.pc = 0
        self.group_bits = (1 << waves) - 1
        self.pcs: Array = np.zeros(waves, np.int64)
        self.status: Array = np.zeros(waves, np.int8)
        self.signals: Array = np.zeros(waves, np.int64)

    def renew(self, memory: Memory, step_limit: int) -> None:
        """For the next launch: its memory, and nothing counted or found. What is bound stays bound."""
        self.memory, self.step_limit = memory, step_limit
        self.group_races = GroupRaces(memory, self.report) if self.checks.groups else None
        self.counts[:] = [0] * len(self.counts)
        self.findings.clear()

    # ---- for the instructions

    def place(self) -> Place:
        return self.program.instructions[self.pc].place

    def report(self, kind: type[Finding], problem: str) -> None:
        self.findings.report(kind, problem, self.place())

    def issue(
        self,
        kind: str,
        registers: tuple[int, ...],
        *,
        unordered: bool = False,
        writes_lds: bool = False,
        half: int | None = None,
    ) -> PendingAccess | None:
        """An access was issued: its registers (or one half of its register) are not to be touched before a wait."""
        if self.waits is None:
            return None
        entry = PendingAccess(frozenset(registers), self.group_bits, self.place(), unordered, writes_lds, half)
        self.waits.issue(kind, entry)
        return entry

    def issue_store(self, offsets: Array, size: int, mask: Array | None) -> None:
        """A store was issued. Who stored which bytes is kept until a wait, where all lanes that are on stored."""
        entry = self.issue("store", ())
        if entry is None or not len(offsets) or self.state.waves == 1:
            return
        lanes = self.state.lanes
        if mask is None and len(offsets) != self.state.waves * lanes:
            return  # some lanes were out of range: whose bytes these are is not known here
        owners = np.repeat(np.arange(self.state.waves), lanes) if mask is None else np.nonzero(mask)[0]
        entry.payload = (int(offsets.min()), int(offsets.max()) + size, offsets, size, owners)

    def ordered(self, offsets: Array, size: int) -> None:
        """A load is about to read these bytes."""
        if self.group_races is not None:
            self.group_races.load(offsets, size)
        if self.waits is not None and self.state.waves > 1:
            check_order(self, offsets, size)

    def undefined(self, registers: tuple[int, ...], mask: Array | None) -> Array | None:
        """[n, bytes] bool of the lanes given: which bytes of the registers are undefined? None when all are defined."""
        if self.defined is None or self.defined.bad.isdisjoint(registers):
            return None
        each = [self.defined.lanes((register,)) for register in registers]
        flat = np.stack([found.reshape(-1) if mask is None else found[mask] for found in each], axis=1)
        return np.repeat(flat, 4, axis=1) if flat.any() else None

    def undefined_store(self, registers: tuple[int, ...]) -> None:
        assert self.defined is not None
        bad = [register for register in registers if register in self.defined.bad]
        problem = f"{register_name(bad[0])} is undefined in some lane, and is stored; {self.defined.since(bad[0])}"
        self.report(Uninitialised, problem)

    def mark(self, registers: tuple[int, ...], mask: Array | None, undefined: Array) -> None:
        """What was loaded into these registers was undefined: [n, bytes] bool of the lanes given."""
        if self.defined is None:
            return
        for number, register in enumerate(registers):
            part = undefined[:, 4 * number : 4 * number + 4].any(1)
            where = np.zeros(self.state.mask.shape, bool)
            if mask is None:
                where[...] = part.reshape(where.shape)
            else:
                where[mask] = part
            self.defined.set_lanes((register,), where)

    def split(self, taken: Array, target: int) -> None:
        """The waves of the group part at a branch."""
        self.pcs[self.state.group] = self.pc + 1
        self.pcs[taken] = target

    def signal(self) -> None:
        self.signals[self.state.group] += 1

    # ---- running

    def run(self, group_id: tuple[int, int, int], kernarg: int) -> None:
        """Execute one work-group. Raises what the checks find, and BadProgram errors, with their place."""
        self.start(group_id, kernarg)
        self.finish()
        if self.group_races is not None:
            self.group_races.next_group()

    def finish(self) -> None:
        """Execute from where the waves are to their end."""
        try:
            while True:
                runnable = self.status == RUNNING
                if not runnable.any():
                    if not self._release():
                        self.lds.barrier()  # the last interval ends with the work-group
                        return
                    continue
                self._run_group(runnable)
        except EmulationError as error:
            raise error.at(self.place()) from None

    def start(self, group_id: tuple[int, int, int], kernarg: int) -> None:
        """Set registers and memories as the dispatcher does, all waves at the first instruction."""
        state, descriptor = self.state, self.program.descriptor
        state.reset()
        self.lds.reset()
        self.scratch.reset()
        self.pcs[...], self.status[...], self.signals[...], self._tired = 0, RUNNING, 0, False
        if self.waits is not None:
            self.waits.reset()
        given: dict[int, int] = {}
        at = 0
        for name, words in _USER_SCALARS:
            if not descriptor.get("user_sgpr_" + name):
                continue
            if name == "kernarg_segment_ptr":
                given |= {at: kernarg & 0xFFFFFFFF, at + 1: kernarg >> 32}
            elif name == "private_segment_buffer":
                given |= {at: 0, at + 1: MAGIC, at + 2: 0xFFFFFFFF, at + 3: 0}
            elif name in ("flat_scratch_init", "private_segment_size"):
                given |= {at + n: 0 for n in range(words)}
            at += words
        at = descriptor.get("user_sgpr_count", at)
        x, y, z = group_id
        if self.program.arch.family == 12:  # work-group ids are in trap temporaries since gfx12
            given |= {TTMP + 9: x, TTMP + 7: y | z << 16, TTMP + 8: 0}
        else:
            for axis, value in zip("xyz", group_id, strict=True):
                if descriptor.get(f"system_sgpr_workgroup_id_{axis}", axis == "x"):
                    given[at] = value
                    at += 1
            if at < 106:
                given[at] = 0  # the wave's offset in scratch, where there is one
        for register, value in given.items():
            state.S[:, register] = value
        if self.program.arch.family == 12:
            state.S[:, TTMP + 8] = np.arange(state.waves) << 25  # the wave's number in its work-group
        wave = np.arange(state.waves)[:, None]
        state.V[0] = wave * state.lanes + state.lane
        if self.defined is not None:
            self.defined.reset(set(given) | {VECTOR})

    def _run_group(self, runnable: Array) -> None:
        """Run the waves that are furthest behind, until they catch up, part, wait or end."""
        waiting_pcs = np.unique(self.pcs[runnable])
        pc = int(waiting_pcs[0])
        if self._tired:
            pc = int(waiting_pcs[-1])
            self._tired = False
        group = runnable & (self.pcs == pc)
        state = self.state
        state.set_group(group)
        self.group_bits = int(
            np.packbits(group, bitorder="little").view(np.uint8).dot(1 << (8 * np.arange(-(-len(group) // 8))))
        )
        others = {int(p) for p in waiting_pcs if p != pc}
        code, counts, waits, defined = self.code, self.counts, self.waits, self.defined
        weight = int(group.sum())
        limit = self.steps + PATIENCE if others else self.step_limit + 1
        steps = self.steps
        while True:
            if others and pc in others:
                self.pcs[group] = pc
                break
            bound = code[pc]
            if bound is None:
                self.pc = pc
                bound = code[pc] = decode.bind(self, self.program.instructions[pc])
            self.pc = pc
            steps += 1
            counts[pc] += weight
            if steps > self.step_limit:
                self.steps = steps
                raise StepLimit(f"still running after {self.step_limit} instructions of a work-group: an endless loop?")
            touches = bound.touches
            if waits is not None and waits.pending and not waits.pending.keys().isdisjoint(touches):
                self._too_early(waits, bound)
            if defined is not None and not defined.bad.isdisjoint(touches):
                defined.move(bound)
            jump = bound.run()
            if jump is None:
                pc += 1
            elif jump >= 0:
                pc = jump
                if steps > limit:
                    self.pcs[group] = pc
                    self._tired = True
                    break
            elif jump == END:
                self.status[group] = ENDED
                self.pcs[group] = pc
                break
            elif jump == WAIT:
                self.status[group] = WAITING
                self.pcs[group] = pc
                break
            else:
                assert jump == SPLIT
                break
        self.steps = steps

    _tired = False

    def _too_early(self, waits: Waits, bound: BoundInstruction) -> None:
        found = waits.culprit(bound, self.group_bits)
        if found is not None:
            entry, register = found
            problem = f"{register_name(register)} is used, and nothing has waited for what writes it at {entry.place}"
            self.report(MissingWait, problem)

    def _release(self) -> bool:
        """No wave can run: let those that wait at a barrier go on. False when all have ended."""
        waiting = self.status == WAITING
        if not waiting.any():
            return False
        places = sorted({int(p) for p in self.pcs[waiting]})
        self.pc = places[0]
        if self.checks.barriers:
            self._same_barrier(waiting, places)
        self.lds.barrier()
        split = self.program.instructions[places[0]].mnemonic == "s_barrier_wait"
        if split:
            self.signals[waiting] -= 1
        self.status[waiting] = RUNNING
        self.pcs[waiting] += 1
        return True

    def _same_barrier(self, waiting: Array, places: list[int]) -> None:
        instructions = self.program.instructions
        if len(places) > 1:
            where = "; ".join(f"waves {_numbers(waiting & (self.pcs == p))} at {instructions[p].place}" for p in places)
            self.report(BarrierMismatch, f"waves wait at different barriers: {where}")
        ended = self.status == ENDED
        if ended.any():
            problem = f"waves {_numbers(waiting)} wait here, and waves {_numbers(ended)} have ended"
            self.report(BarrierMismatch, problem)
        if instructions[places[0]].mnemonic == "s_barrier_wait":
            silent = waiting & (self.signals < 1)
            if silent.any():
                self.report(BarrierMismatch, f"waves {_numbers(silent)} wait, and have not signalled the barrier")


def _numbers(waves: Array) -> str:
    return ", ".join(str(int(n)) for n in np.nonzero(waves)[0])
