"""Reads machine code as text: the loop with matrix products, its instructions by unit, and one warp's way through it.

Languages: amdgcn as LLVM prints it, and SASS as nvdisasm prints it. Standard library only: a compiler's child reads it.
Sources: LLVM, User guide for AMDGPU back end; AMD, Instinct and RDNA ISA references; NVIDIA, CUDA binary utilities
(instruction set of Hopper) and PTX ISA (shapes of wgmma and mma)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_AMD_LINE = re.compile(r"^\s+([a-z][a-z0-9_]*)\b([^;]*)")
_AMD_LABEL = re.compile(r"^([.\w$]+):")
_SASS_LINE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*)")
_SASS_TARGET = re.compile(r"`?\(?(\.L\w+)")
_MFMA = re.compile(r"v_(?:mfma|wmma)_\w*?(?:f32|i32|f16|bf16)_(\d+)x(\d+)x(\d+)_?(?:(\d+)b_)?(\w+)")
_WARP_MMA = {"HMMA": 16, "IMMA": 16, "QMMA": 16, "OMMA": 16}  # mma.sync: rows of a warp's product
_GROUP_MMA = re.compile(r"([HQI])GMMA\.64x(\d+)x(\d+)\S*")
_WARP_SHAPE = re.compile(r"[HIQO]MMA\.(?:SP\.)?16(8)(\d+)\S*")
_WIDTHS = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
# Sources: CUDA programming guide, throughput of native arithmetic instructions; Nsight Compute, pipelines: ALU.
_HALF_RATE = ("FMNMX", "FSETP", "FSET", "ISETP", "IMNMX", "VIMNMX", "IADD3", "LOP3", "SHF", "PRMT", "LEA", "F2FP")
_TRANSCENDENTAL = re.compile(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_")
LEAST_SHARE = 0.25  # of a loop's products, on the path through it: a form of the tile for each of up to four masks
_REGISTERS = re.compile(r"\b([av])(?:\[(\d+):(\d+)\]|(\d+)\b)")


class WarpInstruction(NamedTuple):
    """One instruction of a warp.

    unit     matrix, transcendental, half_rate, vector, scratchpad, or other (scalar, global memory, branches)
    kind     of a product, the type of its operands: f16 (and bf16), tf32, f32, f8, f4, i8
    amount   of a product, the warp's floating-point operations; of the scratchpad, the warp's bytes
    shape    of a product, rows × columns
    target   of a branch, its label
    waits    products that may be under way when the instruction is done; None: it waits for none
    writes, reads   vector registers, where the hardware waits for a product by its registers"""

    name: str
    unit: str
    kind: str = ""
    amount: int = 0
    shape: str = ""
    target: str = ""
    conditional: bool = False
    waits: int | None = None
    closes: bool = False  # it ends a group of products that is waited for together
    writes: frozenset[int] = frozenset()
    reads: frozenset[int] = frozenset()


class KeyLoop(NamedTuple):
    """A loop over keys by the instructions of a round."""

    instructions: tuple[WarpInstruction, ...]

    def count(self, unit: str) -> int:
        return sum(one.unit == unit for one in self.instructions)

    def amount(self, unit: str) -> int:
        return sum(one.amount for one in self.instructions if one.unit == unit)

    def operations(self) -> int:
        return self.amount("matrix")


def is_sass(text: str) -> bool:
    return ".headerflags" in text[:4000] or re.search(r"^\s+/\*0000\*/", text, re.MULTILINE) is not None


def key_loops(text: str) -> list[KeyLoop]:
    """Return the innermost loops with products, without instructions that branches may skip."""
    lines, labels = parse(text)
    return [_loop(lines, labels, *span) for span in _key_spans(lines, labels)]


def _key_spans(lines: Sequence[WarpInstruction], labels: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return where these loops begin and end; without any, the whole text is one round (no loop: one tile)."""
    spans = sorted(
        {(labels[one.target], place) for place, one in enumerate(lines) if labels.get(one.target, place + 1) <= place},
        key=lambda span: span[1] - span[0],
    )
    found: list[tuple[int, int]] = []
    for begin, end in spans:
        has = any(one.unit == "matrix" for one in lines[begin : end + 1])
        if has and not any(begin <= inner and last <= end for inner, last in found):
            found.append((begin, end))
    return sorted(found) or [(0, len(lines) - 1)]


