"""Every vector and scalar instruction that our kernels use, on every arch whose code has it (coverage.json), against
definitions in Python's integers, fractions and numpy's scalars. A used instruction without a definition here fails."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import asmkit
import coverage_data
import numpy as np
import pytest
from test_scalar import ONE, TWO
from vector_definitions import (
    FLOAT,
    GFX9_ONLY,
    GFX11_ONLY,
    INTEGER,
    M32,
    arity,
    exact_fma,
    float_columns,
    integer_inputs,
    same_floats,
    signed,
    unary_to_ternary,
)

from portattn.backends.rocm.emulator.amdgpu.decode import family

USED: dict[str, list[str]] = coverage_data.data()["used"]
HALF = np.float16
SCALARS = [0, 5, 0x80000000, 0xFFFFFFFF, 0x120005]  # fewer than in test_scalar.py: each arch has its turn


def fma(a: Any, b: Any, c: Any) -> Any:
    return exact_fma(a, b, c, np.float32)


def f32_to_int(x: Any, low: int, high: int) -> int:
    return 0 if math.isnan(x) else max(low, min(high, int(x) if math.isfinite(x) else (high if x > 0 else low)))


def bf16(x: Any) -> int:
    """To nearest even, by the distance to the two neighbours in bfloat16."""
    bits = int(np.float32(x).view(np.uint32))
    if math.isnan(x):
        return bits >> 16 | 0x40
    low = bits & 0xFFFF
    return (bits >> 16) + (low > 0x8000 or (low == 0x8000 and bits >> 16 & 1 == 1)) & 0xFFFF


def half_bits(x: Any) -> int:
    with np.errstate(over="ignore"):
        return int(HALF(x).view(np.uint16))


def ldexp(x: Any, e: int) -> Any:
    return np.float32(math.ldexp(float(x), max(-400, min(400, signed(e))))) if math.isfinite(x) else x


# name → (kind written, kinds read, definition). u: 32 bits, U: 64 bits, f: float32, h: the low float16, w: 16 bits.
Entry = tuple[str, str, Callable[..., Any]]


def base(mnemonic: str) -> str:
    return re.sub(r"_(e32|e64|dpp|sdwa)$", "", mnemonic.removeprefix("v_").removeprefix("dual_"))


DEFINED: dict[str, Entry] = {
    base(name): ("u", "u" * unary_to_ternary(name, function), function)
    for name, function in (INTEGER | GFX9_ONLY | GFX11_ONLY).items()
}
DEFINED |= {
    base(name): ("f", "f" * (2 if f in (np.fmax, np.fmin) else 1 if isinstance(f, np.ufunc) else arity(f)), f)
    for name, f in FLOAT.items()
}
DEFINED |= {
    "max_num_f32": DEFINED["max_f32"], "max3_num_f32": DEFINED["max3_f32"], "min_num_f32": DEFINED["min_f32"],
    "rcp_iflag_f32": DEFINED["rcp_f32"], "maxmin_i32": ("u", "uuu", lambda a, b, c: min(max(signed(a), signed(b)),
    signed(c))),
    "accvgpr_read_b32": ("u", "u", lambda a: a), "accvgpr_write_b32": ("u", "u", lambda a: a),
    "accvgpr_mov_b32": ("u", "u", lambda a: a),
    "mov_b64": ("U", "U", lambda a: a), "lshlrev_b64": ("U", "uU", lambda a, b: b << (a & 63)),
    "ashrrev_i64": ("U", "uU", lambda a, b: (b - ((b >> 63) << 64)) >> (a & 63)),
    "lshl_add_u64": ("U", "UuU", lambda a, b, c: (a << (b & 7)) + c),
    "cvt_f16_f32": ("h", "f", lambda a: HALF(a)), "cvt_f32_f16": ("f", "h", lambda a: np.float32(a)),
    "cvt_u32_f32": ("u", "f", lambda a: f32_to_int(a, 0, M32)),
    "cvt_i32_f32": ("u", "f", lambda a: f32_to_int(a, -(2**31), 2**31 - 1)),
    "cvt_pk_bf16_f32": ("u", "ff", lambda a, b: bf16(a) | bf16(b) << 16),
    "cvt_pk_f16_f32": ("u", "ff", lambda a, b: half_bits(a) | half_bits(b) << 16),
    "pack_b32_f16": ("u", "ww", lambda a, b: a | b << 16), "ldexp_f32": ("f", "fu", ldexp),
    "lshlrev_b16": ("w", "ww", lambda a, b: b << (a & 15)), "lshrrev_b16": ("w", "ww", lambda a, b: b >> (a & 15)),
    "mov_b16": ("w", "w", lambda a: a),
}  # fmt: skip
REGISTERS = {"u": 1, "f": 1, "h": 1, "w": 1, "U": 2}
# Modelled by a test of their own: what they do is more than a function of their lanes' sources.
ELSEWHERE = re.compile(
    r"v_(div_(scale|fmas|fixup)_f32|fma_mix(lo|hi)?_f(32|16)|mad_(co_)?[ui]64_[ui]32|readfirstlane|readlane|writelane|"
    r"permlane\w+|mov_b32_dpp|pk_\w+|mfma_\w+|wmma_\w+|addc_co\w+|add_co\w+|sub_co\w+|subb_co\w+|cmpx\w+|bitop3\w+|"
    r"nop|dot\w+|cvt_scale\w+|swap\w+|cmp_class\w+)"
)
CASES = [
    (arch, name)
    for arch, names in USED.items()
    for name in names
    if family(name) in ("vector", "compare") and not ELSEWHERE.match(name)
]


def columns(kind: str, count: int, lanes: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Registers of one source: uint32 [lanes] each."""
    if kind == "f":
        return [float_columns(1, lanes, seed)[0].view(np.uint32)]
    if kind == "h":
        values = np.random.default_rng(seed).standard_normal(lanes).astype(HALF)
        return [values.view(np.uint16).astype(np.uint32) | np.uint32(0x5A5A0000)]
    return integer_inputs(count, lanes, seed)


