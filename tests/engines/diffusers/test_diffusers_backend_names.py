"""A path that no device has is refused as it is registered, not in a model's first attention."""

from __future__ import annotations

import pytest
from diffusers.models.attention_dispatch import AttentionBackendName

import portattn.integrations.diffusers as integration
from portattn.errors import ArgumentError


def test_a_misspelt_backend() -> None:
    before = list(AttentionBackendName)
    with pytest.raises(ArgumentError, match="backend is 'tritton', but must be one of auto, vendor, reference"):
        integration.register("portattn_misspelt", backend="tritton")
    assert list(AttentionBackendName) == before


@pytest.mark.parametrize("backend", ["triton", "interpreter", "sdpa", "gluon_forward"])
def test_names_of_other_devices(backend: str) -> None:
    """Where a model will run is not known yet."""
    integration.register("portattn_elsewhere", backend=backend).remove()
