"""Data-parallel primitives: a source lane moved along its row before the instruction reads it.

Source: AMD MI300 ISA reference, "DPP: Data Parallel Primitives"; RDNA3 ISA reference, "DPP16" and "DPP8".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.isa import EXEC

Array = np.ndarray[Any, Any]
# Control → function of (lanes, its number) that returns the source lane, negative if it is missing. A row is 16 lanes.
_Source = Callable[[Array, int], Array]


def _inside(lane: Array, source: Array) -> Array:
    return np.where(source // 16 == lane // 16, source, -1)


CONTROLS: dict[str, _Source] = {
    "row_shl": lambda lane, n: _inside(lane, lane + n),
    "row_shr": lambda lane, n: _inside(lane, lane - n),
    "row_ror": lambda lane, n: (lane & ~15) + ((lane - n) & 15),
    "row_mirror": lambda lane, n: (lane & ~15) + 15 - (lane & 15),
    "row_half_mirror": lambda lane, n: (lane & ~7) + 7 - (lane & 7),
    "row_newbcast": lambda lane, n: (lane & ~15) + n,
    "row_share": lambda lane, n: (lane & ~15) + n,
    "row_xmask": lambda lane, n: lane ^ n,
    "wave_shr": lambda lane, n: lane - 1,
    "wave_shl": lambda lane, n: np.where(lane + 1 < len(lane), lane + 1, -1),
    "wave_ror": lambda lane, n: (lane - 1) % len(lane),
    "wave_rol": lambda lane, n: (lane + 1) % len(lane),
}


def _broadcast(lane: Array, n: int) -> Array:
    """row_bcast:15 gives the last lane of each row to the next; row_bcast:31 gives lane 31 to the upper half."""
    if n == 15:
        return np.where(lane >= 16, (lane & ~15) - 1, -1)
    if n == 31:
        return np.where(lane >= 32, 31, -1)
    raise UnknownOperand(f"row_bcast:{n}")


CONTROLS["row_bcast"] = _broadcast


class Dpp:
    """The DPP control of one instruction on one state.

    A lane whose source is out of its row, or off, gets 0 where bound_ctrl is given and is not written otherwise. gfx10
    and later read lanes that are off where fi:1 is given.
    """

    def __init__(self, source: Array, enabled: Array, bound: bool, inactive: bool, state: Any) -> None:
        self.source, self.present = np.maximum(source, 0), source >= 0
        self.rows, self.bound, self.inactive, self.state = enabled, bound, inactive, state

    @classmethod
    def of(cls, instruction: Instruction, state: Any) -> Dpp | None:
        """The instruction's DPP control, or None where it has none."""
        modifiers, lane = instruction.modifiers, np.arange(state.lanes)
        source = None
        for name, function in CONTROLS.items():
            if name in modifiers:
                source = function(lane, instruction.number(name))
        if "quad_perm" in modifiers:
            source = (lane & ~3) + np.array(instruction.numbers("quad_perm", []))[lane & 3]
        if "dpp8" in modifiers:
            source = (lane & ~7) + np.array(instruction.numbers("dpp8", []))[lane & 7]
        if source is None:
            if "_dpp" in instruction.mnemonic:
                raise UnknownOperand("a DPP instruction without a DPP control")
            return None
        rows, banks = instruction.number("row_mask", 15), instruction.number("bank_mask", 15)
        enabled = ((rows >> (lane >> 4)) & (banks >> ((lane >> 2) & 3)) & 1).astype(bool)
        # LLVM before 14 printed the same bit as bound_ctrl:0.
        return cls(source, enabled, "bound_ctrl" in modifiers, instruction.number("fi") == 1, state)

    def valid(self) -> Array:
        """Return the lanes that have a source lane, [waves, lanes] bool."""
        if self.inactive:
            return np.broadcast_to(self.present, self.state.mask.shape)
        return self.present & self.state.read_mask(EXEC)[:, self.source]

    def moved(self, plain: Array | Callable[[], Array]) -> Callable[[], Array]:
        """Return a function that reads the source with its lanes moved; 0 in a lane without a source lane."""
        state = self.state

        def get() -> Array:
            value = plain() if callable(plain) else plain
            full = np.broadcast_to(value, (state.waves, state.lanes))
            return np.where(self.valid(), full[:, self.source], value.dtype.type(0))

        return get

    def enabled(self) -> Array:
        """Return the lanes that are written, [waves, lanes] bool."""
        on = self.state.mask & self.rows
        return on if self.bound else on & self.valid()
