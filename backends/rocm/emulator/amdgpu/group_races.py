"""Races through global memory between the work-groups of one launch.

The model runs work-groups one after the other; a chip runs them in any order, and together. So what one stores must not
be stored with another value, nor loaded, by another, unless they order themselves by atomics. A work-group that got the
result of an atomic, or loaded a byte that another's atomic changed, counts as ordered after all work-groups that
ran before it: of kernels that use atomics some races are missed, and none is made up. Source: LLVM AMDGPU guide,
"Memory Model" (scopes: nothing but atomics orders accesses of different work-groups).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.errors import GlobalRace
from portattn.backends.rocm.emulator.amdgpu.memory import BASE, Memory, gather, scatter
from portattn.backends.rocm.emulator.amdgpu.state import Array

_STORED, _LOADED, _ATOMIC = np.uint8(1), np.uint8(2), np.uint8(4)


class GroupRaces:
    """Who stored and loaded which byte of a launch's memory.

    before  [bytes] uint8: what earlier work-groups did to a byte (_STORED, _LOADED, _ATOMIC)
    mine    the same of the work-group that runs
    """

    def __init__(self, memory: Memory, report: Any) -> None:
        self.memory, self.report = memory, report
        self.before: Array = np.zeros(len(memory.bytes), np.uint8)
        self.mine: Array = np.zeros(len(memory.bytes), np.uint8)
        self.ordered = False
        self._low, self._high = len(memory.bytes), 0

    def next_group(self) -> None:
        """The work-group has ended."""
        span = slice(self._low, self._high)
        self.before[span] |= self.mine[span]
        self.mine[span] = 0
        self.ordered, self._low, self._high = False, len(self.mine), 0

    def load(self, offsets: Array, size: int) -> None:
        """The work-group is about to load these bytes."""
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
        """The work-group is about to store uint8 [n, size]."""
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
