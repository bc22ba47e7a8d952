"""Registers of a work-group, as arrays over waves and lanes.

All waves that stand at one instruction execute it together. Vector registers are planes [waves, lanes] of uint32; every
view that an instruction needs (as float32, low halves as float16 …) is made once, so that executing an instruction is
one or two numpy calls on arrays that already exist. Scalar registers are columns of [waves, SCALARS].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.isa import ACCUMULATION, EXEC, SCALARS, AmdArch
from portattn.backends.rocm.emulator.amdgpu.operands import Operand

Array = np.ndarray[Any, Any]
JUNK = 0xDEAD0000  # what registers hold before anything is written: a recognisable number

# Kinds of operands: letter → (numpy type, bits, is it a float).
KINDS: dict[str, tuple[Any, int, bool]] = {
    "u": (np.uint32, 32, False), "i": (np.int32, 32, False), "f": (np.float32, 32, True),
    "w": (np.uint16, 16, False), "s": (np.int16, 16, False), "h": (np.float16, 16, True),
    "U": (np.uint64, 64, False), "I": (np.int64, 64, False), "d": (np.float64, 64, True),
}  # fmt: skip


class WorkGroupState:
    """Registers and masks of one work-group.

    V      [planes, waves, lanes] uint32 vector registers, then accumulation registers from ACCUMULATION
    S      [waves, SCALARS] uint32 scalar registers, exec and vcc among them; S64 is the same as [waves, SCALARS / 2]
    scc    [waves] bool
    group  [waves] bool: the waves that execute now; `together` when it is all of them
    mask   [waves, lanes] bool: the lanes that execute now; `full` when it is all of them
    ieee   MODE.IEEE: maxima and minima make signalling NaN quiet
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
        """As before a work-group starts: junk everywhere, all lanes of all waves on."""
        self.V[...] = JUNK
        self.S[...] = JUNK
        self.scc[...] = False
        self.saturate[...] = False
        self.S[:, EXEC : EXEC + 2] = 0xFFFFFFFF
        if self.lanes == 32:
            self.S[:, EXEC + 1] = 0
        self.set_group(self.everyone)

    def set_group(self, group: Array) -> None:
        """Choose the waves that execute from now on."""
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
        """Scalar registers as [waves, lanes] bool."""
        column = np.ascontiguousarray(self.S8[:, 4 * index : 4 * index + self.mask_bytes])
        return np.unpackbits(column, axis=1, bitorder="little").view(bool)

    def write_mask(self, index: int, bits: Array) -> None:
        """[waves, lanes] bool into scalar registers; of the waves that execute."""
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
        """A scalar register, or a pair of them, of all waves. A view where there can be one."""
        if width == 32:
            return self.S[:, index]
        if index % 2 == 0:
            return self.S64[:, index // 2]
        return self.S[:, index].astype(np.uint64) | (self.S[:, index + 1].astype(np.uint64) << np.uint64(32))

    def set_scalar(self, index: int, value: Any, width: int = 32) -> None:
        """Write a scalar register or pair, of the waves that execute; exec takes effect at once."""
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
        """Write uint32 values to a vector register in the lanes that execute."""
        if self.full:
            self.planes["u"][plane][...] = value
        else:
            np.copyto(self.planes["u"][plane], value, where=self.mask)

    def pair(self, plane: int) -> Array:
        """Two vector registers as uint64 [waves, lanes]."""
        both = np.empty((self.waves, self.lanes, 2), np.uint32)
        both[..., 0] = self.planes["u"][plane]
        both[..., 1] = self.planes["u"][plane + 1]
        return both.view(np.uint64)[..., 0]

    def set_pair(self, plane: int, value: Array) -> None:
        """Write 64-bit values to two vector registers in the lanes that execute."""
        halves = np.ascontiguousarray(value).view(np.uint32).reshape(*value.shape, 2)
        self.whole(plane, halves[..., 0])
        self.whole(plane + 1, halves[..., 1])


def literal(operand: Operand, kind: str) -> Array:
    """A constant as a [1, 1] array of a kind's type."""
    dtype, width, is_float = KINDS[kind]
    return np.array([[operand.bits(width, is_float)]], f"<u{width // 8}").view(dtype)
