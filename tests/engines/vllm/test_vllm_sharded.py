"""Decode context parallelism over full heads: two processes, vLLM's own group and collectives over gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm.triton_utils

works = pytest.mark.engine_feature("decode context parallelism")
CHILD = Path(__file__).with_name("sharded_child.py")
CASES = [
    "decode", "prompts_alone", "refusals", "of_dtypes", "features", "float8", "interleaved", "all_to_all", "replay",
    "kernels",
]  # fmt: skip
SECONDS = 900  # two processes on a machine that others use took 230


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    if not vllm.triton_utils.HAS_TRITON:
        pytest.skip("vLLM does not use Triton in this environment: its merge is a kernel")
    folder = tmp_path_factory.mktemp("processes")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PORTATTN_")}
    own = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PORTATTN_CACHE_DIR": str(folder / "cache")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(CHILD), str(rank), "2", str(folder / "file"), *CASES],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=kept | own,
        ) for rank in range(2)
    ]  # fmt: skip
    try:
        return [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@works
@pytest.mark.parametrize("case", CASES)
def test_ranks(case: str, outputs: list[str]) -> None:
    assert all(f"right {case}\n" in output for output in outputs), "\n".join(output[-4000:] for output in outputs)
