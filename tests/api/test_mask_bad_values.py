"""Block lists and trees that must be refused by name, found by trying every argument."""

from __future__ import annotations

import pytest
import torch

import portattn
from portattn.errors import ArgumentError

Q, K = torch.randn(2, 4, 32, 16), torch.randn(2, 2, 32, 16)


def lists(batch: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(batch, heads, 2, dtype=torch.int32), torch.zeros(batch, heads, 2, 2, dtype=torch.int32)


@pytest.mark.parametrize("full", [(3, 4), (2, 3), (0, 4)])
def test_whole_blocks_of_another_batch(full: tuple[int, int]) -> None:
    mask = portattn.BlockMask(*lists(2, 4), *lists(*full), block_size=(16, 16))
    with pytest.raises(ArgumentError, match=r"^attention: block_mask's full_kv_num_blocks\.shape is .*\(2, 4\)"):
        portattn.attention(Q, K, K, block_mask=mask)


def test_one_list_for_all_beside_lists_of_each() -> None:
    mask = portattn.BlockMask(*lists(1, 4), *lists(2, 1), block_size=(16, 16))
    wide = portattn.BlockMask(*lists(2, 4), block_size=(16, 16))
    assert torch.equal(portattn.attention(Q, K, K, block_mask=mask), portattn.attention(Q, K, K, block_mask=wide))


def test_queries_that_are_none() -> None:
    mask = portattn.BlockMask(*lists(2, 4), block_size=(16, 16))
    with pytest.raises(ArgumentError, match=r"^attention: q is "):
        portattn.attention(None, K, K, block_mask=mask)  # type: ignore[arg-type]


def test_a_parent_beyond_64_bits() -> None:
    with pytest.raises(ArgumentError, match=r"^tree_mask: tree is .*must be a torch\.Tensor of parents"):
        portattn.tree_mask([-1, 2**70])
