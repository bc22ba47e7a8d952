"""Which versions of SGLang the plug-in takes, without SGLang: a build's own label is no other release."""

from __future__ import annotations

import sys

import pytest

from portattn.errors import ArgumentError
from portattn.integrations.sglang import NEWEST, OLDEST, plugin


@pytest.mark.parametrize("version", [OLDEST, NEWEST, f"{NEWEST}+cu130", f"{OLDEST}+local"])
def test_a_label_of_a_build(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.metadata, "version", lambda name: version)
    monkeypatch.setitem(sys.modules, "portattn.integrations.sglang.capabilities", None)
    with pytest.raises(ImportError, match="capabilities"):  # the version was taken, and what comes next is asked for
        plugin.create(None)


@pytest.mark.parametrize("version", [f"{OLDEST}rc1", f"{NEWEST}.post1", "0.6.0+cu130", "0.5.23-dirty.main", "unknown"])
def test_other_releases(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.metadata, "version", lambda name: version)
    with pytest.raises(ArgumentError, match="sglang's version is"):
        plugin.create(None)
