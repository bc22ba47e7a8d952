"""portattn.integrations.flash_attn.hub: flash_attn's functions with attention sinks, as transformers calls them."""

from __future__ import annotations

import math

import pytest
import torch
from flash_attn_oracle import check_one, ints

from portattn.errors import ArgumentError
from portattn.integrations import flash_attn
from portattn.integrations.flash_attn import hub

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CU = ints(0, 5, 12)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # a model's own dtype, which may be another one
def test_sinks(tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    q, k, v = tensors
    sinks = SINKS.to(dtype)
    dense, lse, _ = hub.flash_attn_func(q[None], k[None], v[None], causal=True, return_attn_probs=True, s_aux=sinks)
    check_one(dense[0], lse[0], q, k, v, math.inf, causal=True, sinks=sinks)
    packed = hub.flash_attn_varlen_func(q, k, v, CU, CU, 7, 7, causal=True, s_aux=sinks)
    for rows in (slice(0, 5), slice(5, 12)):
        check_one(packed[rows], None, q[rows], k[rows], v[rows], math.inf, causal=True, sinks=sinks)
    k_cache, v_cache = torch.zeros(1, 16, 2, 16), torch.zeros(1, 16, 2, 16)
    cached = hub.flash_attn_with_kvcache(
        q[None], k_cache, v_cache, k[None], v[None], cache_seqlens=0, causal=True, s_aux=sinks
    )
    check_one(cached[0], None, q, k, v, math.inf, causal=True, sinks=sinks)
    assert torch.equal(k_cache[0, :12], k)


def test_without_sinks_they_are_flash_attn_s(tensors: tuple[torch.Tensor, ...]) -> None:
    q, k, v = tensors
    given = (q[None], k[None], v[None])
    assert torch.equal(hub.flash_attn_func(*given), flash_attn.flash_attn_func(*given))
    assert torch.equal(
        hub.flash_attn_varlen_func(q, k, v, CU, CU, 7, 7), flash_attn.flash_attn_varlen_func(q, k, v, CU, CU, 7, 7)
    )


def test_sinks_of_another_shape_are_refused(tensors: tuple[torch.Tensor, ...]) -> None:
    q, k, v = (tensor[None] for tensor in tensors)
    with pytest.raises(ArgumentError, match=r"^flash_attn_func: s_aux\.shape is \(3,\)"):
        hub.flash_attn_func(q, k, v, s_aux=SINKS[:3])
    cache = torch.zeros(1, 16, 2, 16)
    with pytest.raises(ArgumentError, match=r"^flash_attn_with_kvcache: s_aux\.shape is \(3,\)"):
        hub.flash_attn_with_kvcache(q, cache, cache.clone(), k, v, cache_seqlens=0, s_aux=SINKS[:3])
    assert not cache.any()
