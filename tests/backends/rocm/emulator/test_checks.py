"""Each check with a planted bug: found, as the right error, at its line; and the kernel without the bug passes."""

import contextlib

import asmkit
import numpy as np
import pytest
from test_memory_instructions import launch

from portattn.backends.rocm.emulator.amdgpu import (
    BarrierMismatch,
    Checks,
    Finding,
    GlobalRace,
    LdsOutOfRange,
    LdsRace,
    MissingWait,
    OutOfBounds,
    StepLimit,
    UninitialisedValue,
)

# Two waves exchange values through LDS; each planted bug is one change to this.
EXCHANGE = """
    v_lshlrev_b32_e32 v1, 2, v0
    global_load_dword v2, v1, s[10:11]
    v_xor_b32_e32 v3, 0x100, v1
    s_waitcnt vmcnt(0)
    ds_write_b32 v1, v2
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v4, v3
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v4, s[12:13]
"""
PRELUDE = 3  # lines that `launch` puts before a body for two arrays; the body's first line is empty


def run(body: str, checks: Checks | None = None, lds: int = 512) -> np.ndarray:
    source, target = np.arange(1, 129, dtype=np.uint32), np.zeros(128, np.uint32)
    launch("gfx942", body, [source, target], waves=2, lds=lds, checks=checks)
    np.testing.assert_array_equal(target, np.roll(source, 64))
    return target


def finds(error: type[Finding] | None, match: str = "") -> contextlib.AbstractContextManager[object]:
    """What a launch is run in that has a bug, or none."""
    return contextlib.nullcontext() if error is None else pytest.raises(error, match=match)


def line_of(body: str, text: str) -> str:
    """kernel.py:line of an instruction in a body, as the source place of a finding."""
    number = next(n for n, line in enumerate(body.split("\n")) if text in line)
    return f"kernel.py:{number + PRELUDE + 1}:5"


def plant(old: str, new: str) -> str:
    assert EXCHANGE.count(old) == 1
    return EXCHANGE.replace(old, new)


BUGS = [
    ("no barrier", plant("    s_barrier\n", ""), LdsRace, "ds_read_b32 v4", "races"),
    ("no wait for a load", plant("    s_waitcnt vmcnt(0)\n", ""), MissingWait, "ds_write_b32 v1, v2", "waits"),
    ("no wait for an LDS load", plant("v4, v3\n    s_waitcnt lgkmcnt(0)", "v4, v3"), MissingWait,
    "global_store_dword", "waits"),
    ("no wait before the barrier", plant("    s_waitcnt lgkmcnt(0)\n    s_barrier", "    s_barrier"), MissingWait,
     "ds_write_b32 v1, v2", "waits"),
    ("a register nobody wrote", plant("ds_write_b32 v1, v2", "ds_write_b32 v1, v9"), UninitialisedValue,
    "global_store_dword",
     "undefined"),
    ("an address nobody wrote", plant("global_load_dword v2, v1", "global_load_dword v2, v8"), UninitialisedValue,
     "global_load_dword", "undefined"),
    ("LDS nobody wrote", plant("    ds_write_b32 v1, v2\n", ""), UninitialisedValue, "global_store_dword", "undefined"),
    ("beyond the array", plant("global_load_dword v2, v1, s[10:11]", "global_load_dword v2, v1, s[10:11] offset:4"),
     OutOfBounds, "global_load_dword", "memory"),
    ("before the array", plant("global_store_dword v1, v4, s[12:13]", "global_store_dword v1, v4, s[12:13] offset:-4"),
     OutOfBounds, "global_store_dword", "memory"),
    ("beyond LDS", plant("ds_read_b32 v4, v3", "ds_read_b32 v4, v3 offset:4"), LdsOutOfRange, "ds_read_b32 v4", "lds"),
]  # fmt: skip


def test_the_kernel_without_a_bug_passes() -> None:
    run(EXCHANGE)


@pytest.mark.parametrize(("name", "body", "error", "where", "switch"), BUGS, ids=[bug[0] for bug in BUGS])
def test_planted_bug(name: str, body: str, error: type[Finding], where: str, switch: str) -> None:
    with pytest.raises(error) as caught:
        run(body)
    place = caught.value.place
    assert where in place.text
    assert place.source == line_of(body, where)
    assert f"line {place.line} ({place.source})" in str(caught.value)