def value(kind: str, registers: list[np.ndarray[Any, Any]], lane: int) -> Any:
    """What a definition sees of a source in a lane."""
    bits = int(registers[0][lane])
    if kind == "U":
        return bits | int(registers[1][lane]) << 32
    if kind == "f":
        return np.uint32(bits).view(np.float32)
    if kind in "hw":
        return np.uint16(bits & 0xFFFF).view(HALF) if kind == "h" else bits & 0xFFFF
    return bits


def name_of(first: int, kind: str, accumulation: bool = False) -> str:
    letter = "a" if accumulation else "v"
    return f"{letter}{first}" if REGISTERS[kind] == 1 else f"{letter}[{first}:{first + 1}]"


def compare_with(machine: Any, kind: str, expected: list[Any], plane: int = 0) -> None:
    found = machine.state.V[plane, 0]
    if kind == "f":
        same_floats(found.view(np.float32), np.array(expected, np.float32))
    elif kind == "h":
        same_floats((found & 0xFFFF).astype(np.uint16).view(HALF), np.array(expected, HALF))
    elif kind == "U":
        np.testing.assert_array_equal(machine.state.pair(plane)[0], np.array([e % 2**64 for e in expected], np.uint64))
    else:
        mask = 0xFFFF if kind == "w" else M32
        np.testing.assert_array_equal(found & mask, np.array([int(e) & mask for e in expected], np.uint32))


