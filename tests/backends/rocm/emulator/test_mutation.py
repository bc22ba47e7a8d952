"""Mutations of passing kernels: an instruction is deleted, and the model must notice, by its checks or by wrong
numbers. The rates are printed (pytest -s) and held to a floor; docs/emulation.md states what was measured."""

import numpy as np
import pytest
from test_memory_instructions import launch

from portattn.backends.rocm.emulator.amdgpu import EmulationError

# Four waves sum their numbers through LDS, lane by lane. Both exchanges cross waves: between lanes of one wave a
# barrier
# would order nothing.
HEAD = """
    v_lshlrev_b32_e32 v1, 2, v0
    global_load_dword v2, v1, s[10:11]
    s_waitcnt vmcnt(0)
"""
STEP = """
    ds_write_b32 v1, v2
    v_xor_b32_e32 v3, {distance}, v1
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v4, v3
    s_waitcnt lgkmcnt(0)
    s_barrier
    v_add_u32_e32 v2, v2, v4
"""
TAIL = "    global_store_dword v1, v2, s[12:13]\n"
KERNEL = HEAD + "".join(STEP.format(distance=4 << n) for n in (6, 7)) + TAIL
# Rows scaled by their maximum, in a loop with masks, in floats: branches, exec, selects, conversions.
MASKED = """
    v_lshlrev_b32_e32 v1, 2, v0
    s_mov_b32 s20, 0
    v_mov_b32_e32 v5, 0
loop:
    s_lshl_b32 s21, s20, 8
    v_add_u32_e32 v2, s21, v1
    v_cmp_gt_u32_e32 vcc, 40, v0
    v_mov_b32_e32 v3, 0
    s_and_saveexec_b64 s[22:23], vcc
    global_load_dword v3, v2, s[10:11]
    s_or_b64 exec, exec, s[22:23]
    s_waitcnt vmcnt(0)
    v_cvt_f32_u32_e32 v3, v3
    v_fmac_f32_e32 v5, 0.5, v3
    s_add_i32 s20, s20, 1
    s_cmp_lt_u32 s20, 3
    s_cbranch_scc1 loop
    global_store_dword v1, v5, s[12:13]
"""
RNG = np.random.default_rng(5)
SUMMED = RNG.integers(0, 1000, 256).astype(np.uint32)
ROWS = RNG.integers(1, 1000, (3, 64)).astype(np.uint32)


def summed(body: str) -> bool:
    out = np.zeros(256, np.uint32)
    launch("gfx942", body, [SUMMED, out], waves=4, lds=1024, step_limit=1000)
    return bool((out.reshape(4, 64) == SUMMED.reshape(4, 64).sum(0, dtype=np.uint32)).all())


def masked(body: str) -> bool:
    out = np.full(64, np.nan, np.float32)
    launch("gfx942", body, [ROWS.reshape(-1), out], step_limit=1000)
    expected = np.where(np.arange(64) < 40, ROWS.sum(0) * np.float32(0.5), 0)
    return bool((out == expected).all())


def mutants(body: str, only: str = "") -> list[tuple[str, str]]:
    """Each line left out once: (line, the body without it)."""
    lines = body.split("\n")
    chosen = [n for n, line in enumerate(lines) if line.strip() and not line.strip().endswith(":") and only in line]
    return [(lines[n].strip(), "\n".join(lines[:n] + lines[n + 1 :])) for n in chosen]


def survivors(body: str, passes: object, only: str = "") -> tuple[list[str], int]:
    """Mutants that run without a finding and give the right numbers, and how many there were."""
    left, tried = [], mutants(body, only)
    for line, changed in tried:
        try:
            if passes(changed):  # type: ignore[operator]
                left.append(line)
        except EmulationError:
            pass
    return left, len(tried)


def test_every_barrier_that_is_deleted_is_noticed() -> None:
    assert summed(KERNEL)
    left, tried = survivors(KERNEL, summed, "s_barrier")
    print(f"barriers deleted: {tried - len(left)} of {tried} noticed")
    # The last barrier orders reads before writes that never come.
    assert len(left) <= 1
    assert tried == 4


def test_every_wait_that_is_deleted_is_noticed() -> None:
    left, tried = survivors(KERNEL, summed, "s_waitcnt")
    print(f"waits deleted: {tried - len(left)} of {tried} noticed")
    assert not left


@pytest.mark.parametrize(("body", "passes"), [(KERNEL, summed), (MASKED, masked)], ids=["summed", "masked"])
def test_deleted_instructions_are_noticed(body: str, passes: object) -> None:
    assert passes(body)  # type: ignore[operator]
    left, tried = survivors(body, passes)
    print(f"instructions deleted: {tried - len(left)} of {tried} noticed; not: {left}")
    # The last barrier of `summed` orders reads before writes that never come.
    assert len(left) <= 1
