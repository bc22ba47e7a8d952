"""Scalar instructions against Python's integers: the result and scc."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import asmkit
import numpy as np
import pytest

ARCHES = asmkit.ARCH_NAMES
M32, M64 = 2**32 - 1, 2**64 - 1
VALUES = [0, 1, 5, 31, 32, 63, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678, 0x100004]
WIDE = [0, 1, 2**31, 2**32 - 1, 2**63, M64, 0x123456789ABCDEF0]


def signed(x: int, bits: int = 32) -> int:
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


def fits(x: int) -> bool:
    return -(2**31) <= x < 2**31


# name → function of two integers giving (result, scc or None where scc is left alone)
TWO: dict[str, Callable[[int, int], tuple[int, Any]]] = {
    "s_add_u32": lambda a, b: (a + b, a + b > M32), "s_sub_u32": lambda a, b: (a - b, b > a),
    "s_add_i32": lambda a, b: (a + b, not fits(signed(a) + signed(b))),
    "s_sub_i32": lambda a, b: (a - b, not fits(signed(a) - signed(b))),
    "s_mul_i32": lambda a, b: (a * b, None), "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32, None),
    "s_and_b32": lambda a, b: (a & b, a & b != 0), "s_or_b32": lambda a, b: (a | b, a | b != 0),
    "s_xor_b32": lambda a, b: (a ^ b, a ^ b != 0), "s_andn2_b32": lambda a, b: (a & ~b, a & ~b & M32 != 0),
    "s_lshl_b32": lambda a, b: (a << (b & 31), (a << (b & 31)) & M32 != 0),
    "s_lshr_b32": lambda a, b: (a >> (b & 31), a >> (b & 31) != 0),
    "s_ashr_i32": lambda a, b: (signed(a) >> (b & 31), signed(a) >> (b & 31) != 0),
    "s_min_i32": lambda a, b: (min(signed(a), signed(b)), signed(a) < signed(b)),
    "s_max_i32": lambda a, b: (max(signed(a), signed(b)), signed(a) >= signed(b)),
    "s_min_u32": lambda a, b: (min(a, b), a < b), "s_max_u32": lambda a, b: (max(a, b), a >= b),
    "s_lshl2_add_u32": lambda a, b: ((a << 2) + b, (a << 2) + b > M32),
    "s_pack_ll_b32_b16": lambda a, b: ((a & 0xFFFF) | b << 16, None),
    "s_pack_hh_b32_b16": lambda a, b: (a >> 16 | b >> 16 << 16, None),
    "s_bfm_b32": lambda a, b: (((1 << (a & 31)) - 1) << (b & 31), None),
    "s_absdiff_i32": lambda a, b: (abs(signed(a - b & M32)), a != b),  # of a difference that wraps
}  # fmt: skip


def bfe(a: int, b: int, sign: bool) -> tuple[int, bool]:
    offset, width = b & 31, min(b >> 16 & 127, 32)
    value = (signed(a) if sign else a) >> offset & ((1 << width) - 1)
    if sign and width and value >> (width - 1):
        value -= 1 << width
    return value, value & M32 != 0


TWO["s_bfe_u32"] = lambda a, b: bfe(a, b, False)
TWO["s_bfe_i32"] = lambda a, b: bfe(a, b, True)
ONE: dict[str, Callable[[int], tuple[int, Any]]] = {
    "s_not_b32": lambda a: (~a, ~a & M32 != 0), "s_brev_b32": lambda a: (int(f"{a:032b}"[::-1], 2), None),
    "s_bcnt1_i32_b32": lambda a: (a.bit_count(), a != 0), "s_abs_i32": lambda a: (abs(signed(a)), a != 0),
    "s_ff1_i32_b32": lambda a: ((a & -a).bit_length() - 1, None),
    "s_flbit_i32_b32": lambda a: (32 - a.bit_length() if a else -1, None),
    "s_sext_i32_i8": lambda a: (signed(a & 255, 8), None), "s_sext_i32_i16": lambda a: (signed(a & 65535, 16), None),
}  # fmt: skip


def check(machine: Any, expected: tuple[int, Any], before: bool) -> None:
    value, scc = expected
    assert int(machine.state.S[0, 4]) == value & M32
    assert bool(machine.state.scc[0]) == (before if scc is None else bool(scc))


@pytest.mark.parametrize("name", TWO)
def test_two_operands(name: str) -> None:
    for a in VALUES:
        for b in VALUES:
            before = bool((a ^ b) & 1)
            start = f"s_cmp_eq_u32 {0 if before else 1}, 0"
            machine = asmkit.execute("gfx942", [start, f"{name} s4, s5, s6"], scalars={5: a, 6: b})
            check(machine, TWO[name](a, b), before)


@pytest.mark.parametrize("name", ONE)
def test_one_operand(name: str) -> None:
    for a in VALUES:
        machine = asmkit.execute("gfx942", ["s_cmp_eq_u32 0, 0", f"{name} s4, s5"], scalars={5: a})
        check(machine, ONE[name](a), True)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("s_and_b64", lambda a, b: a & b), ("s_or_b64", lambda a, b: a | b), ("s_xor_b64", lambda a, b: a ^ b),
        ("s_andn2_b64", lambda a, b: a & ~b), ("s_lshl_b64", lambda a, b: a << (b & 63)),
        ("s_lshr_b64", lambda a, b: a >> (b & 63)), ("s_ashr_i64", lambda a, b: signed(a, 64) >> (b & 63)),
    ],
)  # fmt: skip
def test_64_bits(name: str, function: Callable[[int, int], int]) -> None:
    for a in WIDE:
        for b in WIDE:
            scalars = {6: a & M32, 7: a >> 32, 8: b & M32, 9: b >> 32}
            second = "s8" if "sh" in name else "s[8:9]"
            machine = asmkit.execute("gfx942", [f"{name} s[4:5], s[6:7], {second}"], scalars=scalars)
            expected = function(a, b & M32 if "sh" in name else b) & M64
            assert int(machine.state.S64[0, 2]) == expected
            assert bool(machine.state.scc[0]) == (expected != 0)


def test_chains_of_carries() -> None:
    for a in WIDE:
        for b in WIDE:
            scalars = {6: a & M32, 7: a >> 32, 8: b & M32, 9: b >> 32}
            body = ["s_add_u32 s4, s6, s8", "s_addc_u32 s5, s7, s9", "s_sub_u32 s10, s6, s8", "s_subb_u32 s11, s7, s9"]
            machine = asmkit.execute("gfx942", body, scalars=scalars)
            assert int(machine.state.S64[0, 2]) == (a + b) & M64
            assert int(machine.state.S64[0, 5]) == (a - b) & M64


@pytest.mark.parametrize("predicate", ["eq", "lg", "gt", "ge", "lt", "le"])
def test_comparisons(predicate: str) -> None:
    compare = {"eq": "__eq__", "lg": "__ne__", "gt": "__gt__", "ge": "__ge__", "lt": "__lt__", "le": "__le__"}[
        predicate
    ]
    for a in VALUES:
        for b in VALUES:
            for kind, x, y in (("u32", a, b), ("i32", signed(a), signed(b))):
                machine = asmkit.execute("gfx942", [f"s_cmp_{predicate}_{kind} s4, s5"], scalars={4: a, 5: b})
                assert bool(machine.state.scc[0]) == getattr(x, compare)(y)


def test_short_immediates_are_signed() -> None:
    body = ["s_movk_i32 s4, 0xff80", "s_addk_i32 s5, 0x80", "s_mulk_i32 s6, 0xfffe", "s_cmpk_lt_i32 s7, 0xffff"]
    machine = asmkit.execute("gfx942", body, scalars={5: 7, 6: 3, 7: M32 - 5})
    assert [signed(int(x)) for x in machine.state.S[0, 4:7]] == [-128, 135, -6]
    assert machine.state.scc[0]


def test_selects_follow_scc() -> None:
    for chosen in (0, 1):
        body = [
            f"s_cmp_eq_u32 {chosen}, 1",
            "s_cselect_b32 s4, 11, 22",
            "s_cselect_b64 s[6:7], -1, 0",
            "s_cmov_b32 s5, 9",
        ]
        machine = asmkit.execute("gfx942", body, scalars={5: 3})
        assert int(machine.state.S[0, 4]) == (11 if chosen else 22)
        assert int(machine.state.S64[0, 3]) == (M64 if chosen else 0)
        assert int(machine.state.S[0, 5]) == (9 if chosen else 3)


@pytest.mark.parametrize(
    ("arch", "suffix", "pair"), [(a, *(("64", "s[4:5]") if asmkit.lanes(a) == 64 else ("32", "s4"))) for a in ARCHES]
)
def test_save_exec(arch: str, suffix: str, pair: str) -> None:
    source = "s[6:7]" if suffix == "64" else "s6"
    mask, old = 0x0F0F_1234_00FF_F0F0, 0x00FF_FFFF_F0F0_0FF0
    if suffix == "32":
        mask, old = mask & M32, old & M32
    new_names = ["and", "or", "xor"] + (["andn2"] if suffix == "64" else ["and_not1"])
    for name in new_names:
        machine = asmkit.execute(
            arch,
            [f"s_{name}_saveexec_b{suffix} {pair}, {source}"],
            scalars={6: mask & M32, 7: mask >> 32},
            exec_mask=old,
        )
        expected = {"and": mask & old, "or": mask | old, "xor": mask ^ old}.get(name, mask & ~old)
        assert asmkit.mask_of(machine, 4) == old
        assert asmkit.mask_of(machine, 126) == expected
        assert bool(machine.state.scc[0]) == (expected != 0)


def test_branches_and_loops() -> None:
    body = """
        s_mov_b32 s4, 0
        s_mov_b32 s5, 0
    loop:
        s_add_i32 s5, s5, s4
        s_add_i32 s4, s4, 1
        s_cmp_lt_u32 s4, 10
        s_cbranch_scc1 loop
        s_mov_b64 exec, 0
        s_cbranch_execz done
        s_mov_b32 s5, 0
    done:
        s_mov_b64 exec, -1
    """
    machine = asmkit.execute("gfx942", body)
    assert int(machine.state.S[0, 5]) == 45
    assert machine.state.mask.all()


def test_waves_that_part_come_back_together() -> None:
    """Each wave loops as often as its number says; all go on together, with the right counts."""
    body = """
        v_readfirstlane_b32 s4, v1
        s_mov_b32 s5, 0
    loop:
        s_add_i32 s5, s5, 3
        s_sub_i32 s4, s4, 1
        s_cmp_lg_u32 s4, 0
        s_cbranch_scc1 loop
        v_mov_b32_e32 v2, s5
    """
    trips = np.arange(1, 5, dtype=np.uint32)
    machine = asmkit.execute("gfx942", body, {1: np.repeat(trips[:, None], 64, 1)}, waves=4)
    np.testing.assert_array_equal(machine.state.V[2], np.repeat(3 * trips[:, None], 64, 1))
    last = len(machine.counts) - 2
    assert machine.counts[last] == 4
    assert machine.steps < 2 + 4 * 4 + 8  # the loop runs once for all waves that are in it


@pytest.mark.parametrize("arch", ARCHES)
def test_every_branch_is_taken_by_its_condition_only(arch: str) -> None:
    vcc = "vcc" if asmkit.lanes(arch) == 64 else "vcc_lo"
    mov = "s_mov_b64" if asmkit.lanes(arch) == 64 else "s_mov_b32"
    exec_ = "exec" if asmkit.lanes(arch) == 64 else "exec_lo"
    prepare = {"scc": "s_cmp_eq_u32 {0}, 1", "vcc": f"{mov} {vcc}, {{0}}", "exec": f"{mov} {exec_}, {{0}}"}
    branches = {
        "s_cbranch_scc0": ("scc", 0), "s_cbranch_scc1": ("scc", 1), "s_cbranch_vccz": ("vcc", 0),
        "s_cbranch_vccnz": ("vcc", 1), "s_cbranch_execz": ("exec", 0), "s_cbranch_execnz": ("exec", 1),
    }  # fmt: skip
    for name, (what, wanted) in branches.items():
        for held in (0, 1):
            body = [
                prepare[what].format(held),
                "s_mov_b32 s4, 7",
                f"{name} over",
                "s_mov_b32 s4, 8",
                "over:",
                "s_nop 0",
            ]
            machine = asmkit.execute(arch, body)
            assert int(machine.state.S[0, 4]) == (7 if held == wanted else 8), (name, held)
    machine = asmkit.execute(arch, ["s_mov_b32 s4, 7", "s_branch over", "s_mov_b32 s4, 8", "over:", "s_nop 0"])
    assert int(machine.state.S[0, 4]) == 7


@pytest.mark.parametrize("arch", ARCHES)
def test_64_bits_everywhere(arch: str) -> None:
    not_b = "s_andn2_b64" if asmkit.ARCHES[arch].family == 9 else "s_and_not1_b64"
    for a in WIDE[2:]:
        for b in WIDE[2:]:
            scalars = {6: a & M32, 7: a >> 32, 8: b & M32, 9: b >> 32}
            body = ["s_and_b64 s[10:11], s[6:7], s[8:9]", "s_or_b64 s[12:13], s[6:7], s[8:9]",
                    f"{not_b} s[14:15], s[6:7], s[8:9]", "s_lshl_b64 s[16:17], s[6:7], s8"]  # fmt: skip
            if arch != "gfx1201":
                body += ["s_add_u32 s18, s6, s8", "s_addc_u32 s19, s7, s9"]
            machine = asmkit.execute(arch, body, scalars=scalars)
            expected = [a & b, a | b, a & ~b, (a << (b & 63)) & M64, (a + b) & M64][: 5 if arch != "gfx1201" else 4]
            assert [int(machine.state.S64[0, 5 + n]) for n in range(len(expected))] == expected


@pytest.mark.parametrize("arch", ARCHES)
def test_lanes_to_scalars_and_back(arch: str) -> None:
    lanes = asmkit.lanes(arch)
    values = np.random.default_rng(1).integers(0, 2**32, lanes, dtype=np.uint32)
    body = ["v_readfirstlane_b32 s4, v1", "v_readlane_b32 s5, v1, 9", "v_writelane_b32 v1, s6, 11"]
    machine = asmkit.execute(arch, body, {1: values}, {6: 77}, exec_mask=(1 << lanes) - 1 & ~7)
    assert int(machine.state.S[0, 4]) == values[3], "the first lane that is on"
    assert int(machine.state.S[0, 5]) == values[9]
    expected = values.copy()
    expected[11] = 77
    np.testing.assert_array_equal(machine.state.V[1, 0], expected)
    swap = {1: values, 2: ((np.arange(lanes) ^ 5) * 4).astype(np.uint32)}
    wait = "s_wait_dscnt 0x0" if arch == "gfx1201" else "s_waitcnt lgkmcnt(0)"
    machine = asmkit.execute(arch, ["ds_bpermute_b32 v3, v2, v1", wait], swap)
    np.testing.assert_array_equal(machine.state.V[3, 0], values[np.arange(lanes) ^ 5])