@pytest.mark.parametrize(("arch", "name"), [case for case in CASES if not case[1].startswith("v_cmp")])
def test_vector_instruction(arch: str, name: str) -> None:
    short, lanes = base(name), asmkit.lanes(arch)
    if short == "cndmask_b32":
        return check_select(arch, name)
    accumulates, constant = short == "fmac_f32", {"fmaak_f32": 2, "fmamk_f32": 1}.get(short)
    kind, kinds, function = ("f", "fff", fma) if accumulates or constant is not None else DEFINED[short]
    for seed in range(2):
        sources = [columns(k, REGISTERS[k], lanes, seed * 100 + n * 7) for n, k in enumerate(kinds)]
        if name.endswith("_sdwa"):
            modifiers = " dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1"
            modifiers += " src1_sel:DWORD" if len(kinds) == 2 else ""
            seen = [[sources[0][0] >> np.uint32(16)], *sources[1:]]
        elif name.endswith("_dpp"):
            modifiers = " quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"
            seen = [[sources[0][0][np.arange(lanes) ^ 1]], *sources[1:]]
        else:
            modifiers, seen = "", sources
        vectors = {16 + 4 * n + j: column for n, source in enumerate(sources) for j, column in enumerate(source)}
        from_accumulators = short in ("accvgpr_read_b32", "accvgpr_mov_b32")
        to_accumulators = short in ("accvgpr_write_b32", "accvgpr_mov_b32")
        words = [name_of(16 + 4 * n, k, from_accumulators) for n, k in enumerate(kinds)]
        if from_accumulators:
            vectors = {256 + n: column for n, column in vectors.items()}
        if constant is not None:
            words[constant] = "0x40490fdb"
            seen[constant] = [np.full(lanes, 0x40490FDB, np.uint32)]
        target = name_of(0, kind, to_accumulators)
        if accumulates:
            target, words = words.pop(), words
        text = f"{name} {target}, {', '.join(words)}{modifiers}"
        if name.startswith("v_dual"):
            text += " :: v_dual_mov_b32 v9, v16"
        machine = asmkit.execute(arch, [text], vectors)
        with np.errstate(all="ignore"):
            expected = [function(*(value(k, s, i) for k, s in zip(kinds, seen, strict=True))) for i in range(lanes)]
        plane = 24 if accumulates else 256 if to_accumulators else 0
        compare_with(machine, kind, expected, plane)
        if name.startswith("v_dual"):
            np.testing.assert_array_equal(machine.state.V[9, 0], sources[0][0])


def check_select(arch: str, name: str) -> None:
    """v_cndmask_b32: source 1 where the mask has the lane's bit, else source 0."""
    lanes = asmkit.lanes(arch)
    no, yes = integer_inputs(2, lanes, 1)
    mask = 0x9C3A_5F01_DEAD_BEE5 & (1 << lanes) - 1
    explicit = name.endswith("_e64")
    at = 8 if explicit else 106
    operand = (f", s[{at}:{at + 1}]" if lanes == 64 else f", s{at}") if explicit else (
        "" if "dual" in name else ", vcc" if lanes == 64 else ", vcc_lo"
    )  # fmt: skip
    text, shift = f"{name} v0, v1, v2{operand}", 0
    if name.endswith("_sdwa"):
        text += " dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD"
        shift = 16
    if "dual" in name:
        text += " :: v_dual_mov_b32 v9, v1"
    machine = asmkit.execute(arch, [text], {1: no, 2: yes}, {at: mask & M32, at + 1: mask >> 32})
    expected = [int(yes[i]) if mask >> i & 1 else int(no[i]) >> shift for i in range(lanes)]
    np.testing.assert_array_equal(machine.state.V[0, 0], np.array(expected, np.uint32))


