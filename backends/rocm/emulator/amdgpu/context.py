"""What the instruction families use of the machine that executes them.

The machine imports the families, through decode; they know it only by this type, so that imports go one way.
"""

from __future__ import annotations

from typing import Protocol

from portattn.backends.rocm.emulator.amdgpu.assembly import Assembly
from portattn.backends.rocm.emulator.amdgpu.checks import Checks
from portattn.backends.rocm.emulator.amdgpu.definedness import Definedness
from portattn.backends.rocm.emulator.amdgpu.errors import Finding
from portattn.backends.rocm.emulator.amdgpu.group_races import GroupRaces
from portattn.backends.rocm.emulator.amdgpu.lds import Lds
from portattn.backends.rocm.emulator.amdgpu.memory import Memory
from portattn.backends.rocm.emulator.amdgpu.scratch import Scratch
from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState
from portattn.backends.rocm.emulator.amdgpu.waits import PendingAccess, Waits


class Context(Protocol):
    """The work-group in execution, as instructions see it (machine.Machine).

    Fixed when instructions are bound:
    program  what is executed; branches look their labels up
    checks   which checks are on
    state    registers and masks
    lds, scratch            the work-group's memory, and the lanes' own
    has_scratch_descriptor  the dispatcher gives a descriptor of scratch (gfx90a)
    defined  which registers are undefined; None without that check
    waits    which results are on their way; None without that check

    Read each time that an instruction runs:
    memory       the launch's memory
    group_races  who accessed which byte of it; None without that check
    group_bits   bit mask of the waves that execute now
    """

    program: Assembly
    checks: Checks
    state: WorkGroupState
    lds: Lds
    scratch: Scratch
    has_scratch_descriptor: bool
    defined: Definedness | None
    waits: Waits | None
    memory: Memory
    group_races: GroupRaces | None
    group_bits: int

    def report(self, kind: type[Finding], problem: str) -> None:
        """The instruction that is executed has a finding: raised, or collected, as the checks say."""
        ...

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
        ...

    def issue_store(self, offsets: Array, size: int, mask: Array | None) -> None:
        """A store to global memory was issued, of `size` bytes at each offset; `mask`: the lanes, where all of them
        stored."""
        ...

    def ordered(self, offsets: Array, size: int) -> None:
        """A load is about to read these bytes."""
        ...

    def undefined(self, registers: tuple[int, ...], mask: Array | None) -> Array | None:
        """[n, bytes] bool of the lanes given: which bytes of the registers are undefined? None when all are defined."""
        ...

    def undefined_store(self, registers: tuple[int, ...]) -> None:
        """Report that some of these registers are undefined, and are stored."""
        ...

    def mark(self, registers: tuple[int, ...], mask: Array | None, undefined: Array) -> None:
        """What was loaded into these registers was undefined: [n, bytes] bool of the lanes given."""
        ...

    def split(self, taken: Array, target: int) -> None:
        """The waves of the group part at a branch: those in `taken` [waves] bool go on at `target`."""
        ...

    def signal(self) -> None:
        """The waves of the group signal the work-group's barrier."""
        ...