@pytest.mark.parametrize(("name", "body", "error", "where", "switch"), BUGS, ids=[bug[0] for bug in BUGS])
def test_switched_off_a_check_says_nothing(name: str, body: str, error: type[Finding], where: str, switch: str) -> None:
    source, target = np.arange(1, 129, dtype=np.uint32), np.zeros(128, np.uint32)
    checks = Checks(stop=False, **{switch: False})
    report = launch("gfx942", body, [source, target], waves=2, lds=512, checks=checks)
    # A bug may be of two kinds; the one that is off is not reported.
    assert error not in [type(finding) for finding in report.findings]


def test_findings_are_collected_where_the_launch_goes_on() -> None:
    body = plant("ds_write_b32 v1, v2", "ds_write_b32 v1, v9")
    source, target = np.arange(1, 129, dtype=np.uint32), np.zeros(128, np.uint32)
    report = launch("gfx942", body, [source, target], waves=2, lds=512, checks=Checks(stop=False))
    assert [type(finding) for finding in report.findings] == [UninitialisedValue]


WAVES_PART = """
    v_readfirstlane_b32 s4, v0
    s_cmp_lt_u32 s4, 64
    s_cbranch_scc1 first
    s_barrier
    s_branch done
first:
    {first}
done:
    s_nop 0
"""


def test_waves_at_different_barriers() -> None:
    with pytest.raises(BarrierMismatch, match="different barriers"):
        launch("gfx942", WAVES_PART.format(first="s_barrier"), [], waves=2)
    launch("gfx942", WAVES_PART.format(first="s_barrier"), [], waves=2, checks=Checks(barriers=False))


def test_a_wave_that_ends_while_another_waits() -> None:
    with pytest.raises(BarrierMismatch, match="have ended"):
        launch("gfx942", WAVES_PART.format(first="s_nop 1"), [], waves=2)


def test_a_barrier_that_nobody_signals() -> None:
    """gfx12 splits the barrier in two: waiting without having signalled hangs."""
    launch("gfx1201", "s_barrier_signal -1\ns_barrier_wait -1", [], waves=2)
    with pytest.raises(BarrierMismatch, match="not signalled"):
        launch("gfx1201", "s_nop 0\ns_barrier_wait -1", [], waves=2)


def test_endless_loop_says_where() -> None:
    asm = asmkit.text("gfx942", "again:\ns_nop 0\ns_branch again")
    from portattn.backends.rocm.emulator.amdgpu import Memory, Program

    with pytest.raises(StepLimit, match=r"kernel.py:[23]:5") as caught:
        Program.parse(asm).launch((1,), [], Memory(), step_limit=1000)
    assert "1000 instructions" in str(caught.value)


def test_a_spin_lock_between_waves_ends() -> None:
    """The wave that waits for another's store gives way to it, though it stands further back."""
    flag = np.zeros(2, np.uint32)
    launch("gfx942", """
        v_mov_b32_e32 v1, 0
        v_mov_b32_e32 v2, 1
        v_readfirstlane_b32 s4, v0
        s_cmp_lt_u32 s4, 64
        s_cbranch_scc0 set
    wait:
        global_load_dword v3, v1, s[10:11]
        s_waitcnt vmcnt(0)
        v_readfirstlane_b32 s5, v3
        s_cmp_eq_u32 s5, 0
        s_cbranch_scc1 wait
        s_branch done
    set:
        global_store_dword v1, v2, s[10:11]
        s_waitcnt vmcnt(0)
    done:
        s_nop 0
    """, [flag], waves=2)  # fmt: skip
    assert flag[0] == 1


UNDEFINED = [
    ("s_cmp_eq_u32 s40, 0\ns_cbranch_scc1 end\nend:", "scc is undefined"),
    ("s_mov_b64 exec, s[40:41]", "goes into exec"),
    ("v_cmp_eq_u32_e32 vcc, 0, v9\ns_and_saveexec_b64 s[20:21], vcc", "goes into exec"),
    ("v_cmp_eq_u32_e32 vcc, 0, v9\ns_cbranch_vccz end\nend:", "is undefined"),
]


@pytest.mark.parametrize(("body", "match"), UNDEFINED)
def test_undefined_values_that_decide(body: str, match: str) -> None:
    with pytest.raises(UninitialisedValue, match=match):
        launch("gfx942", body, [])