@pytest.mark.parametrize(("arch", "name"), [case for case in CASES if case[1].startswith("v_cmp")])
def test_comparison(arch: str, name: str) -> None:
    found = re.fullmatch(r"v_cmp_(n?(?:eq|lt|le|gt|ge|lg)|ne|o|u)_([iuf])(16|32|64)_(e32|e64|sdwa)", name)
    assert found, name
    predicate, letter, bits, encoding = found[1], found[2], int(found[3]), found[4]
    lanes, seed = asmkit.lanes(arch), 3
    make = float_columns if letter == "f" else integer_inputs
    first, second = (np.asarray(make(2, lanes, seed + n)).view(np.uint32) for n in (0, 1))
    second[:, ::3] = first[:, ::3]
    vectors = {2: first[0], 3: first[1], 4: second[0], 5: second[1]}
    registers = "v[2:3], v[4:5]" if bits == 64 else "v2, v4"
    wide = lanes == 64
    target, at = ("vcc" if wide else "vcc_lo", 106) if encoding == "e32" else ("s[8:9]" if wide else "s8", 8)
    sdwa = " src0_sel:WORD_1 src1_sel:DWORD" if encoding == "sdwa" else ""
    machine = asmkit.execute(arch, [f"{name} {target}, {registers}{sdwa}"], vectors)
    for lane in range(lanes):
        x, y = (int(s[0][lane]) | (int(s[1][lane]) << 32 if bits == 64 else 0) for s in (first, second))
        x = x >> 16 if sdwa else x
        x, y = x & (1 << bits) - 1, y & (1 << bits) - 1
        if letter == "f":
            x, y = (float(np.uint32(v).view(np.float32)) for v in (x, y))
        elif letter == "i":
            x, y = signed(x, bits), signed(y, bits)
        nan = x != x or y != y
        plain = {"eq": x == y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y, "lg": x != y and not nan,
                 "o": not nan, "u": nan, "ne": x != y}  # fmt: skip
        expected = plain[predicate] if predicate in plain else not plain[predicate[1:]]
        assert bool(asmkit.mask_of(machine, at) >> lane & 1) == expected, (x, y)


RENAMED = {"s_add_co_i32": "s_add_i32", "s_sub_co_i32": "s_sub_i32", "s_and_not1_b32": "s_andn2_b32",
           "s_add_co_u32": "s_add_u32", "s_sub_co_u32": "s_sub_u32"}  # fmt: skip
SCALAR_CASES = [(arch, name) for arch, names in USED.items() for name in names if RENAMED.get(name, name) in TWO | ONE]


@pytest.mark.parametrize(("arch", "name"), SCALAR_CASES)
def test_scalar_instruction(arch: str, name: str) -> None:
    known = RENAMED.get(name, name)
    for a in SCALARS:
        for b in SCALARS if known in TWO else (0,):
            before = bool((a ^ b) & 1)
            body = [f"s_cmp_eq_u32 {0 if before else 1}, 0", f"{name} s4, s5" + (", s6" if known in TWO else "")]
            machine = asmkit.execute(arch, body, scalars={5: a, 6: b})
            result, scc = TWO[known](a, b) if known in TWO else ONE[known](a)
            assert int(machine.state.S[0, 4]) == result & M32, (a, b)
            assert bool(machine.state.scc[0]) == (before if scc is None else bool(scc)), (a, b)


def test_64_bit_scalars_and_floats_of_gfx12() -> None:
    for a in (0, 5, 2**31, 2**63 + 7, 2**64 - 1):
        for b in (1, 2**32 + 3, 2**64 - 2):
            scalars = {6: a & M32, 7: a >> 32, 8: b & M32, 9: b >> 32}
            body = ["s_add_nc_u64 s[4:5], s[6:7], s[8:9]", "s_mul_u64 s[10:11], s[6:7], s[8:9]"]
            machine = asmkit.execute("gfx1201", body, scalars=scalars)
            assert int(machine.state.S64[0, 2]) == (a + b) % 2**64
            assert int(machine.state.S64[0, 5]) == a * b % 2**64
    for x, y in ((1.5, 2.25), (-3e38, 3e38), (1e-30, 1e-20), (7.0, -7.0)):
        scalars = {5: asmkit.bits(x, np.float32), 6: asmkit.bits(y, np.float32), 7: 0xFFFFFF81}
        body = ["s_add_f32 s8, s5, s6", "s_mul_f32 s9, s5, s6", "s_cvt_f32_u32 s10, s7", "s_cvt_u32_f32 s11, s5"]
        machine = asmkit.execute("gfx1201", body, scalars=scalars)
        with np.errstate(all="ignore"):
            expected = [np.float32(x) + np.float32(y), np.float32(x) * np.float32(y), np.float32(0xFFFFFF81)]
        found = machine.state.S[0, 8:11].view(np.float32)
        np.testing.assert_array_equal(found, np.array(expected, np.float32))
        assert int(machine.state.S[0, 11]) == f32_to_int(np.float32(x), 0, M32)


