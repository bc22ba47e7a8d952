"""The deepest trees: 64 tokens one after the other, as lists, and every depth below."""

from __future__ import annotations

import pytest

import portattn


@pytest.mark.parametrize("count", [2, 31, 32, 33, 34, 63, 64])
def test_a_chain_of_many(count: int) -> None:
    words = portattn.tree_mask([node - 1 for node in range(count)])
    assert [word % 2**64 for word in words.tolist()] == [2 ** (node + 1) - 1 for node in range(count)]
