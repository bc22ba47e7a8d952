"""The LDS of a work-group: bytes, undefined ones, accesses since a barrier; the machine as instructions see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import Assembly
from portattn.backends.rocm.emulator.amdgpu.errors import (
    Checks,
    Finding,
    Findings,
    GlobalRace,
    LdsOutOfRange,
    LdsRace,
    MissingWait,
    Place,
)
from portattn.backends.rocm.emulator.amdgpu.memory import BASE, Memory, gather, scatter
from portattn.backends.rocm.emulator.amdgpu.register_checks import Definedness, PendingAccess, Waits
from portattn.backends.rocm.emulator.amdgpu.state import Array, Scratch, WorkGroupState


@dataclass(eq=False)
class Access:
    """One LDS instruction: [n] waves and byte offsets, and the bytes written (None for a read)."""

    place: Place
    waves: Array
    offsets: Array
    size: int
    data: Array | None
    entry: PendingAccess | None = None  # place in a wait queue: until it left that, a barrier does not order it
    late: bool = False  # issued before the last barrier and not waited for
    atomic: bool = False


class Lds:
    """`size` bytes. Accesses take [n] byte offsets and the [n] waves that make them."""

    def __init__(self, size: int, waves: int, findings: Findings, track_undefined: bool) -> None:
        self.size, self.waves, self.findings = size, waves, findings
        room = -(-max(size, 16) // 16) * 16
        self.bytes: Array = np.zeros(room, np.uint8)
        self.unset: Array | None = np.ones(room, bool) if track_undefined else None
        self.log: list[Access] = []
        self.dma: list[Access] = []
        self._record = findings.checks.races and waves > 1
        self._marks: Array = np.zeros((2, waves, room), np.uint8)

    def reset(self) -> None:
        self.bytes[...] = 0xA5
        if self.unset is not None:
            self.unset[...] = True
        self.log.clear()
        self.dma.clear()

    def inside(self, offsets: Array, size: int, place: Place) -> Array | None:
        """Return which accesses lie inside (None for all), and report the others."""
        if not len(offsets) or (int(offsets.max()) + size <= self.size and int(offsets.min()) >= 0):
            return None
        ok = (offsets >= 0) & (offsets + size <= self.size)
        if self.findings.checks.lds:
            first = int(offsets[~ok][0])
            problem = f"LDS access of {size} bytes at {first}, and the work-group has {self.size} bytes"
            self.findings.report(LdsOutOfRange, problem, place)
        return ok

    def load(self, offsets: Array, size: int, waves: Array, place: Place) -> tuple[Array, Array | None]:
        """Return bytes [n, size], and which of them are undefined (None: none)."""
        if self.dma:
            self._dma_waited_for(offsets, size, waves, place)
        if self._record:
            self.log.append(Access(place, waves, offsets, size, None))
        data = gather(self.bytes, offsets, size)
        if self.unset is None:
            return data, None
        unset = gather(self.unset.view(np.uint8), offsets, size)
        return data, unset.view(bool) if unset.any() else None

    def store(
        self, offsets: Array, data: Array, waves: Array, place: Place, undefined: Array | None,
        entry: PendingAccess | None, dma: bool = False,
    ) -> None:  # fmt: skip
        """Write uint8 [n, size]. `undefined` [n, size or more] bool marks undefined bytes."""
        if self._record or dma:
            access = Access(place, waves, offsets, data.shape[1], data, entry)
            if self._record:
                self.log.append(access)
            if dma and entry is not None:
                self.dma.append(access)
        scatter(self.bytes, offsets, data)
        if self.unset is not None:
            access_size = int(data.shape[1])
            marks = np.zeros(data.shape, np.uint8)
            if undefined is not None:
                marks[...] = undefined[:, :access_size]
            scatter(self.unset.view(np.uint8), offsets, marks)

    def note_atomic(self, offsets: Array, size: int, waves: Array, place: Place) -> None:
        """Record an atomic, which races with all but atomics."""
        if self._record:
            data = np.zeros((len(offsets), size), np.uint8)
            self.log.append(Access(place, waves, offsets, size, data, atomic=True))
        if self.unset is not None:
            scatter(self.unset.view(np.uint8), offsets, np.zeros((len(offsets), size), np.uint8))

    def _dma_waited_for(self, offsets: Array, size: int, waves: Array, place: Place) -> None:
        """Report a wave's read of bytes that its own load to LDS may still be writing."""
        self.dma = [access for access in self.dma if access.entry is not None and access.entry.waves]
        for access in self.dma:
            assert access.entry is not None
            pending = (access.entry.waves >> access.waves) & 1 == 1
            for wave in np.unique(access.waves[pending]):
                written = np.zeros(len(self.bytes), bool)
                for byte in range(access.size):
                    written[access.offsets[access.waves == wave] + byte] = True
                own = offsets[waves == wave]
                if len(own) and written[own[:, None] + np.arange(size)].any():
                    problem = f"LDS bytes are read that the load at {access.place} may not have written yet"
                    self.findings.report(MissingWait, problem, place)
                    return

    # ---- races

    def barrier(self) -> None:
        """Check the interval that ends, and begin the next."""
        if not self._record:
            return
        if self.log:
            self._look_for_races()
        # Reads are done when their LDS instruction leaves the queue in order; a write that was not waited for may land
        # after the barrier.
        self.log = [a for a in self.log if a.data is not None and a.entry is not None and a.entry.waves]
        for access in self.log:
            access.late = True

    def _look_for_races(self) -> None:
        top = max((int(access.offsets.max()) + access.size for access in self.log if len(access.offsets)), default=0)
        marks = self._marks[:, :, : -(-top // 16) * 16]
        marks[...] = 0
        room = self._marks.shape[2]
        for access in self.log:
            if len(access.offsets):
                flat = self._marks[0 if access.data is None else 1].reshape(-1)
                place = access.waves.astype(np.int64) * room + access.offsets
                scatter(flat, place, np.ones((len(place), access.size), np.uint8))
        written = marks[1].any(0)
        several = (marks[0] | marks[1]).sum(0, dtype=np.uint8) > 1
        suspects = np.nonzero(written & several)[0]
        if len(suspects):
            self._explain(suspects)

    def _explain(self, suspects: Array) -> None:
        """Report the first conflicting accesses to suspected bytes; writes of equal values are harmless."""
        wanted = np.zeros(len(self.bytes), bool)
        wanted[suspects] = True
        bytes_, access_of, wave_of, value_of = [], [], [], []
        for index, access in enumerate(self.log):
            span = access.offsets[:, None] + np.arange(access.size)
            lane, column = np.nonzero(wanted[span])
            bytes_.append(span[lane, column])
            access_of.append(np.full(len(lane), index))
            wave_of.append(access.waves[lane])
            read = access.data is None or access.atomic
            value_of.append(np.full(len(lane), -1) if read else access.data[lane, column].astype(np.int64))  # type: ignore[index]
        byte, number, wave, value = (np.concatenate(x) for x in (bytes_, access_of, wave_of, value_of))
        # A byte is harmless if all accesses write the same value, and none reads.
        order = np.argsort(byte, kind="stable")
        start = np.concatenate([[0], np.nonzero(np.diff(byte[order]))[0] + 1])
        low, high = np.minimum.reduceat(value[order], start), np.maximum.reduceat(value[order], start)
        for group in np.nonzero((low != high) | (low < 0))[0]:
            end = start[group + 1] if group + 1 < len(start) else len(order)
            uses = order[start[group] : end]
            if self._conflict(int(byte[uses[0]]), number[uses], wave[uses], value[uses]):
                return

    def _conflict(self, byte: int, numbers: Array, waves: Array, values: Array) -> bool:
        for index in range(len(numbers)):
            first = self.log[numbers[index]]
            for other in range(index + 1, len(numbers)):
                second = self.log[numbers[other]]
                if waves[index] == waves[other] or (first.data is None and second.data is None):
                    continue
                if values[index] == values[other] >= 0:
                    continue
                if (first.atomic and second.atomic) or (first.late and second.late):
                    continue
                self._race(byte, first, int(waves[index]), second, int(waves[other]))
                return True
        return False

    def _race(self, byte: int, first: Access, wave: int, second: Access, other: int) -> None:
        def verb(access: Access) -> str:
            return "reads" if access.data is None else "writes"

        if first.late and self.findings.checks.waits:
            problem = (
                f"wave {wave} writes LDS byte {byte} here and does not wait for it before the barrier; "
                f"wave {other} {verb(second)} it at {second.place}"
            )
            self.findings.report(MissingWait, problem, first.place)
            return
        problem = (
            f"wave {other} {verb(second)} LDS byte {byte}, which wave {wave} {verb(first)} at {first.place}, "
            "with no barrier between them"
        )
        self.findings.report(LdsRace, problem, second.place)


def flat_waves(mask: Array | None, waves: int, lanes: int) -> Any:
    """Return the wave of each active lane, in the order in which masks flatten."""
    return np.repeat(np.arange(waves), lanes) if mask is None else np.nonzero(mask)[0]


_STORED, _LOADED, _ATOMIC = np.uint8(1), np.uint8(2), np.uint8(4)


class GroupRaces:
    """Marks (_STORED, _LOADED, _ATOMIC) of each byte, uint8: `before` of earlier work-groups, `mine` of this."""

    def __init__(self, memory: Memory, report: Any) -> None:
        self.memory, self.report = memory, report
        self.before: Array = np.zeros(len(memory.bytes), np.uint8)
        self.mine: Array = np.zeros(len(memory.bytes), np.uint8)
        self.ordered = False
        self._low, self._high = len(memory.bytes), 0

    def next_group(self) -> None:
        span = slice(self._low, self._high)
        self.before[span] |= self.mine[span]
        self.mine[span] = 0
        self.ordered, self._low, self._high = False, len(self.mine), 0

    def load(self, offsets: Array, size: int) -> None:
        if not len(offsets):
            return
        before = gather(self.before, offsets, size)
        if before.any() and not self.ordered:
            if (before & _ATOMIC).any():
                self.ordered = True
            else:
                stray = (before & _STORED) & ~gather(self.mine, offsets, size)
                self._found(stray != 0, offsets, "loads what another work-group stores")
        self._note(offsets, size, _LOADED)

    def store(self, offsets: Array, data: Array) -> None:
        size = data.shape[1]
        if not len(offsets):
            return
        before = gather(self.before, offsets, size)
        if not self.ordered and (before & (_STORED | _LOADED)).any():
            changed = gather(self.memory.bytes, offsets, size) != data
            if (changed & ((before & _LOADED) != 0)).any():
                self._found(changed & ((before & _LOADED) != 0), offsets, "stores what another work-group loads")
            else:
                problem = "stores what another work-group stores too, with another value"
                self._found(changed & ((before & _STORED) != 0), offsets, problem)
        self._note(offsets, size, _STORED)

    def atomic(self, offsets: Array, size: int, returns: bool) -> None:
        if len(offsets):
            self.ordered |= returns
            self._note(offsets, size, _ATOMIC)

    def _note(self, offsets: Array, size: int, what: np.uint8) -> None:
        scatter(self.mine, offsets, gather(self.mine, offsets, size) | what)
        self._low = min(self._low, int(offsets.min()))
        self._high = max(self._high, int(offsets.max()) + size)

    def _found(self, where: Array, offsets: Array, problem: str) -> None:
        if where.any():
            lane, byte = (int(n) for n in np.argwhere(where)[0])
            at = int(offsets[lane]) + byte
            self.report(GlobalRace, f"{problem}, and no atomic orders them: {self._name(at)}")

    def _name(self, offset: int) -> str:
        for region in self.memory.regions:
            if region.offset <= offset < region.offset + region.size:
                return f"byte {offset - region.offset} of {region.name}"
        return f"the byte at {BASE + offset:#x}"


class Context(Protocol):
    """The machine's interface to the families of instructions, which it imports: the executing work-group.

    Instructions read memory, group_races, group_bits at each run, the rest at binding."""

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
