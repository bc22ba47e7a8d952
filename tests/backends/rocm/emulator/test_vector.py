"""Vector instructions that the ISA tests have no definition of, or that our kernels do not use: modifiers, other
widths, halves of registers, and moves between lanes; against integers and numpy's scalars, lane by lane."""

import random
from typing import Any

import asmkit
import isa_numbers as number
import isa_run
import numpy as np
import pytest
from isa_numbers import F16, F64, M32, signed


def words(lanes: int, seed: int = 0, kind: str = "u32") -> np.ndarray[Any, Any]:
    return np.array(isa_run.column(kind, lanes, random.Random(seed)), np.uint32)


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


@pytest.mark.parametrize(("name", "f", "kind"), [("v_fma_f16", F16, "u16"), ("v_fma_f64", F64, "u64")])
def test_fma_of_other_widths(name: str, f: number.Format, kind: str) -> None:
    rng = np.random.default_rng(1)
    dtype, bits = (np.float16, np.uint16) if f is F16 else (np.float64, np.uint64)
    columns = [[int(x) for x in rng.standard_normal(64).astype(dtype).view(bits)] for _ in range(3)]
    vectors = {2 * n + 2 + j: word for n, column in enumerate(columns)
               for j, word in enumerate(isa_run.words(kind, column))}  # fmt: skip
    target, *sources = (isa_run.named(n, isa_run.registers(kind)) for n in (0, 2, 4, 6))
    found = isa_run.result(asmkit.execute("gfx942", [f"{name} {target}, {', '.join(sources)}"], vectors), kind)
    assert found == [number.fma(f, *values) for values in zip(*columns, strict=True)]


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1151", "gfx1201"])
def test_a_carry_may_be_dropped(arch: str) -> None:
    a, b = words(32, 1), words(32, 2)
    machine = asmkit.execute(arch, ["v_add_co_ci_u32_e64 v5, null, v1, v3, vcc_lo"], {1: a, 3: b}, {106: M32})
    np.testing.assert_array_equal(machine.state.V[5, 0], a + b + np.uint32(1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v_add_f32_e64 v0, |v1|, 1.0", lambda a, b: np.abs(a) + np.float32(1)),
        ("v_add_f32_e64 v0, -v1, v2", lambda a, b: -a + b),
        ("v_mul_f32_e64 v0, -|v1|, v2", lambda a, b: -np.abs(a) * b),
        ("v_add_f32_e64 v0, v1, v2 clamp", lambda a, b: np.clip(np.nan_to_num(a + b, nan=0), 0, 1)),
        ("v_add_f32_e64 v0, v1, v2 mul:2", lambda a, b: (a + b) * 2),
        ("v_add_f32_e64 v0, v1, v2 div:2", lambda a, b: (a + b) / 2),
        ("v_mul_f32_e32 v0, 0x3fb8aa3b, v1", lambda a, b: np.uint32(0x3FB8AA3B).view(np.float32) * a),
        ("v_mul_f32_e32 v0, 0.5, v1", lambda a, b: np.float32(0.5) * a),
        ("v_mul_f32_e32 v0, s5, v1", lambda a, b: np.float32(2.5) * a),
    ],
)
def test_modifiers_and_constants(text: str, expected: Any) -> None:
    a, b = (words(64, seed, "f32").view(np.float32) for seed in (3, 4))
    machine = asmkit.execute("gfx942", [text], {1: a, 2: b}, {5: asmkit.bits(2.5, np.float32)})
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(machine.state.V[0, 0].view(np.float32), expected(a, b).astype(np.float32))


def test_saturating_add_and_subtract() -> None:
    a, b = words(64, 0), words(64, 1)
    machine = asmkit.execute(
        "gfx942", ["v_sub_u32_e64 v0, v1, v2 clamp", "v_add_u32_e64 v3, v1, v2 clamp"], {1: a, 2: b}
    )
    wide = a.astype(np.int64), b.astype(np.int64)
    np.testing.assert_array_equal(machine.state.V[0, 0], np.clip(wide[0] - wide[1], 0, M32).astype(np.uint32))
    np.testing.assert_array_equal(machine.state.V[3, 0], np.clip(wide[0] + wide[1], 0, M32).astype(np.uint32))


