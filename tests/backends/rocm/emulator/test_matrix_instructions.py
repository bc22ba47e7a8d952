"""Lane layouts of the matrix instructions, by products of basis matrices; and their numbers, in every type.

The layout is written here as AMD's matrix instruction calculator describes it, element by element,
    and shares nothing with the
model's arrays: A·B with A = e_m e_kᵀ and B = e_k e_nᵀ is one 1 at (m, n), which must come out in one lane and register.
"""

from typing import Any

import asmkit
import numpy as np
import pytest

from portattn.backends.rocm.emulator.amdgpu import UnknownOperand

# (arch, mnemonic, size, K, element, registers of A, result type)
MFMA = [
    ("gfx90a", "v_mfma_f32_32x32x8f16", 32, 8, "f16", 2), ("gfx90a", "v_mfma_f32_16x16x16f16", 16, 16, "f16", 2),
    ("gfx90a", "v_mfma_f32_32x32x8bf16_1k", 32, 8, "bf16", 2), ("gfx90a", "v_mfma_f32_16x16x16bf16_1k", 16, 16,
    "bf16", 2),
    ("gfx90a", "v_mfma_f32_32x32x2f32", 32, 2, "f32", 1), ("gfx90a", "v_mfma_f32_16x16x4f32", 16, 4, "f32", 1),
    ("gfx90a", "v_mfma_i32_32x32x8i8", 32, 8, "i8", 1), ("gfx90a", "v_mfma_i32_16x16x16i8", 16, 16, "i8", 1),
    ("gfx90a", "v_mfma_f64_16x16x4f64", 16, 4, "f64", 2),
    ("gfx942", "v_mfma_f32_32x32x8_f16", 32, 8, "f16", 2), ("gfx942", "v_mfma_f32_16x16x16_bf16", 16, 16, "bf16", 2),
    ("gfx942", "v_mfma_f32_32x32x8_bf16", 32, 8, "bf16", 2), ("gfx942", "v_mfma_f32_16x16x16_f16", 16, 16, "f16", 2),
    ("gfx942", "v_mfma_f32_32x32x2_f32", 32, 2, "f32", 1), ("gfx942", "v_mfma_f32_16x16x4_f32", 16, 4, "f32", 1),
    ("gfx942", "v_mfma_f32_32x32x4_xf32", 32, 4, "f32", 2), ("gfx942", "v_mfma_f32_16x16x8_xf32", 16, 8, "f32", 2),
    ("gfx942", "v_mfma_i32_32x32x16_i8", 32, 16, "i8", 2), ("gfx942", "v_mfma_i32_16x16x32_i8", 16, 32, "i8", 2),
    ("gfx942", "v_mfma_f32_32x32x16_fp8_fp8", 32, 16, "fp8", 2), ("gfx942", "v_mfma_f32_16x16x32_fp8_fp8", 16, 32,
    "fp8", 2),
    ("gfx942", "v_mfma_f32_32x32x16_bf8_bf8", 32, 16, "bf8", 2), ("gfx942", "v_mfma_f32_16x16x32_bf8_bf8", 16, 32,
    "bf8", 2),
    ("gfx942", "v_mfma_f64_16x16x4_f64", 16, 4, "f64", 2),
    ("gfx950", "v_mfma_f32_32x32x16_f16", 32, 16, "f16", 4), ("gfx950", "v_mfma_f32_16x16x32_f16", 16, 32, "f16", 4),
    ("gfx950", "v_mfma_f32_32x32x16_bf16", 32, 16, "bf16", 4), ("gfx950", "v_mfma_f32_16x16x32_bf16", 16, 32, "bf16",
    4),
    ("gfx950", "v_mfma_i32_32x32x32_i8", 32, 32, "i8", 4), ("gfx950", "v_mfma_i32_16x16x64_i8", 16, 64, "i8", 4),
    ("gfx950", "v_mfma_f32_32x32x64_f8f6f4", 32, 64, "fp8", 8), ("gfx950", "v_mfma_f32_16x16x128_f8f6f4", 16, 128,
    "fp8", 8),
    ("gfx950", "v_mfma_f32_16x16x16_bf16", 16, 16, "bf16", 2), ("gfx950", "v_mfma_f32_16x16x4_f32", 16, 4, "f32", 1),
    ("gfx950", "v_mfma_f32_32x32x2_f32", 32, 2, "f32", 1),
    ("gfx950", "v_mfma_f32_16x16x32_fp8_fp8", 16, 32, "fp8", 2), ("gfx950", "v_mfma_f32_32x32x16_fp8_fp8", 32, 16,
    "fp8", 2),
]  # fmt: skip
WMMA = [
    ("gfx1100", "v_wmma_f32_16x16x16_f16", "f16", 8), ("gfx1100", "v_wmma_f32_16x16x16_bf16", "bf16", 8),
    ("gfx1100", "v_wmma_i32_16x16x16_iu8", "i8", 4),
    ("gfx1201", "v_wmma_f32_16x16x16_f16", "f16", 4), ("gfx1201", "v_wmma_f32_16x16x16_bf16", "bf16", 4),
    ("gfx1201", "v_wmma_i32_16x16x16_iu8", "i8", 2), ("gfx1201", "v_wmma_f32_16x16x16_fp8_fp8", "fp8", 2),
    ("gfx1201", "v_wmma_f32_16x16x16_bf8_bf8", "bf8", 2),
]  # fmt: skip
BYTES = {"f16": 2, "bf16": 2, "f32": 4, "i8": 1, "u8": 1, "fp8": 1, "bf8": 1, "f64": 8}