@pytest.mark.parametrize(
    ("x", "y"), [(1.5, 2.25), (-3e38, 3e38), (7.0, -7.0), (2.0, 2.0), (np.nan, 1.0), (-np.inf, 3.0)]
)
def test_differences_maxima_and_exponentials_of_scalar_floats(x: float, y: float) -> None:
    scalars = {5: asmkit.bits(x, np.float32), 6: asmkit.bits(y, np.float32)}
    body = ["s_sub_f32 s8, s5, s6", "s_max_num_f32 s9, s5, s6", "v_s_exp_f32 s10, s6", "s_cmp_neq_f32 s5, s6"]
    machine = asmkit.execute("gfx1201", body, scalars=scalars)
    with np.errstate(all="ignore"):
        expected = [np.float32(x) - np.float32(y), np.fmax(np.float32(x), np.float32(y)), np.exp2(np.float32(y))]
    np.testing.assert_array_equal(machine.state.S[0, 8:11].view(np.float32), np.array(expected, np.float32))
    assert bool(machine.state.scc[0]) == (not x == y)  # noqa: SIM201 - NaN is unequal to all


SELECTS = [
    (arch, name)
    for arch, names in USED.items()
    for name in names
    if re.fullmatch(r"s_(cmpk?_\w+_[iu]32|cselect_b(32|64)|mov_b(32|64)|movk_i32|addk_(co_)?i32|bitcmp[01]_b32)", name)
]


@pytest.mark.parametrize(("arch", "name"), SELECTS)
def test_scalar_selects_and_comparisons(arch: str, name: str) -> None:
    compare: dict[str, Callable[[int, int], bool]] = {
        "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
        "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    }  # fmt: skip
    for a in SCALARS:
        for b in SCALARS:
            scalars = {5: a, 6: b, 7: b ^ 0x5555, 8: a, 9: ~b & M32}
            short = signed(b & 0xFFFF, 16)  # of the immediate forms
            if name.startswith("s_cmp"):
                _, _, predicate, kind = name.split("_")
                immediate = name.startswith("s_cmpk")
                machine = asmkit.execute(arch, [f"{name} s5, {short if immediate else 's6'}"], scalars=scalars)
                x, y = (signed(a), short if immediate else signed(b)) if kind[0] == "i" else (a, b)
                assert bool(machine.state.scc[0]) == compare[predicate](x, y)
            elif name.startswith("s_bitcmp"):
                machine = asmkit.execute(arch, [f"{name} s5, s6"], scalars=scalars)
                assert bool(machine.state.scc[0]) == ((a >> (b & 31) & 1) == int(name[8]))
            elif name.startswith("s_cselect"):
                wide = name.endswith("64")
                first, second = ("s[6:7]", "s[8:9]") if wide else ("s6", "s8")
                target = "s[10:11]" if wide else "s10"
                body = ["s_cmp_eq_u32 s5, 5", f"{name} {target}, {first}, {second}"]
                machine = asmkit.execute(arch, body, scalars=scalars)
                at = 6 if a == 5 else 8
                for word in range(1 + wide):
                    assert int(machine.state.S[0, 10 + word]) == scalars[at + word]
            elif name.startswith("s_mov_"):
                wide = name.endswith("64")
                target, source = ("s[10:11]", "s[6:7]") if wide else ("s10", "s6")
                machine = asmkit.execute(arch, [f"{name} {target}, {source}"], scalars=scalars)
                for word in range(1 + wide):
                    assert int(machine.state.S[0, 10 + word]) == scalars[6 + word]
            else:
                machine = asmkit.execute(arch, [f"{name} s5, {b & 0xFFFF:#x}"], scalars=scalars)
                total = short + (signed(a) if "addk" in name else 0)
                assert int(machine.state.S[0, 5]) == total & M32
                if "addk" in name:
                    assert bool(machine.state.scc[0]) == (not -(2**31) <= total < 2**31)
