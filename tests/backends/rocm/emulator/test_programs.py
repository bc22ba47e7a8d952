"""Programs in Triton's language, compiled by the installed Triton for each arch and executed in the model; the Triton
driver around a launch, with each Triton of the lab that this Python can load. test_emulated_plans.py runs attention."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import asmkit
import pytest
import support
from packaging.version import Version

from portattn.backends.rocm.emulator.executor import OLDEST
from portattn.tools import lab

HERE = Path(__file__).parent
SECONDS = 600

pytestmark = pytest.mark.skipif(support.TRITON is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return what each program of an arch gave: one process for all of them."""
    return asmkit.run_apart(HERE / "programs.py", request.param, seconds=SECONDS)


NAMES = (
    "add fp32", "add bf16", "add int64", "softmax fp32", "softmax fp16", "dot fp16", "dot fp16 16", "dot bf16",
    "dot fp32", "dot int8", "sort int32", "sort fp16", "cumsum fp32", "cumsum int64", "atomics",
)  # fmt: skip
FP8 = [("gfx942", "dot xf32"), ("gfx942", "dot fp8 fnuz"), ("gfx942", "dot bf8 fnuz"), ("gfx950", "dot fp8"),
       ("gfx950", "dot bf8"), ("gfx1201", "dot fp8"), ("gfx1201", "dot bf8")]  # fmt: skip


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("outcome", "name"), [(arch, name) for arch in asmkit.ARCH_NAMES for name in NAMES] + FP8, indirect=["outcome"]
)
def test_program(outcome: dict[str, Any], name: str) -> None:
    line = outcome.get(name) or outcome[""]
    assert "failed" not in line, line["failed"]
    for error, budget in line["results"]:
        assert error != "nan", "NaN left in the output"
        assert error <= budget


CASES = (
    "chips_one_after_the_other", "nested", "launches_again_and_again", "autotune_and_heuristics", "views",
    "negative_strides", "zero_size", "overlapping_storages", "optional_arguments", "errors_leave_triton_as_it_was",
    "checks_of_a_block", "threads_launch", "threads_take_turns", "interpreted_kernels_are_told",
)  # fmt: skip
SMOKE = ("views", "autotune_and_heuristics")
TRITONS = ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")


def check(found: dict[str, dict[str, str]], names: tuple[str, ...]) -> None:
    for name in names:
        line = found.get(name) or found[""]
        assert "failed" not in line, f"{name}: {line['failed']}"


@pytest.mark.compiles
def test_cases() -> None:
    """All in one process, which takes less than the compiles of one case."""
    check(asmkit.run_apart(HERE / "driver_cases.py", *CASES), CASES)


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
    lines = asmkit.run_apart(HERE / "driver_cases.py", *SMOKE, first=str(packages[0]))
    check(lines, SMOKE)
    assert {lines[name]["triton"] for name in SMOKE} == {version}
