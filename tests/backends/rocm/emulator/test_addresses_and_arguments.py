"""LDS addresses are sums of 32 bits, and arguments that a runtime fills in are not the caller's."""

from __future__ import annotations

import numpy as np
import pytest
from asmkit import ARCH_NAMES, execute, text

from portattn.backends.rocm.emulator.amdgpu import ARCHES, BadLaunch, LdsOutOfRange, Memory, Program


@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_lds_address_wraps(arch: str) -> None:
    """A compiler folds the negative part of an address into the register: −912 + 1,024 is byte 112."""
    lanes = ARCHES[arch].wave
    place = (4 * np.arange(lanes) - 912).astype(np.int64).astype(np.uint32)
    write, read = ("ds_store_b32", "ds_load_b32") if arch.startswith("gfx1") else ("ds_write_b32", "ds_read_b32")
    wait = "s_wait_dscnt 0x0" if arch.startswith("gfx12") else "s_waitcnt lgkmcnt(0)"
    body = [f"{write} v1, v2 offset:1024", wait, f"{read} v3, v4 offset:112", wait]
    values = np.arange(lanes, dtype=np.uint32) + 7
    registers = {1: place, 2: values, 4: (4 * np.arange(lanes)).astype(np.uint32)}
    seen = execute(arch, body, registers, lds=1024).state.V[3].reshape(-1)
    assert seen[:lanes].tolist() == values.tolist()
    with pytest.raises(LdsOutOfRange):
        execute(arch, body, registers, lds=200)  # the last lanes' bytes are past it


def test_hidden_arguments_are_not_the_callers() -> None:
    hidden = "      - .offset: 24\n        .size: 4\n        .value_kind: hidden_block_count_x\n"
    plain = text("gfx942", ["s_nop 0"], arguments=(8, 8, 8))
    listed = plain.replace("    .max_flat_workgroup_size", hidden + "    .max_flat_workgroup_size", 1)
    listed = listed.replace("kernarg_size 24", "kernarg_size 32")
    memory = Memory()
    address = memory.add(np.zeros(4, np.float32))
    program = Program.parse(listed)
    assert len(program.arguments) == 3
    program.launch((1, 1, 1), [address], memory)  # two pointers that Triton adds may be left out
    with pytest.raises(BadLaunch, match="4 arguments given; kernel takes 3"):
        program.launch((1, 1, 1), [address] * 4, memory)
