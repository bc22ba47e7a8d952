"""Modules beside the tests, which ranks import too, and processes that are ranks."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import rank_processes


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], rank_processes.Ranks]]:
    """`ranks(4)`: processes of a gloo group, started once."""
    pools = rank_processes.Pools()
    try:
        yield pools.of
    finally:
        pools.close()
