"""After an engine's start no batch compiles a kernel: random layers and batches, with the plans of an H100."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from fakedriver import run, triton_folders


@pytest.mark.engine_feature("kernels compiled at the start")
@pytest.mark.parametrize("seeds", ["0", "3"])
def test_no_batch_compiles_a_kernel(tmp_path: Path, seeds: str) -> None:
    triton = triton_folders()[importlib.metadata.version("triton")]
    for one in run("engines/sglang/warmup_child.py", tmp_path, triton, seeds, "20")["engines"]:
        assert one["failed"] == []
        assert one["loaded"] > 3
        assert [kernels for kernels, *_ in one["wrong"] if kernels] == [], one["settings"]
        assert len(one["wrong"]) <= 2, "nearly every shape class is cached too"
