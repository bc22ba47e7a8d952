"""A first call compiles each of its kernels once (Triton 3.3 on): in a child, whose result this process then loads."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import fakedriver
import pytest
from packaging.version import Version

TRITONS = fakedriver.triton_folders()
# The installed one comes first; of the lab's the oldest and the newest, for each takes some seconds.
LOOKED_AT = list(
    dict.fromkeys([*list(TRITONS)[:1], *sorted(TRITONS, key=Version)[:1], *sorted(TRITONS, key=Version)[-1:]])
)
pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux" or not shutil.which("cc"), reason="needs Linux and a C compiler"),
    pytest.mark.skipif(not TRITONS, reason="Triton is not installed"),
]


@pytest.mark.parametrize("version", LOOKED_AT)
def test_the_child_and_this_process_compile_the_same(version: str, tmp_path: Path) -> None:
    found: dict[str, Any] = fakedriver.run("once_child.py", tmp_path, TRITONS[version])
    decoding = "warps_apart" if Version(version) >= Version("3.6") else "decode_split"
    expected = {"dense_forward": 2, decoding: 1, "combine": 1, "sparse_split": 1}
    if version == "3.6.0":
        assert found["paths"] == ["gluon_forward"]
        expected["scheduled_forward"] = 1
    if version.startswith("3.2."):  # what it knows of arguments has another form there, which the child does not match
        expected = {name: 2 * count for name, count in expected.items()}
    assert found["compiled"] == expected
    assert found["launchers"] == []
