"""Every load and store that our kernels use, on every arch whose code has it (coverage.json), against a byte image."""

from __future__ import annotations

import re
from typing import Any

import asmkit
import coverage_data
import numpy as np
import pytest

from portattn.backends.rocm.emulator.amdgpu import Memory

STRIDE = 32  # bytes of a lane in the image
SIZES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b32": 4, "b64": 8, "b96": 12, "b128": 16, "u8": 1,
         "i8": 1, "u16": 2, "i16": 2, "b16": 2, "b8": 1, "ubyte": 1, "sbyte": 1, "ushort": 2, "short": 2, "byte": 1,
         "sshort": 2}  # fmt: skip
NAME = re.compile(
    r"(buffer|global|scratch|ds)_(load|read|store|write)_?(2(?:addr)?(?:st64|_stride64)?_)?"
    r"(dwordx?\d?|[bui]\d+|[us]?(?:byte|short))(_d16_hi|_d16)?"
)
CASES = [(arch, name) for arch, names in coverage_data.data()["used"].items() for name in names if NAME.fullmatch(name)]


def test_all_loads_and_stores_are_here() -> None:
    missing = {
        name
        for names in coverage_data.data()["used"].values()
        for name in names
        if re.match(r"(buffer|global|scratch|flat|ds)_\w*(load|store|read|write)", name) and not NAME.fullmatch(name)
    }
    assert missing <= {"ds_read_b64_tr_b16"}, "those have tests of their own in test_memory_instructions.py"


def whole(arch: str, action: str, at: int, first: int) -> str:
    """An LDS access of 16 bytes: what is tested elsewhere, and tested with."""
    name = {"load": "ds_read_b128", "store": "ds_write_b128"}[action]
    if arch.startswith("gfx1"):
        name = f"ds_{action}_b128"
    data = f"v[{first}:{first + 3}]"
    return f"{name} {data}, v1 offset:{at}" if action == "load" else f"{name} v1, {data} offset:{at}"


def wait(arch: str) -> list[str]:
    if arch == "gfx1201":
        return ["s_wait_loadcnt 0x0", "s_wait_storecnt 0x0", "s_wait_dscnt 0x0"]
    return ["s_waitcnt vmcnt(0) lgkmcnt(0)"] + (["s_waitcnt_vscnt null, 0x0"] if arch == "gfx1100" else [])


