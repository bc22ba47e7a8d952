"""Without SGLang and vLLM: the plug-ins' modules can be imported, and say what is missing. With them: tests/engines."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from portattn import config
from portattn.errors import ArgumentError
from portattn.integrations import sglang, vllm
from portattn.integrations.sglang import NEWEST, OLDEST

ENTRY_POINTS = {
    "vllm": ("vllm.general_plugins", "portattn.integrations.vllm:register", vllm.register),
    "sglang": ("sglang.srt.plugins", "portattn.integrations.sglang:activate", sglang.activate),
}


@pytest.mark.parametrize("engine", ENTRY_POINTS)
def test_importing_it_imports_no_engine(engine: str) -> None:
    code = (
        f"import sys, portattn.integrations.{engine}; print(*(n for n in sys.modules if n.split('.')[0] == '{engine}'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("engine", ENTRY_POINTS)
def test_the_entry_point_is_the_function(engine: str) -> None:
    group, value, function = ENTRY_POINTS[engine]
    found = [one for one in importlib.metadata.entry_points(group=group) if one.name == "portattn"]
    if not found:
        pytest.skip("portattn was installed before it had this entry point: install it again")
    assert {one.value for one in found} == {value}
    assert found[0].load() is function


@pytest.mark.parametrize("engine", ENTRY_POINTS)
def test_without_the_engine(engine: str) -> None:
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    with pytest.raises(ModuleNotFoundError, match=engine):
        ENTRY_POINTS[engine][2]()
    if engine == "sglang":
        with pytest.raises(importlib.metadata.PackageNotFoundError, match="sglang"):
            sglang.create(None)


# What vLLM is told of portattn's own settings, without vLLM: stand-ins of the modules that are asked.
MODULE = "portattn.integrations.vllm.caches"


class Asked:
    """vLLM's AttentionBackend: its own reasons."""

    @classmethod
    def validate_configuration(cls, *given: Any, **named: Any) -> list[str]:
        return ["another"]


@pytest.fixture
def capabilities(monkeypatch: pytest.MonkeyPatch) -> Any:
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0", "envs": SimpleNamespace(VLLM_KV_CACHE_LAYOUT=None)},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: True)},
        "vllm.v1.attention.backend": {"AttentionBackend": Asked, "MultipleOf": int},
        "vllm.v1.kv_cache_layout": {"KVCacheLayout": Enum("KVCacheLayout", {"LBHNC": 0})},
    }
    for name in (*parts, "vllm.v1", "vllm.v1.attention"):
        module = ModuleType(name)
        vars(module).update(parts.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    package = importlib.import_module("portattn.integrations.vllm")
    for part in ("capabilities", "caches", "versions"):  # gone again afterwards: they hold the stand-ins
        monkeypatch.delitem(sys.modules, f"portattn.integrations.vllm.{part}", raising=False)
        monkeypatch.delattr(package, part, raising=False)
    yield importlib.import_module(MODULE)
    for part in ("capabilities", "caches", "versions"):
        sys.modules.pop(f"portattn.integrations.vllm.{part}", None)
        vars(package).pop(part, None)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PORTATTN_BACKEND", "tritton"), ("PORTATTN_FALLBACK", "maybe"), ("PORTATTN_VALIDATE", "yes")],
)
def test_a_wrong_setting_is_a_reason(
    capabilities: Any, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert capabilities.Capabilities.validate_configuration() == ["another"]
    monkeypatch.setenv(variable, value)
    config.environment_settings.cache_clear()
    first, *others = capabilities.Capabilities.validate_configuration()
    assert f"{variable} is '{value}', but must be one of" in first
    assert others == ["another"]


def test_a_services_variables_are_no_reason(capabilities: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets them beside a service named portattn."""
    monkeypatch.setattr(config, "_warned", set())
    monkeypatch.setenv("PORTATTN_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("PORTATTN_PORT", "tcp://10.0.0.1:8000")
    config.environment_settings.cache_clear()
    with pytest.warns(UserWarning, match="PORTATTN_SERVICE_HOST"):
        assert capabilities.Capabilities.validate_configuration() == ["another"]


# Without SGLang: the plug-in's module can be imported, and says what is missing. With it: tests/engines/sglang.


# Which versions of SGLang the plug-in takes, without SGLang: a build's own label is no other release.
@pytest.mark.parametrize("version", [OLDEST, NEWEST, f"{NEWEST}+cu130", f"{OLDEST}+local"])
def test_a_label_of_a_build(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang.metadata, "version", lambda name: version)
    monkeypatch.setitem(sys.modules, "portattn.integrations.sglang.capabilities", None)
    with pytest.raises(ImportError, match="capabilities"):  # the version was taken, and what comes next is asked for
        sglang.create(None)


@pytest.mark.parametrize("version", [f"{OLDEST}rc1", f"{NEWEST}.post1", "0.6.0+cu130", "0.5.23-dirty.main", "unknown"])
def test_other_releases(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang.metadata, "version", lambda name: version)
    with pytest.raises(ArgumentError, match="sglang's version is"):
        sglang.create(None)
