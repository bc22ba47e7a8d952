"""The address space of a launch: the caller's arrays at 64-bit addresses, with guards between them."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.errors import BadLaunch

Array = np.ndarray[Any, Any]
BASE = 0x2_0000_0000  # above 32 bits, so that an address cut to 32 bits is never right
GUARD = 1 << 14  # bytes between arrays: what is just outside of one is in no other
ALIGNMENT = 256  # as device allocators align
_WORD: dict[int, Any] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64),
         16: np.dtype("V16")}  # fmt: skip


@dataclass(frozen=True)
class Region:
    """An array in memory. `offset` and `size` in bytes, from BASE."""

    name: str
    offset: int
    size: int
    array: Array | None


def gather(store: Array, offsets: Array, size: int) -> Array:
    """`size` bytes at each offset of a byte array, as uint8 [n, size]."""
    word = _WORD.get(size)
    if word is not None and not (offsets & (size - 1)).any():
        found = store.view(word)[offsets >> (size.bit_length() - 1)]
        return found.view(np.uint8).reshape(-1, size)
    return store[offsets[:, None] + np.arange(size)]


def scatter(store: Array, offsets: Array, data: Array) -> None:
    """Write uint8 [n, size] at each offset of a byte array. Of two lanes at one place the later one wins."""
    size = data.shape[1]
    word = _WORD.get(size)
    if word is not None and not (offsets & (size - 1)).any():
        store.view(word)[offsets >> (size.bit_length() - 1)] = np.ascontiguousarray(data).view(word)[:, 0]
    else:
        store[offsets[:, None] + np.arange(size)] = data


class Memory:
    """Arrays that a kernel may access, and no other byte.

    >>> memory = Memory()
    >>> address = memory.add(np.zeros(100, np.float32))

    The contents are copied in by `add` and copied back after each launch.
    """

    def __init__(self) -> None:
        self.bytes: Array = np.zeros(1 << 16, np.uint8)
        self.unset: Array | None = None  # True where nothing was written yet; None where nobody asked for the check
        self.regions: list[Region] = []
        self._starts: list[int] = []
        self._top = GUARD

    def add(self, array: Array, name: str = "", *, defined: bool = True) -> int:
        """Map an array; its 64-bit address comes back. Raises BadLaunch unless it is a C-contiguous numpy array.

        `defined=False`: its contents count as undefined until the kernel writes them.
        """
        if not isinstance(array, np.ndarray):
            raise BadLaunch(f"array {name or len(self.regions)} is a {type(array).__name__}; a numpy array is needed")
        if not array.flags.c_contiguous:
            raise BadLaunch(f"array {name or len(self.regions)} is not C-contiguous")
        offset = -(-self._top // ALIGNMENT) * ALIGNMENT
        self._top = offset + array.nbytes + GUARD
        self._grow(self._top)
        region = Region(name or f"array {len(self.regions)}", offset, array.nbytes, array)
        self.regions.append(region)
        self._starts.append(offset)
        self.bytes[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        if not defined:
            if self.unset is None:
                self.unset = np.zeros(len(self.bytes), bool)
            self.unset[offset : offset + array.nbytes] = True
        return BASE + offset

    def address(self, region: Region) -> int:
        """The address at which an array was mapped."""
        return BASE + region.offset

    def remove_last(self) -> None:
        """Unmap the array added last; its address is used again."""
        region = self.regions.pop()
        self._starts.pop()
        self._top = region.offset
        if self.unset is not None:
            self.unset[region.offset : region.offset + region.size] = False

    def _grow(self, size: int) -> None:
        if size <= len(self.bytes):
            return
        room = max(2 * len(self.bytes), 1 << (size - 1).bit_length())
        bigger = np.zeros(room, np.uint8)
        bigger[: len(self.bytes)] = self.bytes
        self.bytes = bigger
        if self.unset is not None:
            unset = np.zeros(room, bool)
            unset[: len(self.unset)] = self.unset
            self.unset = unset

    def write_back(self) -> None:
        """Copy the contents to the caller's arrays, those that changed: others may be mapped for reading only."""
        for region in self.regions:
            if region.array is not None and region.array.flags.writeable:
                flat = region.array.reshape(-1).view(np.uint8)
                now = self.bytes[region.offset : region.offset + region.size]
                if not np.array_equal(flat, now):
                    flat[...] = now

    def outside(self, offsets: Array, size: int) -> Array | None:
        """Which accesses of `size` bytes (offsets from BASE) lie in no array; None when all lie in one."""
        low, high = int(offsets.min()), int(offsets.max()) + size
        index = bisect.bisect_right(self._starts, low) - 1
        if index >= 0:
            region = self.regions[index]
            if high <= region.offset + region.size:
                return None
        starts = np.array(self._starts, np.int64)
        ends = np.array([region.offset + region.size for region in self.regions], np.int64)
        if not len(starts):
            return np.ones(len(offsets), bool)
        at = np.searchsorted(starts, offsets, "right") - 1
        bad = (at < 0) | (offsets + size > ends[np.maximum(at, 0)])
        return bad if bad.any() else None

    def describe(self, offset: int, size: int) -> str:
        """Words for an access outside every array: which is nearest, and by how much it is missed."""
        text = f"{size} bytes at {BASE + offset:#x}"
        if not self.regions:
            return text
        nearest = min(self.regions, key=lambda r: max(r.offset - offset, offset + size - r.offset - r.size))
        if offset < nearest.offset:
            return f"{text}, {nearest.offset - offset} bytes before {nearest.name} ({nearest.size} bytes)"
        beyond = offset + size - nearest.offset - nearest.size
        return f"{text}, {beyond} bytes beyond the end of {nearest.name} ({nearest.size} bytes)"
