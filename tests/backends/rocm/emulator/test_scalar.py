"""Loops, of waves that take them a different number of times."""

from __future__ import annotations

import asmkit
import numpy as np


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
