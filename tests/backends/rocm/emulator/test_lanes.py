"""Moves between lanes against index arithmetic written out lane by lane."""

from __future__ import annotations

from typing import Any

import asmkit
import numpy as np
import pytest

RNG = np.random.default_rng(21)


def values(lanes: int) -> np.ndarray[Any, Any]:
    return RNG.integers(1, 2**32, lanes, dtype=np.uint32)


# control → function of (lane, lanes) giving the source lane, or None
DPP = {
    "quad_perm:[1,0,3,2]": lambda i, n: (i & ~3) + [1, 0, 3, 2][i & 3],
    "row_shl:3": lambda i, n: i + 3 if i % 16 + 3 < 16 else None,
    "row_shr:8": lambda i, n: i - 8 if i % 16 >= 8 else None,
    "row_ror:5": lambda i, n: i // 16 * 16 + (i - 5) % 16,
    "row_mirror": lambda i, n: i // 16 * 16 + 15 - i % 16,
    "row_half_mirror": lambda i, n: i // 8 * 8 + 7 - i % 8,
}  # fmt: skip
DPP_GFX9 = {
    "row_bcast:15": lambda i, n: i // 16 * 16 - 1 if i >= 16 else None, "row_bcast:31": lambda i,
    n: 31 if i >= 32 else None,
    "wave_shr:1": lambda i, n: i - 1 if i else None, "row_newbcast:6": lambda i, n: i // 16 * 16 + 6,
}  # fmt: skip
DPP_GFX11 = {"row_xmask:9": lambda i, n: i ^ 9, "row_share:4": lambda i, n: i // 16 * 16 + 4,
             "dpp8:[7,6,5,4,3,2,1,0]": lambda i, n: i // 8 * 8 + 7 - i % 8}  # fmt: skip
CASES = [("gfx942", c, f) for c, f in (DPP | DPP_GFX9).items()] + [
    ("gfx1100", c, f) for c, f in (DPP | DPP_GFX11).items()
]


@pytest.mark.parametrize(("arch", "control", "source"), CASES, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("bound", [False, True])
def test_dpp(arch: str, control: str, source: Any, bound: bool) -> None:
    lanes = asmkit.lanes(arch)
    x, old = values(lanes), values(lanes)
    rows = "" if "dpp8" in control else " row_mask:0x7 bank_mask:0xe" + (" bound_ctrl:1" if bound else "")
    machine = asmkit.execute(arch, [f"v_mov_b32_dpp v0, v1 {control}{rows}"], {0: old, 1: x})
    for lane in range(lanes):
        at = source(lane, lanes)
        written = "dpp8" in control or (
            0x7 >> lane // 16 & 1 and 0xE >> lane // 4 % 4 & 1 and (at is not None or bound)
        )
        expected = (int(x[at]) if at is not None else 0) if written else int(old[lane])
        assert int(machine.state.V[0, 0, lane]) == expected, lane


def test_dpp_of_a_lane_that_is_off() -> None:
    x, old = values(64), values(64)
    mask = 0xFFFF_FFFF_FFFF_FFF0
    for bound, expected in (("", old[4]), (" bound_ctrl:1", 0)):
        body = [f"v_mov_b32_dpp v0, v1 row_shr:4 row_mask:0xf bank_mask:0xf{bound}"]
        machine = asmkit.execute("gfx942", body, {0: old, 1: x}, exec_mask=mask)
        assert int(machine.state.V[0, 0, 4]) == expected
        assert int(machine.state.V[0, 0, 3]) == old[3]


def test_read_and_write_lane() -> None:
    x = values(64)
    body = [
        "v_readlane_b32 s4, v1, 37",
        "v_readlane_b32 s5, v1, s6",
        "v_readfirstlane_b32 s7, v1",
        "v_writelane_b32 v1, s4, 3",
    ]
    machine = asmkit.execute("gfx942", body, {1: x}, {6: 9}, exec_mask=0xFF00)
    assert [int(machine.state.S[0, i]) for i in (4, 5, 7)] == [x[37], x[9], x[8]]
    assert int(machine.state.V[1, 0, 3]) == x[37]  # whether the lane is on or not


def test_permutes_through_lds_hardware() -> None:
    x, to = values(64), RNG.permutation(64).astype(np.uint32)
    machine = asmkit.execute("gfx942", ["ds_bpermute_b32 v0, v1, v2", "ds_permute_b32 v3, v1, v2",
        "s_waitcnt lgkmcnt(0)"],
                             {1: to * 4, 2: x})  # fmt: skip
    np.testing.assert_array_equal(machine.state.V[0, 0], x[to])
    scattered = np.zeros(64, np.uint32)
    scattered[to] = x
    np.testing.assert_array_equal(machine.state.V[3, 0], scattered)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("swizzle(SWAP,16)", lambda i: i ^ 16), ("swizzle(SWAP,1)", lambda i: i ^ 1),
        ("swizzle(REVERSE,8)", lambda i: i ^ 7), ("swizzle(BROADCAST,4,2)", lambda i: i // 4 * 4 + 2),
        ("swizzle(QUAD_PERM,3,2,1,0)", lambda i: i ^ 3),
        ('swizzle(BITMASK_PERM,"01pip")', lambda i: i),
        ("0x401f", lambda i: i ^ 16),
    ],
)  # fmt: skip
def test_swizzle(text: str, source: Any) -> None:
    x = values(64)
    machine = asmkit.execute("gfx942", [f"ds_swizzle_b32 v0, v1 offset:{text}", "s_waitcnt lgkmcnt(0)"], {1: x})
    expected = [x[(lane & 32) + (source(lane & 31) & 31)] for lane in range(64)]
    if "BITMASK" in text:  # from the highest bit: 0, 1, keep, invert, keep
        expected = [x[(lane & 32) | 8 | lane & 4 | ~lane & 2 | lane & 1] for lane in range(64)]
    np.testing.assert_array_equal(machine.state.V[0, 0], expected)


@pytest.mark.parametrize("size", [16, 32])
def test_permlane_swap(size: int) -> None:
    a, b = values(64), values(64)
    machine = asmkit.execute("gfx950", [f"v_permlane{size}_swap_b32_e32 v1, v2"], {1: a, 2: b})
    new_a, new_b = a.copy(), b.copy()
    for start in range(0, 64, 2 * size):  # the odd rows of the first with the even rows of the second
        new_a[start + size : start + 2 * size] = b[start : start + size]
        new_b[start : start + size] = a[start + size : start + 2 * size]
    np.testing.assert_array_equal(machine.state.V[1, 0], new_a)
    np.testing.assert_array_equal(machine.state.V[2, 0], new_b)


@pytest.mark.parametrize("across", [0, 16])
def test_permlane16(across: int) -> None:
    x, picks = values(32), RNG.integers(0, 16, 16)
    low = sum(int(p) << 4 * i for i, p in enumerate(picks[:8]))
    high = sum(int(p) << 4 * i for i, p in enumerate(picks[8:]))
    name = "v_permlanex16_b32" if across else "v_permlane16_b32"
    machine = asmkit.execute("gfx1100", [f"{name} v0, v1, s4, s5 op_sel:[1,0]"], {1: x}, {4: low, 5: high})
    for lane in range(32):
        assert int(machine.state.V[0, 0, lane]) == x[(lane & 16 ^ across) + picks[lane & 15]]


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_mbcnt_numbers_the_lanes(arch: str) -> None:
    lanes = asmkit.lanes(arch)
    body = ["v_mbcnt_lo_u32_b32 v0, -1, 0"] + (["v_mbcnt_hi_u32_b32 v0, -1, v0"] if lanes == 64 else [])
    np.testing.assert_array_equal(asmkit.execute(arch, body).state.V[0, 0], np.arange(lanes))
