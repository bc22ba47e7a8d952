from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import rank_processes


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], rank_processes.Ranks]]:
    """`ranks(4)`: processes of a gloo group, started once."""
    pools = rank_processes.Pools()
    try:
        yield pools.of
    finally:
        pools.close()
