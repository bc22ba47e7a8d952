"""Atomics, and the loads and stores that test_isa_memory.py has no definition of, against bytes moved by hand."""

from collections.abc import Sequence
from typing import Any

import asmkit
import numpy as np
import pytest

from portattn.backends.rocm.emulator.amdgpu import Checks, LdsOutOfRange, Memory, Program, Report

RNG = np.random.default_rng(31)
WAIT = {"gfx942": "s_waitcnt vmcnt(0) lgkmcnt(0)", "gfx1100": "s_waitcnt vmcnt(0) lgkmcnt(0)",
        "gfx950": "s_waitcnt vmcnt(0) lgkmcnt(0)", "gfx1201": "s_wait_loadcnt_dscnt 0x0",
        "gfx90a": "s_waitcnt vmcnt(0)"}  # fmt: skip


def launch(
    arch: str, body: str, arrays: Sequence[np.ndarray[Any, Any]], *, waves: int = 1, lds: int = 0, grid: int = 1,
    checks: Checks | None = None, step_limit: int = 200_000,
) -> Report:  # fmt: skip
    """Run a kernel whose arguments are the arrays' addresses; s[2:3] is the first, s[4:5] the second …"""
    load = {"gfx9": "s_load_dwordx2", "gfx1": "s_load_b64"}[arch[:4]]
    wait = "s_waitcnt lgkmcnt(0)" if arch != "gfx1201" else "s_wait_kmcnt 0x0"
    head = [f"{load} s[{10 + 2 * i}:{11 + 2 * i}], s[0:1], {8 * i:#x}" for i in range(len(arrays))] + [wait]
    program = Program.parse(asmkit.text(arch, "\n".join(head) + "\n" + body, waves=waves, arguments=[8] * len(arrays)))
    memory = Memory()
    arguments = [memory.add(array, f"array {i}") for i, array in enumerate(arrays)]
    report = program.launch((grid,), arguments, memory, lds_bytes=lds, checks=checks, step_limit=step_limit)
    asmkit.record(arch, [ran for ran in program.assembly.instructions if ran.mnemonic in report.coverage])
    return report


DESCRIPTOR = """
    s_mov_b64 s[20:21], s[10:11]
    s_and_b32 s21, s21, 0xffff
    s_mov_b32 s22, {records}
    s_mov_b32 s23, 0x27000
"""


def test_64_bit_addresses_and_offsets() -> None:
    source, target = np.arange(64, dtype=np.uint32), np.zeros(80, np.uint32)
    launch("gfx942", """
        v_mov_b32_e32 v3, 0
        v_lshlrev_b32_e32 v2, 2, v0
        v_lshl_add_u64 v[4:5], v[2:3], 0, s[10:11]
        v_lshl_add_u64 v[6:7], v[2:3], 0, s[12:13]
        global_load_dword v8, v[4:5], off
        s_waitcnt vmcnt(0)
        global_store_dword v[6:7], v8, off offset:64
    """, [source, target])  # fmt: skip
    np.testing.assert_array_equal(target[16:], source)
    assert not target[:16].any()


@pytest.mark.parametrize(
    ("name", "dtype", "keep"),
    [("ubyte", np.uint8, None), ("sbyte", np.int8, None), ("ushort", np.uint16, None), ("sshort", np.int16, None),
     ("short_d16", np.uint16, 0), ("short_d16_hi", np.uint16, 1), ("ubyte_d16_hi", np.uint8, 1)],
)  # fmt: skip
def test_narrow_loads(name: str, dtype: Any, keep: int | None) -> None:
    source = RNG.integers(0, 255, 64).astype(np.uint8).view(np.int8).astype(dtype)
    target = np.zeros(64, np.uint32)
    size = source.itemsize
    launch("gfx942", f"""
        v_mul_u32_u24_e32 v1, {size}, v0
        v_lshlrev_b32_e32 v2, 2, v0
        v_mov_b32_e32 v3, 0x12345678
        global_load_{name} v3, v1, s[10:11]
        s_waitcnt vmcnt(0)
        global_store_dword v2, v3, s[12:13]
    """, [source, target])  # fmt: skip
    value = source.astype(np.int64) & 0xFFFFFFFF
    expected = {None: value, 0: 0x12340000 | value & 0xFFFF, 1: 0x5678 | (value & 0xFFFF) << 16}[keep]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("records", [256, 100, 2])
