"""Scalar instructions that our kernels use, bit for bit as AMD's documents define them (isa_scalar.py): the result and
scc, on every arch whose code has them. Each wave has operands of its own."""

from __future__ import annotations

import random
import re
from typing import Any

import asmkit
import isa_masks
import isa_run
import isa_scalar
import isa_vector
import numpy as np
import pytest
from isa_numbers import M32, M64, field, signed

USED = isa_run.USED
WAVES = 64  # operands of one run
_OTHERS = """
    s_add_u32 s_addc_u32 s_sub_u32 s_subb_u32 s_add_i32 s_sub_i32 s_mul_i32 s_mul_hi_u32 s_mul_hi_i32 s_and_b32 s_or_b32
    s_xor_b32 s_andn2_b32 s_lshl_b32 s_lshr_b32 s_ashr_i32 s_min_i32 s_max_i32 s_min_u32 s_max_u32 s_lshl2_add_u32
    s_pack_ll_b32_b16 s_pack_hh_b32_b16 s_bfm_b32 s_bfe_u32 s_bfe_i32 s_not_b32 s_brev_b32 s_bcnt1_i32_b32 s_abs_i32
    s_ff1_i32_b32 s_flbit_i32_b32 s_sext_i32_i8 s_sext_i32_i16 s_xor_b64 s_lshr_b64 s_ashr_i64 s_cselect_b32
    s_cselect_b64 s_cmov_b32"""
# Not used: once wrong in the model, or modelled for other kernels.
UNUSED = {"gfx1201": ["s_max_num_f32", "s_min_num_f32", "s_cvt_f32_f16"],
          "gfx1151": ["s_max_f32", "s_min_f32", "s_cvt_f32_f16"],
          "gfx942": _OTHERS.split()}  # fmt: skip
EVERYWHERE = ["s_bfe_i64", "s_absdiff_i32", "s_bitset0_b32", "s_and_b64", "s_or_b64", "s_lshl_b64"]
COMPARES = dict.fromkeys(("gfx1151", "gfx1201"), "s_cmp_lg_f32 s_cmp_nlg_f32") | {
    "gfx942": " ".join(["s_cmpk_lt_i32", *(f"s_cmp_{p}_{kind}" for p in ("eq", "lg", "gt", "ge", "lt", "le")
                                           for kind in ("u32", "i32"))]),
}  # fmt: skip


def short(name: str) -> str:
    return name.removeprefix("v_").removeprefix("s_").removesuffix("_e64")


def wanted(arch: str) -> list[str]:
    inverse = "s_andn2_b64" if arch.startswith("gfx9") else "s_and_not1_b64"
    return list(dict.fromkeys([*USED[arch], *UNUSED.get(arch, []), *EVERYWHERE, inverse]))


CASES = isa_run.checked(
    (arch, name) for arch in USED for name in wanted(arch)
    if name.startswith(("s_", "v_s_")) and short(name) in isa_scalar.defined(isa_run.family(arch))
)  # fmt: skip


def place(scalars: dict[int, Any], first: int, kind: str, values: list[int]) -> str:
    """Put a value for every wave into scalar registers; their name."""
    for n in range(isa_run.registers(kind)):
        scalars[first + n] = np.array([value >> 32 * n & M32 for value in values], np.uint64)
    return isa_run.named(first, isa_run.registers(kind), "s")


