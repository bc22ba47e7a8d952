"""Loads and stores that our kernels use, byte for byte as AMD's documents define them (isa_memory.py), with lanes off,
unequal offsets, and buffers that end anywhere within an access."""

import random
from typing import Any

import asmkit
import isa_memory
import isa_run
import numpy as np
import pytest

from portattn.backends.rocm.emulator.amdgpu import Memory
from portattn.backends.rocm.emulator.amdgpu.memory import BASE

ON = 0x7F3A_5F01_DEAD_BEE6
STRIDE = 64  # bytes from a lane's address to the next lane's
OLD = 0x1234ABCD


# Not used by our kernels.
UNUSED = {
    "gfx942": "ds_write_b32 ds_read_b32 ds_write_b64 ds_read_b64 ds_write_b128 ds_read_b128 ds_write2_b32 ds_read2_b32 "
    "ds_write2st64_b32 ds_read2st64_b32 global_load_dword global_load_dwordx2 global_load_dwordx3 global_load_dwordx4 "
    "global_store_dword global_store_dwordx2 global_store_dwordx3 global_store_dwordx4",
    "gfx1100": "ds_store_b32 ds_load_b32 ds_store_b64 ds_load_b64 ds_store_b128 ds_load_b128 ds_store_2addr_b32 "
    "ds_load_2addr_b32 ds_store_2addr_stride64_b32 ds_load_2addr_stride64_b32",
    "gfx1201": "global_load_b32 global_load_b64 global_load_b96 global_load_b128 global_store_b32 global_store_b64 "
    "global_store_b96 global_store_b128",
}  # fmt: skip


def cases(*spaces: str) -> list[tuple[str, str]]:
    found = ((arch, name, isa_memory.access(name)) for arch, names in isa_run.USED.items()
             for name in dict.fromkeys([*names, *UNUSED.get(arch, "").split()]))  # fmt: skip
    return isa_run.checked((arch, name) for arch, name, access in found if access and access.space in spaces)


def wait(arch: str) -> list[str]:
    if arch == "gfx1201":
        return ["s_wait_loadcnt 0x0", "s_wait_storecnt 0x0", "s_wait_dscnt 0x0", "s_wait_kmcnt 0x0"]
    return ["s_waitcnt vmcnt(0) lgkmcnt(0)"] + (["s_waitcnt_vscnt null, 0x0"] if arch.startswith("gfx11") else [])


