"""What the scheduled kernels rely on in the PTX that a release of Triton makes of them."""

import re
import subprocess
from pathlib import Path

import pytest

from portattn.schema.target import Target
from portattn.schema.toolchain import installed_toolchain

# The kernels' own hardware barriers begin at 5, and are computed; those that a compiler takes are numbers.
OWN_BARRIERS = 5
_BARRIER = re.compile(r"\b(?:bar|barrier)(?:\.cta)?\.(?:sync|arrive|red)\S*\s+(\d+)")
_LINE = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)")
_PASSED_OVER = re.compile(r"^\s*(//|\.loc|$|\$L|add|shl|sub|mov|setp|and|or|selp|mad|cvt|bfe|xor|\{|\})")


def assert_synchronised(ptx: str) -> None:
    """The compiler takes none of the kernel's hardware barriers; and threads have come together before one of them
    arrives at an mbarrier for all of them, which says that they have read, or written, what it guards."""
    own = {int(number) for number in _BARRIER.findall(ptx)}
    assert own, "the groups of warps are brought together"
    assert max(own) < OWN_BARRIERS, f"the compiler takes {sorted(own)}"
    lines = ptx.splitlines()
    arrivals = [place for place, line in enumerate(lines) if re.search(r"\bmbarrier\.arrive\.shared", line)]
    for place in arrivals:
        assert re.match(r"bar(rier)?\.", before(lines, place)), "\n".join(lines[max(0, place - 12) : place + 1])


def before(lines: list[str], place: int) -> str:
    """The last instruction before a line that is no arithmetic on addresses."""
    for line in reversed(lines[:place]):
        if not _PASSED_OVER.match(line):
            found = _LINE.match(line)
            return found.group(1) if found else line
    return ""


def nvdisasm(target: Target) -> Path:
    """Return the installed Triton's disassembler; skip the test if there is none, or if `target` has another Triton."""
    import triton

    if str(target.toolchain) != str(installed_toolchain()):
        pytest.skip("assembles with the installed Triton's ptxas, which --release does not choose")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("this Triton comes without nvdisasm: scripts/pack_triton.py leaves it out")
    return tool


def disassemble(tool: Path, ptx: str, folder: Path) -> str:
    """Return the machine code that the installed ptxas makes of `ptx` for sm_90a, as text."""
    from triton.backends.nvidia.compiler import get_ptxas

    (folder / "k.ptx").write_text(ptx)
    subprocess.run([get_ptxas(90).path, "--gpu-name=sm_90a", "k.ptx", "-o", "k.cubin"], cwd=folder, check=True)
    return subprocess.run([tool, "-c", "k.cubin"], cwd=folder, check=True, capture_output=True, text=True).stdout