def held(machine: Any, first: int, kind: str) -> list[int]:
    words = [machine.state.S[:, first + n].astype(object) for n in range(isa_run.registers(kind))]
    return [int(sum(int(w) << 32 * n for n, w in enumerate(row))) for row in zip(*words, strict=True)]


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_result_and_scc(arch: str, name: str) -> None:
    kind, kinds, function = isa_scalar.defined(isa_run.family(arch))[short(name)]
    for seed in range(4):
        draw = random.Random(f"{name} {seed}")
        sources = [isa_run.column(k, WAVES, draw) for k in kinds.split()]
        if name.startswith("s_bfe") and seed:  # widths and offsets that matter
            sources[1] = [draw.randrange(70) | draw.randrange(68) << 16 for _ in range(WAVES)]
        elif len(sources) == 2 and len(set(kinds.split())) == 1:
            sources[1][::4] = sources[0][::4]
        before, old = [draw.randrange(2) for _ in range(WAVES)], isa_run.column(kind, WAVES, draw)
        scalars: dict[int, Any] = {20: np.array(before, np.uint64)}
        words = [place(scalars, 4 + 4 * n, k, values) for n, (k, values) in enumerate(zip(kinds.split(), sources,
            strict=True))]  # fmt: skip
        target = place(scalars, 16, kind, old)
        body = ["s_cmp_lg_u32 s20, 0", f"{name} {target}, {', '.join(words)}"]
        machine = asmkit.execute(arch, body, scalars=scalars, waves=WAVES)
        found = held(machine, 16, kind)
        for wave, values in enumerate(zip(*sources, strict=True)):
            value, scc = function(*values, before[wave], old[wave])
            expected = isa_vector.masked(kind, value)
            said = f"{arch}: {body[1]}: {[hex(v) for v in values]} gives {found[wave]:#x}, {expected:#x} is defined"
            assert isa_vector.agrees(kind, found[wave], expected), said
            assert bool(machine.state.scc[wave]) == bool(before[wave] if scc is isa_scalar.KEEPS else scc), said


@pytest.mark.parametrize(("arch", "name"), [c for c in CASES if "64" not in c[1]])
def test_constants(arch: str, name: str) -> None:
    kind, kinds, function = isa_scalar.defined(isa_run.family(arch))[short(name)]
    first = kinds.split()[0]
    width = int(first[1:])
    rows = [(str(n), n & ((1 << width) - 1)) for n in (-16, -3, 0, 1, 64)]
    rows += [("1.0", 0x3C00), ("-4.0", 0xC400)] if first == "f16" else [("1.0", 0x3F800000), ("-4.0", 0xC0800000)]
    for text, value in rows:
        others = [isa_run.edges(k)[9] for k in kinds.split()[1:]]
        scalars: dict[int, Any] = {16: 0x12345678}
        words = [text, *(place(scalars, 8, k, [v]) for k, v in zip(kinds.split()[1:], others, strict=True))]
        machine = asmkit.execute(arch, ["s_cmp_lg_u32 0, 0", f"{name} s16, {', '.join(words)}"], scalars=scalars)
        expected = isa_vector.masked(kind, function(value, *others, 0, 0x12345678)[0])
        assert isa_vector.agrees(kind, held(machine, 16, kind)[0], expected), (name, text)


IMMEDIATES = isa_run.used(r"s_(movk|addk(_co)?)_i32", {"gfx942": "s_movk_i32 s_addk_i32 s_mulk_i32"})


@pytest.mark.parametrize(("arch", "name"), IMMEDIATES)
def test_immediates(arch: str, name: str) -> None:
    function = isa_scalar.immediate(name[2:])
    assert function is not None
    old = isa_run.column("u32", WAVES, random.Random(name))
    for k in (0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x1234):
        scalars: dict[int, Any] = {}
        place(scalars, 4, "u32", old)
        machine = asmkit.execute(arch, ["s_cmp_eq_u32 0, 0", f"{name} s4, {k:#x}"], scalars=scalars, waves=WAVES)
        for wave, found in enumerate(held(machine, 4, "u32")):
            value, scc = function(k, old[wave])
            assert found == value & M32
            assert bool(machine.state.scc[wave]) == (True if scc is isa_scalar.KEEPS else scc)


COMPARE = re.compile(r"s_cmp(k?)_(\w+)_([iuf])(32|64)")
COMPARISONS = isa_run.used(COMPARE.pattern, COMPARES)


@pytest.mark.parametrize(("arch", "name"), COMPARISONS)
def test_comparisons(arch: str, name: str) -> None:
    found = COMPARE.fullmatch(name)
    assert found
    kind = found[3] + found[4]
    operand, draw = "f32" if kind == "f32" else "u32", random.Random(name)
    for seed in range(4):
        first, second = (isa_run.column(operand, WAVES, draw) for _ in range(2))
        second[::3] = first[::3]
        scalars: dict[int, Any] = {}
        words = [place(scalars, 4 + 2 * n, operand, values) for n, values in enumerate((first, second))]
        if found[1]:
            words[1], second = str((-3, 7, 0, -32768)[seed]), [(-3, 7, 0, -32768)[seed] & M32] * WAVES
        machine = asmkit.execute(arch, [f"{name} {', '.join(words)}"], scalars=scalars, waves=WAVES)
        expected = [isa_masks.compare(found[2], kind, a, b) for a, b in zip(first, second, strict=True)]
        assert machine.state.scc.tolist() == expected


