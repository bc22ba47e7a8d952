"""Programs in Triton's language, compiled by the installed Triton for each arch and executed in the model.
test_emulated_plans.py runs attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asmkit
import pytest
import support

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
