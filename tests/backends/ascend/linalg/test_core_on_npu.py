"""Public operations on a device called npu, from detection to the result: triton-ascend compiles the core kernels, and
their linalg runs on the device's tensors. tests/devices says what stands in for torch_npu, CANN and the chip."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opcalls import problem
from places import ROOT, TESTS

from portattn.backends.ascend.linalg.llvm_tools import TOOLCHAIN
from portattn.schema.problem_limits import OPS
from portattn.tools import lab
from portattn.tools.matrix.cell_text import recorded_evidence

CHILD, DEVICES = Path(__file__).with_name("core_child.py"), TESTS / "devices"
SECONDS = 300
GRADIENTS = ["backward_delta", "backward_keys", "backward_rows", "dense_forward"]
KERNELS = {
    "attention": ["dense_forward"], "varlen": ["dense_forward"], "decode": ["decode_split"], "paged": ["decode_split"],
    "ragged": ["decode_split"], "sparse": ["sparse_split"], "sparse paged": ["sparse_split"], "mla": ["decode_split"],
    "mla ragged": ["decode_split"], "gradients": GRADIENTS, "packed gradients": GRADIENTS,
    "append_kv": ["write_cache"], "write_pages": ["write_cache"], "topk_indices": ["topk_rows"],
    "indexer_logits": ["index_scores"], "block_sparse_attention": ["block_forward"],
}  # fmt: skip


@pytest.fixture
def run_case(mlir: None, tmp_path: Path) -> Any:
    sys.path.insert(0, str(DEVICES))
    try:
        import host_device
        import triton_ascend_site
    finally:
        sys.path.remove(str(DEVICES))
    if missing := host_device.missing():
        pytest.skip(missing)
    found = lab.find(TOOLCHAIN)
    if found is None:
        pytest.skip(f"no {TOOLCHAIN} in the lab")
    made = triton_ascend_site.make(tmp_path / "npu", found.folder)
    paths = [ROOT, TESTS, DEVICES, DEVICES / "npu", TESTS / "backends" / "ascend", made["PYTHONPATH"]]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "PATH": made["PATH"] + os.pathsep + os.environ["PATH"],
        "TRITON_CACHE_DIR": str(tmp_path / "triton"), "TRITON_INTERPRET": "0",
    }  # fmt: skip

    def run(name: str, **more: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-S", str(CHILD), name], env=os.environ | variables | more, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_the_recorded_evidence_is_of_these_operations() -> None:
    gradients = {"gradients": "attention_backward", "packed gradients": "varlen_attention_backward"}
    named = {name: gradients.get(name) or (name if name in OPS else problem(name).op) for name in KERNELS}
    (row,) = (row for row in recorded_evidence("ascend") if row.path == "triton")
    assert set(row.ops) == set(named.values())


@pytest.mark.parametrize("name", KERNELS)
def test_the_core_runs_each_operation(name: str, run_case: Any) -> None:
    assert run_case(name, PORTATTN_CANARY="never") == {"kernels": KERNELS[name], "strays": []}


def test_canaries_decide_before_the_first_call(run_case: Any, tmp_path: Path) -> None:
    run_case("attention", PORTATTN_CANARY="always")
    records = [json.loads(path.read_text())["body"] for path in (tmp_path / "cache" / "records").iterdir()]
    (ran,) = (record for record in records if record["level"] == "runs")
    assert ran["passed"]
    assert ran["target"] == "ascend:ascend910b2"
    assert 0 < ran["error"] < 0.01
