"""Scratch: each lane's private memory, where registers spill to."""

from __future__ import annotations

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.state import Array

# What the dispatcher's descriptor of scratch holds in its base: recognised again where it is used.
MAGIC = 0x5C5C


class Scratch:
    """Word by word as registers lie: words [size / 4, waves · lanes] uint32, and which bytes are undefined, [size, …].

    Spills address one place in all lanes: one row for each register then.
    """

    def __init__(self, lanes: int, size: int) -> None:
        self.size, self.lanes = size, lanes
        self.words: Array = np.zeros((-(-size // 4), lanes), np.uint32)
        self.bytes: Array = self.words.view(np.uint8)  # [size / 4, 4 · lanes]
        self.unset: Array = np.ones((size, lanes), bool)

    def reset(self) -> None:
        self.unset[...] = True

    def gather(self, rows: Array, where: Array) -> tuple[Array, Array]:
        """Bytes [n, size] of lanes `rows` [n, 1] at offsets `where` [n, size], and which of them are undefined."""
        return self.bytes[where // 4, 4 * rows + where % 4], self.unset[where, rows]

    def scatter(self, rows: Array, where: Array, data: Array, undefined: Array | bool) -> None:
        self.bytes[where // 4, 4 * rows + where % 4] = data
        self.unset[where, rows] = undefined