@pytest.mark.parametrize(
    "body",
    [
        "v_add_u32_e32 v5, v9, v9",  # never used
        "v_mov_b32_e32 v8, 0\nv_cndmask_b32_e64 v5, v8, v9, 0\nglobal_store_dword v8, v5, s[10:11]",  # not chosen
        "s_mov_b64 s[20:21], 0\nv_cmp_eq_u32_e64 s[22:23], 0, v9\ns_and_b64 vcc, s[20:21], s[22:23]\n"
        "s_cbranch_vccz end\nend:",
        "s_mov_b64 exec, 1\nv_mov_b32_e32 v5, 0\ns_mov_b64 s[20:21], exec\nglobal_store_dword v5, v5, s[10:11]",
        # lanes off
        "v_mov_b32_e32 v2, 1.0\nv_mov_b32_e32 v4, 0\nv_mov_b32_e32 v5, 0\nv_mov_b32_e32 v3, 0\n"
        "v_pk_mul_f32 v[2:3], v[2:3], v[4:5] op_sel_hi:[1,0]\nglobal_store_dwordx2 v5, v[2:3], s[10:11]",
    ],
)
def test_undefined_values_that_do_not_matter(body: str) -> None:
    launch("gfx942", body, [np.zeros(64, np.uint32)])


def test_undefined_memory() -> None:
    from portattn.backends.rocm.emulator.amdgpu import Memory, Program

    body = "s_load_dwordx2 s[10:11], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\nv_lshlrev_b32_e32 v1, 2, v0\n"
    body += "global_load_dword v2, v1, s[10:11]\ns_waitcnt vmcnt(0)\nglobal_store_dword v1, v2, s[10:11]"
    program = Program.parse(asmkit.text("gfx942", body, arguments=[8]))
    for defined in (True, False):
        memory = Memory()
        arguments = [memory.add(np.zeros(64, np.uint32), defined=defined)]
        with finds(None if defined else UninitialisedValue, "v2 is undefined"):
            program.launch((1,), arguments, memory)


def test_equal_values_from_two_waves_are_no_race() -> None:
    body = """
        v_mov_b32_e32 v1, 0
        v_mov_b32_e32 v2, {value}
        ds_write_b32 v1, v2
        s_waitcnt lgkmcnt(0)
        s_barrier
    """
    launch("gfx942", body.format(value=7), [], waves=2, lds=64)
    with pytest.raises(LdsRace):
        launch("gfx942", body.format(value="v0"), [], waves=2, lds=64)


TWO_LOADS = "global_load_dword v2, v1, s[10:11]\nglobal_load_dword v3, v1, s[10:11]\n"
WAITS = [
    # (body, fine): loads finish in order; v2 is the first of two
    (TWO_LOADS + "s_waitcnt vmcnt(1)\nv_mov_b32_e32 v4, v2", True),
    (TWO_LOADS + "s_waitcnt vmcnt(1)\nv_mov_b32_e32 v4, v3", False),
    ("global_load_dword v2, v1, s[10:11]\nv_mov_b32_e32 v2, 0", False),  # overwritten before it arrives
    ("global_load_dword v2, v1, s[10:11]\nglobal_load_dword v2, v1, s[10:11]\ns_waitcnt vmcnt(0)", True),
    ("global_load_dword v2, v1, s[10:11]\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v4, v2", False),  # another counter
    # scalar loads finish in any order: only a wait for none is a wait
    (
        "s_load_dword s20, s[10:11], 0x0\ns_load_dword s21, s[10:11], 0x4\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s22, s20",
        False,
    ),
    (
        "s_load_dword s20, s[10:11], 0x0\ns_load_dword s21, s[10:11], 0x4\ns_waitcnt lgkmcnt(0)\ns_mov_b32 s22, s20",
        True,
    ),
]


@pytest.mark.parametrize(("body", "fine"), WAITS)
def test_wait_counts(body: str, fine: bool) -> None:
    body = "v_lshlrev_b32_e32 v1, 2, v0\n" + body
    with finds(None if fine else MissingWait):
        launch("gfx942", body, [np.zeros(64, np.uint32)])


