"""Hand-written kernels for the tests: a body of instructions becomes a whole assembly text, and registers are set and
read directly."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from places import ROOT

from portattn.backends.rocm.emulator.amdgpu import Checks, Memory, Program
from portattn.backends.rocm.emulator.amdgpu.assembly import ARCHES, VECTOR, Instruction
from portattn.backends.rocm.emulator.amdgpu.machine import Machine

ARCH_NAMES = tuple(name for name, arch in ARCHES.items() if not arch.same_as)  # one of each set of instructions
JUNK = 0xA5A5A5A5


def text(
    arch: str, body: Sequence[str] | str, *, waves: int = 1, arguments: Sequence[int] = (8, 8), lds: int = 0,
    scratch: int = 0, name: str = "kernel",
) -> str:  # fmt: skip
    """Assembly text of a kernel. Line n of the body is line n of the source "kernel.py"."""
    lines = body.splitlines() if isinstance(body, str) else list(body)
    wave = ARCHES[arch].wave
    code = []
    for number, line in enumerate(lines, 1):
        code += [f"\t.loc\t1 {number} 5", line if line.strip().endswith(":") else "\t" + line.strip()]
    described, offset = [], 0
    for size in arguments:
        offset = -(-offset // size) * size
        described.append(f"      - .offset: {offset}\n        .size: {size}\n        .value_kind: " + (
            "global_buffer" if size == 8 else "by_value"))  # fmt: skip
        offset += size
    return "\n".join([
        f'\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"', "\t.text", f"{name}:", '\t.file\t1 "/" "kernel.py"', *code,
        "\ts_endpgm", ".Lfunc_end0:", f"\t.amdhsa_kernel {name}", f"\t\t.amdhsa_group_segment_fixed_size {lds}",
        f"\t\t.amdhsa_private_segment_fixed_size {scratch}", f"\t\t.amdhsa_kernarg_size {max(offset, 8)}",
        "\t\t.amdhsa_user_sgpr_count 2", "\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1",
        "\t\t.amdhsa_system_sgpr_workgroup_id_x 1", *(["\t\t.amdhsa_wavefront_size32 1"] if wave == 32 else []),
        "\t.end_amdhsa_kernel", "\t.amdgpu_metadata", "amdhsa.kernels:", "  - .args:", *described,
        f"    .max_flat_workgroup_size: {waves * wave}", f"    .name: {name}", "\t.end_amdgpu_metadata", "",
    ])  # fmt: skip


def execute(
    arch: str, body: Sequence[str] | str, vectors: Mapping[int, Any] | None = None,
    scalars: Mapping[int, Any] | None = None, *, waves: int = 1, lds: int = 0, scratch: int = 0,
    checks: Checks | None = None, exec_mask: int | None = None, memory: Memory | None = None, lds_image: Any = None,
) -> Machine:  # fmt: skip
    """Run instructions with registers set: vectors {index: [lanes] or [waves, lanes] 32-bit values}, scalars {index:
    n}.

    `lds_image`: bytes that LDS holds at the start.
    Indices from 256 on are accumulation registers. Vector registers that are not given hold JUNK, and count as defined.
    """
    program = Program.parse(text(arch, body, waves=waves, scratch=scratch))
    machine = Machine(program.assembly, waves, lds, checks or Checks())
    machine.renew(memory or Memory(), 100_000)
    machine.start((0, 0, 0), 0)
    state = machine.state
    state.V[...] = JUNK
    for index, values in (vectors or {}).items():
        state.V[index] = np.ascontiguousarray(values).view(np.uint32)
    for index, value in (scalars or {}).items():
        state.S[:, index] = np.asarray(value) & 0xFFFFFFFF
    if exec_mask is not None:
        state.S[:, 126] = exec_mask & 0xFFFFFFFF
        if state.lanes == 64:
            state.S[:, 127] = exec_mask >> 32
        state.exec_changed()
    if lds_image is not None:
        machine.lds.bytes[: len(lds_image)] = lds_image
        if machine.lds.unset is not None:
            machine.lds.unset[: len(lds_image)] = False
    if machine.defined is not None:
        machine.defined.reset(set(range(126)) | set(range(VECTOR, VECTOR + len(state.V))))
        machine.defined.scc[...] = False
        machine.defined.bad.clear()
    with np.errstate(all="ignore"):
        machine.finish()
    record(arch, [ran for ran, count in zip(program.assembly.instructions, machine.counts, strict=True) if count])
    return machine


_RECORDS = os.environ.get("EMULATE_EXECUTED", "")  # a folder: coverage_data.py asks what the tests execute


def record(arch: str, instructions: Sequence[Instruction]) -> None:
    """Note what a test executed, where somebody asks."""
    if _RECORDS:
        with (Path(_RECORDS) / str(os.getpid())).open("a") as file:
            for instruction in instructions:
                for part in (instruction, instruction.second):
                    if part is not None:
                        file.write(f"{arch} {part.mnemonic}\n")


def lanes(arch: str) -> int:
    return ARCHES[arch].wave


def bits(values: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Values of a 32-bit type as uint32."""
    return np.ascontiguousarray(np.asarray(values, dtype)).view(np.uint32)


def mask_of(machine: Machine, index: int, wave: int = 0) -> int:
    """A lane mask in scalar registers as an integer."""
    low, high = (int(machine.state.S[wave, index + n]) for n in (0, 1))
    return low | (high << 32 if machine.state.lanes == 64 else 0)


def run_apart(script: Path, *arguments: str, first: str = "", seconds: float = 300.0) -> dict[str, dict[str, Any]]:
    """Return the lines of JSON that a script prints, by name: in a process without TRITON_INTERPRET, with the packages
    in `first` before this Python's own. The line of "" says what an absent one failed of."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = [first, str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, str(script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines} | {"": {"failed": result.stderr[-800:]}}
