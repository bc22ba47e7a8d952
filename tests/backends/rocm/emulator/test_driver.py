"""The Triton driver around a launch, and the same with every Triton of the lab that this Python can load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import support
from packaging.version import Version
from places import ROOT

from portattn.backends.rocm.emulator.executor import OLDEST
from portattn.tools import lab

HERE = Path(__file__).parent
CASES = (
    "chips_one_after_the_other", "nested", "launches_again_and_again", "autotune_and_heuristics", "views",
    "negative_strides", "zero_size", "overlapping_storages", "optional_arguments", "errors_leave_triton_as_it_was",
    "checks_of_a_block", "threads_launch", "threads_take_turns", "interpreted_kernels_are_told",
)  # fmt: skip
SMOKE = ("views", "autotune_and_heuristics")
TRITONS = ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")

pytestmark = pytest.mark.skipif(support.TRITON is None, reason="Triton is not installed")


def outcome(first: str = "", names: tuple[str, ...] = CASES) -> dict[str, dict[str, str]]:
    """What each case gave, in a fresh process; with the packages in `first` before this Python's own."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = [first, str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, str(HERE / "driver_cases.py"), *names]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines} | {"": {"failed": result.stderr[-800:]}}


def check(found: dict[str, dict[str, str]], names: tuple[str, ...]) -> None:
    for name in names:
        line = found.get(name) or found[""]
        assert "failed" not in line, f"{name}: {line['failed']}"


@pytest.mark.compiles
def test_cases() -> None:
    """All in one process, which takes less than the compiles of one case."""
    check(outcome(), CASES)


@pytest.mark.compiles
@pytest.mark.usefixtures("real_lab")
@pytest.mark.parametrize("version", TRITONS)
def test_other_tritons(version: str) -> None:
    assert Version(version) >= OLDEST
    if Version(version) == support.TRITON:
        pytest.skip("this Triton is the installed one, which the cases above are run with")
    found = lab.find(f"triton=={version}")
    if found is None:
        pytest.skip(f"no environment: portattn lab create triton=={version}")
    packages = sorted(found.folder.glob(f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"))
    if not packages:
        pytest.skip(f"the environment of triton=={version} is of another Python than {sys.version_info[:2]}")
    lines = outcome(str(packages[0]), SMOKE)
    check(lines, SMOKE)
    assert {lines[name]["triton"] for name in SMOKE} == {version}
