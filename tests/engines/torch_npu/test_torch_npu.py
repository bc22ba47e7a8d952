"""The vendor's own torch_npu without CANN: its schemas take portattn's calls, its autograd formulas give the gradients.
Its libraries load over stand-ins for CANN's (stand_in_libraries.py), and the kernels beneath its operators are those of
tests/backends/ascend/recorded_torch_npu.py. So what is tested is the vendor's code between a call and a kernel."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, TESTS

HERE = Path(__file__).parent
TOOLS = ("gcc", "nm", "objdump")
SECONDS = 300
# Largest errors: of float32, and of results rounded to float16.
FLOAT32, FLOAT16 = 2e-6, 1e-3


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What npu_child.py found."""
    if platform.machine() != "x86_64":
        pytest.skip(f"the stand-ins for CANN's libraries are x86-64 assembly, and this machine is {platform.machine()}")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"the stand-ins for CANN's libraries are made by {', '.join(TOOLS)}; missing: {', '.join(missing)}")
    sys.path.insert(0, str(HERE))
    try:
        import stand_in_libraries
    finally:
        sys.path.remove(str(HERE))
    folder = tmp_path_factory.mktemp("cann")
    stand_in_libraries.make(folder, folder_of("torch_npu"), folder_of("torch"), HERE / "cann.c")
    paths = [ROOT, TESTS, TESTS / "backends" / "ascend"]
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }  # fmt: skip
    command = [sys.executable, str(HERE / "npu_child.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_chip_is_detected_by_its_name(found: dict[str, Any]) -> None:
    assert found["arch"] == "ascend910b2"


def test_the_vendors_formula_ignores_the_gradient_of_its_statistics(found: dict[str, Any]) -> None:
    """Why portattn's LSE has an autograd function of its own: with another torch_npu it may be needed no more."""
    assert found["formula"]["out"] < FLOAT32
    assert found["formula"]["out and lse"] > 0.1


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("loss", ["out", "out and lse", "lse"])
def test_fusion_attention_and_its_gradients(found: dict[str, Any], causal: str, loss: str) -> None:
    errors = found["fusion"][f"{causal}, {loss}"]
    assert errors.keys() == {"out", "lse", "grad_q", "grad_k", "grad_v"}
    assert max(errors.values()) < FLOAT32


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("seqlens_k", [None, [7, 3]])
def test_fused_infer_attention(found: dict[str, Any], causal: str, seqlens_k: list[int] | None) -> None:
    errors = found["infer"][f"{causal}, {seqlens_k}"]
    assert errors["out"] < FLOAT16
    assert errors["lse"] < FLOAT32
