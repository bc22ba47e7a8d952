"""What vLLM is told of portattn's own settings, without vLLM: stand-ins of the modules that are asked."""

from __future__ import annotations

import importlib
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from portattn import config

MODULE = "portattn.integrations.vllm.capabilities"


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