@pytest.mark.parametrize(
    ("arch", "load", "wait", "fine"),
    [
        ("gfx1100", "global_load_b32 v2, v1, s[10:11]", "s_waitcnt vmcnt(0)", True),
        ("gfx1100", "global_load_b32 v2, v1, s[10:11]", "s_waitcnt_vscnt null, 0x0", False),
        ("gfx1201", "global_load_b32 v2, v1, s[10:11]", "s_wait_loadcnt 0x0", True),
        ("gfx1201", "global_load_b32 v2, v1, s[10:11]", "s_wait_dscnt 0x0", False),
        ("gfx1201", "ds_load_b32 v2, v1", "s_wait_dscnt 0x0", True),
        ("gfx1201", "ds_load_b32 v2, v1", "s_wait_loadcnt_dscnt 0x100", True),
        ("gfx1201", "ds_load_b32 v2, v1", "s_wait_kmcnt 0x0", False),
    ],
)
def test_counters_of_rdna(arch: str, load: str, wait: str, fine: bool) -> None:
    store = "ds_store_b32 v1, v0" if "ds_" in load else "s_nop 0"
    body = f"v_lshlrev_b32_e32 v1, 2, v0\n{store}\n{load}\n{wait}\nv_mov_b32_e32 v4, v2"
    with finds(None if fine else MissingWait, "v2 is used"):
        launch(arch, body, [np.zeros(64, np.uint32)], lds=256)


@pytest.mark.parametrize(
    ("arch", "load", "filler", "most"),
    [
        ("gfx942", "global_load_dword v2, v1, s[10:11]", "global_load_dword v3, v1, s[10:11]", 63),
        ("gfx942", "ds_read_b32 v2, v1", "ds_read_b32 v3, v1", 15),
        ("gfx1100", "global_load_b32 v2, v1, s[10:11]", "global_load_b32 v3, v1, s[10:11]", 63),
        ("gfx1100", "ds_load_b32 v2, v1", "ds_load_b32 v3, v1", 63),
        ("gfx1201", "global_load_b32 v2, v1, s[10:11]", "global_load_b32 v3, v1, s[10:11]", 63),
    ],
)
def test_an_access_behind_as_many_as_its_counter_counts_has_finished(arch, load, filler, most):
    """A full counter holds the next access up. With one access fewer the first may be on its way still."""
    store = "ds_store_b32 v1, v0" if arch != "gfx942" else "ds_write_b32 v1, v0"
    none = {"gfx1201": "s_wait_dscnt 0x0"}.get(arch, "s_waitcnt lgkmcnt(0)")
    begin = f"v_lshlrev_b32_e32 v1, 2, v0\n{store}\n{none}\n{load}\n"
    use = "v_mov_b32_e32 v4, v2"
    launch(arch, begin + f"{filler}\n" * most + use, [np.zeros(64, np.uint32)], lds=256)
    with pytest.raises(MissingWait, match="v2 is used"):
        launch(arch, begin + f"{filler}\n" * (most - 1) + use, [np.zeros(64, np.uint32)], lds=256)


def test_a_full_counter_says_nothing_of_scalar_loads() -> None:
    body = "s_load_dword s20, s[10:11], 0x0\n" * 16 + "s_mov_b32 s22, s20"
    with pytest.raises(MissingWait, match="s20 is used"):
        launch("gfx942", body, [np.zeros(64, np.uint32)])


def test_halves_of_a_register_are_waited_for_apart() -> None:
    body = """
        v_lshlrev_b32_e32 v1, 2, v0
        ds_store_b32 v1, v0
        ds_load_u16_d16 v2, v1
        ds_load_u16_d16_hi v2, v1
        s_waitcnt lgkmcnt(1)
        v_mov_b16_e32 v3.l, v2.{half}
        s_waitcnt lgkmcnt(0)
    """
    launch("gfx1100", body.format(half="l"), [], lds=128)
    with pytest.raises(MissingWait):
        launch("gfx1100", body.format(half="h"), [], lds=128)


@pytest.mark.parametrize("waited", [True, False])
def test_a_load_to_lds_is_waited_for(waited: bool) -> None:
    source, target = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    body = f"""
        v_lshlrev_b32_e32 v1, 2, v0
        s_mov_b32 m0, 0
        global_load_lds_dword v1, s[10:11]
        {"s_waitcnt vmcnt(0)" if waited else "s_nop 0"}
        ds_read_b32 v3, v1
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v3, s[12:13]
    """
    with finds(None if waited else MissingWait, "global_load_lds_dword"):
        launch("gfx950", body, [source, target], lds=256)
        np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize(("arch", "wait"), [("gfx942", "s_waitcnt vmcnt(0)"), ("gfx1100", "s_waitcnt_vscnt null, 0x0")])