def data_of(first: int, size: int) -> str:
    words = max(size // 4, 1)
    return f"v{first}" if words == 1 else f"v[{first}:{first + words - 1}]"


def loaded(image: np.ndarray[Any, Any], at: int, size: int, signed: bool, hi: str | None, old: int) -> list[int]:
    """Registers that a load of image bytes gives."""
    data = image[at : at + size].tobytes()
    if size >= 4:
        return [int.from_bytes(data[n : n + 4], "little") for n in range(0, size, 4)]
    value = int.from_bytes(data, "little", signed=signed)
    if hi is None:
        return [value & 0xFFFFFFFF]
    return [(value & 0xFFFF) << 16 | old & 0xFFFF] if hi == "_d16_hi" else [value & 0xFFFF | old & 0xFFFF0000]


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_load_or_store(arch: str, name: str) -> None:
    found = NAME.fullmatch(name)
    assert found
    space, load, two, size, hi = found[1], found[2] in ("load", "read"), found[3], SIZES[found[4]], found[5]
    signed, lanes, rng = found[4][0] in "is", asmkit.lanes(arch), np.random.default_rng(len(name))
    image = rng.integers(0, 256, lanes * STRIDE, dtype=np.uint8)
    words = np.ascontiguousarray(image.reshape(lanes, STRIDE)).view(np.uint32)  # [lanes, 8]
    step = size * (64 if two and "64" in two else 1)
    places = [0, step] if two else [8 if size == 16 else 4]
    stride = size if two and "64" in two else STRIDE  # both places of the strided forms would else meet
    numbers = np.arange(lanes, dtype=np.uint32)
    vectors: dict[int, Any] = {1: numbers * STRIDE, 2: numbers * stride, **{20 + n: words[:, n] for n in range(8)}}
    vectors |= {40 + n: np.full(lanes, 0x1234ABCD, np.uint32) for n in range(8)}
    memory = Memory()
    held = image.copy() if load else np.zeros_like(image)
    start = memory.add(held, "image")
    scalars = {10: start & 0xFFFFFFFF, 11: start >> 32, 20: start & 0xFFFFFFFF, 21: start >> 32, 22: held.nbytes,
               23: 0x27000}  # fmt: skip
    offset = f" offset0:0 offset1:{1}" if two else f" offset:{places[0]}"
    data = [data_of(40 if load else 20, size * len(places))] if load else (
        [data_of(20, size), data_of(20 + size // 4, size)] if two else [data_of(20, size)]
    )  # fmt: skip
    after = memory.bytes[start - 0x2_0000_0000 :][: held.nbytes]
    if space == "ds":
        text = f"{name} {data[0]}, v2{offset}" if load else f"{name} v2, {', '.join(data)}{offset}"
    elif space == "buffer":
        off = "null" if arch == "gfx1201" else "0"
        text = f"{name} {data[0]}, v1, s[20:23], {off} offen{offset}"
    elif space == "global":
        text = f"{name} {data[0]}, v1, s[10:11]{offset}" if load else f"{name} v1, {data[0]}, s[10:11]{offset}"
    else:
        text = f"{name} {data[0]}, off, off{offset}" if load else f"{name} off, {data[0]}, off{offset}"
    body = [text, *wait(arch)]
    if space == "ds":
        fill = 20 if load else 60
        vectors |= {60 + n: np.zeros(lanes, np.uint32) for n in range(8)}
        body = [whole(arch, "store", 0, fill), whole(arch, "store", 16, fill + 4), *wait(arch), *body]
        body += [] if load else [whole(arch, "load", 0, 50), whole(arch, "load", 16, 54), *wait(arch)]
    if space == "scratch":
        spill = [f"scratch_store_b128 off, v[{20 + 4 * n}:{23 + 4 * n}], off offset:{16 * n}" for n in (0, 1)]
        back = [f"scratch_load_b128 v[{50 + 4 * n}:{53 + 4 * n}], off, off offset:{16 * n}" for n in (0, 1)]
        body = [*spill, *wait(arch), *body] if load else [*body, *back, *wait(arch)]
    room = lanes * STRIDE + 2 * step
    machine = asmkit.execute(arch, body, vectors, scalars, lds=room if space == "ds" else 0, scratch=64, memory=memory)
    if load:
        for lane in range(lanes):
            for number, place in enumerate(places):
                at = lane * stride + place
                if at + size > len(image):
                    continue
                expected = loaded(image, at, size, signed, hi, 0x1234ABCD)
                first = 40 + number * len(expected)
                got = [int(machine.state.V[first + n, 0, lane]) for n in range(len(expected))]
                assert got == expected, (lane, place)
        return
    expected_image = np.zeros(room, np.uint8)
    for lane in range(lanes):
        for number, place in enumerate(places):
            source = words[lane, number * size // 4 :].tobytes()[:size] if size >= 4 else (
                words[lane, :1].tobytes()[2 if hi == "_d16_hi" else 0 :][:size]
            )  # fmt: skip
            expected_image[lane * stride + place :][:size] = np.frombuffer(source, np.uint8)
    if space in ("buffer", "global"):
        np.testing.assert_array_equal(after, expected_image[: lanes * STRIDE])
    else:
        back_again = np.stack([machine.state.V[50 + n, 0] for n in range(8)], 1).view(np.uint8).reshape(-1)
        wanted = expected_image[: lanes * STRIDE]
        if space == "scratch":  # nothing else was written there: only the bytes that were
            touched = np.zeros((lanes, STRIDE), bool)
            touched[:, places[0] : places[0] + size] = True
            np.testing.assert_array_equal(back_again[touched.reshape(-1)], wanted[touched.reshape(-1)])
        else:
            np.testing.assert_array_equal(back_again, wanted)


LOADS = [
    (arch, name) for arch, names in coverage_data.data()["used"].items() for name in names if name.startswith("s_load_")
]


@pytest.mark.parametrize(("arch", "name"), LOADS)
def test_scalar_load(arch: str, name: str) -> None:
    size = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}
    kind = name.removeprefix("s_load_")
    words = size[kind] if kind in size else int(kind[1:]) // 32
    image = np.random.default_rng(words).integers(0, 2**32, 32, dtype=np.uint32)
    memory = Memory()
    start = memory.add(image)
    target = "s20" if words == 1 else f"s[20:{19 + words}]"
    stop = "s_wait_kmcnt 0x0" if arch == "gfx1201" else "s_waitcnt lgkmcnt(0)"
    scalars = {10: start & 0xFFFFFFFF, 11: start >> 32}
    machine = asmkit.execute(arch, [f"{name} {target}, s[10:11], 0xc", stop], scalars=scalars, memory=memory)
    np.testing.assert_array_equal(machine.state.S[0, 20 : 20 + words], image[3 : 3 + words])
