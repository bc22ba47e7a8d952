"""A path that no device has is refused as it is registered, not in a model's first attention."""

from __future__ import annotations

import pytest
import torch
from calls import dispatch
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


def test_advice_names_what_the_call_has(registered: integration.DiffusersRegistration) -> None:
    """diffusers' call has no `layout`."""
    query, key = torch.randn(1, 4, 6, 16), torch.randn(1, 4, 9, 16)  # as (batch, heads, seq, head_dim)
    with pytest.raises(ArgumentError, match="heads_q is 6") as raised:
        dispatch(registered, query, key, key, enable_gqa=True)
    assert str(raised.value).endswith("give query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)")
