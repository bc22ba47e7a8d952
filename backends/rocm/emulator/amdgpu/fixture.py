"""A pytest fixture: `pytest_plugins = ["portattn.backends.rocm.emulator.amdgpu.fixture"]`, then

    def test_kernel(amdgpu):
        with amdgpu("gfx942") as gpu:
            kernel[(1,)](x, y)

Skips where torch or Triton is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def amdgpu() -> Callable[..., Any]:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from portattn.backends.rocm.emulator.amdgpu.triton_driver import emulate

    return emulate