def one(kind: str, arch: str) -> int:
    """The bits of 1 in a format."""
    fnuz = arch == "gfx942"
    return {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000, "f64": 0x3FF0000000000000, "i8": 1,
            "fp8": 0x40 if fnuz else 0x38, "bf8": 0x40 if fnuz else 0x3C}[kind]  # fmt: skip


class Operand:
    """Registers of A or B: [registers, lanes] uint32, set element by element."""

    def __init__(self, registers: int, lanes: int, kind: str) -> None:
        self.words = np.zeros((registers, lanes), np.uint32)
        self.kind, self.size = kind, BYTES[kind]

    def set(self, lane: int, element: int, code: int) -> None:
        for byte, value in enumerate(code.to_bytes(self.size, "little")):
            at = element * self.size + byte
            self.words[at // 4, lane] |= np.uint32(value << 8 * (at % 4))


def mfma_source(size: int, depth: int, m: int, k: int) -> tuple[int, int]:
    """Lane and element of A[m, k] (and of B[k, m])."""
    per_lane = depth * size // 64
    return m + size * (k // per_lane), k % per_lane


def mfma_result(size: int, kind: str, i: int, j: int) -> tuple[int, int]:
    """Lane and register (pair) of D[i, j]."""
    if kind == "f64":
        return j + 16 * (i % 4), i // 4
    if size == 32:
        return j + 32 * (i // 4 % 2), 4 * (i // 8) + i % 4
    return j + 16 * (i // 4), i % 4


def wmma_sources(arch: str, m: int, k: int) -> list[tuple[int, int]]:
    """Lanes and elements of A[m, k] (and of B[k, m]); gfx11 has them twice."""
    return [(m, k), (m + 16, k)] if arch == "gfx1100" else [(m + 16 * (k // 8), k % 8)]


def wmma_result(arch: str, i: int, j: int) -> tuple[int, int]:
    """Lane and register of D[i, j]."""
    return (j + 16 * (i % 2), i // 2) if arch == "gfx1100" else (j + 16 * (i // 8), i % 8)


def product(arch: str, mnemonic: str, a: Operand, b: Operand, results: int, modifiers: str = "") -> Any:
    count = len(a.words)
    vectors = {16 + n: a.words[n] for n in range(count)} | {32 + n: b.words[n] for n in range(count)}
    a_text, b_text = (f"v{r}" if count == 1 else f"v[{r}:{r + count - 1}]" for r in (16, 32))
    machine = asmkit.execute(arch, [f"{mnemonic} v[64:{63 + results}], {a_text}, {b_text}, 0{modifiers}"], vectors)
    return machine.state.V[64 : 64 + results, 0]


@pytest.mark.parametrize(("arch", "mnemonic", "size", "depth", "kind", "registers"), MFMA, ids=lambda x: str(x))
def test_mfma_layout(arch: str, mnemonic: str, size: int, depth: int, kind: str, registers: int) -> None:
    rng = np.random.default_rng(size * depth)
    words = 2 if kind == "f64" else 1
    results = size * size // 64 * words
    picks = {
        (int(m), int(n), int(k))
        for m, n, k in zip(*(rng.integers(0, top, 10) for top in (size, size, depth)), strict=True)
    }
    for m, n, k in sorted(picks):
        a, b = Operand(registers, 64, kind), Operand(registers, 64, kind)
        a.set(*mfma_source(size, depth, m, k), one(kind, arch))
        b.set(*mfma_source(size, depth, n, k), one(kind, arch))
        found = product(arch, mnemonic, a, b, results)
        lane, register = mfma_result(size, kind, m, n)
        expected = np.zeros((results, 64), np.uint32)
        code = {"f64": 0x3FF00000, "i8": 1}.get(kind, 0x3F800000)
        expected[register * words + words - 1, lane] = code
        np.testing.assert_array_equal(found, expected, f"A[{m},{k}] · B[{k},{n}]")


@pytest.mark.parametrize(("arch", "mnemonic", "kind", "registers"), WMMA, ids=lambda x: str(x))
def test_wmma_layout(arch: str, mnemonic: str, kind: str, registers: int) -> None:
    rng = np.random.default_rng(registers)
    for m, n, k in rng.integers(0, 16, (12, 3)):
        a, b = Operand(registers, 32, kind), Operand(registers, 32, kind)
        for operand, index in ((a, m), (b, n)):
            for place in wmma_sources(arch, int(index), int(k)):
                operand.set(*place, one(kind, arch))
        found = product(arch, mnemonic, a, b, 8, " neg_lo:[1,1,0]" if kind == "i8" else "")
        lane, register = wmma_result(arch, m, n)
        expected = np.zeros((8, 32), np.uint32)
        expected[register, lane] = 1 if kind == "i8" else 0x3F800000
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("mnemonic", ["v_mfma_f32_32x32x8_f16", "v_mfma_f32_16x16x16_bf16", "v_mfma_i32_32x32x16_i8"])
def test_numbers_and_addend(mnemonic: str) -> None:
    """A random product plus C, against float64; C is read from accumulation registers and D overwrites it."""
    arch, mnemonic, size, depth, kind, registers = next(
        case for case in MFMA if case[1] == mnemonic and case[0] == "gfx942"
    )
    rng = np.random.default_rng(3)
    values = [rng.integers(-7, 8, (size, depth)) for _ in range(2)]
    addend = rng.integers(-100, 100, (size, size))
    operands = [Operand(registers, 64, kind) for _ in range(2)]
    for operand, matrix in zip(operands, values, strict=True):
        for m in range(size):
            for k in range(depth):
                code = {"f16": lambda x: int(np.float16(x).view(np.uint16)), "i8": lambda x: int(x) & 255,
                        "bf16": lambda x: int(np.float32(x).view(np.uint32)) >> 16}[kind](matrix[m, k])  # fmt: skip
                operand.set(*mfma_source(size, depth, m, k), code)
    results, dtype = size * size // 64, np.int32 if kind == "i8" else np.float32
    c = np.zeros((results, 64), dtype)
    for i in range(size):
        for j in range(size):
            lane, register = mfma_result(size, kind, i, j)
            c[register, lane] = addend[i, j]
    vectors = {16 + n: operands[0].words[n] for n in range(registers)} | {
        32 + n: operands[1].words[n] for n in range(registers)
    }
    vectors |= {256 + r: c[r] for r in range(results)}
    a, b = f"v[16:{15 + registers}]", f"v[32:{31 + registers}]"
    machine = asmkit.execute(arch, [f"{mnemonic} a[0:{results - 1}], {a}, {b}, a[0:{results - 1}]"], vectors)
    expected = values[0] @ values[1].T + addend
    found = machine.state.V[256 : 256 + results, 0].view(dtype)
    for i in range(size):
        for j in range(size):
            lane, register = mfma_result(size, kind, i, j)
            assert found[register, lane] == expected[i, j]


def test_every_fp8_code_of_both_kinds() -> None:
    """Values of the 256 codes by the formats' definitions."""
    for fnuz in (False, True):
        for kind, mantissa, bias in (("fp8", 3, 7), ("bf8", 2, 15)):
            arch = "gfx942" if fnuz else "gfx950"
            codes = np.arange(64, dtype=np.uint32)
            for base in (0, 64, 128, 192):
                machine = asmkit.execute(arch, [f"v_cvt_pk_f32_{kind}_e32 v[2:3], v1"], {1: codes + np.uint32(base)})
                for lane in range(64):
                    code = base + lane
                    value = float(machine.state.V[2, 0, lane].view(np.float32))
                    exponent, fraction = (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
                    scale = bias + fnuz
                    size = (fraction / 2**mantissa if exponent == 0 else 1 + fraction / 2**mantissa) * 2.0 ** (
                        max(exponent, 1) - scale
                    )
                    top = exponent == (1 << (7 - mantissa)) - 1
                    if (fnuz and code == 128) or (not fnuz and kind == "fp8" and code & 127 == 127):
                        assert np.isnan(value)
                    elif not fnuz and kind == "bf8" and top:
                        assert np.isnan(value) if fraction else np.isinf(value)
                    else:
                        assert value == (-size if code & 128 else size), (kind, fnuz, code)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_to_fp8_rounds_to_the_nearest_even(arch: str, kind: str) -> None:
    """Every code converts back to itself, midpoints go to the even code, and what is beyond follows the mode."""
    fnuz = arch == "gfx942"
    codes = np.arange(1, 64, dtype=np.uint32)
    machine = asmkit.execute(
        arch, [f"v_cvt_pk_f32_{kind}_e32 v[2:3], v1"], {1: np.concatenate([[0], codes]).astype(np.uint32)}
    )
    values = machine.state.V[2, 0].view(np.float32)
    middle = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    middle = np.append(middle, middle[-1])
    body = [f"v_cvt_pk_{kind}_f32 v4, v2, v3"]
    machine = asmkit.execute(arch, body, {2: values, 3: middle, 4: np.full(64, 0xABCD0000, np.uint32)})
    found = machine.state.V[4, 0]
    np.testing.assert_array_equal(found & 0xFF, np.arange(64))
    np.testing.assert_array_equal((found >> 8 & 0xFF)[:63], np.array([c if c % 2 == 0 else c + 1 for c in range(63)]))
    np.testing.assert_array_equal(found >> 16, 0xABCD)
    large = np.full(64, 1e9, np.float32)
    plain = asmkit.execute(arch, body, {2: large, 3: -large}).state.V[4, 0, 0] & 0xFFFF
    clamped = asmkit.execute(arch, ["s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1", *body], {2: large, 3: -large})
    top = {("fp8", True): 0x7F, ("bf8", True): 0x7F, ("fp8", False): 0x7E, ("bf8", False): 0x7B}[kind, fnuz]
    assert int(clamped.state.V[4, 0, 0]) & 0xFFFF == top | (top | 0x80) << 8
    assert int(plain) == {("fp8", False): 0xFF7F, ("bf8", False): 0xFC7C}.get((kind, fnuz), 0x8080)


def test_wmma_of_gfx11_needs_its_sources_twice() -> None:
    a = Operand(8, 32, "f16")
    a.set(0, 0, 0x3C00)
    with pytest.raises(UnknownOperand, match="repeat lanes 0 to 15"):
        product("gfx1100", "v_wmma_f32_16x16x16_f16", a, a, 8)
