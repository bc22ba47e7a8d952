"""Moves between lanes that our kernels use, bit for bit as the pseudocode of AMD's documents moves them, lanes off
included: V_READLANE, V_READFIRSTLANE, V_WRITELANE, V_PERMLANEX16, V_PERMLANE16_SWAP and 32, DS_BPERMUTE, V_MOV_B32 with
DPP. DS_SWIZZLE has prose and tables in the documents: test_vector.py."""

import random
from collections.abc import Callable

import asmkit
import isa_run
import numpy as np
import pytest

MASKS = (0xFFFF_FFFF_FFFF_FFFF, 0x7F3A_5F01_DEAD_BEE6, 0xFFFF_0000_FF00_0000)


def column(arch: str, seed: str) -> list[int]:
    return isa_run.column("u32", asmkit.lanes(arch), random.Random(seed))


def as_register(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


@pytest.mark.parametrize(("arch", "name"), isa_run.used("", {"": "v_readlane_b32"}))
def test_readlane(arch: str, name: str) -> None:
    """The lane's number is taken modulo the wave; whether it is on does not matter."""
    lanes, x = asmkit.lanes(arch), column(arch, name)
    for select in (0, 5, lanes - 1, lanes, 63, 0xFFFFFFE7):
        machine = asmkit.execute(arch, [f"{name} s4, v16, s6"], {16: as_register(x)}, {6: select}, exec_mask=0xF0)
        assert int(machine.state.S[0, 4]) == x[select % lanes]


@pytest.mark.parametrize(("arch", "name"), isa_run.used("", {"": "v_readfirstlane_b32"}))
def test_readfirstlane(arch: str, name: str) -> None:
    """The lowest lane that is on; lane 0 where none is."""
    x = column(arch, name)
    for on, lane in ((0b1000, 3), (0xFFFF0000, 16), (1 << 31, 31), (0, 0), (1, 0)):
        machine = asmkit.execute(arch, [f"{name} s4, v16"], {16: as_register(x)}, exec_mask=on)
        assert int(machine.state.S[0, 4]) == x[lane]


@pytest.mark.parametrize(("arch", "name"), isa_run.used("", {"": "v_writelane_b32"}))
def test_writelane(arch: str, name: str) -> None:
    lanes, x = asmkit.lanes(arch), column(arch, name)
    for select in (0, 7, lanes - 1, lanes + 3):
        machine = asmkit.execute(arch, [f"{name} v16, s5, s6"], {16: as_register(x)}, {5: 0xC0FFEE, 6: select},
                                 exec_mask=1)  # fmt: skip
        expected = [0xC0FFEE if n == select % lanes else value for n, value in enumerate(x)]
        assert isa_run.result(machine, "u32", 16) == expected


@pytest.mark.parametrize(("arch", "name"), isa_run.used(r"v_permlanex16_b32", {"gfx1100": "v_permlane16_b32"}))
def test_permlane16(arch: str, name: str) -> None:
    """Lane i of a row takes a lane of its row (with x: of the other row of its pair), by four bits of {S2, S1}. The
    pseudocode reads lanes that are off as well; op_sel:[1,0] asks for that."""
    lanes, x = asmkit.lanes(arch), column(arch, name)
    selects = random.Random(name).getrandbits(64)
    for mask in MASKS:
        on = mask & (1 << lanes) - 1
        body = [f"{name} v0, v16, s4, s5 op_sel:[1,0]"]
        scalars = {4: selects & 0xFFFFFFFF, 5: selects >> 32}
        found = isa_run.result(asmkit.execute(arch, body, {16: as_register(x)}, scalars, exec_mask=on), "u32")
        for lane in range(lanes):
            row, place = divmod(lane, 16)
            source = (row ^ ("x16" in name)) * 16 + (selects >> 4 * place & 15)
            assert found[lane] == (x[source] if on >> lane & 1 else asmkit.JUNK)


SWAPS = {"gfx950": "v_permlane16_swap_b32_e32 v_permlane32_swap_b32_e32"}


@pytest.mark.parametrize(("arch", "name"), isa_run.used("", SWAPS))
def test_permlane_swap(arch: str, name: str) -> None:
    """Of every two rows: the second of the destination and the first of the source change places."""
    size = int(name[10:12])
    destination, source = column(arch, name), column(arch, name + "source")
    vectors = {16: as_register(destination), 17: as_register(source)}
    machine = asmkit.execute(arch, [f"{name} v16, v17"], vectors)
    for start in range(0, 64, 2 * size):
        for lane in range(start, start + size):
            source[lane], destination[lane + size] = destination[lane + size], source[lane]
    assert isa_run.result(machine, "u32", 16) == destination
    assert isa_run.result(machine, "u32", 17) == source


@pytest.mark.parametrize(("arch", "name"), isa_run.used("", {"": "ds_bpermute_b32"}))
def test_bpermute(arch: str, name: str) -> None:
    """Address / 4 modulo the lanes names the lane; 0 from one that is off. A wave of RDNA is 32 lanes here."""
    lanes = asmkit.lanes(arch)
    draw = random.Random(name)
    x, address = column(arch, name), [draw.getrandbits(32) for _ in range(lanes)]
    for mask in MASKS:
        on = mask & (1 << lanes) - 1
        for offset in (0, 4, 252):
            text = f"{name} v0, v16, v17" + (f" offset:{offset}" if offset else "")
            wait = "s_wait_dscnt 0x0" if arch == "gfx1201" else "s_waitcnt lgkmcnt(0)"
            vectors = {16: as_register(address), 17: as_register(x)}
            found = isa_run.result(asmkit.execute(arch, [text, wait], vectors, exec_mask=on), "u32")
            for lane in range(lanes):
                source = ((address[lane] + offset) & 0xFFFFFFFF) // 4 % lanes
                expected = (x[source] if on >> source & 1 else 0) if on >> lane & 1 else asmkit.JUNK
                assert found[lane] == expected, (text, lane)


DPP: dict[str, Callable[[int, int], int | None]] = {
    "quad_perm:[1,2,3,0]": lambda i, n: (i & ~3) + (i + 1 & 3), "row_ror:12": lambda i, n: (i & ~15) + (i - 12) % 16,
    "row_shl:8": lambda i, n: i + 8 if i % 16 < 8 else None,
    "row_shr:15": lambda i, n: i - 15 if i % 16 == 15 else None,
    "row_mirror": lambda i, n: i ^ 15, "row_half_mirror": lambda i, n: i ^ 7,
}  # fmt: skip
GFX9 = {"row_bcast:15": lambda i, n: i // 16 * 16 - 1 if i >= 16 else None,
        "wave_shr:1": lambda i, n: i - 1 if i else None, "row_newbcast:6": lambda i, n: i // 16 * 16 + 6,
        "row_bcast:31": lambda i, n: 31 if i >= 32 else None}  # fmt: skip
RDNA = {"row_xmask:5": lambda i, n: i ^ 5, "row_share:9": lambda i, n: i // 16 * 16 + 9}


@pytest.mark.parametrize(("arch", "name"), isa_run.used(r"v_mov_b32_dpp"))
def test_dpp_move(arch: str, name: str) -> None:
    lanes, x = asmkit.lanes(arch), column(arch, name)
    for control, source in (DPP | (GFX9 if lanes == 64 else RDNA)).items():
        for mask in MASKS:
            on = mask & (1 << lanes) - 1
            for bound in ("", " bound_ctrl:1"):
                text = f"{name} v0, v16 {control} row_mask:0xf bank_mask:0xf{bound}"
                found = isa_run.result(asmkit.execute(arch, [text], {16: as_register(x)}, exec_mask=on), "u32")
                for lane in range(lanes):
                    at = source(lane, lanes)
                    valid = at is not None and on >> at & 1
                    moved = x[at] if at is not None and valid else 0 if bound else asmkit.JUNK
                    assert found[lane] == (moved if on >> lane & 1 else asmkit.JUNK), (text, lane)
