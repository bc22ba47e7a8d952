"""DTensors: two processes compute and differentiate a call as one does, sharded by sequences and by heads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHILD = Path(__file__).with_name("dtensor_child.py")
WAYS = ("batch", "heads", "whole", "mixed")
CALLS = ("attention", "attention, bshd", "attention, one key head", "drop-in", "varlen", "decode", "paged", "mla")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each rank 0 has found, by call and placement: empty where all was right."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    store = tmp_path_factory.mktemp("store") / "file"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), str(store)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    done = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors for _, errors in done)
    lines = [line.split("\t") for line in done[0][0].splitlines() if "\t" in line]
    return {f"{call}: {way}": found for call, way, found in lines}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_a_sharded_call(call: str, way: str, reports: dict[str, str]) -> None:
    assert reports[f"{call}: {way}"] == "right"
