"""Without vLLM: the plug-in's module can be imported, and says what is missing. With it: tests/engines/vllm."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from portattn.integrations import vllm as integration


def test_importing_it_imports_no_engine() -> None:
    code = "import sys, portattn.integrations.vllm; print(*(name for name in sys.modules if name.startswith('vllm')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_entry_point_is_the_function() -> None:
    found = [one for one in importlib.metadata.entry_points(group="vllm.general_plugins") if one.name == "portattn"]
    if not found:
        pytest.skip("portattn was installed before it had this entry point: install it again")
    assert {one.value for one in found} == {"portattn.integrations.vllm:register"}
    assert found[0].load() is integration.register


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm() -> None:
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        integration.register()
