"""A build of diffusers with a label of its own is the release that it is a build of."""

from __future__ import annotations

import diffusers
import pytest

from portattn.integrations.diffusers import NEWEST, register


def test_a_label_of_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "__version__", f"{NEWEST}+local")
    registered = register("portattn_labelled")
    assert registered.name == "portattn_labelled"
    registered.remove()
