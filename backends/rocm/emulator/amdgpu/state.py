"""Registers of a work-group, as arrays over waves and lanes.

Vector registers are planes [waves, lanes] of uint32, every view made once: an instruction is a numpy call or two."""

from __future__ import annotations

from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import ACCUMULATION, EXEC, SCALARS, AmdArch, Operand

Array = np.ndarray[Any, Any]
JUNK = 0xDEAD0000  # initial contents of registers: a recognisable number

# Kinds of operands: letter → (numpy type, bits, is it a float).
KINDS: dict[str, tuple[Any, int, bool]] = {
    "u": (np.uint32, 32, False), "i": (np.int32, 32, False), "f": (np.float32, 32, True),
    "w": (np.uint16, 16, False), "s": (np.int16, 16, False), "h": (np.float16, 16, True),
    "U": (np.uint64, 64, False), "I": (np.int64, 64, False), "d": (np.float64, 64, True),
}  # fmt: skip


class WorkGroupState:
    """Registers and masks of one work-group.

    Attributes:
        V: [planes, waves, lanes] uint32 vector registers, then accumulation registers from ACCUMULATION
        S, S64: [waves, SCALARS] uint32 scalar registers, exec and vcc among them; [waves, SCALARS / 2]
        group, together: the waves that execute now, [waves] bool; whether it is all of them
        mask, full: the lanes that execute now, [waves, lanes] bool; whether it is all of them
        ieee: MODE.IEEE: maxima and minima make signalling NaN quiet
    """

    def __init__(self, arch: AmdArch, wave: int, waves: int) -> None:
        self.arch, self.lanes, self.waves = arch, wave, waves
        planes = arch.planes if arch.planes > ACCUMULATION else ACCUMULATION
        self.V: Array = np.zeros((planes, waves, wave), np.uint32)
        self.S: Array = np.zeros((waves, SCALARS), np.uint32)
        self.S64: Array = self.S.view(np.uint64)
        self.S8: Array = self.S.view(np.uint8)
        self.scc: Array = np.zeros(waves, bool)
        halves = self.V.view(np.uint16)
        whole = {"u": self.V, "i": self.V.view(np.int32), "f": self.V.view(np.float32)}
        self.planes: dict[str, list[Array]] = {kind: list(view) for kind, view in whole.items()}
        self.halves: dict[str, tuple[list[Array], list[Array]]] = {
            kind: (list(halves.view(KINDS[kind][0])[..., 0::2]), list(halves.view(KINDS[kind][0])[..., 1::2]))
            for kind in "wsh"
        }
        self.lane: Array = np.arange(wave)
        self.mask_bytes = wave // 8
        self.everyone: Array = np.ones(waves, bool)
        self.saturate: Array = np.zeros(waves, bool)  # MODE.FP16_OVFL: fp8 conversions clamp instead of overflowing
        self.ieee = arch.family != 12  # MODE.IEEE, as the kernel's descriptor has it; gfx12 has no such mode
        self.reset()

    def reset(self) -> None:
        """Set the state before a work-group: junk everywhere, all lanes of all waves on."""
        self.V[...] = JUNK
        self.S[...] = JUNK
        self.scc[...] = False
        self.saturate[...] = False
        self.S[:, EXEC : EXEC + 2] = 0xFFFFFFFF
        if self.lanes == 32:
            self.S[:, EXEC + 1] = 0
        self.set_group(self.everyone)

    def set_group(self, group: Array) -> None:
        self.group = group
        self.together = bool(group.all())
        self.exec_changed()

    def exec_changed(self) -> None:
        """Derive the lane mask from exec; called after every write to it."""
        mask = self.read_mask(EXEC)
        self.mask: Array = mask if self.together else mask & self.group[:, None]
        self.full = bool(self.mask.all())

    # ---- masks: a bit a lane, in one (wave32) or two (wave64) scalar registers

    def read_mask(self, index: int) -> Array:
        column = np.ascontiguousarray(self.S8[:, 4 * index : 4 * index + self.mask_bytes])
        return np.unpackbits(column, axis=1, bitorder="little").view(bool)

    def write_mask(self, index: int, bits: Array) -> None:
        """Write [waves, lanes] bool to scalar registers, of the executing waves."""
        packed = np.packbits(bits, axis=1, bitorder="little")
        target = self.S8[:, 4 * index : 4 * index + self.mask_bytes]
        if self.together:
            target[...] = packed
        else:
            target[self.group] = packed[self.group]
        if index == EXEC:
            self.exec_changed()

    # ---- scalars, as [waves] arrays

    def scalar(self, index: int, width: int = 32) -> Array:
        """Return a scalar register or pair of all waves, as a view if possible."""
        if width == 32:
            return self.S[:, index]
        if index % 2 == 0:
            return self.S64[:, index // 2]
        return self.S[:, index].astype(np.uint64) | (self.S[:, index + 1].astype(np.uint64) << np.uint64(32))

    def set_scalar(self, index: int, value: Any, width: int = 32) -> None:
        """Write a scalar register or pair of the executing waves; exec takes effect at once."""
        if width == 32:
            target = self.S[:, index]
        elif index % 2 == 0:
            target = self.S64[:, index // 2]
        else:
            self.set_scalar(index, np.asarray(value, np.uint64) & np.uint64(0xFFFFFFFF))
            self.set_scalar(index + 1, np.asarray(value, np.uint64) >> np.uint64(32))
            return
        if self.together:
            target[...] = value
        else:
            np.copyto(target, value, where=self.group, casting="unsafe")
        if index >= EXEC - 1:
            self.exec_changed()

    def set_scc(self, value: Any) -> None:
        if self.together:
            self.scc[...] = value
        else:
            np.copyto(self.scc, value, where=self.group)

    # ---- vectors

    def whole(self, plane: int, value: Array) -> None:
        """Write uint32 values to a vector register in the executing lanes."""
        if self.full:
            self.planes["u"][plane][...] = value
        else:
            np.copyto(self.planes["u"][plane], value, where=self.mask)

    def pair(self, plane: int) -> Array:
        """Return two vector registers as uint64 [waves, lanes]."""
        both = np.empty((self.waves, self.lanes, 2), np.uint32)
        both[..., 0] = self.planes["u"][plane]
        both[..., 1] = self.planes["u"][plane + 1]
        return both.view(np.uint64)[..., 0]

    def set_pair(self, plane: int, value: Array) -> None:
        """Write 64-bit values to two vector registers in the executing lanes."""
        halves = np.ascontiguousarray(value).view(np.uint32).reshape(*value.shape, 2)
        self.whole(plane, halves[..., 0])
        self.whole(plane + 1, halves[..., 1])


def literal(operand: Operand, kind: str) -> Array:
    """Return a constant as a [1, 1] array of a kind's type."""
    dtype, width, is_float = KINDS[kind]
    return np.array([[operand.bits(width, is_float)]], f"<u{width // 8}").view(dtype)


# Base of the dispatcher's scratch descriptor, recognised again at its use.
SCRATCH_MAGIC = 0x5C5C


class Scratch:
    """Words [size / 4, waves · lanes] uint32, and undefined bytes, [size, …]: a spill at one place is one row."""

    def __init__(self, lanes: int, size: int) -> None:
        self.size, self.lanes = size, lanes
        self.words: Array = np.zeros((-(-size // 4), lanes), np.uint32)
        self.bytes: Array = self.words.view(np.uint8)  # [size / 4, 4 · lanes]
        self.unset: Array = np.ones((size, lanes), bool)

    def reset(self) -> None:
        self.unset[...] = True

    def gather(self, rows: Array, where: Array) -> tuple[Array, Array]:
        """Return bytes [n, size] of lanes `rows` [n, 1] at offsets `where` [n, size], and which are undefined."""
        return self.bytes[where // 4, 4 * rows + where % 4], self.unset[where, rows]

    def scatter(self, rows: Array, where: Array, data: Array, undefined: Array | bool) -> None:
        self.bytes[where // 4, 4 * rows + where % 4] = data
        self.unset[where, rows] = undefined
