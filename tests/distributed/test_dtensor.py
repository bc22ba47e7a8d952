"""DTensors: two processes compute and differentiate a call as one does, sharded by sequences and by heads."""

from collections.abc import Callable

import dtensor_ranks
import pytest
from rank_processes import Ranks


@pytest.mark.parametrize("way", ["batch", "heads", "whole", "mixed"])
@pytest.mark.parametrize("call", dtensor_ranks.calls())
def test_a_sharded_call(call: str, way: str, ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(dtensor_ranks.judged, call, way) == ["right"] * 2
