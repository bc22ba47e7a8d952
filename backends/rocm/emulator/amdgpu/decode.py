"""Binds an instruction by its family: branches, barriers, waits and moves between lanes (readlane, writelane, permutes,
swizzles) here, the other families by their modules.

Sources: AMD "Instinct MI300" ISA reference, "Program control" (SOPP), V_READLANE, DS_BPERMUTE, DS_SWIZZLE; "RDNA3",
"RDNA4" (S_BARRIER_SIGNAL, S_WAIT_*); "CDNA4" (V_PERMLANE16/32_SWAP); "RDNA3" (V_PERMLANE16, V_PERMLANEX16,
V_PERMLANE64). Symbolic swizzles: LLVM, "Syntax of AMDGPU Modifiers"."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import (
    global_memory_ops,
    lds_scratch_ops,
    packed_matrix_ops,
    scalar,
    vcc_ops,
    vector,
)
from portattn.backends.rocm.emulator.amdgpu.assembly import EXEC, SCC, VCC, Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction, base_name, vector_plane
from portattn.backends.rocm.emulator.amdgpu.errors import EmulationError, UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.lds import Context
from portattn.backends.rocm.emulator.amdgpu.register_checks import wait_limits as wait_limits
from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState

Bind = Callable[["Context", Instruction], BoundInstruction]


def _first_lane(state: Any) -> Array:
    """Return each wave's lowest active lane; 0 without one."""
    return np.argmax(state.read_mask(EXEC), axis=1)


def _read_lane(machine: Context, instruction: Instruction) -> BoundInstruction:
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow()
    first = "first" in instruction.mnemonic
    binder.expect(2 if first else 3)
    source, target = binder.operands[1], binder.operands[0]
    wave = np.arange(state.waves)
    chosen = None if first else scalar.reader(state, binder.operands[2], "u")
    if source.kind != "v":  # the compiler sometimes reads "lane n" of a scalar
        value = scalar.reader(state, source, "u")
        return BoundInstruction(
            instruction, lambda: state.set_scalar(target.index, value()), source.registers,
            scalar_writes=target.registers,
        )  # fmt: skip
    plane = state.planes["u"][source.index]

    def lane() -> Array:
        return _first_lane(state) if chosen is None else chosen().astype(np.int64) & (state.lanes - 1)

    def run() -> None:
        state.set_scalar(target.index, plane[wave, lane()])

    def flow(defined: Any) -> None:
        defined.set_scalars(target.registers, defined.vectors[source.index][wave, lane()])

    uses = () if first else binder.registers(2)
    return BoundInstruction(instruction, run, source.registers, scalar_writes=target.registers, uses=uses, flow=flow)


def _write_lane(machine: Context, instruction: Instruction) -> BoundInstruction:
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow()
    binder.expect(3)
    target = vector_plane(binder.operands[0])
    value = scalar.reader(state, binder.operands[1], "u")
    chosen = scalar.reader(state, binder.operands[2], "u")

    def where() -> Array:
        lane = chosen().astype(np.int64) & (state.lanes - 1)
        return (state.lane == lane[:, None]) & state.group[:, None]

    def run() -> None:
        np.copyto(state.planes["u"][target], value()[:, None], where=where())

    def flow(defined: Any) -> None:
        undefined = np.zeros(state.waves, bool)
        for register in binder.registers(1):
            undefined |= defined.scalars[:, register] != 0
        defined.set_lanes(binder.registers(0), np.broadcast_to(undefined[:, None], state.mask.shape), where())

    return BoundInstruction(
        instruction, run, binder.registers(1), (), binder.registers(0), uses=binder.registers(2), flow=flow
    )


