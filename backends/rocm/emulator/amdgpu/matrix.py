"""Matrix instructions: MFMA (gfx9) and WMMA (gfx11, gfx12), by the lane layouts of the ISA documents.

MFMA of M×N×K, one block, 64 lanes: with G = 64 / M groups of lanes,
    A[m, k]   lane m + M·(k // p), element k % p of its registers, p = K / G elements a lane; B[k, n] likewise
    D[i, j]   lane j + N·((i // 4) % G), register 4·(i // (4 G)) + i % 4
of float64 16×16×4: D's rows lie i = group + 4·register, two registers each.
WMMA 16×16×16 of gfx11, wave32: A[m, k] is element k of lane m and of lane m + 16 (the same again); B likewise;
    D[i, j]   lane j + 16·(i % 2), register i // 2
of gfx12: A[m, k] is lane m + 16·(k // 8), element k % 8; D[i, j] lane j + 16·(i // 8), register i % 8.

Products are summed in float64 and rounded once to the result's type; the chips round after groups of products.
Sources: AMD "Instinct MI200", "MI300", "CDNA4" ISA references, "Matrix arithmetic instructions" (and AMD's matrix
instruction calculator); "RDNA3" and "RDNA4" ISA references, "WMMA".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import floats
from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction, unified_registers, vector_plane
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.operands import Operand
from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState, literal

_MFMA = re.compile(
    r"v_mfma_(f32|i32|f64)_(\d+)x(\d+)x(\d+)_?(?:(\d+)b_)?"
    r"(xf32|f32|f64|f16|bf16|i8|fp8_fp8|fp8_bf8|bf8_fp8|bf8_bf8|f8f6f4)(_1k)?"
)
_WMMA = re.compile(r"v_wmma_(f32|f16|bf16|i32)_16x16x16_(f16|bf16|iu8|fp8_fp8|fp8_bf8|bf8_fp8|bf8_bf8)(?:_w32)?")
# Elements in a 32-bit register.
_PER_REGISTER = {"f32": 1, "xf32": 1, "f16": 2, "bf16": 2, "i8": 4, "u8": 4, "fp8": 4, "bf8": 4}
# M×N×K by type, on every chip that has the type; a shape outside of this set is not modelled.
_SHAPES = {
    "f32": {(32, 2), (16, 4)}, "xf32": {(32, 4), (16, 8)}, "f64": {(16, 4)},
    "f16": {(32, 8), (16, 16), (32, 16), (16, 32)}, "bf16": {(32, 8), (16, 16), (32, 16), (16, 32)},
    "i8": {(32, 8), (16, 16), (32, 16), (16, 32), (32, 32), (16, 64)},
    "fp8": {(32, 16), (16, 32)}, "bf8": {(32, 16), (16, 32)}, "f8f6f4": {(32, 64), (16, 128)},
}  # fmt: skip


def elements(registers: list[Array], kind: str, fnuz: bool) -> Array:
    """Registers, each [waves, lanes] uint32 → [waves, lanes, elements] as float64."""
    words = np.stack(registers, axis=-1)
    if kind == "f32":
        return words.view(np.float32).astype(np.float64)
    if kind == "xf32":
        return floats.xf32(words.view(np.float32)).astype(np.float64)
    if kind == "f64":
        return words.view(np.float64)
    if kind == "f16":
        return words.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if kind in ("i8", "u8"):
        return words.view(np.int8 if kind == "i8" else np.uint8).astype(np.float64)
    return floats.fp8_table(kind, fnuz)[words.view(np.uint8)].astype(np.float64)


@dataclass(frozen=True)
class Layout:
    """Where the parts of a product lie.

    groups  how many groups of lanes share K; a group is M lanes
    row, column  [registers, lanes]: which element of D each register and lane holds
    """

    size: int
    groups: int
    registers: int
    row: Array
    column: Array

    def operand(self, values: Array) -> Array:
        """[waves, lanes, p] → [waves, M, K]: K runs over the groups, then over a lane's elements."""
        waves, _, per_lane = values.shape
        grouped = values.reshape(waves, self.groups, self.size, per_lane)
        return grouped.transpose(0, 2, 1, 3).reshape(waves, self.size, self.groups * per_lane)


