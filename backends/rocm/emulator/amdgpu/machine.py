"""Program: an assembly text that can be launched. Machine: one of its work-groups in execution.

Waves at one instruction run together, the group furthest behind first; a group that loops for long gives way."""

from __future__ import annotations

import gc
import reprlib
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import decode
from portattn.backends.rocm.emulator.amdgpu.assembly import TTMP, VECTOR, Assembly, KernargSlot, parse
from portattn.backends.rocm.emulator.amdgpu.binder import BoundInstruction
from portattn.backends.rocm.emulator.amdgpu.decode import END, SPLIT, WAIT
from portattn.backends.rocm.emulator.amdgpu.errors import (
    BadLaunch,
    BadProgram,
    BarrierMismatch,
    Checks,
    EmulationError,
    Finding,
    Findings,
    MissingWait,
    Place,
    StepLimit,
    UninitialisedValue,
    UnknownInstruction,
)
from portattn.backends.rocm.emulator.amdgpu.global_memory_ops import check_order
from portattn.backends.rocm.emulator.amdgpu.lds import GroupRaces, Lds
from portattn.backends.rocm.emulator.amdgpu.memory import Memory
from portattn.backends.rocm.emulator.amdgpu.register_checks import Definedness, PendingAccess, Waits, register_name
from portattn.backends.rocm.emulator.amdgpu.state import SCRATCH_MAGIC, Array, Scratch, WorkGroupState

RUNNING, WAITING, ENDED = 0, 1, 2
PATIENCE = 20_000  # steps a group may run while another could, before it gives way
# Words that each user scalar takes, in the order of the registers. LLVM AMDGPU guide, "Initial Kernel Execution State".
_USER_SCALARS = (
    ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2),
    ("dispatch_id", 2), ("flat_scratch_init", 2), ("private_segment_size", 1),
)  # fmt: skip


class Machine:
    """One work-group of a program, reused for each work-group of a grid and for later launches."""

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
        """Reset counts and findings for the next launch and its memory; bindings stay."""
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
        if self.waits is None:
            return None
        entry = PendingAccess(frozenset(registers), self.group_bits, self.place(), unordered, writes_lds, half)
        self.waits.issue(kind, entry)
        return entry

    def issue_store(self, offsets: Array, size: int, mask: Array | None) -> None:
        """Record a store's bytes until a wait, if all active lanes stored."""
        entry = self.issue("store", ())
        if entry is None or not len(offsets) or self.state.waves == 1:
            return
        lanes = self.state.lanes
        if mask is None and len(offsets) != self.state.waves * lanes:
            return  # some lanes were out of range: whose bytes these are is not known here
        owners = np.repeat(np.arange(self.state.waves), lanes) if mask is None else np.nonzero(mask)[0]
        entry.payload = (int(offsets.min()), int(offsets.max()) + size, offsets, size, owners)

    def ordered(self, offsets: Array, size: int) -> None:
        if self.group_races is not None:
            self.group_races.load(offsets, size)
        if self.waits is not None and self.state.waves > 1:
            check_order(self, offsets, size)

    def undefined(self, registers: tuple[int, ...], mask: Array | None) -> Array | None:
        if self.defined is None or self.defined.bad.isdisjoint(registers):
            return None
        each = [self.defined.lanes((register,)) for register in registers]
        flat = np.stack([found.reshape(-1) if mask is None else found[mask] for found in each], axis=1)
        return np.repeat(flat, 4, axis=1) if flat.any() else None

    def undefined_store(self, registers: tuple[int, ...]) -> None:
        assert self.defined is not None
        bad = [register for register in registers if register in self.defined.bad]
        problem = f"{register_name(bad[0])} is undefined in some lane, and is stored; {self.defined.since(bad[0])}"
        self.report(UninitialisedValue, problem)

    def mark(self, registers: tuple[int, ...], mask: Array | None, undefined: Array) -> None:
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
        self.pcs[self.state.group] = self.pc + 1
        self.pcs[taken] = target

    def signal(self) -> None:
        self.signals[self.state.group] += 1

    # ---- running

    def run(self, group_id: tuple[int, int, int], kernarg: int) -> None:
        """Execute one work-group. Raise findings and BadProgram errors, with their place."""
        self.start(group_id, kernarg)
        self.finish()
        if self.group_races is not None:
            self.group_races.next_group()

    def finish(self) -> None:
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
                given |= {at: 0, at + 1: SCRATCH_MAGIC, at + 2: 0xFFFFFFFF, at + 3: 0}
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
                given[at] = 0  # the wave's offset in scratch, if it has scratch
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
        """Release the waves at a barrier as no wave can run; return False when all have ended."""
        waiting = self.status == WAITING
        if not waiting.any():
            return False
        places = sorted({int(p) for p in self.pcs[waiting]})
        self.pc = places[0]
        if self.checks.barriers:
            self._same_barrier(waiting, places)
        self.lds.barrier()
        if self.waits is not None and self.program.one_cache:
            self.waits.order_stores()
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


