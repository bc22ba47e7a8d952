"""Sequences of a negative length just below 0, several of whose new rows would lie at 0 and behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_attn_oracle import ints

from portattn.integrations.flash_attn_interface import flash_attn_with_kvcache

NEW = 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["own", "batch_idx", "pages"])
def test_no_row_of_a_negative_length_is_written(form: str, packed: bool) -> None:
    size = (4, 4) if form == "pages" else (2, 8)
    k_cache, v_cache = torch.full((*size, 2, 16), 7.0), torch.full((*size, 2, 16), 7.0)
    given: dict[str, Any] = {
        "own": {},
        "batch_idx": {"cache_batch_idx": ints(1, 0)},
        "pages": {"page_table": torch.arange(4, dtype=torch.int32).view(2, 2)},
    }[form]
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, NEW, 2, 16), torch.randn(2, NEW, 2, 16)
    if packed:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        given["cu_seqlens_k_new"] = ints(0, NEW, 2 * NEW)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=ints(-1, 2), **given)
    for cache in (k_cache, v_cache):
        assert int((cache != 7.0).any(-1).any(-1).sum()) == NEW  # the other sequence's
    assert bool((out[0] == 0).all())
    assert bool((out[1] != 0).all())
