"""The instruction families' interface to the machine, which imports them: so imports go one way."""

from __future__ import annotations

from typing import Protocol

from portattn.backends.rocm.emulator.amdgpu.assembly import Assembly
from portattn.backends.rocm.emulator.amdgpu.errors import Checks, Finding
from portattn.backends.rocm.emulator.amdgpu.lds import GroupRaces, Lds
from portattn.backends.rocm.emulator.amdgpu.memory import Memory
from portattn.backends.rocm.emulator.amdgpu.register_checks import Definedness, PendingAccess, Waits
from portattn.backends.rocm.emulator.amdgpu.state import Array, Scratch, WorkGroupState


class Context(Protocol):
    """The executing work-group; instructions read memory, group_races, group_bits at each run, the rest at binding."""

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
        """Raise or collect a finding of the current instruction, as the checks say."""
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
        """Record an access: its registers (or one half of its register) must not be touched before a wait."""
        ...

    def issue_store(self, offsets: Array, size: int, mask: Array | None) -> None:
        """Record a store to global memory, of `size` bytes at each offset; `mask`: lanes, if all of them stored."""
        ...

    def ordered(self, offsets: Array, size: int) -> None:
        """Check a load's bytes before it reads them."""
        ...

    def undefined(self, registers: tuple[int, ...], mask: Array | None) -> Array | None:
        """Return which bytes of the registers are undefined, [n, bytes] of the given lanes; None if all are defined."""
        ...

    def undefined_store(self, registers: tuple[int, ...]) -> None:
        """Report a store of undefined registers."""
        ...

    def mark(self, registers: tuple[int, ...], mask: Array | None, undefined: Array) -> None:
        """Mark loaded registers as undefined: [n, bytes] bool of the given lanes."""
        ...

    def split(self, taken: Array, target: int) -> None:
        """Part the group's waves at a branch: those in `taken` [waves] bool go on at `target`."""
        ...

    def signal(self) -> None:
        """Signal the work-group's barrier for the group's waves."""
        ...