class Case:
    """One access of every lane: its registers, addresses and the bytes that it should meet."""

    def __init__(self, arch: str, name: str, seed: int) -> None:
        found = isa_memory.access(name)
        self.arch, self.name, self.access, self.lanes = arch, name, found, asmkit.lanes(arch)
        draw = random.Random(f"{name} {seed}")
        self.on = (ON if seed else (1 << 64) - 1) & (1 << self.lanes) - 1
        self.words = max(found.size // 4, 1)
        self.offsets = [draw.randrange(4) for _ in found.places] if len(found.places) == 2 else [4 * draw.randrange(8)]
        if len(found.places) == 2 and self.offsets[0] == self.offsets[1]:
            self.offsets[1] += 1
        order = list(range(self.lanes))
        draw.shuffle(order)
        # Two elements of a strided access would meet other lanes': lanes lie side by side there.
        unit = found.places[0]
        self.step = found.size if unit >= 256 else STRIDE
        self.address = [n * self.step for n in order]
        self.image = np.frombuffer(draw.randbytes(self.lanes * STRIDE + 4 * unit + 64), np.uint8).copy()
        self.data = [[draw.getrandbits(32) for _ in range(self.words * len(found.places))] for _ in order]

    def at(self, lane: int, element: int) -> int:
        return self.address[lane] + self.offsets[element] * self.access.places[element]

    def vectors(self) -> dict[int, Any]:
        count = len(self.data[0])
        columns = [[OLD] * self.lanes if self.access.load else [row[n] for row in self.data] for n in range(count)]
        return {1: np.array(self.address, np.uint32)} | {20 + n: np.array(c, np.uint32) for n, c in enumerate(columns)}

    def run(self, records: int) -> tuple[Any, np.ndarray[Any, Any]]:
        """The machine after the access, and the memory that it met."""
        access, memory = self.access, Memory()
        held = self.image.copy()
        start = memory.add(held, "image")
        size = self.words
        every = isa_run.named(20, size * len(access.places))
        parts = ", ".join(isa_run.named(20 + size * n, size) for n in range(len(access.places)))
        offset = f"offset:{self.offsets[0]}"
        if len(access.places) == 2:
            offset = f"offset0:{self.offsets[0]} offset1:{self.offsets[1]}"
        text = {
            "ds": f"{self.name} {every}, v1 {offset}" if access.load else f"{self.name} v1, {parts} {offset}",
            "buffer": f"{self.name} {every}, v1, s[20:23], {'null' if self.arch == 'gfx1201' else '0'} offen {offset}",
            "global": f"{self.name} {every}, v1, s[10:11] {offset}" if access.load else (
                f"{self.name} v1, {every}, s[10:11] {offset}"),
        }[access.space]  # fmt: skip
        scalars = {10: start & 0xFFFFFFFF, 11: start >> 32, 20: start & 0xFFFFFFFF, 21: start >> 32, 22: records,
                   23: 0x27000}  # fmt: skip
        lds = access.space == "ds"
        machine = asmkit.execute(
            self.arch, [text, *wait(self.arch)], self.vectors(), scalars, exec_mask=self.on, memory=memory,
            lds=len(self.image) if lds else 0, lds_image=self.image if lds else None,
        )  # fmt: skip
        after = machine.lds.bytes if lds else memory.bytes[start - BASE :]
        return machine, after[: len(self.image)]

    def check(self, records: int) -> None:
        machine, after = self.run(records)
        access, size, expected = self.access, min(self.access.size, 4), self.image.copy()
        for lane in range(self.lanes):
            if not self.on >> lane & 1:
                continue
            for element in range(len(access.places)):
                at = self.at(lane, element)
                registers = self.data[lane][element * self.words :][: self.words]
                written, read = isa_memory.stored(access, registers), bytearray(access.size)
                for first in range(0, access.size, size):
                    if isa_memory.in_range(access, at, records, first):
                        read[first : first + size] = self.image[at + first : at + first + size].tobytes()
                        if not access.load:
                            expected[at + first : at + first + size] = list(written[first : first + size])
                if access.load:
                    found = [int(machine.state.V[20 + element * self.words + n, 0, lane]) for n in range(self.words)]
                    assert found == isa_memory.registers(access, bytes(read), [OLD]), (self.name, lane, records)
        np.testing.assert_array_equal(after, expected)
        off = [lane for lane in range(self.lanes) if not self.on >> lane & 1]
        if access.load and off:
            assert set(machine.state.V[20, 0, off].tolist()) == {OLD}


@pytest.mark.parametrize(("arch", "name"), cases("ds", "global", "buffer"))
def test_vector_access(arch: str, name: str) -> None:
    for seed in range(3):
        case = Case(arch, name, seed)
        case.check(len(case.image))


@pytest.mark.parametrize(("arch", "name"), cases("buffer"))
def test_buffers_end_within_an_access(arch: str, name: str) -> None:
    case = Case(arch, name, 1)
    last = max(case.at(lane, 0) for lane in range(case.lanes))
    for records in (last + n for n in range(0, case.access.size + 1, min(case.access.size, 4))):
        case.check(records)
    case.check(0)


@pytest.mark.parametrize("cells", ["shared", "own"])
@pytest.mark.parametrize(("arch", "name"), isa_run.used("ds_add_u32"))
def test_lds_addition(arch: str, name: str, cells: str) -> None:
    """MEM[ADDR].u32 += DATA.u32 of each lane that is on, modulo 2^32."""
    draw, lanes = random.Random(f"{arch} {cells}"), asmkit.lanes(arch)
    expected, data = ([draw.getrandbits(32) for _ in range(lanes + 2)] for _ in range(2))
    cell = [draw.randrange(5) for _ in range(lanes)] if cells == "shared" else draw.sample(range(lanes), lanes)
    image, on = np.array(expected, np.uint32).view(np.uint8), ON & (1 << lanes) - 1
    for lane in range(lanes):
        if on >> lane & 1:
            expected[cell[lane] + 2] = (expected[cell[lane] + 2] + data[lane]) % 2**32
    machine = asmkit.execute(
        arch, [f"{name} v1, v2 offset:8", *wait(arch)],
        {1: 4 * np.array(cell, np.uint32), 2: np.array(data[:lanes], np.uint32)}, exec_mask=on, lds=len(image),
        lds_image=image,
    )  # fmt: skip
    assert machine.lds.bytes.view(np.uint32)[: len(expected)].tolist() == expected


@pytest.mark.parametrize(("arch", "name"), cases("s"))
def test_scalar_load(arch: str, name: str) -> None:
    access = isa_memory.access(name)
    image = np.frombuffer(random.Random(name).randbytes(128), np.uint8).copy()
    memory = Memory()
    start, words = memory.add(image), access.size // 4
    for offset in (0, 0xC, 0x30):
        body = [f"{name} {isa_run.named(20, words, 's')}, s[10:11], {offset:#x}", *wait(arch)]
        machine = asmkit.execute(arch, body, scalars={10: start & 0xFFFFFFFF, 11: start >> 32}, memory=memory)
        expected = isa_memory.registers(access, image[offset : offset + access.size].tobytes(), [])
        assert machine.state.S[0, 20 : 20 + words].tolist() == expected
