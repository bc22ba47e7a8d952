"""A repeated step that fills a cache: nothing planned, nothing allocated, one launch, by native.c as by Python."""

from __future__ import annotations

from typing import Any

import pytest
from fakedriver import run, triton_folders
from packaging.version import Version

TRITONS = triton_folders()


@pytest.mark.compiles
def test_a_step_is_one_launch_from_the_cache(tmp_path: Any) -> None:
    if not TRITONS:
        pytest.skip("Triton is not installed, and the lab has none for this Python")
    version = "3.6.0" if "3.6.0" in TRITONS else max(TRITONS, key=Version)
    seen = run("writing_child.py", tmp_path, TRITONS[version])
    for op, found in seen.items():
        assert found["path"] == "triton"
        assert found["why fixed"] == "", "each number of tokens would be planned for itself"
        assert (found["hit"], found["way"]) == (True, "native")
        assert found["launches"] == 1
        assert found["same"], f"{op}: other launches by C, by Python, or prepared"
        assert found["allocated"] == 0
        assert found["planned"] == 0, "another number of tokens was planned"
        caches = {"k_cache", "v_cache"} if op == "append_kv" else {"k_pages", "v_pages", "slot_mapping", "positions"}
        assert caches | {"k", "v", "k_scale", "v_scale", "cos", "sin"} <= set(found["addresses"])
