"""Vector comparisons: v_cmp_… writes a bit a lane, v_cmpx_… writes exec.

Source: AMD "Instinct MI300" ISA reference, "VOPC"; "RDNA3" ISA reference (v_cmpx writes exec only).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction, compute
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction
from portattn.backends.rocm.emulator.amdgpu.isa import EXEC, VCC
from portattn.backends.rocm.emulator.amdgpu.operands import Operand
from portattn.backends.rocm.emulator.amdgpu.state import KINDS, Array, WorkGroupState
from portattn.backends.rocm.emulator.amdgpu.vector_forms import DPP, SDWA, base_name

_NAME = re.compile(r"cmp(x?)_(\w+)_(f16|f32|f64|i16|u16|i32|u32|i64|u64)")
_KIND = {"f16": "h", "f32": "f", "f64": "d", "i16": "s", "u16": "w", "i32": "i", "u32": "u", "i64": "I", "u64": "U"}


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


# "n…" is the negation, true for NaN; "lg" is less or greater, false for NaN.
PREDICATES: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "ne": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b), "o": lambda a, b: ~_unordered(a, b), "u": _unordered,
    "nlt": lambda a, b: ~(a < b), "neq": lambda a, b: ~(a == b), "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b), "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
    "t": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
    "tru": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
}  # fmt: skip


def _class(kind: str) -> Callable[[Array, Array], Array]:
    """V_CMP_CLASS: bit n of the second source asks for the n-th of signalling NaN, quiet NaN, −∞, −normal, −denormal,
    −0, +0, +denormal, +normal, +∞."""
    bits = KINDS[kind][1]
    unsigned = {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    mantissa = {16: 10, 32: 23, 64: 52}[bits]

    def function(value: Array, wanted: Array) -> Array:
        value, wanted = np.broadcast_arrays(value, wanted)
        raw = np.ascontiguousarray(value).view(unsigned)
        quiet = (raw >> unsigned(mantissa - 1)) & unsigned(1)
        negative = np.signbit(value)
        tiny = np.finfo(KINDS[kind][0]).tiny
        magnitude = np.abs(value)
        kinds = [np.isnan(value), np.isinf(value), magnitude >= tiny, magnitude > 0]
        codes = [quiet, np.where(negative, 2, 9), np.where(negative, 3, 8), np.where(negative, 4, 7)]
        code = np.select(kinds, codes, np.where(negative, 5, 6)).astype(np.uint32)
        return ((wanted >> code) & np.uint32(1)).astype(bool)

    return function


def bind(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    """Bind one comparison. Raises UnknownInstruction."""
    found = _NAME.fullmatch(base_name(instruction.mnemonic))
    if not found or (found[2] not in PREDICATES and found[2] != "class"):
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    kind = _KIND[found[3]]
    binder = Binder(state, instruction)
    binder.allow("op_sel", "clamp", *DPP, *SDWA)
    to_exec = bool(found[1])
    # gfx10 and later: v_cmpx has no destination but exec. Dual-issue and e32 forms may leave vcc out.
    implicit = len(binder.operands) == 2
    first = 0 if implicit else 1
    if implicit and not to_exec:
        binder.operands.insert(0, Operand("s", VCC, state.lanes // 32))
        first = 1
    binder_sources = (first, first + 1)
    if found[2] == "class":
        bits = binder.array(binder_sources[1], "u", 1)
        value = compute(_class(kind), [binder.array(binder_sources[0], kind, 0), bits])
    else:
        value = compute(PREDICATES[found[2]], [binder.array(i, kind, s) for s, i in enumerate(binder_sources)])
    destinations = [] if first == 0 else [binder.operands[0].index]
    if to_exec:
        destinations.append(EXEC)

    def run() -> None:
        bits = np.broadcast_to(value(), state.mask.shape) & state.mask
        for index in destinations:
            state.write_mask(index, bits)

    words = state.lanes // 32
    written = tuple(index + n for index in destinations for n in range(words))
    return BoundInstruction(instruction, run, binder.registers(*binder_sources), (), mask_writes=written)


def is_modelled(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and (found[2] in PREDICATES or found[2] == "class")
