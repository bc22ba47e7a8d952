"""A warm-up of a range of sizes leaves nothing to plan for any of them: launches are recorded, not run."""

from __future__ import annotations

import platform
import shutil
from typing import Any

import fakedriver
import pytest
from packaging.version import Version

TRITONS = fakedriver.triton_folders()
pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux" or not shutil.which("cc"), reason="needs Linux and a C compiler"),
    pytest.mark.skipif(not TRITONS, reason="Triton is not installed"),
    pytest.mark.compiles,
]
RANGES = {"decode": 9000, "a view of a cache": 1640, "attention": 700, "varlen": 800}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    version = "3.6.0" if "3.6.0" in TRITONS else max(TRITONS, key=Version)
    return fakedriver.run("warmed_child.py", tmp_path_factory.mktemp("warmed"), TRITONS[version])


@pytest.mark.parametrize("name", RANGES)
def test_no_call_in_the_range_is_planned(seen: dict[str, Any], name: str) -> None:
    found = seen[name]
    assert found["calls"] == RANGES[name]
    assert found["planned"] == []
    assert found["warnings"] == []


@pytest.mark.parametrize("name", RANGES)
def test_each_class_is_run_once(seen: dict[str, Any], name: str) -> None:
    classes = seen[name]["classes"]
    assert 2 <= len(classes) <= 40
    assert len({one["call"] for one in classes}) == len(classes)
    assert all(one["cached"] and not one["failed"] and not one["sizes"] for one in classes)
    assert {one["spec"] for one in classes} == {0}
    told = seen[name]["told"]
    assert next(text for text in told if text.startswith("running")).endswith(classes[0]["call"])
    assert sum(text.startswith("running") for text in told) == len(classes)


def test_what_ends_a_range_is_reported(seen: dict[str, Any]) -> None:
    ends = seen["ends"]
    assert ends["many"][0] == ""
    assert ends["many"][-1].startswith("more than 2 classes of sizes: from B = ")
    assert ends["wrong"][0] == ""
    refused = ends["wrong"][1]
    assert refused.startswith("specs[0].heads_q is 4, but must be a multiple of the 3 key/value heads (heads_k)")
    (warned,) = ends["warned"]
    assert warned.endswith(refused)
