"""DTensors: two processes compute and differentiate a call as one does, sharded by sequences and by heads."""

from pathlib import Path

import pytest
from two_processes import outputs

CHILD = Path(__file__).with_name("dtensor_child.py")
WAYS = ("batch", "heads", "whole", "mixed")
CALLS = ("attention", "attention, bshd", "attention, one key head", "drop-in", "varlen", "decode", "paged", "mla")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    first = outputs(CHILD, tmp_path_factory.mktemp("store"))[0]
    lines = [line.split("\t") for line in first.splitlines() if "\t" in line]
    return {f"{call}: {way}": found for call, way, found in lines}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_a_sharded_call(call: str, way: str, reports: dict[str, str]) -> None:
    assert reports[f"{call}: {way}"] == "right"
