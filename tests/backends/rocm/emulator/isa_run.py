"""Operands for the ISA tests, and instructions run on them in the model."""

import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import coverage_data
import isa_numbers as number
import numpy as np
from isa_numbers import BF16, F16, F32, M32

from portattn.backends.rocm.emulator.amdgpu.assembly import ARCHES

USED: dict[str, list[str]] = coverage_data.data()["used"]
CHECKED: set[tuple[str, str]] = set()  # (arch, mnemonic) that the ISA tests compare with a definition


def checked(cases: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Note what a test of the ISA oracle runs with."""
    found = list(cases)
    CHECKED.update(found)
    return found


def used(pattern: str, unused: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """(arch, mnemonic) that kernels use and that match, and others by arch ("" is all); whoever asks tests them."""
    more = {arch: f"{(unused or {}).get(arch, '')} {(unused or {}).get('', '')}".split() for arch in USED}
    found = {
        arch: [*(name for name in names if re.fullmatch(pattern, name)), *more[arch]] for arch, names in USED.items()
    }
    return checked((arch, name) for arch, names in found.items() for name in dict.fromkeys(names))


# What instructions treat differently: see edges().
_INTEGERS = (0, 1, 2, 3, 15, 16, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFFFF, 0x8000, 0xFFFFFF, 0x800000, 0x1000000,
             0x7FFFFFFF, 0x80000000, 0x80000001, M32, 0xAAAAAAAA, 0x55555555, 0xFFFFFFF0)  # fmt: skip


def edges(kind: str) -> list[int]:
    """Bit patterns of a kind that instructions treat differently from others."""
    if kind[0] == "u":
        width = int(kind[1:])
        wide = [n << 32 | m for n, m in zip(_INTEGERS, reversed(_INTEGERS), strict=True)] if width == 64 else []
        return [n & ((1 << width) - 1) for n in (*_INTEGERS, *wide)]
    f = {"f16": F16, "bf16": BF16, "f32": F32}[kind]
    one = f.bias << f.mantissa
    positive = [
        0, 1, f.quiet, (1 << f.mantissa) - 1, 1 << f.mantissa,  # zero, denormals, the smallest normal number
        one - 1, one, one + 1, one + f.quiet, f.infinity - 1, f.infinity,
        f.infinity | 1, f.infinity | f.quiet, f.infinity | f.quiet | 5,  # a signalling NaN, two quiet ones
    ]  # fmt: skip
    if f is F32:  # around the ends of integers, float16 and bfloat16, and halves of their steps
        positive += [0x4EFFFFFF, 0x4F000000, 0x4F7FFFFF, 0x4F800000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x33000000,
                     0x33000001, 0x38801000, 0x38803000, 0x3F808000, 0x3F818000, 0x7F7F8000, 0x7F7F7FFF, 0x7FC01234,
                     0x7FA00000, 0x4B000000, 0x7E800001, 0x7F000001, 0x2F800000, 0x42FC0000, 0x43000000]  # fmt: skip
    return [sign | n for n in positive for sign in (0, f.sign)]


def column(kind: str, count: int, random_: random.Random) -> list[int]:
    """`count` values of a kind: edges, random bits, and for floats numbers near 1."""
    width = int(kind.lstrip("bfu"))
    special = edges(kind)

    def one() -> int:
        draw = random_.random()
        if draw < 0.45:
            return random_.choice(special)
        bits = random_.getrandbits(width)
        if kind == "f32" and draw < 0.8:
            return bits & 0x807FFFFF | random_.randrange(110, 144) << 23
        if kind[0] == "u" and draw < 0.6:
            return bits >> random_.randrange(width)
        return bits

    return [one() for _ in range(count)]


def registers(kind: str) -> int:
    return 2 if kind.endswith("64") or kind == "f32x2" else 1


def words(kind: str, values: Sequence[int], junk: int = 0) -> list[np.ndarray[Any, Any]]:
    """The registers that hold a column; `junk` in the upper half of 16-bit values."""
    high = junk << 16 if kind.endswith("16") else 0
    return [
        np.array([(value >> 32 * n & M32) | high for value in values], np.uint32) for n in range(registers(kind))
    ]  # fmt: skip


def named(first: int, count: int, letter: str = "v") -> str:
    return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"


def result(machine: Any, kind: str, plane: int = 0) -> list[int]:
    """What a register of the first wave holds, as integers of a kind's width."""
    found = machine.state.V[plane, 0].astype(object)
    if registers(kind) == 2:
        found = found + machine.state.V[plane + 1, 0].astype(object) * 2**32
    mask = 0xFFFF if kind in ("u16", "f16", "bf16") else (1 << 32 * registers(kind)) - 1
    return [int(x) & mask for x in found]


def family(arch: str) -> int:
    return ARCHES[arch].family


def changed(kind: str, value: int, absolute: bool, negative: bool) -> int:
    """|x| and −x of a source: its sign bit, NaN too."""
    f = {"f16": F16, "f32": F32}[kind]
    value = number.magnitude(f, value) if absolute else value
    return value ^ f.sign if negative else value