def test_buffer_range_check(records: int) -> None:
    """Beyond num_records a load gives 0 and a store does nothing; the scalar offset counts."""
    source, target = np.arange(1, 65, dtype=np.uint32), np.full(64, 7, np.uint32)
    launch("gfx942", DESCRIPTOR.format(records=records) + """
        v_lshlrev_b32_e32 v1, 2, v0
        s_mov_b32 s30, 8
        buffer_load_dword v2, v1, s[20:23], s30 offen offset:4
        s_waitcnt vmcnt(0)
        global_store_dword v1, v2, s[12:13]
    """, [source, target])  # fmt: skip
    expected = [source[i + 3] if 4 * i + 16 <= records else 0 for i in range(64)]
    np.testing.assert_array_equal(target, expected)


def test_scalar_loads_ignore_the_low_address_bits() -> None:
    source, target = np.arange(100, 116, dtype=np.uint32), np.zeros(64, np.uint32)
    launch("gfx942", """
        s_load_dwordx4 s[20:23], s[10:11], 0x12
        v_lshlrev_b32_e32 v1, 2, v0
        s_waitcnt lgkmcnt(0)
        v_mov_b32_e32 v2, s23
        global_store_dword v1, v2, s[12:13]
    """, [source, target])  # fmt: skip
    assert (target == 107).all()


