"""Without SGLang: the plug-in's module can be imported, and says what is missing. With it: tests/engines/sglang."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from portattn.integrations import sglang as integration

absent = importlib.util.find_spec("sglang") is None


def test_importing_it_imports_no_engine() -> None:
    code = (
        "import sys, portattn.integrations.sglang; print(*(n for n in sys.modules if n.partition('.')[0] == 'sglang'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_entry_point_is_the_function() -> None:
    found = [one for one in importlib.metadata.entry_points(group="sglang.srt.plugins") if one.name == "portattn"]
    if not found:
        pytest.skip("portattn was installed before it had this entry point: install it again")
    assert {one.value for one in found} == {"portattn.integrations.sglang.plugin:activate"}
    assert found[0].load() is integration.activate


@pytest.mark.skipif(not absent, reason="SGLang is installed")
def test_without_sglang() -> None:
    with pytest.raises(ModuleNotFoundError, match="sglang"):
        integration.activate()
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="sglang"):
        integration.plugin.create(None)
