"""Parses amdgcn assembly of a modelled arch, as LLVM prints it: instructions, operands, descriptor and arguments.

The modelled arches are rows of backends/rocm/arches. Sources: LLVM "User Guide for AMDGPU Backend" (processors, address
spaces, assembler, code object V5 metadata, kernel descriptor, initial register state); AMD "Instinct MI200", "MI300",
"CDNA4", "RDNA3" and "RDNA4" ISA references.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from portattn.backends.rocm.emulator.amdgpu.errors import (
    BadLaunch,
    BadProgram,
    Place,
    TruncatedText,
    UnknownOperand,
    WrongArch,
)
from portattn.planning.data_files import load_arches

EXECUTOR = "emulated"  # the table of an arch's file that is the model's

# Column of the scalar register file where a name lies. m0 and null swap encodings between gfx9 and gfx10; the model
# keeps one numbering, and null is no register here.
VCC, TTMP, M0, EXEC = 106, 108, 124, 126
SCALARS = 128
# Unified numbers for registers of every kind, in sets of the registers that an instruction touches.
SCC = 300  # a free number above the scalar file
VECTOR = 512  # vector register i is VECTOR + i
ACCUMULATION = 256  # accumulation register i is vector plane ACCUMULATION + i


@dataclass(frozen=True)
class AmdArch:
    name: str
    wave: int  # lanes that Triton compiles for
    planes: int  # vector registers of a lane, accumulation registers included
    lds_bytes: int  # of one work-group at most
    family: int  # 9, 11 or 12: encoding of waits, barriers and 16-bit registers
    fnuz: bool  # fp8 is FNUZ, else OCP
    counters: dict[str, str]  # kind of access → wait counter
    most: dict[str, int]  # most accesses of each counter
    same_as: str = ""  # an arch with the same instructions, which tests of instructions run instead


# LLVM AMDGPU guide, "Memory Model": vmcnt covers vector loads and stores before gfx10; stores have vscnt since; gfx12
# splits all of them. LDS and scalar loads share lgkmcnt before gfx12.
_GFX9 = {"load": "vmcnt", "store": "vmcnt", "atomic": "vmcnt", "lds": "lgkmcnt", "scalar": "lgkmcnt"}
_GFX11 = {"load": "vmcnt", "store": "vscnt", "atomic": "vscnt", "lds": "lgkmcnt", "scalar": "lgkmcnt"}
_GFX12 = {"load": "loadcnt", "store": "storecnt", "atomic": "storecnt", "lds": "dscnt", "scalar": "kmcnt"}

_COUNTERS = {9: _GFX9, 11: _GFX11, 12: _GFX12}
# The most that each counter counts. LLVM, AMDGPUBaseInfo.cpp (bits of the fields of S_WAITCNT and S_WAIT_*).
_MOST = {"vmcnt": 63, "vscnt": 63, "lgkmcnt": 63, "loadcnt": 63, "storecnt": 63, "dscnt": 63, "kmcnt": 31}
_MOST_OF = {9: _MOST | {"lgkmcnt": 15}, 11: _MOST, 12: _MOST}


def _modelled() -> dict[str, AmdArch]:
    """Return the arches of backends/rocm/arches whose [executors.emulated] names an instruction set."""
    found = {}
    for name, arch in load_arches(Path(__file__).parents[2]).items():
        row = arch.executors[EXECUTOR]
        if "lacks" not in row:
            family = int(row["isa"])
            found[name] = AmdArch(
                name=name,
                wave=arch.warp_size,
                planes=arch.registers,
                lds_bytes=arch.scratchpad_bytes,
                family=family,
                fnuz=any(kind.endswith("fnuz") for kind in arch.fp8),
                counters=_COUNTERS[family],
                most=_MOST_OF[family],
                same_as=str(row.get("same_as", "")),
            )
    return found


ARCHES = _modelled()

_TARGET = re.compile(r'^\s*\.amdgcn_target\s+"[^"]*--?(gfx\w+)(?::[^"]*)?"', re.MULTILINE)
_LABEL = re.compile(r"^([.\w$]+):$")
_LOC = re.compile(r"^\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
_DESCRIPTOR = re.compile(r"^\.amdhsa_(\w+)\s+(\S+)")
_MNEMONIC = re.compile(r"^[a-z][a-z0-9_]*$")

# Instructions whose operands are a little language of their own, kept as one string.
RAW = ("s_waitcnt", "s_delay_alu", "s_sendmsg", "s_wait_alu", "s_waitcnt_depctr", "s_setreg_imm32_b32", "s_getreg_b32",
       "s_setreg_b32")  # fmt: skip
# Modifiers without a value. LLVM, "Syntax of AMDGPU Instruction Modifiers".
FLAGS = frozenset(
    ["offen", "idxen", "glc", "slc", "dlc", "sc0", "sc1", "nt", "lds", "clamp", "gds", "tfe", "lwe", "scc"]
)
# Modifiers with a value.
VALUED = frozenset(
    [
        "offset",
        "offset0",
        "offset1",
        "op_sel",
        "op_sel_hi",
        "neg_lo",
        "neg_hi",
        "quad_perm",
        "row_shl",
        "row_shr",
        "row_ror",
        "row_mirror",
        "row_half_mirror",
        "row_bcast",
        "row_newbcast",
        "row_share",
        "row_xmask",
        "wave_shr",
        "wave_shl",
        "wave_ror",
        "wave_rol",
        "row_mask",
        "bank_mask",
        "bound_ctrl",
        "fi",
        "dpp8",
        "dst_sel",
        "dst_unused",
        "src0_sel",
        "src1_sel",
        "mul",
        "div",
        "bitop3",
        "cbsz",
        "abid",
        "blgp",
        "th",
        "scope",
        "index_key",
        "byte_sel",
    ]
)
# DPP controls that LLVM prints without a value.
BARE = frozenset({"row_mirror", "row_half_mirror"})


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction. `second` is the other half of a dual-issue pair (v_dual_… :: v_dual_…)."""

    place: Place
    mnemonic: str
    operands: tuple[str, ...]
    modifiers: dict[str, str]
    second: Instruction | None = None

    def number(self, modifier: str, default: int = 0) -> int:
        return int(self.modifiers[modifier], 0) if modifier in self.modifiers else default

    def numbers(self, modifier: str, default: list[int]) -> list[int]:
        if modifier not in self.modifiers:
            return default
        return [int(part, 0) for part in self.modifiers[modifier].strip("[]").split(",")]