STEP_LIMIT = 20_000_000  # instructions of one work-group; minutes here, milliseconds on the chip
_HIDDEN = 2  # trailing pointers that Triton's compiler adds to a kernel's own arguments: global and profiling scratch
_MOST_GROUPS = 2**31 - 1


@dataclass
class Report:
    instructions: int = 0  # of all waves
    steps: int = 0  # of groups of waves together, on which a launch's time depends
    coverage: Counter[str] = field(default_factory=Counter)  # mnemonic → executions, of all waves
    findings: list[Finding] = field(default_factory=list)  # with Checks(stop=False)


class Program:
    """A kernel in amdgcn assembly.

    >>> program = Program.parse(text)
    >>> memory = Memory()
    >>> report = program.launch(grid=(4, 1, 1), arguments=[memory.add(x), memory.add(y), 1000], memory=memory)
    """

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self._machines: dict[tuple[int, int, Checks], Machine] = {}  # idle ones; to bind takes longer than to run

    @classmethod
    def parse(cls, text: str, kernel: str | None = None) -> Program:
        """Parse a text, of which `kernel` may name one kernel. Raise BadProgram, on unknown instructions too."""
        if not isinstance(text, str):
            raise BadProgram(f"the text is of type {type(text).__name__}; amdgcn assembly as a string is needed")
        assembly = parse(text, kernel)
        for instruction in assembly.instructions:
            for part in (instruction, instruction.second):
                if part is not None and decode.family(part.mnemonic) is None:
                    raise UnknownInstruction(f"{part.mnemonic} is not modelled", instruction.place)
        return cls(assembly)

    @property
    def name(self) -> str:
        return self.assembly.name

    @property
    def arguments(self) -> tuple[KernargSlot, ...]:
        """The caller's arguments; Triton's runtime appends its own."""
        # From 3.8 on some kernels list arguments of the runtime after them (hidden_block_count_x and the like), unread.
        return tuple(a for a in self.assembly.arguments if not a.kind.startswith("hidden_"))

    def launch(
        self,
        grid: Sequence[int],
        arguments: Sequence[int | float | None] | bytes,
        memory: Memory,
        *,
        lds_bytes: int | None = None,
        waves: int | None = None,
        checks: Checks | None = None,
        step_limit: int = STEP_LIMIT,
        groups: Iterable[tuple[int, int, int]] | None = None,
    ) -> Report:
        """Run every work-group of the grid, one after the other; memory's arrays hold the results afterwards.

        Args:
            arguments: the kernel's addresses, integers and floats (omitted trailing pointers, at most two, are null:
                Triton's own), or the kernarg segment as bytes
            lds_bytes, waves: of a work-group (Triton's `metadata.shared`); the text's by default
            step_limit: instructions of one work-group before StepLimit
            groups: run these work-groups only

        Raises BadLaunch, and findings (errors.Finding).
        """
        extent = _grid(grid)
        waves = max(self.assembly.threads // self.assembly.wave, 1) if waves is None else waves
        static = self.assembly.descriptor.get("group_segment_fixed_size", 0)
        lds_bytes = static if lds_bytes is None else lds_bytes
        if not 0 <= lds_bytes <= self.assembly.arch.lds_bytes:
            limit = self.assembly.arch.lds_bytes
            raise BadLaunch(f"{lds_bytes} bytes of LDS asked for; {self.assembly.arch.name} has {limit}")
        if step_limit < 1:
            raise BadLaunch(f"step_limit {step_limit}: at least 1 instruction")
        if not 1 <= waves * self.assembly.wave <= 1024:
            raise BadLaunch(f"{waves} waves of {self.assembly.wave} lanes: a work-group has 1 to 1,024 work-items")
        checks = checks or Checks()
        kernarg = np.frombuffer(self.kernarg(arguments), np.uint8).copy()
        kernarg.flags.writeable = False
        address = memory.add(kernarg, "the arguments")
        report = Report()
        try:
            with np.errstate(all="ignore"), _no_collections():
                machine = self._machine(waves, lds_bytes, checks)
                machine.renew(memory, step_limit)
                chosen = groups if groups is not None else _every(extent)
                for group in chosen:
                    machine.steps = 0
                    machine.run(group, address)
                    report.steps += machine.steps
        finally:
            memory.remove_last()
            memory.write_back()
        for instruction, count in zip(self.assembly.instructions, machine.counts, strict=True):
            if count:
                report.instructions += count
                for part in (instruction, instruction.second):
                    if part is not None:
                        report.coverage[part.mnemonic] += count
        report.findings = machine.findings.found
        machine.renew(Memory(), step_limit)
        self._machines[waves, lds_bytes, checks] = machine
        return report

    def _machine(self, waves: int, lds_bytes: int, checks: Checks) -> Machine:
        """Return an idle machine with everything bound; if another thread has it, a new one."""
        idle = self._machines.pop((waves, lds_bytes, checks), None)
        return idle or Machine(self.assembly, waves, lds_bytes, checks)

    def kernarg(self, arguments: Sequence[int | float | None] | bytes) -> bytes:
        """Return the kernarg segment for these arguments. Raise BadLaunch on a wrong number or type."""
        size = max(self.assembly.descriptor.get("kernarg_size", 0), 8)
        if isinstance(arguments, (bytes, bytearray)):
            if len(arguments) > size:
                raise BadLaunch(f"{len(arguments)} bytes of arguments; {self.name} takes {size}")
            return bytes(arguments).ljust(size, b"\0")
        missing = self.arguments[len(arguments) :]
        hidden = len(missing) <= _HIDDEN and all(argument.kind == "global_buffer" for argument in missing)
        if len(arguments) > len(self.arguments) or not hidden:
            raise BadLaunch(f"{len(arguments)} arguments given; {self.name} takes {len(self.arguments)}")
        segment = bytearray(size)
        for number, (value, argument) in enumerate(zip(arguments, self.arguments, strict=False)):
            segment[argument.offset : argument.offset + argument.size] = _encoded(value, argument, number)
        return bytes(segment)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Pause garbage collection: binding makes many lasting objects, and a collection walks all of a process."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _grid(grid: Sequence[int]) -> tuple[int, int, int]:
    if not isinstance(grid, Sequence) or not all(isinstance(n, (int, np.integer)) for n in grid):
        raise BadLaunch(f"grid {reprlib.repr(grid)}: one to three whole numbers are needed, such as (4, 1, 1)")
    if not 1 <= len(grid) <= 3:
        raise BadLaunch(f"a grid has one to three extents; {tuple(grid)} has {len(grid)}")
    extent = tuple(int(n) for n in grid) + (1,) * (3 - len(grid))
    if min(extent) < 1 or max(extent) > _MOST_GROUPS:
        raise BadLaunch(f"grid {tuple(grid)}: every extent is 1 to {_MOST_GROUPS:,}")
    return extent[0], extent[1], extent[2]


def _every(extent: tuple[int, int, int]) -> Iterable[tuple[int, int, int]]:
    x, y, z = extent
    return ((i, j, k) for k in range(z) for j in range(y) for i in range(x))


def _encoded(value: int | float | None, argument: KernargSlot, number: int) -> bytes:
    size, what = argument.size, f"argument {number}"
    if value is None and argument.kind == "global_buffer":
        return bytes(size)
    if isinstance(value, (float, np.floating)):
        if argument.kind == "global_buffer" or size not in (2, 4, 8):
            raise BadLaunch(f"{what} is {value!r}, but the kernel takes {argument.kind} of {size} bytes")
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], float(value))
    if isinstance(value, (bool, int, np.integer)):
        integer = int(value)
        if not -(1 << 8 * size - 1) <= integer < 1 << 8 * size:
            raise BadLaunch(f"{what} is {integer}, which {size} bytes do not hold")
        return (integer & (1 << 8 * size) - 1).to_bytes(size, "little")
    given = type(value).__name__ if hasattr(value, "shape") else reprlib.repr(value)
    raise BadLaunch(f"{what} is {given}; a number or an address is needed (of an array: what Memory.add returns)")
