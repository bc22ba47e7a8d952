"""After an engine's start no batch compiles a kernel: random layers and batches, with the plans of an H100."""

from pathlib import Path

import pytest
from fuzz.recorded import assert_no_batch_compiles


@pytest.mark.engine_feature("kernels compiled at the start")
@pytest.mark.parametrize("seeds", ["0", "3"])
def test_no_batch_compiles_a_kernel(tmp_path: Path, seeds: str) -> None:
    assert_no_batch_compiles("engines/sglang/warmup_child.py", tmp_path, seeds, 20)
