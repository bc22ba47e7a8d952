"""The data of coverage.json.

    python coverage_data.py          makes coverage.json anew, with the installed Triton
    python coverage_data.py tested   the same of `tested` alone

used    arch → mnemonics in the code of the slice (emulated_slice.py) and of the matrix's quick set
tested  arch → mnemonics that the instruction tests execute: those modules that compare with definitions of their own"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from portattn.backends.rocm.emulator.amdgpu.assembly import parse
from portattn.planning.registry import parse_target

HERE = Path(__file__).parent
FILE = HERE / "coverage.json"
# Modules whose expected values come from Python's integers and fractions, numpy's scalars, AMD's layouts, or AMD's
# documents (test_isa_…).
INSTRUCTION_TESTS = (
    "test_vector.py", "test_memory_instructions.py", "test_matrix_instructions.py", "test_isa_vector.py",
    "test_isa_masks.py", "test_isa_scalar.py", "test_isa_lanes.py", "test_isa_memory.py",
)  # fmt: skip


def data() -> Any:
    return json.loads(FILE.read_text(encoding="utf-8"))


def used_mnemonics(texts: Iterable[str]) -> dict[str, set[str]]:
    """Return arch → mnemonics in the assembly texts. Raise BadProgram on another text."""
    found: dict[str, set[str]] = {}
    for assembly in map(parse, texts):
        parts = [part for one in assembly.instructions for part in (one, one.second) if part is not None]
        found.setdefault(assembly.arch.name, set()).update(part.mnemonic for part in parts)
    return found


def check_used(arch: str, mnemonics: set[str]) -> None:
    """Nothing that kernels use is missing from the data, where they were compiled with the same Triton."""
    import triton

    found = data()
    if found["triton"] == triton.__version__:
        new = mnemonics - set(found["used"][arch])
        assert not new, f"{arch} code has {sorted(new)}: python {Path(__file__).name}"


def executed() -> dict[str, list[str]]:
    """arch → mnemonics that the instruction tests execute now. Runs them."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "EMULATE_EXECUTED": folder}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-x"]
        modules = [str(HERE / name) for name in INSTRUCTION_TESTS]
        done = subprocess.run(
            [*command, *modules], capture_output=True, text=True, env=environment, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:]
        lines = {line for path in Path(folder).iterdir() for line in path.read_text().splitlines()}
    found: dict[str, list[str]] = {}
    for line in sorted(lines):
        arch, mnemonic = line.split()
        found.setdefault(arch, []).append(mnemonic)
    return found


def compiled() -> dict[str, set[str]]:
    """arch → mnemonics of the slice and of the quick set, compiled now."""
    from asmkit import ARCH_NAMES
    from emulated_slice import SLICE

    from portattn.backends.rocm.emulator.executor import EmulatorExecutor
    from portattn.launch import KernelCall
    from portattn.planning.planner import plan
    from portattn.schema.toolchain import installed_toolchain
    from portattn.tools.matrix.problems import quick
    from portattn.worker.client import Reply, Worker

    texts: list[str] = []

    class Recording(EmulatorExecutor):
        def piece(self, launch: KernelCall, reply: Reply) -> Any:
            found = super().piece(launch, reply)
            texts.append(found["text"])
            return found

    with Worker(runs="") as compiling, Worker(runs="kernels") as running:
        for arch in ARCH_NAMES:
            where = parse_target(f"rocm:{arch}", str(installed_toolchain()))
            for problem in (*SLICE.values(), *(named.problem for named in quick())):
                seen = Recording(600.0).check(plan(problem, where), where, compiling, running)
                assert seen.outcome == "pass", f"{arch}: {problem}: {seen.reason}"
                print(f"{arch}: {problem}", file=sys.stderr)
    return used_mnemonics(texts)


def main() -> None:
    import triton

    found = data() if FILE.exists() else {}
    if sys.argv[1:] != ["tested"]:
        found = {"triton": triton.__version__, "used": {arch: sorted(names) for arch, names in compiled().items()}}
        FILE.write_text(json.dumps(found | {"tested": {}}, indent=1) + "\n", encoding="utf-8")  # the tests read it
    found["tested"] = executed()
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[2]))
    pytest.importorskip("triton")
    main()