@dataclass(frozen=True)
class KernargSlot:
    """A kernel argument in the metadata: bytes from the start of the kernarg segment, and kind."""

    offset: int
    size: int
    kind: str
    name: str = ""


@dataclass
class Assembly:
    arch: AmdArch
    name: str
    wave: int
    descriptor: dict[str, int]  # the .amdhsa_… values
    arguments: tuple[KernargSlot, ...]
    threads: int  # per work-group (.max_flat_workgroup_size): Triton's exact number
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label → index of the instruction after it

    @property
    def one_cache(self) -> bool:
        """Whether a work-group's waves share one vector cache, which takes their accesses in order.

        Source: LLVM's AMDGPUUsage, memory models of gfx90a and gfx942 (tgsplit) and gfx10 to gfx12 (CU mode)."""
        if self.arch.family == 9:
            return not self.descriptor.get("tg_split", 0)
        return not self.descriptor.get("workgroup_processor_mode", 1)


def parse(text: str, kernel: str | None = None) -> Assembly:
    """Parse one kernel's assembly. Raise WrongArch, TruncatedText, UnknownOperand or BadProgram with the line."""
    target = _TARGET.search(text)
    if target is None:
        raise BadProgram("no .amdgcn_target line: this is no amdgcn assembly, or its beginning is missing")
    if target[1] not in ARCHES:
        raise WrongArch(f"the text is for {target[1]}; modelled are {', '.join(ARCHES)}")
    arch = ARCHES[target[1]]
    name, descriptor = _descriptor(text, kernel)
    metadata = _metadata(text, name)
    for key, only in (("float_round_mode_32", 0), ("float_round_mode_16_64", 0), ("float_denorm_mode_16_64", 3),
                      ("float_denorm_mode_32", 3)):  # fmt: skip
        if descriptor.get(key, only) != only:
            raise BadProgram(f".amdhsa_{key} is {descriptor[key]}; modelled is {only} only")
    wave = 32 if descriptor.get("wavefront_size32") else 64
    if wave == 32 and arch.family == 9:
        raise WrongArch(f"{arch.name} has waves of 64 lanes only, and the text asks for 32")
    threads = re.search(r"\.max_flat_workgroup_size:\s+(\d+)", metadata)
    result = Assembly(arch, name, wave, descriptor, _arguments(metadata), int(threads[1]) if threads else wave)
    _body(text, result)
    return result


