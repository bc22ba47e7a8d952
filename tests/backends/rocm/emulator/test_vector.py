"""Vector instructions against definitions in Python's own integers, fractions and numpy's scalar types
(vector_definitions.py), lane by lane."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import asmkit
import numpy as np
import pytest
from vector_definitions import (
    FLOAT,
    GFX9_ONLY,
    GFX11_ONLY,
    INTEGER,
    M32,
    exact_fma,
    float_columns,
    integer_inputs,
    same_floats,
    signed,
    unary_to_ternary,
)

INTEGER_CASES = (
    [("gfx942", name, f) for name, f in (INTEGER | GFX9_ONLY).items()]
    + [("gfx1100", name, f) for name, f in (INTEGER | GFX11_ONLY).items()]
)  # fmt: skip


@pytest.mark.parametrize(("arch", "name", "function"), INTEGER_CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_integer(arch: str, name: str, function: Callable[..., int]) -> None:
    count, lanes = unary_to_ternary(name, function), asmkit.lanes(arch)
    for seed in range(3):
        columns = integer_inputs(count, lanes, seed)
        sources = ", ".join(f"v{i + 1}" for i in range(count))
        machine = asmkit.execute(arch, [f"{name} v0, {sources}"], dict(enumerate(columns, 1)))
        expected = [function(*(int(c[lane]) for c in columns)) & M32 for lane in range(lanes)]
        np.testing.assert_array_equal(machine.state.V[0, 0], np.array(expected, np.uint32))


@pytest.mark.parametrize("name", FLOAT)
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_float32(arch: str, name: str) -> None:
    function, lanes = FLOAT[name], asmkit.lanes(arch)
    count = (
        2 if function in (np.fmax, np.fmin) else 1 if isinstance(function, np.ufunc) else function.__code__.co_argcount
    )
    for seed in range(3):
        columns = float_columns(count, lanes, seed)
        sources = ", ".join(f"v{i + 1}" for i in range(count))
        machine = asmkit.execute(arch, [f"{name} v0, {sources}"], dict(enumerate(columns, 1)))
        with np.errstate(all="ignore"):
            expected = np.array([function(*(c[lane] for c in columns)) for lane in range(lanes)], np.float32)
        same_floats(machine.state.V[0, 0].view(np.float32), expected)


def test_fma_rounds_once_where_two_roundings_differ() -> None:
    """a·b + c is a hair above a tie of float32: rounding to float64 first would hide the hair."""
    a = np.float32(1 + 2**-12)
    b = np.float32(1 + 2**-12)  # a·b = 1 + 2^-11 + 2^-24: a tie between two float32
    c = np.float32(2.0**-100)
    vectors = {n: np.full(64, v, np.float32) for n, v in ((1, a), (2, b), (3, c))}
    machine = asmkit.execute("gfx942", ["v_fma_f32 v0, v1, v2, v3", "v_mad_f32 v4, v1, v2, v3"], vectors)
    result = machine.state.V[0, 0, 0].view(np.float32)
    assert result == np.float32(1 + 2**-11 + 2**-23)
    assert result != np.float32(np.float64(a) * np.float64(b) + np.float64(c))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_fma_of_other_widths(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(64).astype(dtype) for _ in range(3))
    if dtype == np.float16:
        vectors = {n + 1: v.view(np.uint16).astype(np.uint32) for n, v in enumerate((a, b, c))}
        machine = asmkit.execute("gfx942", ["v_fma_f16 v0, v1, v2, v3"], vectors)
        ours = (machine.state.V[0, 0] & 0xFFFF).astype(np.uint16).view(np.float16)
    else:
        vectors = {}
        for n, v in enumerate((a, b, c)):
            vectors[2 * n + 2] = v.view(np.uint32)[0::2]
            vectors[2 * n + 3] = v.view(np.uint32)[1::2]
        machine = asmkit.execute("gfx942", ["v_fma_f64 v[0:1], v[2:3], v[4:5], v[6:7]"], vectors)
        ours = machine.state.pair(0)[0].view(np.float64)
    expected = np.array([exact_fma(x, y, z, dtype) for x, y, z in zip(a, b, c, strict=True)], dtype)
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v_add_f32_e64 v0, |v1|, 1.0", lambda a, b: np.abs(a) + np.float32(1)),
        ("v_add_f32_e64 v0, -v1, v2", lambda a, b: -a + b),
        ("v_mul_f32_e64 v0, -|v1|, v2", lambda a, b: -np.abs(a) * b),
        ("v_add_f32_e64 v0, v1, v2 clamp", lambda a, b: np.clip(np.nan_to_num(a + b, nan=0), 0, 1)),
        ("v_add_f32_e64 v0, v1, v2 mul:2", lambda a, b: (a + b) * 2),
        ("v_add_f32_e64 v0, v1, v2 div:2", lambda a, b: (a + b) / 2),
        ("v_fmac_f32_e32 v3, v1, v2", None),
        ("v_mul_f32_e32 v0, 0x3fb8aa3b, v1", lambda a, b: np.uint32(0x3FB8AA3B).view(np.float32) * a),
        ("v_mul_f32_e32 v0, 0.5, v1", lambda a, b: np.float32(0.5) * a),
        ("v_mul_f32_e32 v0, s5, v1", lambda a, b: np.float32(2.5) * a),
    ],
)
def test_modifiers_and_constants(text: str, expected: Any) -> None:
    a, b = float_columns(2, 64, 3)
    c = np.linspace(-2, 2, 64, dtype=np.float32)
    machine = asmkit.execute("gfx942", [text], {1: a, 2: b, 3: c}, {5: asmkit.bits(2.5, np.float32)})
    with np.errstate(all="ignore"):
        if expected is None:
            result = np.array([exact_fma(x, y, z, np.float32) for x, y, z in zip(a, b, c, strict=True)], np.float32)
            same_floats(machine.state.V[3, 0].view(np.float32), result)
        else:
            same_floats(machine.state.V[0, 0].view(np.float32), expected(a, b).astype(np.float32))


def test_saturating_add_and_subtract() -> None:
    a, b = integer_inputs(2, 64, 0)
    machine = asmkit.execute(
        "gfx942", ["v_sub_u32_e64 v0, v1, v2 clamp", "v_add_u32_e64 v3, v1, v2 clamp"], {1: a, 2: b}
    )
    wide = a.astype(np.int64), b.astype(np.int64)
    np.testing.assert_array_equal(machine.state.V[0, 0], np.clip(wide[0] - wide[1], 0, M32).astype(np.uint32))
    np.testing.assert_array_equal(machine.state.V[3, 0], np.clip(wide[0] + wide[1], 0, M32).astype(np.uint32))


def test_lanes_that_are_off_keep_their_value() -> None:
    a, b = integer_inputs(2, 64, 4)
    mask = 0xF0F0_0000_FFFF_00FF
    machine = asmkit.execute("gfx942", ["v_add_u32_e32 v0, v1, v2"], {0: a, 1: a, 2: b}, exec_mask=mask)
    for lane in range(64):
        expected = (int(a[lane]) + int(b[lane])) & M32 if mask >> lane & 1 else int(a[lane])
        assert int(machine.state.V[0, 0, lane]) == expected


@pytest.mark.parametrize("predicate", ["lt", "eq", "le", "gt", "ne", "ge"])
@pytest.mark.parametrize("kind", ["i32", "u32", "i16", "u16", "u64", "i64"])
def test_integer_comparisons(predicate: str, kind: str) -> None:
    width, lanes = int(kind[1:]), 64
    a, b = integer_inputs(2, lanes, 5)
    c, d = integer_inputs(2, lanes, 6)
    b[::3] = a[::3]
    d[::3] = c[::3]
    registers = "v[2:3], v[4:5]" if width == 64 else "v2, v4"
    machine = asmkit.execute("gfx942", [f"v_cmp_{predicate}_{kind}_e64 s[8:9], {registers}"], {2: a, 3: c, 4: b, 5: d})
    compare = {"lt": "__lt__", "eq": "__eq__", "le": "__le__", "gt": "__gt__", "ne": "__ne__", "ge": "__ge__"}[
        predicate
    ]
    expected = 0
    for lane in range(lanes):
        x, y = int(a[lane]), int(b[lane])
        if width == 64:
            x, y = x | int(c[lane]) << 32, y | int(d[lane]) << 32
        x, y = x & (1 << width) - 1, y & (1 << width) - 1
        if kind[0] == "i":
            x, y = signed(x, width), signed(y, width)
        expected |= getattr(x, compare)(y) << lane
    assert asmkit.mask_of(machine, 8) == expected


@pytest.mark.parametrize(
    "predicate", ["lt", "eq", "le", "gt", "lg", "ge", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt"]
)
def test_float_comparisons_and_nan(predicate: str) -> None:
    a, b = float_columns(2, 32, 7)
    b[::4] = a[::4]
    machine = asmkit.execute("gfx1100", [f"v_cmp_{predicate}_f32_e64 s8, v1, v2"], {1: a, 2: b})
    for lane in range(32):
        x, y = float(a[lane]), float(b[lane])
        unordered = math.isnan(x) or math.isnan(y)
        plain = {"lt": x < y, "eq": x == y, "le": x <= y, "gt": x > y, "lg": x < y or x > y, "ge": x >= y,
                 "o": not unordered, "u": unordered}  # fmt: skip
        expected = plain[predicate] if predicate in plain else not plain[{"neq": "eq"}.get(predicate, predicate[1:])]
        assert bool(asmkit.mask_of(machine, 8) >> lane & 1) == expected, (x, y)


def test_cmpx_writes_exec() -> None:
    a = np.arange(32, dtype=np.uint32)
    machine = asmkit.execute("gfx1100", ["v_cmpx_lt_u32_e32 7, v1", "v_mov_b32_e32 v2, 1"], {1: a, 2: 0 * a})
    np.testing.assert_array_equal(machine.state.V[2, 0], (a > 7).astype(np.uint32))


@pytest.mark.parametrize("arch", asmkit.ARCH_NAMES)
def test_carries(arch: str) -> None:
    lanes = asmkit.lanes(arch)
    low, high = integer_inputs(2, lanes, 8)
    low2, high2 = integer_inputs(2, lanes, 9)
    if lanes == 64:
        body = ["v_add_co_u32_e32 v4, vcc, v0, v2", "v_addc_co_u32_e32 v5, vcc, v1, v3, vcc",
                "v_add_co_u32_e64 v8, s[4:5], v0, v2", "v_addc_co_u32_e64 v9, s[6:7], v1, v3, s[4:5]",
                "v_sub_co_u32_e64 v6, s[4:5], v0, v2", "v_subb_co_u32_e64 v7, s[6:7], v1, v3, s[4:5]"]  # fmt: skip
    else:
        body = ["v_add_co_u32 v4, vcc_lo, v0, v2", "v_add_co_ci_u32_e64 v5, null, v1, v3, vcc_lo",
                "v_mov_b32_e32 v8, v4", "v_mov_b32_e32 v9, v5",
                "v_sub_co_u32 v6, s4, v0, v2", "v_sub_co_ci_u32_e64 v7, s6, v1, v3, s4"]  # fmt: skip
    machine = asmkit.execute(arch, body, {0: low, 1: high, 2: low2, 3: high2})
    x, y = (a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32) for a, b in ((low, high), (low2, high2)))
    np.testing.assert_array_equal(machine.state.pair(4)[0], x + y)
    np.testing.assert_array_equal(machine.state.pair(6)[0], x - y)
    np.testing.assert_array_equal(machine.state.pair(8)[0], x + y)


@pytest.mark.parametrize("arch", asmkit.ARCH_NAMES)
def test_wide_products_and_mixed_sums_everywhere(arch: str) -> None:
    lanes = asmkit.lanes(arch)
    a, b, c, d = integer_inputs(4, lanes, 10)
    f = np.random.default_rng(15).standard_normal(lanes).astype(np.float32)
    name = "v_mad_co_u64_u32" if arch == "gfx1201" else "v_mad_u64_u32"
    flag = "s[4:5]" if lanes == 64 else "s4"
    body = [f"{name} v[4:5], {flag}, v0, v1, v[2:3]", "v_fma_mix_f32 v6, v7, v7, v7 op_sel_hi:[0,0,0]",
            "v_fma_mixlo_f16 v8, v7, v7, 0", "v_fma_mixhi_f16 v9, -v7, v7, 0"]  # fmt: skip
    old = np.full(lanes, 0x11112222, np.uint32)
    machine = asmkit.execute(arch, body, {0: a, 1: b, 2: c, 3: d, 7: f, 8: old, 9: old})
    for lane in range(lanes):
        total = int(a[lane]) * int(b[lane]) + (int(c[lane]) | int(d[lane]) << 32)
        assert int(machine.state.pair(4)[0, lane]) == total % 2**64
        assert asmkit.mask_of(machine, 4) >> lane & 1 == total >> 64
        assert machine.state.V[6, 0, lane].view(np.float32) == exact_fma(f[lane], f[lane], f[lane], np.float32)
        square = np.float16(np.float64(f[lane]) ** 2)
        assert int(machine.state.V[8, 0, lane]) == 0x11110000 | int(square.view(np.uint16))
        assert int(machine.state.V[9, 0, lane]) == 0x2222 | int((-square).view(np.uint16)) << 16


def test_mad_64() -> None:
    a, b, c, d = integer_inputs(4, 64, 10)
    body = ["v_mad_u64_u32 v[4:5], s[4:5], v0, v1, v[2:3]", "v_mad_i64_i32 v[6:7], s[6:7], v0, v1, v[2:3]",
            "v_lshl_add_u64 v[8:9], v[0:1], 3, v[2:3]", "v_lshlrev_b64 v[10:11], v0, v[2:3]",
            "v_ashrrev_i64 v[12:13], v0, v[2:3]"]  # fmt: skip
    machine = asmkit.execute("gfx942", body, {0: a, 1: b, 2: c, 3: d})
    for lane in range(64):
        x, y, z = int(a[lane]), int(b[lane]), int(c[lane]) | int(d[lane]) << 32
        assert int(machine.state.pair(4)[0, lane]) == (x * y + z) % 2**64
        assert asmkit.mask_of(machine, 4) >> lane & 1 == (x * y + z) >> 64
        assert int(machine.state.pair(6)[0, lane]) == (signed(x) * signed(y) + z) % 2**64
        assert int(machine.state.pair(8)[0, lane]) == (((x | y << 32) << 3) + z) % 2**64
        assert int(machine.state.pair(10)[0, lane]) == (z << (x & 63)) % 2**64
        assert int(machine.state.pair(12)[0, lane]) == (signed(z, 64) >> (x & 63)) % 2**64


@pytest.mark.parametrize("arch", asmkit.ARCH_NAMES)
def test_ieee_division_sequence(arch: str) -> None:
    """The sequence that LLVM makes of a float32 division gives the correctly rounded quotient."""
    lanes = asmkit.lanes(arch)
    flag, vcc = ("s[4:5]", "vcc") if lanes == 64 else ("s4", "vcc_lo")
    body = [f"v_div_scale_f32 v2, {flag}, v1, v1, v0", "v_rcp_f32_e32 v3, v2", f"v_div_scale_f32 v5, {vcc}, v0, v1, v0",
            "v_fma_f32 v4, -v2, v3, 1.0", "v_fmac_f32_e32 v3, v4, v3", "v_mul_f32_e32 v4, v5, v3",
            "v_fma_f32 v6, -v2, v4, v5", "v_fmac_f32_e32 v4, v6, v3", "v_fma_f32 v2, -v2, v4, v5",
            "v_div_fmas_f32 v2, v2, v3, v4", "v_div_fixup_f32 v7, v2, v1, v0"]  # fmt: skip
    for seed in range(8):
        n, d = float_columns(2, lanes, seed)
        machine = asmkit.execute(arch, body, {0: n, 1: d})
        with np.errstate(all="ignore"):
            same_floats(machine.state.V[7, 0].view(np.float32), n / d)


def test_sdwa_selects_and_fills() -> None:
    a, b = integer_inputs(2, 64, 11)
    body = [
        "v_and_b32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD",
        "v_add_u32_sdwa v3, sext(v1), sext(v2) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:BYTE_3",
        "v_or_b32_sdwa v4, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2 src1_sel:BYTE_0",
        "v_lshlrev_b16_sdwa v5, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1",
    ]
    machine = asmkit.execute("gfx90a", body, {1: a, 2: b, 4: b})
    for lane in range(64):
        x, y = int(a[lane]), int(b[lane])
        assert int(machine.state.V[0, 0, lane]) == (x >> 16) & y
        assert int(machine.state.V[3, 0, lane]) == (signed(x, 16) + signed(y >> 24, 8)) & M32
        assert int(machine.state.V[4, 0, lane]) == ((x >> 16 & 255) | (y & 255)) << 16 | (y & 0xFFFF)
        assert int(machine.state.V[5, 0, lane]) == ((y >> 16) << (x & 15)) & 0xFFFF


def test_sixteen_bit_destinations_by_family() -> None:
    """gfx9 clears the upper half; gfx11 keeps it, and names halves."""
    a, b = integer_inputs(2, 64, 12)
    old = np.full(64, 0x12345678, np.uint32)
    machine = asmkit.execute(
        "gfx942", ["v_add_u16_e32 v0, v1, v2", "v_fma_f16 v3, v1, 0, 0"], {0: old, 1: a * 0, 2: b, 3: old}
    )
    np.testing.assert_array_equal(machine.state.V[0, 0], b & 0xFFFF)
    np.testing.assert_array_equal(machine.state.V[3, 0], 0x12340000)
    half = slice(0, 32)
    body = ["v_add_nc_u16 v0.h, v1.l, v2.h", "v_add_nc_u16 v3, v1, v2 op_sel:[0,1,0]", "v_mov_b16_e32 v4.l, v1.h"]
    machine = asmkit.execute("gfx1100", body, {0: old[half], 1: a[half], 2: b[half], 3: old[half], 4: old[half]})
    total = ((a[half] & 0xFFFF) + (b[half] >> 16)) & 0xFFFF
    np.testing.assert_array_equal(machine.state.V[0, 0], 0x5678 | total << 16)
    np.testing.assert_array_equal(machine.state.V[3, 0], 0x12340000 | total)
    np.testing.assert_array_equal(machine.state.V[4, 0], 0x12340000 | a[half] >> 16)


def test_bitop3_truth_table() -> None:
    a, b, c = integer_inputs(3, 64, 13)
    for table in (0x6C, 0xF8, 0x36, 0x96, 0x00, 0xFF):
        machine = asmkit.execute("gfx950", [f"v_bitop3_b32 v0, v1, v2, v3 bitop3:{table:#x}"], {1: a, 2: b, 3: c})
        for lane in range(0, 64, 7):
            x, y, z = (int(v[lane]) for v in (a, b, c))
            expected = sum((table >> (4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1)) & 1) << i for i in range(32))
            assert int(machine.state.V[0, 0, lane]) == expected


def test_class_of_floats() -> None:
    kinds = [0x7F800001, 0x7FC00000, 0xFF800000, 0xBF800000, 0x80000001, 0x80000000, 0, 1, 0x3F800000, 0x7F800000]
    values = np.resize(np.array(kinds, np.uint32), 64)
    for bit in range(10):
        machine = asmkit.execute("gfx942", ["v_cmp_class_f32_e64 s[8:9], v1, s4"], {1: values}, {4: 1 << bit})
        assert asmkit.mask_of(machine, 8) == sum((lane % 10 == bit) << lane for lane in range(64))


def test_dual_issue_reads_before_either_half_writes() -> None:
    a, b = integer_inputs(2, 32, 14)
    machine = asmkit.execute("gfx1100", ["v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1"], {1: a, 2: b})
    np.testing.assert_array_equal(machine.state.V[1, 0], b)
    np.testing.assert_array_equal(machine.state.V[2, 0], a)


def test_mixed_precision_fma() -> None:
    rng = np.random.default_rng(15)
    h = rng.standard_normal(64).astype(np.float16)
    low = h.view(np.uint16).astype(np.uint32)
    f = rng.standard_normal(64).astype(np.float32)
    old = np.full(64, 0x1111AAAA, np.uint32)
    body = ["v_fma_mix_f32 v0, v1, v2, v2 op_sel:[1,0,0] op_sel_hi:[1,0,0]",
            "v_fma_mixlo_f16 v3, v2, v2, 0", "v_fma_mixhi_f16 v4, -v2, v2, 0"]  # fmt: skip
    machine = asmkit.execute("gfx942", body, {1: low << 16, 2: f, 3: old, 4: old})
    expected = [exact_fma(np.float32(x), y, y, np.float32) for x, y in zip(h, f, strict=True)]
    np.testing.assert_array_equal(machine.state.V[0, 0].view(np.float32), np.array(expected, np.float32))
    square = (f.astype(np.float64) ** 2).astype(np.float16).view(np.uint16).astype(np.uint32)
    np.testing.assert_array_equal(machine.state.V[3, 0], 0x11110000 | square)
    np.testing.assert_array_equal(machine.state.V[4, 0], 0xAAAA | (square ^ 0x8000) << 16)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_packed_float32(arch: str, name: str) -> None:
    rng = np.random.default_rng(16)
    x = {n: rng.standard_normal(64).astype(np.float32) for n in range(2, 8)}
    third = ", v[6:7]" if name == "fma" else ""
    zeros = ",0" if name == "fma" else ""
    ones = ",1" if name == "fma" else ""
    body = [f"v_pk_{name}_f32 v[0:1], v[2:3], v[4:5]{third} op_sel_hi:[1,0{ones}] neg_lo:[0,1{zeros}]"]
    machine = asmkit.execute(arch, body, x)
    for result, (a, b, c) in enumerate(((x[2], -x[4], x[6]), (x[3], x[4], x[7]))):
        expected = {"add": a + b, "mul": a * b}.get(name)
        if expected is None:
            expected = np.array([exact_fma(*v, np.float32) for v in zip(a, b, c, strict=True)], np.float32)
        np.testing.assert_array_equal(machine.state.V[result, 0].view(np.float32), expected)


def test_packed_move() -> None:
    a, b, c, d = integer_inputs(4, 64, 19)
    vectors = {2: a, 3: b, 4: c, 5: d}
    machine = asmkit.execute("gfx90a", ["v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]"], vectors)
    np.testing.assert_array_equal(machine.state.V[0, 0], b)
    np.testing.assert_array_equal(machine.state.V[1, 0], c)


@pytest.mark.parametrize("name", ["add_f16", "mul_f16", "max_f16", "add_u16", "sub_i16", "lshlrev_b16", "ashrrev_i16"])
def test_packed_halves(name: str) -> None:
    rng = np.random.default_rng(17)
    kind = {"f16": np.float16, "u16": np.uint16, "i16": np.int16, "b16": np.uint16}[name[-3:]]
    if kind is np.float16:
        a, b = (rng.standard_normal((64, 2)).astype(np.float16) for _ in range(2))
    else:
        a, b = (rng.integers(0, 65536, (64, 2)).astype(np.uint16).view(kind) for _ in range(2))
    packed = [np.ascontiguousarray(v).view(np.uint32)[:, 0] for v in (a, b)]
    machine = asmkit.execute(
        "gfx942", [f"v_pk_{name} v0, v1, v2 op_sel:[0,1] op_sel_hi:[0,0]"], {1: packed[0], 2: packed[1]}
    )
    ours = machine.state.V[0, 0][:, None].view(kind)
    function = {"add": lambda x, y: x + y, "mul": lambda x, y: x * y, "max": np.fmax, "sub": lambda x, y: x - y,
                "lshlrev": lambda x, y: y << (x & kind(15)), "ashrrev": lambda x, y: y >> (x & kind(15))}  # fmt: skip
    for result, other in ((0, 1), (1, 0)):
        np.testing.assert_array_equal(ours[:, result], function[name.split("_")[0]](a[:, 0], b[:, other]))


def test_dot_products_of_bytes() -> None:
    a, b, c = integer_inputs(3, 32, 18)
    body = ["v_dot4_i32_iu8 v0, v1, v2, v3 neg_lo:[1,0,0]", "v_dot4_i32_iu8 v4, v1, v2, v3 neg_lo:[1,1,0]"]
    machine = asmkit.execute("gfx1100", body, {1: a, 2: b, 3: c})
    for lane in range(32):
        x, y = (int(v[lane]).to_bytes(4, "little") for v in (a, b))
        mixed = sum(signed(p, 8) * q for p, q in zip(x, y, strict=True)) + int(c[lane])
        both = sum(signed(p, 8) * signed(q, 8) for p, q in zip(x, y, strict=True)) + int(c[lane])
        assert int(machine.state.V[0, 0, lane]) == mixed & M32
        assert int(machine.state.V[4, 0, lane]) == both & M32