def instructions_a_megaflop(text: str) -> int:
    """Return a warp's instructions for 10⁶ operations of its products, of the key loop with most; 0 without products.

    Unrolling a loop changes nothing. Instructions that branches may skip count, and so do their products."""
    lines, labels = parse(text)
    loops = [KeyLoop(tuple(lines[begin : end + 1])) for begin, end in _key_spans(lines, labels)]
    return max((round(1e6 * len(one.instructions) / one.operations()) for one in loops if one.operations()), default=0)


def _loop(lines: Sequence[WarpInstruction], labels: Mapping[str, int], begin: int, end: int) -> KeyLoop:
    """Return a loop by the path that takes every conditional branch forward, or, where that skips most products, by
    the one that takes only those which skip none."""
    loop, others = (KeyLoop(_path(lines, labels, begin, end, products=products)) for products in (True, False))
    return loop if loop.operations() >= LEAST_SHARE * others.operations() else others


def _path(
    lines: Sequence[WarpInstruction], labels: Mapping[str, int], begin: int, end: int, products: bool
) -> tuple[WarpInstruction, ...]:
    """Return the instructions along branches forward; `products`: also along conditional ones that skip products."""
    kept, place = [], begin
    while place <= end:
        one = lines[place]
        kept.append(one)
        there = labels.get(one.target, -1)
        skipped = lines[place + 1 : there] if place < there <= end else ()
        taken = products or not one.conditional or all(other.unit != "matrix" for other in skipped)
        place = there if skipped and taken else place + 1
    return tuple(kept)


def parse(text: str) -> tuple[list[WarpInstruction], dict[str, int]]:
    """Return the instructions of a kernel's text, and the place of each label."""
    lines: list[WarpInstruction] = []
    labels: dict[str, int] = {}
    sass = is_sass(text)
    lanes = 32 if re.search(r"^\s*\.amdhsa_wavefront_size32 1", text, re.MULTILINE) else 64
    for line in text.splitlines():
        label = _AMD_LABEL.match(line)
        if label:
            labels[label[1]] = len(lines)
            continue
        found = (_SASS_LINE if sass else _AMD_LINE).match(line)
        if found:
            lines.append(_sass(found) if sass else _amd(found[1], found[2], lanes))
            if lines[-1].name == "s_endpgm":
                break
    return lines, labels


def _sass(found: re.Match[str]) -> WarpInstruction:
    guard, name, rest = found[1] or "", found[2], found[3]
    base = name.partition(".")[0]
    if group := _GROUP_MMA.match(name):
        kind = {"H": "f16", "Q": "f8", "I": "i8"}[group[1]]
        kind = "tf32" if ".TF32" in name else kind
        # Four warps work on 64 rows: a quarter of the product is a warp's.
        amount, shape = 2 * 16 * int(group[2]) * int(group[3]), f"64x{group[2]}"
        return WarpInstruction(name, "matrix", kind, amount, shape, closes="gsb" in rest)
    if shape_of := _WARP_SHAPE.match(name):
        kind = "tf32" if ".TF32" in name else {"H": "f16", "I": "i8", "Q": "f8", "O": "f4"}[base[0]]
        return WarpInstruction(name, "matrix", kind, 2 * 16 * 8 * int(shape_of[2]), "16x8")
    if base == "WARPGROUP" and "DEPBAR" in name:
        left = re.search(r"0x([0-9a-f]+)", rest)
        return WarpInstruction(name, "other", waits=int(left[1], 16) if left else 0)
    if base == "BRA":
        target = _SASS_TARGET.search(rest)
        return WarpInstruction(name, "other", target=target[1] if target else "", conditional=bool(guard))
    if guard:  # where its predicate is false, it takes its place in the order and no unit
        return WarpInstruction(name, "other")
    if base == "MUFU":
        return WarpInstruction(name, "transcendental")
    if base in ("LDS", "STS", "LDSM", "STSM"):
        return WarpInstruction(name, "scratchpad", amount=32 * _sass_width(name))
    return WarpInstruction(name, "half_rate" if base in _HALF_RATE else "vector")