def _gathered(
    machine: Context, binder: Binder, value: int, address: int | None, select: Callable[[], tuple[Array, Array | None]]
) -> BoundInstruction:
    """dst lane = source lane `select()[0]` of operand `value`, 0 (or kept: see callers) where select()[1] is False."""
    state = machine.state
    source, target = vector_plane(binder.operands[value]), vector_plane(binder.operands[0])
    uses = binder.registers(address) if address is not None else ()

    def run() -> None:
        index, valid = select()
        moved = np.take_along_axis(state.planes["u"][source], index, 1)
        state.whole(target, moved if valid is None else np.where(valid, moved, np.uint32(0)))
        if binder.instruction.mnemonic.startswith("ds_"):
            machine.issue("lds", binder.registers(0))

    def flow(defined: Any) -> None:
        index, valid = select()
        everywhere = np.ones(state.mask.shape, bool) if valid is None else valid
        defined.permuted(binder.registers(0), binder.registers(value), index, everywhere)

    return BoundInstruction(
        binder.instruction, run, binder.registers(value), (), binder.registers(0), uses=uses, flow=flow
    )


def _bpermute(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Each lane takes the value of the lane that its address / 4 names; 0 from a lane that is off."""
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow("offset")
    binder.expect(3)
    address = state.planes["u"][vector_plane(binder.operands[1])]
    offset = np.uint32(instruction.number("offset"))

    def select() -> tuple[Array, Array | None]:
        index = ((address + offset) >> np.uint32(2)).astype(np.int64) & (state.lanes - 1)
        return index, None if state.full else np.take_along_axis(state.read_mask(EXEC), index, 1)

    return _gathered(machine, binder, 2, 1, select)


def _permute(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Each lane sends its value to lane address / 4; the highest sender wins, 0 without a sender."""
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow("offset")
    binder.expect(3)
    address = state.planes["u"][vector_plane(binder.operands[1])]
    offset = np.uint32(instruction.number("offset"))

    def select() -> tuple[Array, Array | None]:
        to = ((address + offset) >> np.uint32(2)).astype(np.int64) & (state.lanes - 1)
        index, valid = np.zeros(state.mask.shape, np.int64), np.zeros(state.mask.shape, bool)
        on = state.read_mask(EXEC)
        for wave in range(state.waves):
            senders = state.lane[on[wave]]
            index[wave, to[wave, senders]] = senders
            valid[wave, to[wave, senders]] = True
        return index, valid

    return _gathered(machine, binder, 2, 1, select)


def swizzle_pattern(text: str) -> int:
    """Return the 16 bits of a ds_swizzle offset, from a number or its symbolic form."""
    if not text.startswith("swizzle("):
        return int(text, 0)
    name, *parts = [part.strip().strip('"') for part in text[8:-1].split(",")]
    if name == "QUAD_PERM":
        return 0x8000 | sum(int(part) << 2 * n for n, part in enumerate(parts))
    if name == "SWAP":
        return int(parts[0]) << 10 | 31
    if name == "REVERSE":
        return (int(parts[0]) - 1) << 10 | 31
    if name == "BROADCAST":
        return int(parts[1]) << 5 | (32 - int(parts[0]))
    if name == "BITMASK_PERM":
        # One letter a bit of the lane's number, highest first: 0, 1, p(reserve), i(nvert).
        masks = {"0": 0, "1": 1 << 5, "p": 1, "i": 1 | 1 << 10}
        return sum(masks[letter] << 4 - n for n, letter in enumerate(parts[0]))
    raise UnknownOperand(f"swizzle {text!r} is not known")


def _swizzle(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Within groups of 32 lanes: (lane & and) | or, xor; or within groups of four."""
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow("offset")
    binder.expect(2)
    pattern, lane = swizzle_pattern(instruction.modifiers.get("offset", "0")), state.lane
    if pattern & 0xE000 == 0xC000 or pattern & 0xE000 == 0xE000:
        raise UnknownOperand("rotating and FFT swizzles are not modelled")
    if pattern & 0x8000:
        source = (lane & ~3) + (pattern >> 2 * (lane & 3) & 3)
    else:
        source = (lane & ~31) + (((lane & 31 & pattern) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31))
    index = np.broadcast_to(source, state.mask.shape)

    def select() -> tuple[Array, Array | None]:
        return index, None if state.full else np.take_along_axis(state.read_mask(EXEC), index, 1)

    return _gathered(machine, binder, 1, None, select)


def _permlane16(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Any lane of the same row (16), or of the other row of a pair (x16), by 4-bit selectors in two scalars.

    op_sel:[fi, bound_ctrl]: read lanes that are off; write 0 instead of keeping the destination. LLVM has the two bits;
    AMD's pseudocode of RDNA3 and RDNA4 lacks them and reads every lane, as fi:1 does."""
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow("op_sel")
    binder.expect(4)
    low, high = scalar.reader(state, binder.operands[2], "u"), scalar.reader(state, binder.operands[3], "u")
    source, target = vector_plane(binder.operands[1]), vector_plane(binder.operands[0])
    inactive, bound = (bool(x) for x in instruction.numbers("op_sel", [0, 0])[:2])
    across, lane = 16 if "x16" in instruction.mnemonic else 0, state.lane

    def select() -> tuple[Array, Array]:
        both = low().astype(np.uint64) | high().astype(np.uint64) << np.uint64(32)
        chosen = (both[:, None] >> (4 * (lane & 15)).astype(np.uint64)).astype(np.int64) & 15
        index = ((lane & ~15) ^ across) + chosen
        valid = np.ones(state.mask.shape, bool) if inactive else np.take_along_axis(state.read_mask(EXEC), index, 1)
        return index, valid

    def run() -> None:
        index, valid = select()
        moved = np.take_along_axis(state.planes["u"][source], index, 1)
        other = np.uint32(0) if bound else state.planes["u"][target]
        state.whole(target, np.where(valid, moved, other))

    def flow(defined: Any) -> None:
        index, valid = select()
        moved = np.take_along_axis(defined.lanes(binder.registers(1)), index, 1)
        kept = np.zeros(state.mask.shape, bool) if bound else defined.lanes(binder.registers(0))
        defined.set_lanes(binder.registers(0), np.where(valid, moved, kept))

    reads = binder.registers(0, 1) if not bound else binder.registers(1)
    return BoundInstruction(instruction, run, reads, (), binder.registers(0), uses=binder.registers(2, 3), flow=flow)


def _permlane64(machine: Context, instruction: Instruction) -> BoundInstruction:
    state = machine.state
    binder = Binder(state, instruction)
    binder.allow()
    binder.expect(2)
    index = np.broadcast_to(state.lane ^ (state.lanes // 2), state.mask.shape)
    return _gathered(machine, binder, 1, None, lambda: (index, None))


def _permlane_swap(size: int) -> Bind:
    """Swap the odd rows (of `size` lanes) of the first register with the even rows of the second."""

    def make(machine: Context, instruction: Instruction) -> BoundInstruction:
        state = machine.state
        binder = Binder(state, instruction)
        binder.allow("bound_ctrl", "fi")
        binder.expect(2)
        first, second = (vector_plane(item) for item in binder.operands)
        odd = (state.lane // size) % 2 == 1
        from_other = np.where(odd, state.lane - size, state.lane + size)

        def swapped(a: Array, b: Array) -> tuple[Array, Array]:
            return np.where(odd, b[:, from_other], a), np.where(odd, b, a[:, from_other])

        def run() -> None:
            on = state.read_mask(EXEC)
            if (on[:, from_other] != on)[state.group].any():
                raise UnknownInstruction(f"{instruction.mnemonic} with a lane on whose partner is off is not modelled")
            a, b = swapped(state.planes["u"][first], state.planes["u"][second])
            state.whole(first, a)
            state.whole(second, b)

        def flow(defined: Any) -> None:
            a, b = swapped(defined.vectors[first], defined.vectors[second])
            defined.set_lanes(binder.registers(0), a)
            defined.set_lanes(binder.registers(1), b)

        both = binder.registers(0, 1)
        return BoundInstruction(instruction, run, both, (), both, flow=flow)

    return make


LANE_INSTRUCTIONS: dict[str, Bind] = {
    "v_readlane_b32": _read_lane, "v_readfirstlane_b32": _read_lane, "v_writelane_b32": _write_lane,
    "ds_bpermute_b32": _bpermute, "ds_permute_b32": _permute, "ds_swizzle_b32": _swizzle,
    "v_permlane16_b32": _permlane16, "v_permlanex16_b32": _permlane16, "v_permlane64_b32": _permlane64,
    "v_permlane16_swap_b32": _permlane_swap(16), "v_permlane32_swap_b32": _permlane_swap(32),
}  # fmt: skip


def lane_instruction(mnemonic: str) -> str:
    return "v_" + base_name(mnemonic) if mnemonic.startswith("v_") else mnemonic


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
# (first bit, bits) → field. LLVM AMDGPU guide, "MODE"; 23: FP16_OVFL on gfx9 (fp8 conversions saturate).
_FP16_OVERFLOW = (23, 1)


def _is_control(mnemonic: str) -> bool:
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


def _bind_control(machine: Context, instruction: Instruction) -> BoundInstruction:
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
    limits = wait_limits(instruction.mnemonic, ", ".join(instruction.operands) or text)
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


FAMILIES = ("control", "scalar", "scalar memory", "vector", "compare", "packed", "matrix", "lanes", "LDS", "scratch",
            "vector memory")  # fmt: skip


def family(mnemonic: str) -> str | None:
    name = base_name(mnemonic)
    if _is_control(mnemonic):
        return "control"
    if lane_instruction(mnemonic) in LANE_INSTRUCTIONS:
        return "lanes"
    if mnemonic.startswith("s_"):
        if global_memory_ops.is_scalar_memory_modelled(mnemonic):
            return "scalar memory"
        return "scalar" if scalar.is_modelled(mnemonic[2:]) else None
    if mnemonic.startswith("ds_"):
        return "LDS" if lds_scratch_ops.is_lds_modelled(mnemonic) else None
    if mnemonic.startswith("scratch_"):
        return "scratch" if lds_scratch_ops.is_scratch_modelled(mnemonic) else None
    if mnemonic.startswith(("buffer_", "global_", "flat_")):
        return "vector memory" if global_memory_ops.is_vector_memory_modelled(mnemonic) else None
    if packed_matrix_ops.is_matrix_modelled(mnemonic):
        return "matrix"
    if packed_matrix_ops.is_packed_modelled(mnemonic):
        return "packed"
    if vcc_ops.is_modelled(name):
        return "compare"
    if mnemonic.startswith("v_s_"):
        return "scalar" if name[2:] in scalar.TRANSCENDENTAL else None
    return "vector" if mnemonic.startswith("v_") and vector.is_modelled(name) else None


def bind(machine: Context, instruction: Instruction) -> BoundInstruction:
    """Bind an instruction to a machine. Raise UnknownInstruction or UnknownOperand, with the line."""
    try:
        if instruction.second is not None:
            first = _bind_single(machine, instruction)
            second = _bind_single(machine, instruction.second)
            return packed_matrix_ops.dual(first, second, machine.state, instruction)
        return _bind_single(machine, instruction)
    except EmulationError as error:
        raise error.at(instruction.place) from None


def _bind_single(machine: Context, instruction: Instruction) -> BoundInstruction:
    kind = family(instruction.mnemonic)
    state = machine.state
    if kind is None:
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    if kind == "lanes":
        return LANE_INSTRUCTIONS[lane_instruction(instruction.mnemonic)](machine, instruction)
    if instruction.mnemonic.startswith("v_s_"):
        return scalar.bind_transcendental(state, instruction)
    if kind in _ON_STATE:
        return _ON_STATE[kind](state, instruction)
    return _ON_MACHINE[kind](machine, instruction)


_ON_STATE = {
    "scalar": scalar.bind, "vector": vector.bind, "compare": vcc_ops.bind,
    "packed": packed_matrix_ops.bind_packed, "matrix": packed_matrix_ops.bind_matrix,
}  # fmt: skip
_ON_MACHINE = {
    "control": _bind_control, "scalar memory": global_memory_ops.bind_scalar_memory,
    "vector memory": global_memory_ops.bind_vector_memory, "LDS": lds_scratch_ops.bind_lds,
    "scratch": lds_scratch_ops.bind_scratch,
}  # fmt: skip
