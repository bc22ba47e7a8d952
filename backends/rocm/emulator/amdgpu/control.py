"""Branches, barriers, waits and the instructions that have no effect on values.

Source: AMD "Instinct MI300" ISA reference, "Program control" (SOPP); "RDNA3", "RDNA4" (S_BARRIER_SIGNAL, S_WAIT_*).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import waits
from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import BoundInstruction
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.isa import EXEC, SCC, VCC
from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState

if TYPE_CHECKING:
    from portattn.backends.rocm.emulator.amdgpu.context import Context

# What run() returns besides an index to go on from.
END, WAIT, SPLIT = -1, -2, -3

# Scheduling hints, cache maintenance, messages to the hardware: values never depend on them here.
_NO_EFFECT = re.compile(
    r"s_(nop|delay_alu|clause|setprio|setprio_inc_wg|sched_\w+|sendmsg|sethalt|inst_prefetch|"
    r"set_inst_prefetch_distance|code_end|icache_inv|dcache_\w+|sleep|ttracedata\w*|incperflevel|decperflevel|wakeup|"
    r"waitcnt_depctr|wait_alu|wait_idle|prefetch_\w+)"
    r"|buffer_(gl\d_inv|wbl2|inv|wbinvl1|wbinvl1_vol|inv_l2)|global_(inv|wb|wbinv)|v_nop"
)
_SETREG = re.compile(r"s_setreg(_imm32)?_b32")
# Bits of the MODE register that change no value in this model: exceptions, and the debugger's.
# (first bit, bits) → what it is. LLVM AMDGPU guide, "MODE"; 23: FP16_OVFL on gfx9 (fp8 conversions saturate).
_FP16_OVERFLOW = (23, 1)


def is_modelled(mnemonic: str) -> bool:
    return bool(
        _NO_EFFECT.fullmatch(mnemonic)
        or mnemonic in _BRANCHES
        or mnemonic in ("s_endpgm", "s_barrier", "s_barrier_wait", "s_barrier_signal", "s_branch")
        or mnemonic.startswith(("s_waitcnt", "s_wait_"))
        or mnemonic == "s_setreg_imm32_b32"
    )


def _any_lane(index: int) -> Callable[[WorkGroupState], Array]:
    return lambda state: np.asarray(state.read_mask(index).any(1))


_BRANCHES: dict[str, tuple[Callable[[WorkGroupState], Array], bool, str]] = {
    "s_cbranch_scc0": (lambda state: state.scc, False, "scc"), "s_cbranch_scc1": (lambda state: state.scc, True, "scc"),
    "s_cbranch_vccz": (_any_lane(VCC), False, "vcc"), "s_cbranch_vccnz": (_any_lane(VCC), True, "vcc"),
    "s_cbranch_execz": (_any_lane(EXEC), False, "exec"), "s_cbranch_execnz": (_any_lane(EXEC), True, "exec"),
}  # fmt: skip


def bind(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Bind one control instruction. Raises UnknownInstruction."""
    name = instruction.mnemonic
    if name == "s_endpgm":
        return BoundInstruction(instruction, lambda: END)
    if name == "s_branch":
        target = machine.program.labels[instruction.operands[0]]
        return BoundInstruction(instruction, lambda: target)
    if name in _BRANCHES:
        return _branch(machine, instruction)
    if name in ("s_barrier", "s_barrier_wait"):
        return BoundInstruction(instruction, lambda: WAIT)
    if name == "s_barrier_signal":
        if instruction.operands != ("-1",):
            raise UnknownOperand("only the work-group's own barrier (-1) is modelled")
        return BoundInstruction(instruction, machine.signal)
    if _NO_EFFECT.fullmatch(name):
        return BoundInstruction(instruction, lambda: None)
    if name.startswith(("s_waitcnt", "s_wait_")):
        return _wait(machine, instruction)
    if _SETREG.fullmatch(name):
        return _set_mode(machine, instruction)
    raise UnknownInstruction(f"{name} is not modelled")


def _branch(machine: Context, instruction: Instruction) -> BoundInstruction:
    state = machine.state
    condition, wanted, register = _BRANCHES[instruction.mnemonic]
    target = machine.program.labels[instruction.operands[0]]

    def run() -> int | None:
        taken = condition(state) == wanted
        if not state.together:
            taken = taken & state.group
            if not taken.any():
                return None
            if (taken == state.group).all():
                return target
        elif taken.all():
            return target
        elif not taken.any():
            return None
        machine.split(taken, target)
        return SPLIT

    words = tuple(range(VCC, VCC + state.lanes // 32))
    uses = {"scc": (SCC,), "vcc": words, "exec": ()}[register]
    return BoundInstruction(instruction, run, uses=uses)


def _wait(machine: Context, instruction: Instruction) -> BoundInstruction:
    text = instruction.operands[0] if instruction.operands else ""
    limits = waits.limits(instruction.mnemonic, ", ".join(instruction.operands) or text)
    wanted = [(counter, limit) for counter, limit in limits.items() if limit < 63]

    def run() -> None:
        if machine.waits is not None:
            for counter, limit in wanted:
                machine.waits.wait(counter, limit, machine.group_bits)

    return BoundInstruction(instruction, run)


def _set_mode(machine: Context, instruction: Instruction) -> BoundInstruction:
    found = re.fullmatch(r"hwreg\((\w+)(?:,\s*(\d+),\s*(\d+))?\),\s*(\w+)", instruction.operands[0])
    if not found:
        raise UnknownOperand(f"{instruction.operands[0]!r} is not known")
    if found[1] in ("HW_REG_SCHED_MODE", "HW_REG_WAVE_SCHED_MODE"):
        return BoundInstruction(instruction, lambda: None)
    if found[1] not in ("HW_REG_MODE", "HW_REG_WAVE_MODE") or (int(found[2]), int(found[3])) != _FP16_OVERFLOW:
        raise UnknownOperand(f"setting {found[1]} bits {found[2]} to {found[3]} is not modelled")
    on = int(found[4], 0) != 0

    def run() -> None:
        machine.state.saturate[machine.state.group] = on

    return BoundInstruction(instruction, run)