def test_sixteen_bit_destinations_by_family() -> None:
    """gfx9 clears the upper half; gfx11 keeps it, and names halves."""
    a, b = words(64, 12), words(64, 13)
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


def test_dual_issue_reads_before_either_half_writes() -> None:
    a, b = words(32, 14), words(32, 15)
    machine = asmkit.execute("gfx1100", ["v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1"], {1: a, 2: b})
    np.testing.assert_array_equal(machine.state.V[1, 0], b)
    np.testing.assert_array_equal(machine.state.V[2, 0], a)


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
    a, b, c = (words(32, n) for n in (18, 19, 20))
    body = ["v_dot4_i32_iu8 v0, v1, v2, v3 neg_lo:[1,0,0]", "v_dot4_i32_iu8 v4, v1, v2, v3 neg_lo:[1,1,0]"]
    machine = asmkit.execute("gfx1100", body, {1: a, 2: b, 3: c})
    for lane in range(32):
        x, y = (int(v[lane]).to_bytes(4, "little") for v in (a, b))
        mixed = sum(signed(p, 8) * q for p, q in zip(x, y, strict=True)) + int(c[lane])
        both = sum(signed(p, 8) * signed(q, 8) for p, q in zip(x, y, strict=True)) + int(c[lane])
        assert int(machine.state.V[0, 0, lane]) == mixed & M32
        assert int(machine.state.V[4, 0, lane]) == both & M32


# ---- moves between lanes that have prose alone in the documents, or that our kernels do not use


def test_dpp8() -> None:
    x = words(32)
    machine = asmkit.execute("gfx1100", ["v_mov_b32_dpp v0, v1 dpp8:[7,6,5,4,3,2,1,0]"], {1: x})
    np.testing.assert_array_equal(machine.state.V[0, 0], x.reshape(4, 8)[:, ::-1].reshape(-1))


def test_a_permute_scatters() -> None:
    x, to = words(64), np.random.default_rng(21).permutation(64).astype(np.uint32)
    machine = asmkit.execute("gfx942", ["ds_permute_b32 v3, v1, v2", "s_waitcnt lgkmcnt(0)"], {1: to * 4, 2: x})
    np.testing.assert_array_equal(machine.state.V[3, 0][to], x)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("swizzle(SWAP,16)", lambda i: i ^ 16), ("swizzle(SWAP,1)", lambda i: i ^ 1),
        ("swizzle(REVERSE,8)", lambda i: i ^ 7), ("swizzle(BROADCAST,4,2)", lambda i: i // 4 * 4 + 2),
        ("swizzle(QUAD_PERM,3,2,1,0)", lambda i: i ^ 3), ("0x401f", lambda i: i ^ 16),
        ('swizzle(BITMASK_PERM,"01pip")', lambda i: 8 | i & 4 | ~i & 2 | i & 1),  # from the highest bit: 0, 1, keep …
    ],
)  # fmt: skip
def test_swizzle(text: str, source: Any) -> None:
    x = words(64)
    machine = asmkit.execute("gfx942", [f"ds_swizzle_b32 v0, v1 offset:{text}", "s_waitcnt lgkmcnt(0)"], {1: x})
    np.testing.assert_array_equal(machine.state.V[0, 0], [x[(n & 32) + (source(n & 31) & 31)] for n in range(64)])


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_mbcnt_numbers_the_lanes(arch: str) -> None:
    lanes = asmkit.lanes(arch)
    body = ["v_mbcnt_lo_u32_b32 v0, -1, 0"] + (["v_mbcnt_hi_u32_b32 v0, -1, v0"] if lanes == 64 else [])
    np.testing.assert_array_equal(asmkit.execute(arch, body).state.V[0, 0], np.arange(lanes))