def _descriptor(text: str, kernel: str | None) -> tuple[str, dict[str, int]]:
    names = re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.MULTILINE)
    if not names:
        raise TruncatedText("no .amdhsa_kernel: the kernel's descriptor is missing")
    name = kernel or names[0]
    if name not in names:
        raise BadLaunch(f"no kernel {name!r} in the text; it has {', '.join(names)}")
    start = re.search(rf"^\s*\.amdhsa_kernel\s+{re.escape(name)}\s*$", text, re.MULTILINE)
    end = text.find(".end_amdhsa_kernel", start.start() if start else 0)
    if start is None or end < 0:
        raise TruncatedText(f"the descriptor of {name} has no end (.end_amdhsa_kernel)")
    values: dict[str, int] = {}
    for line in text[start.start() : end].splitlines():
        found = _DESCRIPTOR.match(line.strip())
        if found and found[1] != "kernel":
            try:
                values[found[1]] = int(found[2], 0)
            except ValueError:
                continue  # a symbol that the assembler would resolve; none that the model reads
    return name, values


def _metadata(text: str, name: str) -> str:
    start = text.find(".amdgpu_metadata")
    end = text.find(".end_amdgpu_metadata")
    if start < 0 or end < 0:
        raise TruncatedText("the text ends before its metadata does (.end_amdgpu_metadata)")
    kernels = re.split(r"^  - (?=\.)", text[start:end], flags=re.MULTILINE)[1:]
    for block in kernels:
        if re.search(rf"\.name:\s+'?{re.escape(name)}'?\s*$", block, re.MULTILINE):
            return block
    raise TruncatedText(f"the metadata has no entry for {name}")


def _arguments(metadata: str) -> tuple[KernargSlot, ...]:
    found = []
    listed = re.search(r"^(?:    )?\.args:[^\n]*\n((?:      .*\n)*)", metadata, re.MULTILINE)
    for block in re.split(r"^\s+- ", listed[1] if listed else "", flags=re.MULTILINE)[1:]:
        values = dict(re.findall(r"\.(\w+):\s+'?([^\s']+)'?", block))
        if "offset" in values and "value_kind" in values:
            kind = values["value_kind"]
            found.append(KernargSlot(int(values["offset"]), int(values["size"]), kind, values.get("name", "")))
    return tuple(found)


def _body(text: str, result: Assembly) -> None:
    files: dict[str, str] = {}
    source, inside, ended = "", False, False
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.split(";", 1)[0].strip()
        if line.startswith(".file"):
            found = _FILE.match(line)
            if found:
                files[found[1]] = found[2]
        if not inside:
            inside = line == result.name + ":"
            continue
        if not line:
            continue
        if line.startswith((".Lfunc_end", ".section", ".end_amdhsa_kernel")):
            ended = True
            break
        label = _LABEL.match(line)
        if label:
            result.labels[label[1]] = len(result.instructions)
        elif line.startswith(".loc"):
            found = _LOC.match(line)
            # Line 0 is the compiler's own code: the last real line is nearer than nothing.
            if found and found[2] != "0":
                source = f"{files.get(found[1], '?')}:{found[2]}:{found[3]}"
        elif not line.startswith("."):
            result.instructions.append(parse_instruction(line, number, source))
    if not inside:
        raise TruncatedText(f"no code for {result.name}")
    if not ended or not any(i.mnemonic == "s_endpgm" for i in result.instructions):
        raise TruncatedText(f"the code of {result.name} ends before an s_endpgm")
    for instruction in result.instructions:
        name = instruction.operands[0] if instruction.operands else ""
        if instruction.mnemonic.startswith(("s_branch", "s_cbranch")) and name not in result.labels:
            raise TruncatedText(f"no label {name} in the text", instruction.place)


def parse_instruction(text: str, line: int = 0, source: str = "") -> Instruction:
    """Parse a line of assembly without its comment. Raise UnknownOperand for an unknown modifier."""
    place = Place(line, text, source)
    if "::" in text:
        first, _, second = text.partition("::")
        other = _single(second.strip(), place)
        main = _single(first.strip(), place)
        return Instruction(place, main.mnemonic, main.operands, main.modifiers, other)
    return _single(text, place)


def _single(text: str, place: Place) -> Instruction:
    mnemonic, _, rest = text.partition(" ")
    if "\t" in mnemonic:
        mnemonic, _, rest = text.partition("\t")
    if not _MNEMONIC.match(mnemonic):
        raise BadProgram(f"{mnemonic!r} is no mnemonic", place)
    rest = rest.strip()
    if mnemonic in RAW:
        return Instruction(place, mnemonic, (rest,) if rest else (), {})
    operands: list[str] = []
    modifiers: dict[str, str] = {}
    for piece in split_outside(rest, ","):
        for index, word in enumerate(split_outside(piece, " ")):
            name, colon, value = word.partition(":")
            is_modifier = word in FLAGS or word in BARE or (bool(colon) and name in VALUED)
            if index == 0 and not is_modifier:
                operands.append(word)
            elif is_modifier:
                modifiers[name] = value or "1"
            else:
                raise UnknownOperand(f"modifier {word!r} is not known", place)
    return Instruction(place, mnemonic, tuple(operands), modifiers)


