"""Operands: from their text to registers and constants.

Source: LLVM, "Syntax of AMDGPU Instruction Operands"; AMD ISA references, "Scalar operands" and "Inline constants".
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cache

from portattn.backends.rocm.emulator.amdgpu.errors import UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.isa import ACCUMULATION, EXEC, M0, TTMP, VCC, VECTOR

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
    """One operand.

    kind      "v" (vector plane `index`; accumulation registers lie from ACCUMULATION), "s", "literal", "null", "off",
              "scc"
    count     how many 32-bit registers the text names
    value     of a literal: an integer, or a float (inline constants only)
    half      0 or 1 where the text names the low or high 16 bits (v1.l, v1.h)
    negative, absolute, extend   source modifiers -x, |x|, sext(x)
    """

    kind: str
    index: int = 0
    count: int = 1
    value: int | float = 0
    half: int | None = None
    negative: bool = False
    absolute: bool = False
    extend: bool = False

    @property
    def registers(self) -> tuple[int, ...]:
        """Unified numbers of the registers that it names."""
        if self.kind == "v":
            return tuple(range(VECTOR + self.index, VECTOR + self.index + self.count))
        return tuple(range(self.index, self.index + self.count)) if self.kind == "s" else ()

    def bits(self, width: int, is_float: bool = False) -> int:
        """A literal as `width` bits (16, 32 or 64).

        A float constant has the width's format. A 32-bit literal of a 64-bit float is its upper half. Negative inline
        constants are sign-extended. Source: MI300 ISA reference, "Inline constants" and "Literal constants".
        """
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
