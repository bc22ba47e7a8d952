"""What the machine code uses: registers, spills, local memory, matrix instructions. Read without a GPU.

NVIDIA: `ptxas -v` and the PTX text. AMD: the metadata at the end of the amdgcn text. Child process only.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any

_AMD_NUMBERS = {
    "registers": r"\.vgpr_count:\s+(\d+)",
    "spilled_registers": r"\.vgpr_spill_count:\s+(\d+)",
    "scratch_bytes": r"\.private_segment_fixed_size:\s+(\d+)",
    "scalar_registers": r"\.sgpr_count:\s+(\d+)",
    "occupancy": r"; Occupancy:\s*(\d+)",
}
_PTXAS_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_PTXAS_REGISTERS = re.compile(r"Used (\d+) registers")
_PTX_MATRIX = {"wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma", "mma": r"\bmma\.sync"}
_AMD_MATRIX = {"mfma": r"^\s+v_s?mfma_", "wmma": r"^\s+v_s?wmma_"}


def read(kernel: Any, arch: int | str, full: bool) -> dict[str, int | str]:
    """Facts of a compiled kernel. Without `full` only what its metadata holds, which costs nothing."""
    facts: dict[str, int | str] = {
        "scratchpad_bytes": int(kernel.metadata.shared),
        "num_warps": kernel.metadata.num_warps,
    }
    if not full:
        return facts
    if "ptx" in kernel.asm:
        ptx = kernel.asm["ptx"]
        facts |= count(ptx, _PTX_MATRIX) | ptxas_report(ptx, int(arch))
    else:
        facts |= amd_report(kernel.asm["amdgcn"])
    return facts


def text(kernel: Any) -> dict[str, int | str]:
    """The assembly text that is run elsewhere: `amdgcn`; or `ptx`, and the bytes of `scratch` that it wants."""
    if "amdgcn" in kernel.asm:
        return {"amdgcn": kernel.asm["amdgcn"]}
    # Triton 3.2 has no scratch memory, 3.3 and 3.4 none for profiles.
    sizes = (getattr(kernel.metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
    return {"ptx": kernel.asm["ptx"], "scratch": sum(int(size or 0) for size in sizes)}


def count(text: str, patterns: dict[str, str]) -> dict[str, int | str]:
    """How often each instruction stands in the text; those that do not occur are left out."""
    found = {name: len(re.findall(pattern, text, re.MULTILINE)) for name, pattern in patterns.items()}
    return {name: number for name, number in found.items() if number}


def amd_report(text: str) -> dict[str, int | str]:
    facts = count(text, _AMD_MATRIX)
    for name, pattern in _AMD_NUMBERS.items():
        match = re.search(pattern, text)
        if match:
            facts[name] = int(match.group(1))
    # Scalar registers spill to vector lanes, not to memory: only vector spills and scratch cost memory traffic.
    facts["spills"] = int(facts.get("spilled_registers", 0)) * 4 + int(facts.get("scratch_bytes", 0))
    return facts


def ptxas_report(ptx: str, arch: int) -> dict[str, int | str]:
    """Registers and spilled bytes as ptxas reports them, from the ptxas that Triton itself would call."""
    target = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    assert target, "PTX names its target"
    for tool in ptxas_candidates(arch):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "kernel.ptx")
            with open(path, "w") as file:
                file.write(ptx)
            done = subprocess.run(
                [tool, "-v", f"--gpu-name={target.group(1)}", path, "-o", os.path.join(folder, "kernel.o")],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        if done.returncode == 0:
            break
    else:
        raise RuntimeError(f"no ptxas of this Triton assembles its own PTX for {target.group(1)}: {done.stderr[-500:]}")
    spills, registers = _PTXAS_SPILLS.search(done.stderr), _PTXAS_REGISTERS.search(done.stderr)
    facts: dict[str, int | str] = {"spills": sum(map(int, spills.groups())) if spills else 0}
    if registers:
        facts["registers"] = int(registers.group(1))
    if "serialized" in done.stderr:  # C7510 and its like: ptxas could not keep wgmma asynchronous
        facts["serialized_wgmma"] = len(re.findall("serialized", done.stderr))
    return facts


def ptxas_candidates(arch: int) -> list[str]:
    """The ptxas programs to try: the user's, then the wheel's, in the order in which Triton would choose."""
    import triton
    import triton.backends.nvidia as nvidia

    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])
    first_new = 90 if version >= (3, 9) else 100  # the first arch that Triton sends to ptxas-blackwell
    names = ["ptxas-blackwell", "ptxas"] if arch >= first_new else ["ptxas", "ptxas-blackwell"]
    folder = os.path.join(next(iter(nvidia.__path__)), "bin")
    tools = [os.environ.get("TRITON_PTXAS_PATH", "")] + [os.path.join(folder, name) for name in names]
    return [tool for tool in tools if tool and os.path.exists(tool)]
