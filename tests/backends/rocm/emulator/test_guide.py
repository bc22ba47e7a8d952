"""The guide's program as it is printed, broken as it says, and the pytest fixture: each in a Python of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import support
from places import ROOT

GUIDE = (ROOT / "docs" / "emulation.md").read_text(encoding="utf-8")
FIXTURE = """
import torch, triton, triton.language as tl


@triton.jit
def twice(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, i < n) * 2, i < n)


def test_right(portattn_amdgpu):
    x = torch.arange(100.0)
    out = torch.full_like(x, float("nan"))
    with portattn_amdgpu("gfx1100") as gpu:
        twice[(2,)](x, out, 100, B=64)
    assert torch.equal(out, 2 * x)
    assert len(gpu.launches) == 1


def test_wrong(portattn_amdgpu):
    out = torch.zeros(10)
    with portattn_amdgpu("gfx1100"):
        twice[(2,)](torch.arange(100.0), out, 100, B=64)
"""

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(support.TRITON is None, reason="Triton is not installed")]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300)


def program() -> str:
    found = re.search(r"```python\n(import torch, triton.*?)```", GUIDE, re.DOTALL)
    assert found
    return found.group(1)


def test_the_guides_program_runs(tmp_path: Path) -> None:
    path = tmp_path / "double.py"
    path.write_text(program())
    done = run(str(path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"\('\w+', \d+\)", done.stdout)


def test_broken_as_the_guide_says_it_names_the_line(tmp_path: Path) -> None:
    broken = program().replace("* 2, i < n)", "* 2)").replace("o = torch.full_like(x,", "o = torch.full((500,),")
    path = tmp_path / "double.py"
    path.write_text(broken)
    done = run(str(path))
    assert done.returncode != 0
    line = next(n for n, text in enumerate(broken.splitlines(), 1) if "tl.store" in text)
    assert re.search(rf"OutOfBounds: line \d+ \(double\.py:{line}:\d+\).*outside every buffer", done.stderr)


def test_the_fixture(tmp_path: Path) -> None:
    path = tmp_path / "test_twice.py"
    path.write_text(FIXTURE)
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(path))
    assert "1 failed, 1 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    assert "OutOfBounds" in done.stdout