def test_a_store_that_another_wave_reads_is_waited_for(arch: str, wait: str) -> None:
    """The class of the RDNA bugs with a missing vscnt wait: stored by one wave, read by the other after a barrier.

    The waves of a CDNA work-group share a cache that takes their accesses in order: there the barrier alone is enough,
    and without it the load is early."""
    size = asmkit.lanes(arch) * 4
    load, store = (
        ("global_load_dword", "global_store_dword") if arch == "gfx942" else ("global_load_b32", "global_store_b32")
    )
    for text, barrier in ((wait, "s_barrier"), ("s_nop 0", "s_barrier"), ("s_nop 0", "s_nop 0")):
        cells = np.zeros(2 * asmkit.lanes(arch), np.uint32)
        body = f"""
            v_lshlrev_b32_e32 v1, 2, v0
            v_xor_b32_e32 v3, {size:#x}, v1
            {store} v1, v0, s[10:11]
            {text}
            {barrier}
            {load} v4, v3, s[10:11]
            s_waitcnt vmcnt(0)
        """
        ordered = text == wait or (arch == "gfx942" and barrier == "s_barrier")
        with finds(None if ordered else MissingWait, "may not have written yet"):
            launch(arch, body, [cells], waves=2)


# Two work-groups. s14 is the work-group's number: the first scalar after the kernel's two user scalars is s2.
BETWEEN_GROUPS = {
    "both store, other values": ("global_store_dword v1, v3, s[10:11]", GlobalRace, "another value"),
    "both store one value": ("global_store_dword v1, v0, s[10:11]", None, ""),
    "one loads what the other stores": (
        "global_load_dword v4, v1, s[10:11]\ns_waitcnt vmcnt(0)\nglobal_store_dword v1, v3, s[10:11]", GlobalRace,
        "loads what another work-group stores",
    ),
    "both load": ("global_load_dword v4, v1, s[10:11]\ns_waitcnt vmcnt(0)", None, ""),
    "each its own": ("global_store_dword v2, v3, s[10:11]", None, ""),
    "atomics": ("global_atomic_add v1, v3, s[10:11]", None, ""),
    "stores after an atomic that returns": (
        "global_atomic_add v5, v1, v3, s[12:13] sc0\ns_waitcnt vmcnt(0)\nglobal_store_dword v1, v3, s[10:11]", None, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN_GROUPS)
def test_races_between_work_groups(name: str) -> None:
    text, kind, said = BETWEEN_GROUPS[name]
    body = (
        "v_lshlrev_b32_e32 v1, 2, v0\nv_add_u32_e32 v3, s2, v0\ns_lshl_b32 s3, s2, 8\nv_add_u32_e32 v2, s3, v1\n" + text
    )
    cells = [np.zeros(128, np.uint32), np.zeros(128, np.uint32)]
    launch("gfx942", body, cells, grid=2)  # off by default
    launch("gfx942", body, cells, grid=1, checks=Checks(groups=True))
    with finds(kind, said) as caught:
        launch("gfx942", body, cells, grid=2, checks=Checks(groups=True))
    if kind is None:
        return
    assert caught.value.place.text.startswith("global_store" if "loads" not in name else "global_load")
    assert "of array 0" in str(caught.value)


def test_a_negative_buffer_offset_is_told_from_a_masked_lane() -> None:
    """Triton's descriptors end at 2 GiB; a lane that its mask leaves out has the offset 0x80000000."""
    body = """
        s_and_b32 s11, s11, 0xffff
        s_mov_b32 s12, 0x7ffffffe
        s_mov_b32 s13, 0x27000
        v_mov_b32_e32 v1, {offset}
        buffer_load_dword v2, v1, s[10:13], 0 offen
    """
    launch("gfx942", body.format(offset="0x80000000"), [np.zeros(4, np.uint32)])
    with pytest.raises(OutOfBounds, match=r"a buffer offset of -4 .*64 lanes"):
        launch("gfx942", body.format(offset="-4"), [np.zeros(4, np.uint32)])
