"""Gradients where ranks compute different losses: each still answers the others' messages."""

from __future__ import annotations

from collections.abc import Callable

import gradient_ranks
import pytest
from rank_processes import Ranks


@pytest.mark.parametrize(("method", "world"), [("ulysses", 2), ("ulysses", 3), ("ring", 3)])
def test_a_rank_may_leave_out_or_the_lse_out_of_its_loss(
    ranks: Callable[[int], Ranks], method: str, world: int
) -> None:
    for found in ranks(world).run(gradient_ranks.losses_that_differ, method):
        assert max(found.values()) < 1e-5, found
