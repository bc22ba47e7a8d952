"""Program: an assembly text that can be launched. Report: what a launch did."""

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
from portattn.backends.rocm.emulator.amdgpu.assembly import Assembly, KernargSlot, parse
from portattn.backends.rocm.emulator.amdgpu.checks import Checks
from portattn.backends.rocm.emulator.amdgpu.errors import BadLaunch, BadProgram, Finding, UnknownInstruction
from portattn.backends.rocm.emulator.amdgpu.machine import Machine
from portattn.backends.rocm.emulator.amdgpu.memory import Memory

STEP_LIMIT = 20_000_000  # instructions of one work-group; minutes here, milliseconds on the chip
_HIDDEN = 2  # trailing pointers that Triton's compiler adds to a kernel's own arguments: global and profiling scratch
_MOST_GROUPS = 2**31 - 1


@dataclass
class Report:
    """What a launch did.

    instructions  executed, of all waves
    steps         executed by groups of waves together: what the time of a launch follows
    coverage      mnemonic → how often it was executed, of all waves
    findings      what the checks found, with Checks(stop=False)
    """

    instructions: int = 0
    steps: int = 0
    coverage: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


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
        """Parse a text; `kernel` names one of several. Every instruction in it must be known.

        Raises WrongArch, TruncatedText, UnknownInstruction, UnknownOperand, BadProgram.
        """
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
        """The arguments that a caller gives; those that Triton's runtime adds for itself come after them."""
        # From 3.8 on some kernels list what a runtime fills in after them (hidden_block_count_x and its like), unread.
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

        grid        work-groups along x, y, z
        arguments   a value for each argument of the kernel (addresses, integers, floats; the last two pointers may be
                    left out and are null: Triton adds such), or the whole kernarg segment as bytes
        lds_bytes   LDS of a work-group; Triton's `metadata.shared`. Default: what the text says
        waves       of a work-group; default: what the text says
        checks      which checks are on; all by default
        step_limit  instructions of one work-group before StepLimit
        groups      run these work-groups only

        Raises BadLaunch, and what the checks find (errors.Finding).
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
        """The machine of an earlier launch with everything bound, unless another thread has it; else a new one."""
        idle = self._machines.pop((waves, lds_bytes, checks), None)
        return idle or Machine(self.assembly, waves, lds_bytes, checks)

    def kernarg(self, arguments: Sequence[int | float | None] | bytes) -> bytes:
        """The kernarg segment for these arguments. Raises BadLaunch on a wrong number or type."""
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
    """No cyclic garbage collection: binding makes many objects that stay, and a collection walks all of a process."""
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
