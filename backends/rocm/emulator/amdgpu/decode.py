"""From a mnemonic to the family that knows it, and from an instruction to a BoundInstruction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portattn.backends.rocm.emulator.amdgpu import (
    compare,
    control,
    lanes,
    lds_ops,
    matrix,
    packed,
    scalar,
    scratch_ops,
    smem,
    vector,
    vector_forms,
    vmem,
)
from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import BoundInstruction
from portattn.backends.rocm.emulator.amdgpu.errors import EmulationError, UnknownInstruction

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.context import Context

FAMILIES = ("control", "scalar", "scalar memory", "vector", "compare", "packed", "matrix", "lanes", "LDS", "scratch",
            "vector memory")  # fmt: skip


def family(mnemonic: str) -> str | None:
    """Which family models a mnemonic; None where none does."""
    name = vector_forms.base_name(mnemonic)
    if control.is_modelled(mnemonic):
        return "control"
    if lanes.table_name(mnemonic) in lanes.TABLE:
        return "lanes"
    if mnemonic.startswith("s_"):
        if smem.is_modelled(mnemonic):
            return "scalar memory"
        return "scalar" if scalar.is_modelled(mnemonic[2:]) else None
    if mnemonic.startswith("ds_"):
        return "LDS" if lds_ops.is_modelled(mnemonic) else None
    if mnemonic.startswith("scratch_"):
        return "scratch" if scratch_ops.is_modelled(mnemonic) else None
    if mnemonic.startswith(("buffer_", "global_", "flat_")):
        return "vector memory" if vmem.is_modelled(mnemonic) else None
    if matrix.is_modelled(mnemonic):
        return "matrix"
    if packed.is_modelled(mnemonic):
        return "packed"
    if compare.is_modelled(name):
        return "compare"
    if mnemonic.startswith("v_s_"):
        return "scalar" if name[2:] in scalar.TRANSCENDENTAL else None
    return "vector" if mnemonic.startswith("v_") and vector.is_modelled(name) else None


def bind(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Bind an instruction to a machine. Raises UnknownInstruction and UnknownOperand, with the line."""
    try:
        if instruction.second is not None:
            first = _bind_single(machine, instruction)
            second = _bind_single(machine, instruction.second)
            return packed.dual(first, second, machine.state, instruction)
        return _bind_single(machine, instruction)
    except EmulationError as error:
        raise error.at(instruction.place) from None


def _bind_single(machine: Context, instruction: Instruction) -> BoundInstruction:
    kind = family(instruction.mnemonic)
    state = machine.state
    if kind is None:
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    if kind == "lanes":
        return lanes.TABLE[lanes.table_name(instruction.mnemonic)](machine, instruction)
    if instruction.mnemonic.startswith("v_s_"):
        return scalar.bind_transcendental(state, instruction)
    if kind in _ON_STATE:
        return _ON_STATE[kind].bind(state, instruction)
    return _ON_MACHINE[kind].bind(machine, instruction)


_ON_STATE = {"scalar": scalar, "vector": vector, "compare": compare, "packed": packed, "matrix": matrix}
_ON_MACHINE = {"control": control, "scalar memory": smem, "LDS": lds_ops, "scratch": scratch_ops, "vector memory": vmem}