def _sass_width(name: str) -> int:
    """Return the bytes of a lane: LDSM.16.M88.4 moves four matrices of 8 × 8 halves, 512 bytes of a warp."""
    parts = name.split(".")
    if parts[0] in ("LDSM", "STSM"):
        return 4 * int(parts[-1]) if parts[-1] in ("2", "4") else 4
    widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((widths[part] for part in parts if part in widths), 4)


def _amd(name: str, rest: str, lanes: int) -> WarpInstruction:
    if product := _MFMA.match(name):
        rows, columns, depth, blocks = (int(product[n] or 1) for n in (1, 2, 3, 4))
        operands = rest.split(",")
        return WarpInstruction(
            name, "matrix", _kind(product[5]), 2 * rows * columns * depth * blocks, f"{rows}x{columns}",
            writes=_registers(operands[0]), reads=_registers(",".join(operands[1:])),
        )  # fmt: skip
    if name.startswith(("s_cbranch", "s_branch")):
        return WarpInstruction(name, "other", target=rest.strip(), conditional="cbranch" in name)
    if name.startswith("ds_"):
        return WarpInstruction(name, "scratchpad", amount=lanes * _lane_bytes(name), reads=_registers(rest))
    if name.startswith("v_"):
        unit = "transcendental" if _TRANSCENDENTAL.match(name) else "vector"
        return WarpInstruction(name, unit, reads=_registers(rest))
    stores = name.startswith(("global", "buffer"))
    return WarpInstruction(name, "other", reads=_registers(rest) if stores else frozenset())


def _kind(text: str) -> str:
    first = text.split("_")[0]
    return {"xf32": "tf32", "fp8": "f8", "bf8": "f8", "iu8": "i8", "f8f6f4": "f8", "bf16": "f16"}.get(first, first)


def _lane_bytes(name: str) -> int:
    """Return a lane's bytes of an access to the LDS, or 0."""
    width = next((bytes_ for text, bytes_ in _WIDTHS.items() if name.endswith((f"_{text}", f"_{text}_d16"))), 0)
    return width * (2 if re.match(r"ds_(?:read|write|load|store)_?(?:2addr|2)", name) else 1)


def _registers(text: str) -> frozenset[int]:
    found: set[int] = set()
    for kind, low, high, single in _REGISTERS.findall(text):
        base = 512 if kind == "a" else 0
        found.update(range(base + int(single or low), base + int(single or high) + 1))
    return frozenset(found)


def pass_through(loop: KeyLoop, cycles: Mapping[str, float], product: Callable[[WarpInstruction], float]) -> float:
    """Return the cycles of one round of a warp that is alone: instructions in order, products side by side with others.

    A warp issues one instruction at a time and waits for a product where the code does: at a wait for its group, or at
    a register that it writes. Other latencies count as nothing, so that no chip is faster.

    cycles: of an instruction, by unit; product: of a matrix instruction"""
    time, unit_free, rounds = 0.0, 0.0, []
    groups: list[float] = []
    ready: dict[int, float] = {}
    for _ in range(3):
        for one in loop.instructions:
            for register in one.reads & ready.keys() if ready else ():
                time = max(time, ready.pop(register))
            if one.unit == "matrix":
                unit_free = max(time, unit_free) + product(one)
                if one.closes:
                    groups.append(unit_free)
                elif not one.writes:
                    time = max(time, unit_free - product(one))
                ready |= dict.fromkeys(one.writes, unit_free)
                time += cycles["issue"]
                continue
            if one.waits is not None and groups:
                done = groups[: len(groups) - one.waits] if one.waits else groups
                time = max([time, *done])
                groups = groups[len(done) :]
            time += cycles.get(one.unit, cycles["issue"])
        rounds.append(time)
    return rounds[2] - rounds[1]
