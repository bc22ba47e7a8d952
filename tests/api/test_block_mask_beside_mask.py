"""A block mask of torch's with a mask_mod, and a mask beside it: a score counts where both say so."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import portattn


@pytest.mark.filterwarnings("ignore:attention computes block_mask")
def test_a_mask_beside_a_mask_mod() -> None:
    def causal(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return i >= j

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
    blocks = create_block_mask(causal, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    mask = torch.rand(1, 2, 32, 32) < 0.6
    both = mask & torch.ones(32, 32, dtype=torch.bool).tril()
    found = portattn.attention(q, k, v, mask=mask, block_mask=blocks, backend="reference")
    expected = portattn.attention(q, k, v, mask=both, backend="reference")
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(found, portattn.attention(q, k, v, causal=True, backend="reference"), atol=1e-2)
    assert not torch.allclose(found, portattn.attention(q, k, v, mask=mask, backend="reference"), atol=1e-2)