def mfma_layout(size: int, double: bool = False) -> Layout:
    lanes, groups = np.arange(64), 64 // size
    register = np.arange(size * size // 64)[:, None]
    if double:
        row = lanes // size + groups * register
    else:
        row = (register // 4) * 4 * groups + 4 * (lanes // size) + register % 4
    return Layout(size, groups, size * size // 64, row, np.broadcast_to(lanes % size, row.shape))


def wmma_layout(family: int) -> Layout:
    lanes, register = np.arange(32), np.arange(8)[:, None]
    row = 8 * (lanes // 16) + register if family == 12 else 2 * register + lanes // 16
    return Layout(16, 2, 8, row, np.broadcast_to(lanes % 16, row.shape))


def is_modelled(mnemonic: str) -> bool:
    found = _MFMA.fullmatch(mnemonic)
    if found:
        kind = found[6].split("_")[0]
        return not found[5] and found[2] == found[3] and (int(found[2]), int(found[4])) in _SHAPES[kind]
    return bool(_WMMA.fullmatch(mnemonic))


def bind(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    """Bind one matrix instruction. Raises UnknownInstruction."""
    if not is_modelled(instruction.mnemonic):
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    binder = Binder(state, instruction)
    binder.expect(4)
    mfma = _MFMA.fullmatch(instruction.mnemonic)
    if mfma:
        return _bind_mfma(state, binder, mfma)
    found = _WMMA.fullmatch(instruction.mnemonic)
    assert found
    return _bind_wmma(state, binder, found)


def _bind_mfma(state: WorkGroupState, binder: Binder, found: re.Match[str]) -> BoundInstruction:
    instruction, size, depth = binder.instruction, int(found[2]), int(found[4])
    first, _, second = found[6].partition("_")
    second = second or first
    if first == "f8f6f4":
        binder.allow("cbsz", "blgp")
        formats = [instruction.number("cbsz"), instruction.number("blgp")]
        if max(formats) > 1:
            raise UnknownOperand("fp6 and fp4 operands of f8f6f4 are not modelled")
        first, second = (("fp8", "bf8")[code] for code in formats)
    else:
        binder.allow()
    layout = mfma_layout(size, first == "f64")
    per_lane = depth // layout.groups
    registers = per_lane * 2 if first == "f64" else max(per_lane // _PER_REGISTER[first], 1)
    result = {"f32": np.float32, "i32": np.int32, "f64": np.float64}[found[1]]
    return _product(state, binder, layout, (first, second), registers, result, lambda values: layout.operand(values))


def _bind_wmma(state: WorkGroupState, binder: Binder, found: re.Match[str]) -> BoundInstruction:
    instruction, gfx12 = binder.instruction, state.arch.family == 12
    if state.lanes != 32:
        raise UnknownInstruction(f"{instruction.mnemonic} in waves of 64 is not modelled")
    if found[1] in ("f16", "bf16"):
        raise UnknownInstruction(f"{instruction.mnemonic}: results of 16 bits are not modelled")
    binder.allow("neg_lo")
    kinds = found[2].split("_") if "_" in found[2] else [found[2]] * 2
    if found[2] == "iu8":
        signs = instruction.numbers("neg_lo", [0, 0, 0])
        kinds = ["i8" if signs[n] else "u8" for n in (0, 1)]
    elif "neg_lo" in instruction.modifiers:
        raise UnknownOperand("neg_lo on a float matrix product is not modelled")
    layout = wmma_layout(state.arch.family)
    registers = (8 if gfx12 else 16) // _PER_REGISTER[kinds[0]]
    result = np.float32 if found[1] == "f32" else np.int32

    def operand(values: Array) -> Array:
        if gfx12:
            return layout.operand(values)
        lower, upper = values[:, :16], values[:, 16:]
        same = (lower == upper) | (np.isnan(lower) & np.isnan(upper))
        if not same[state.group].all():
            raise UnknownOperand("a WMMA source whose lanes 16 to 31 do not repeat lanes 0 to 15")
        return lower

    return _product(state, binder, layout, (kinds[0], kinds[1]), registers, result, operand)


def _product(
    state: WorkGroupState, binder: Binder, layout: Layout, kinds: tuple[str, str], registers: int, result: Any,
    arrange: Callable[[Array], Array],
) -> BoundInstruction:  # fmt: skip
    planes, fnuz = state.planes["u"], state.arch.fnuz
    sources = [vector_plane(item) for item in binder.operands[1:3]]
    for item in binder.operands[1:3]:
        if item.count != registers:
            raise UnknownOperand(
                f"{binder.instruction.mnemonic} reads {registers} registers, the text has {item.count}"
            )
    words = np.dtype(result).itemsize // 4
    count = layout.registers * words
    target = vector_plane(binder.operands[0])
    addend = _addend(state, binder.operands[3], layout.registers, words, result)
    row, column = layout.row, layout.column

    def run() -> None:
        # EXEC is ignored: every lane of the waves that run takes part.
        a, b = (
            arrange(elements(planes[plane : plane + registers], kind, fnuz))
            for plane, kind in zip(sources, kinds, strict=True)
        )
        product = np.matmul(a, b.transpose(0, 2, 1))
        total = product[:, row, column] + addend()  # [waves, registers, lanes]
        # Integers wrap; floats are rounded here, once.
        rounded = total.astype(np.int64).astype(np.uint32) if result is np.int32 else total.astype(result)
        for register in range(layout.registers):
            values = np.ascontiguousarray(rounded[:, register]).view(np.uint32).reshape(*total[:, 0].shape, words)
            for word in range(words):
                plane = planes[target + register * words + word]
                if state.together:
                    plane[...] = values[..., word]
                else:
                    np.copyto(plane, values[..., word], where=state.group[:, None])

    written = unified_registers(target, count)
    reads = binder.registers(1, 2, 3)

    def flow(defined: Any) -> None:
        defined.whole_waves(written, reads, np.broadcast_to(state.group[:, None], state.mask.shape))

    return BoundInstruction(binder.instruction, run, reads, (), written, flow=flow)


def _addend(state: WorkGroupState, item: Operand, registers: int, words: int, result: Any) -> Callable[[], Array]:
    """C as [waves, registers, lanes] float64, or a constant."""
    if item.kind == "literal":
        kind = {np.float32: "f", np.int32: "i", np.float64: "d"}[result]
        constant = literal(item, kind).astype(np.float64)[None]
        return lambda: constant
    plane = vector_plane(item)
    if item.count != registers * words:
        raise UnknownOperand(f"C has {item.count} registers, {registers * words} are needed")
    if words == 1:
        return lambda: state.V[plane : plane + registers].view(result).transpose(1, 0, 2).astype(np.float64)
    return lambda: np.stack([state.pair(plane + 2 * r).view(np.float64) for r in range(registers)], axis=1)