@pytest.mark.parametrize(
    ("name", "function"),
    [("add", lambda o, x: o + x), ("sub", lambda o, x: o - x), ("smax", max), ("umin", min), ("and", lambda o,
        x: o & x),
     ("or", lambda o, x: o | x), ("xor", lambda o, x: o ^ x), ("swap", lambda o, x: x),
     ("inc", lambda o, x: 0 if o >= x else o + 1), ("dec", lambda o, x: x if o == 0 or o > x else o - 1)],
)  # fmt: skip
def test_atomics_in_lane_order(name: str, function: Any) -> None:
    """Four lanes share a cell: each sees what the one before left."""
    cells = RNG.integers(0, 100, 16).astype(np.uint32)
    operand, old = RNG.integers(0, 100, 64).astype(np.uint32), np.zeros(64, np.uint32)
    expected, before = cells.copy(), np.zeros(64, np.uint32)
    for lane in range(64):
        before[lane] = expected[lane // 4]
        expected[lane // 4] = function(int(before[lane]), int(operand[lane])) & 0xFFFFFFFF
    launch("gfx942", f"""
        v_lshlrev_b32_e32 v1, 2, v0
        global_load_dword v2, v1, s[12:13]
        v_and_b32_e32 v3, 60, v0
        s_waitcnt vmcnt(0)
        global_atomic_{name} v4, v3, v2, s[10:11] sc0
        s_waitcnt vmcnt(0)
        global_store_dword v1, v4, s[14:15]
    """, [cells, operand, old])  # fmt: skip
    np.testing.assert_array_equal(cells, expected)
    np.testing.assert_array_equal(old, before)


@pytest.mark.parametrize(("name", "dtype"), [("add_f32", np.float32), ("pk_add_f16", np.float16)])
def test_float_atomics(name: str, dtype: Any) -> None:
    per = 4 // np.dtype(dtype).itemsize
    cells, operand = np.zeros(16 * per, dtype), RNG.integers(-8, 9, 64 * per).astype(dtype)
    launch("gfx942", f"""
        v_lshlrev_b32_e32 v1, 2, v0
        global_load_dword v2, v1, s[12:13]
        v_and_b32_e32 v3, 60, v0
        s_waitcnt vmcnt(0)
        global_atomic_{name} v3, v2, s[10:11]
    """, [cells, operand])  # fmt: skip
    np.testing.assert_array_equal(cells.reshape(16, per), operand.reshape(16, 4, per).sum(1))


def test_compare_and_swap() -> None:
    """One lane of all wins a cell that holds what it expects."""
    cell, winner = np.array([5], np.uint32), np.zeros(64, np.uint32)
    launch("gfx942", """
        v_mov_b32_e32 v1, 0
        v_add_u32_e32 v2, 100, v0
        v_mov_b32_e32 v3, 5
        global_atomic_cmpswap v4, v1, v[2:3], s[10:11] sc0
        v_lshlrev_b32_e32 v5, 2, v0
        s_waitcnt vmcnt(0)
        global_store_dword v5, v4, s[12:13]
    """, [cell, winner])  # fmt: skip
    assert cell[0] == 100
    np.testing.assert_array_equal(winner, [5] + [100] * 63)


def test_lds_bytes_and_halves() -> None:
    lane = np.arange(64, dtype=np.uint32)
    x = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    body = ["ds_write_b16 v1, v2", "ds_write_b16_d16_hi v1, v2 offset:128", "ds_write_b8 v3, v2 offset:256",
            "s_waitcnt lgkmcnt(0)", "ds_read_u16 v4, v1", "ds_read_u16_d16_hi v5, v1 offset:128",
            "ds_read_i8 v6, v3 offset:256",
            "s_waitcnt lgkmcnt(0)"]  # fmt: skip
    machine = asmkit.execute("gfx942", body, {1: lane * 2, 2: x, 3: lane, 5: x}, lds=512)
    np.testing.assert_array_equal(machine.state.V[4, 0], x & 0xFFFF)
    np.testing.assert_array_equal(machine.state.V[5, 0], x & 0xFFFF | x >> 16 << 16)
    np.testing.assert_array_equal(machine.state.V[6, 0].view(np.int32), x.astype(np.uint8).view(np.int8))


@pytest.mark.parametrize("bits", [8, 16])
def test_transposing_lds_loads(bits: int) -> None:
    """16 lanes read 8 bytes each, row after row of a 16-wide matrix; lane i gets column i."""
    dtype = {8: np.uint8, 16: np.uint16}[bits]
    rows = 64 // bits
    matrix = RNG.integers(0, 1 << bits, (4, rows, 16)).astype(dtype)
    words = matrix.reshape(-1).view(np.uint32).reshape(64, 2)
    lane = np.arange(64, dtype=np.uint32)
    body = [
        "ds_write_b64 v1, v[2:3]", "s_waitcnt lgkmcnt(0)", f"ds_read_b64_tr_b{bits} v[4:5], v1", "s_waitcnt lgkmcnt(0)",
    ]  # fmt: skip
    machine = asmkit.execute("gfx950", body, {1: lane * 8, 2: words[:, 0], 3: words[:, 1]}, lds=512)
    found = np.stack([machine.state.V[4, 0], machine.state.V[5, 0]], 1).copy().view(dtype).reshape(4, 16, rows)
    np.testing.assert_array_equal(found, matrix.transpose(0, 2, 1))


@pytest.mark.parametrize(("name", "dtype"), [("add_u32", np.uint32), ("max_i32", np.int32), ("add_f32", np.float32)])
def test_lds_atomics(name: str, dtype: Any) -> None:
    x = RNG.integers(1, 50, 64).astype(dtype)
    lane = np.arange(64, dtype=np.uint32)
    body = ["ds_write_b32 v1, v4", "s_waitcnt lgkmcnt(0)", f"ds_{name} v2, v3", "s_waitcnt lgkmcnt(0)",
        "ds_read_b32 v5, v2",
            "s_waitcnt lgkmcnt(0)"]  # fmt: skip
    machine = asmkit.execute("gfx942", body, {1: lane * 4, 2: lane // 8 * 4, 3: x, 4: lane * 0}, lds=256)
    groups = x.reshape(8, 8)
    expected = np.repeat(groups.max(1) if "max" in name else groups.sum(1), 8).astype(dtype)
    np.testing.assert_array_equal(machine.state.V[5, 0].view(dtype), expected)


def test_scratch_of_bytes() -> None:
    x = RNG.integers(0, 2**32, (4, 64), dtype=np.uint32)
    body = ["scratch_store_dwordx4 off, v[4:7], off offset:16", "scratch_store_short off, v4, off offset:2",
            "scratch_load_dwordx4 v[8:11], off, off offset:16", "scratch_load_ushort v12, off, off offset:2",
            "s_waitcnt vmcnt(0)"]  # fmt: skip
    machine = asmkit.execute("gfx942", body, {4 + i: x[i] for i in range(4)}, scratch=64)
    np.testing.assert_array_equal(machine.state.V[8:12, 0], x)
    np.testing.assert_array_equal(machine.state.V[12, 0], x[0] & 0xFFFF)


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1151", "gfx1201"])
def test_scratch(arch: str) -> None:
    """Stores of every size beside each other, read as another size."""
    x = RNG.integers(0, 2**32, (7, 32), dtype=np.uint32)
    body = ["scratch_store_b128 off, v[4:7], off offset:16", "scratch_store_b32 off, v8, off offset:4",
            "scratch_store_b64 off, v[9:10], off offset:8"]  # fmt: skip
    wait = (
        ["s_wait_loadcnt 0x0", "s_wait_storecnt 0x0"]
        if arch == "gfx1201"
        else [WAIT["gfx1100"], "s_waitcnt_vscnt null, 0x0"]
    )
    loads = ["scratch_load_b128 v[20:23], off, off offset:16", "scratch_load_b32 v24, off, off offset:4",
             "scratch_load_b32 v25, off, off offset:20", "scratch_load_b64 v[26:27], off, off offset:8"]  # fmt: skip
    machine = asmkit.execute(arch, [*body, *wait, *loads, *wait], {4 + i: x[i] for i in range(7)}, scratch=64)
    found = [*x[:5], x[1], *x[5:7]]
    np.testing.assert_array_equal(machine.state.V[20 : 20 + len(found), 0], found)


@pytest.mark.parametrize("size", [4, 16])
def test_loads_that_go_to_lds(size: int) -> None:
    source, target = RNG.integers(0, 2**32, 64 * size // 4, dtype=np.uint32), np.zeros(64, np.uint32)
    kind = {4: "dword", 16: "dwordx4"}[size]
    launch("gfx950", f"""
        v_mul_u32_u24_e32 v1, {size}, v0
        s_mov_b32 m0, 32
        s_nop 0
        global_load_lds_{kind} v1, s[10:11]
        s_waitcnt vmcnt(0)
        v_lshlrev_b32_e32 v2, 2, v0
        ds_read_b32 v3, v2 offset:32
        s_waitcnt lgkmcnt(0)
        global_store_dword v2, v3, s[12:13]
    """, [source, target], lds=32 + 64 * size)  # fmt: skip
    np.testing.assert_array_equal(target, source[:64])


@pytest.mark.parametrize("arch", asmkit.ARCH_NAMES)
def test_work_group_numbers(arch: str) -> None:
    target = np.zeros(6, np.uint32)
    store = "global_store_dword" if arch.startswith("gfx9") else "global_store_b32"
    number = "ttmp9" if arch == "gfx1201" else "s2"
    launch(arch, f"""
        s_lshl_b32 s30, {number}, 2
        v_mov_b32_e32 v1, s30
        v_mov_b32_e32 v2, {number}
        {store} v1, v2, s[10:11]
    """, [target], grid=6)  # fmt: skip
    np.testing.assert_array_equal(target, np.arange(6))


@pytest.mark.parametrize("arch", asmkit.ARCH_NAMES)
def test_lds_address_wraps(arch: str) -> None:
    """A compiler folds the negative part of an address into the register: −912 + 1,024 is byte 112."""
    lane = np.arange(asmkit.lanes(arch))
    write, read = ("ds_store_b32", "ds_load_b32") if arch.startswith("gfx1") else ("ds_write_b32", "ds_read_b32")
    wait = "s_wait_dscnt 0x0" if arch.startswith("gfx12") else "s_waitcnt lgkmcnt(0)"
    body = [f"{write} v1, v2 offset:1024", wait, f"{read} v3, v4 offset:112", wait]
    registers = {1: (4 * lane - 912).astype(np.int64).astype(np.uint32), 2: lane.astype(np.uint32) + 7,
                 4: (4 * lane).astype(np.uint32)}  # fmt: skip
    assert asmkit.execute(arch, body, registers, lds=1024).state.V[3, 0].tolist() == (lane + 7).tolist()
    with pytest.raises(LdsOutOfRange):
        asmkit.execute(arch, body, registers, lds=200)  # the last lanes' bytes are past it