def split_outside(text: str, separator: str) -> list[str]:
    if "[" not in text and "(" not in text:
        return [part for part in map(str.strip, text.split(separator)) if part]
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == separator and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    parts.append(current.strip())
    return [part for part in parts if part]


_REGISTER = re.compile(r"(v|s|a|ttmp)(\d+)(?:\.([lh]))?")
_RANGE = re.compile(r"(v|s|a|ttmp)\[(\d+):(\d+)\]")
_INTEGER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)")
# Name → (first scalar register, how many).
_NAMED = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "exec": (EXEC, 2), "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1), "m0": (M0, 1), "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1), "xnack_mask": (104, 2),
}  # fmt: skip
# Inline constants that LLVM prints as floats; 0.15915494… is 1/(2π).
_FLOATS = ("0.5", "1.0", "2.0", "4.0", "0.15915494", "0.15915494309189532", "0.1592")


@dataclass(frozen=True)
class Operand:
    kind: str  # "v", "s", "literal", "null", "off", "scc"
    index: int = 0  # vector plane (accumulation registers from ACCUMULATION) or scalar register
    count: int = 1  # 32-bit registers
    value: int | float = 0  # of a literal; float for inline constants only
    half: int | None = None  # 0 or 1 for low or high 16 bits (v1.l, v1.h)
    negative: bool = False
    absolute: bool = False
    extend: bool = False

    @property
    def registers(self) -> tuple[int, ...]:
        """Unified numbers of its registers."""
        if self.kind == "v":
            return tuple(range(VECTOR + self.index, VECTOR + self.index + self.count))
        return tuple(range(self.index, self.index + self.count)) if self.kind == "s" else ()

    def bits(self, width: int, is_float: bool = False) -> int:
        """Return a literal as `width` bits (16, 32 or 64).

        A float constant has the width's format. A 32-bit literal of a 64-bit float is its upper half. Negative inline
        constants are sign-extended. Source: MI300 ISA reference, "Inline constants" and "Literal constants"."""
        if isinstance(self.value, float):
            code = {16: "<e", 32: "<f", 64: "<d"}[width]
            return int.from_bytes(struct.pack(code, self.value), "little")
        if width == 64 and is_float and not -16 <= self.value <= 64:
            return (self.value & 0xFFFFFFFF) << 32
        return self.value & ((1 << width) - 1)


@cache
def operand(text: str) -> Operand:
    """Parse one operand. Raises UnknownOperand."""
    original, negative, absolute, extend = text, False, False, False
    if text.startswith("-") and not re.match(r"-[\d.]", text):
        negative, text = True, text[1:]
    if text.startswith("neg("):
        negative, text = True, text[4:-1]
    if text.startswith("|") and text.endswith("|"):
        absolute, text = True, text[1:-1]
    elif text.startswith("abs("):
        absolute, text = True, text[4:-1]
    if text.startswith("sext("):
        extend, text = True, text[5:-1]
    found = _plain(text)
    if found is None:
        raise UnknownOperand(f"operand {original!r} is not known")
    if not (negative or absolute or extend):
        return found
    return Operand(found.kind, found.index, found.count, found.value, found.half, negative, absolute, extend)


def _plain(text: str) -> Operand | None:
    single = _REGISTER.fullmatch(text)
    if single:
        half = {None: None, "l": 0, "h": 1}[single[3]]
        return _register(single[1], int(single[2]), 1, half)
    several = _RANGE.fullmatch(text)
    if several:
        return _register(several[1], int(several[2]), int(several[3]) - int(several[2]) + 1, None)
    if text in _NAMED:
        return Operand("s", *_NAMED[text])
    if text in ("null", "off", "scc"):
        return Operand(text)
    if text.lstrip("-") in _FLOATS:
        value = 0.15915494309189532 if "0.159" in text else float(text)
        return Operand("literal", value=-abs(value) if text.startswith("-") else value)
    if _INTEGER.fullmatch(text):
        return Operand("literal", value=int(text, 0))
    return None


def _register(letter: str, index: int, count: int, half: int | None) -> Operand | None:
    limits = {"v": 256, "a": 256, "s": 106, "ttmp": 16}
    if index + count > limits[letter] or count < 1:
        return None
    if letter in "va":
        return Operand("v", index + (ACCUMULATION if letter == "a" else 0), count, half=half)
    return Operand("s", index + (TTMP if letter == "ttmp" else 0), count)