@pytest.mark.parametrize(("arch", "name"), isa_run.used("s_bitcmp1_b32"))
def test_bit_is_set(arch: str, name: str) -> None:
    draw = random.Random(name)
    value, at = isa_run.column("u32", WAVES, draw), isa_run.column("u32", WAVES, draw)
    scalars: dict[int, Any] = {}
    words = [place(scalars, 4, "u32", value), place(scalars, 5, "u32", at)]
    machine = asmkit.execute(arch, [f"{name} {', '.join(words)}"], scalars=scalars, waves=WAVES)
    assert machine.state.scc.tolist() == [bool(field(v, n & 31, 1)) for v, n in zip(value, at, strict=True)]


_SAVES = {64: "s_and_saveexec_b64 s_or_saveexec_b64 s_xor_saveexec_b64 s_andn2_saveexec_b64",
          32: "s_and_saveexec_b32 s_or_saveexec_b32 s_xor_saveexec_b32 s_and_not1_saveexec_b32"}  # fmt: skip
SAVES = {arch: _SAVES[asmkit.lanes(arch)] for arch in asmkit.ARCH_NAMES}


@pytest.mark.parametrize(("arch", "name"), isa_run.used("", SAVES))
def test_exec_is_saved_and_changed(arch: str, name: str) -> None:
    changed = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}.get(
        name[2:].partition("_saveexec")[0], lambda source, on: source & ~on)  # fmt: skip
    kind, mask = f"u{name[-2:]}", M32 if name.endswith("32") else M64
    source = isa_run.column(kind, WAVES, random.Random(name))
    source[0] = 0
    scalars: dict[int, Any] = {}
    text = f"{name} {isa_run.named(8, isa_run.registers(kind), 's')}, {place(scalars, 4, kind, source)}"
    for on in (mask, 0x00FF_00FF_0F0F_5A5A & mask):
        machine = asmkit.execute(arch, [text], scalars=scalars, waves=WAVES, exec_mask=on)
        assert held(machine, 8, kind) == [on] * WAVES
        expected = [changed(value, on) for value in source]
        assert held(machine, 126, kind) == expected
        assert machine.state.scc.tolist() == [value != 0 for value in expected]


BRANCHES = "s_branch s_cbranch_scc0 s_cbranch_scc1 s_cbranch_vccz s_cbranch_vccnz s_cbranch_execz s_cbranch_execnz"


@pytest.mark.parametrize(("arch", "name"), isa_run.used("", {"": BRANCHES}))
def test_branches(arch: str, name: str) -> None:
    """A branch on scc, vcc or exec is taken when the condition that its name says holds, a plain one always."""
    for value in (0, 1, 1 << 20):
        condition = {"scc0": value == 0, "scc1": value != 0, "vccz": value == 0, "vccnz": value != 0,
                     "execz": value == 0, "execnz": value != 0}.get(name.removeprefix("s_cbranch_"), True)  # fmt: skip
        body = ["s_mov_b32 s9, 1", "s_cmp_lg_u32 s8, 0", f"{name} .LBB0_1", "s_mov_b32 s9, 2", ".LBB0_1:"]
        machine = asmkit.execute(arch, body, scalars={8: value, 106: value, 107: 0}, exec_mask=value)
        assert int(machine.state.S[0, 9]) == (1 if condition else 2), value


def test_fields_that_end_beyond_the_top_have_the_sign() -> None:
    for arch in asmkit.ARCH_NAMES:
        scalars = {4: 0x9E404479, 5: 31 | 31 << 16, 6: 0, 7: 0xBFF80000, 10: 51 | 40 << 16}
        body = ["s_bfe_i32 s8, s4, s5", "s_bfe_i64 s[12:13], s[6:7], s10", "v_mov_b32_e32 v1, s4",
                "v_bfe_i32 v0, v1, 31, 31"]  # fmt: skip
        machine = asmkit.execute(arch, body, scalars=scalars)
        assert int(machine.state.S[0, 8]) == int(machine.state.V[0, 0, 0]) == M32
        assert signed(held(machine, 12, "u64")[0], 64) == signed(0xBFF80000 << 32, 64) >> 51


# Loops, of waves that take them a different number of times.


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
