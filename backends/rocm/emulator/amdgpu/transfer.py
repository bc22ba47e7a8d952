"""Between memory and vector registers: element types of loads and stores, and moving them for many lanes at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction
from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState

# Names of sizes: of gfx9, then of gfx11 and later. (bytes, sign-extended)
_SIZES = {
    "dword": (4, False), "dwordx2": (8, False), "dwordx3": (12, False), "dwordx4": (16, False), "ubyte": (1, False),
    "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True), "short": (2, False), "byte": (1, False),
    "b32": (4, False), "b64": (8, False), "b96": (12, False), "b128": (16, False), "u8": (1, False), "i8": (1, True),
    "u16": (2, False), "i16": (2, True), "b16": (2, False), "b8": (1, False),
}  # fmt: skip


@dataclass(frozen=True)
class Element:
    """What one lane moves. `half`: 0 or 1 for the d16 forms, which leave the other half of the register alone."""

    size: int
    signed: bool
    half: int | None

    @property
    def registers(self) -> int:
        return max(self.size // 4, 1)


@cache
def element(name: str) -> Element:
    """dword, ubyte_d16_hi, d16_b16, b128 … Raises UnknownInstruction."""
    half = None
    for mark, which in (("_d16_hi", 1), ("d16_hi_", 1), ("_d16", 0), ("d16_", 0)):
        if mark in name:
            half, name = which, name.replace(mark, "")
            break
    if name not in _SIZES:
        raise UnknownInstruction(f"an access of type {name!r} is not modelled")
    return Element(*_SIZES[name], half)


def put(state: WorkGroupState, plane: int, kind: Element, data: Array, lanes: Array | None) -> None:
    """Write uint8 [n, size] into registers from `plane` on. lanes: [waves, lanes] bool, None for all."""
    shape = (state.waves, state.lanes)
    if kind.size >= 4:
        words = np.ascontiguousarray(data).view(np.uint32)
        for j in range(kind.size // 4):
            if lanes is None:
                state.planes["u"][plane + j][...] = words[:, j].reshape(shape)
            else:
                state.planes["u"][plane + j][lanes] = words[:, j]
        return
    code = {1: np.int8, 2: np.int16}[kind.size] if kind.signed else {1: np.uint8, 2: np.uint16}[kind.size]
    value = np.ascontiguousarray(data).view(code)[:, 0]
    if kind.half is None:
        target: Array = state.planes["u"][plane]
        wide = value.astype(np.int32).view(np.uint32) if kind.signed else value.astype(np.uint32)
    else:
        target = state.halves["w"][kind.half][plane]
        wide = value.astype(np.int16).view(np.uint16) if kind.signed else value.astype(np.uint16)
    if lanes is None:
        target[...] = wide.reshape(shape)
    else:
        target[lanes] = wide


def get(state: WorkGroupState, plane: int, kind: Element, lanes: Array | None) -> Array:
    """Registers from `plane` on as uint8 [n, size], of the lanes given (None for all)."""
    planes: Any = state.planes["u"]
    if kind.size >= 4:
        count = state.waves * state.lanes if lanes is None else int(np.count_nonzero(lanes))
        words = np.empty((count, kind.size // 4), np.uint32)
        for j in range(kind.size // 4):
            words[:, j] = planes[plane + j].reshape(-1) if lanes is None else planes[plane + j][lanes]
        return words.view(np.uint8)
    source = planes[plane] if not kind.half else state.halves["w"][1][plane]
    # A copy in every case: what was stored is looked at later, when the register holds something else.
    values = source.flatten() if lanes is None else source[lanes]
    return values[:, None].view(np.uint8)[:, : kind.size]
