"""The three instructions of a float32 division: each as AMD's documents define it (isa_masks.py says where they cannot
be meant), and the sequence that LLVM makes of them, whose quotient is correctly rounded."""

from __future__ import annotations

import random
from typing import Any

import asmkit
import isa_masks
import isa_numbers as number
import isa_run
import numpy as np
import pytest
from isa_numbers import F32, M32
from isa_vector import agrees

ARCHES = list(isa_run.USED)
DIVIDES = isa_run.used(r"v_div_(scale|fmas|fixup)_f32")
SEEDS = range(6)


def operands(arch: str, seed: str, count: int) -> tuple[list[list[int]], dict[int, Any]]:
    draw = random.Random(seed)
    values = [isa_run.column("f32", asmkit.lanes(arch), draw) for _ in range(count)]
    return values, {16 + n: np.array(column, np.uint32) for n, column in enumerate(values)}


def mask_at(arch: str, at: int) -> str:
    wide = asmkit.lanes(arch) == 64
    return ("vcc" if wide else "vcc_lo") if at == 106 else (f"s[{at}:{at + 1}]" if wide else f"s{at}")


def test_every_arch_divides() -> None:
    assert len(DIVIDES) == 3 * len(ARCHES)


@pytest.mark.parametrize("arch", ARCHES)
def test_scale(arch: str) -> None:
    for seed in SEEDS:
        (denominator, numerator), vectors = operands(arch, f"scale {seed}", 2)
        for source in (16, 17):
            text = f"v_div_scale_f32 v0, {mask_at(arch, 8)}, v{source}, v16, v17"
            machine = asmkit.execute(arch, [text], vectors)
            found, flags = isa_run.result(machine, "f32"), asmkit.mask_of(machine, 8)
            for lane, (d, n) in enumerate(zip(denominator, numerator, strict=True)):
                value, flag = isa_masks.div_scale_f32((d, n)[source - 16], d, n)
                said = f"{text}: denominator {d:#x}, numerator {n:#x} gives {found[lane]:#x}"
                assert agrees("f32", found[lane], value), said
                assert flags >> lane & 1 == flag, said


@pytest.mark.parametrize("arch", ARCHES)
def test_multiply_add(arch: str) -> None:
    for seed in SEEDS:
        values, vectors = operands(arch, f"fmas {seed}", 3)
        chosen = random.Random(seed).getrandbits(asmkit.lanes(arch))
        text = "v_div_fmas_f32 v0, v16, v17, v18"
        machine = asmkit.execute(arch, [text], vectors, {106: chosen & M32, 107: chosen >> 32})
        found = isa_run.result(machine, "f32")
        for lane, sources in enumerate(zip(*values, strict=True)):
            expected = isa_masks.div_fmas_f32(*sources, chosen >> lane & 1)
            assert agrees("f32", found[lane], expected), [hex(x) for x in sources]


@pytest.mark.parametrize("arch", ARCHES)
def test_fixup(arch: str) -> None:
    for seed in SEEDS:
        values, vectors = operands(arch, f"fixup {seed}", 3)
        machine = asmkit.execute(arch, ["v_div_fixup_f32 v0, v16, v17, v18"], vectors)
        found = isa_run.result(machine, "f32")
        for lane, sources in enumerate(zip(*values, strict=True)):
            special = any(number.is_nan(F32, x) or number.is_infinite(F32, x) for x in sources[1:])
            if number.is_nan(F32, sources[0]) and not special:
                continue  # an overflow on the way: the sequence below says what is right
            expected = isa_masks.div_fixup_f32(*sources)
            assert agrees("f32", found[lane], expected), [hex(x) for x in sources]


@pytest.mark.parametrize("arch", ARCHES)
def test_quotients_are_rounded_correctly(arch: str) -> None:
    flag, vcc = mask_at(arch, 4), mask_at(arch, 106)
    body = [f"v_div_scale_f32 v2, {flag}, v16, v16, v17", "v_rcp_f32_e32 v3, v2",
            f"v_div_scale_f32 v5, {vcc}, v17, v16, v17", "v_fma_f32 v4, -v2, v3, 1.0", "v_fma_f32 v3, v4, v3, v3",
            "v_mul_f32_e32 v4, v5, v3", "v_fma_f32 v6, -v2, v4, v5", "v_fma_f32 v4, v6, v3, v4",
            "v_fma_f32 v2, -v2, v4, v5", "v_div_fmas_f32 v2, v2, v3, v4",
            "v_div_fixup_f32 v7, v2, v16, v17"]  # fmt: skip
    lanes = asmkit.lanes(arch)
    pairs = [(0xFF7FFFFF, 0x4B000000)]  # once off by one: the inverse of the denominator is denormal
    draw = random.Random(arch)
    for n in range(40 * lanes):
        d, x = isa_run.column("f32", 2, draw)
        if n % 4 == 0:  # large denominators
            d = d & 0x80FFFFFF | (0x7E000000 if n % 8 else 0x7F000000 & ~0x00800000)
        if n % 4 == 1:  # quotients near the smallest normal number
            d, x = d & 0x807FFFFF | 0x5F000000, x & 0x807FFFFF | draw.randrange(0x3B, 0x45) << 23
        pairs.append((d, x))
    for start in range(0, len(pairs) - lanes + 1, lanes):
        some = pairs[start : start + lanes]
        vectors = {16 + n: np.array([pair[n] for pair in some], np.uint32) for n in range(2)}
        found = isa_run.result(asmkit.execute(arch, body, vectors), "f32", 7)
        for lane, (d, x) in enumerate(some):
            expected = number.divide(F32, x, d)
            # Two NaN operands, 0/0: a quiet NaN, of whatever payload.
            assert agrees("f32", found[lane], expected), f"{arch}: {x:#x} / {d:#x} gives {found[lane]:#x}"


def test_an_overflow_before_the_scale_stays_infinite() -> None:
    """V_DIV_FMAS: 2^100 · 2^100 + 1 is infinite as a float32, whatever it is scaled by."""
    for arch in ARCHES:
        vectors = {n: asmkit.bits([2.0**100] * asmkit.lanes(arch), np.float32) for n in (16, 17)}
        machine = asmkit.execute(arch, ["v_div_fmas_f32 v0, v16, v17, 1.0"], vectors, {106: M32, 107: M32})
        assert set(isa_run.result(machine, "f32")) == {F32.infinity}
