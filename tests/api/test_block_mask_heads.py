"""torch's BlockMask of other heads or another batch: refused as the block mask's, not as the mask that it makes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import portattn

Q = torch.randn(1, 4, 32, 16)


@pytest.mark.parametrize(
    ("batch", "heads", "text"),
    [(1, 8, "block_mask's Hq is 8, but must be 1 or 4"), (3, None, "block_mask's B is 3, but must be 1")],
)
def test_other_heads(batch: int, heads: int | None, text: str) -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, batch, heads, 32, 32, device="cpu", BLOCK_SIZE=16)
    for layout in ("bhsd", "bshd"):
        q = Q if layout == "bhsd" else Q.transpose(1, 2)
        with pytest.raises(portattn.ArgumentError, match=f"^attention: {text}$"):
            portattn.attention(q, q, q, block_mask=mask, layout=layout)
