"""What tests of the backends share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from portattn.toolchain import installed
from portattn.worker.client import Worker


@pytest.fixture(scope="module")
def compiler() -> Iterator[Worker]:
    if str(installed()) != "triton==3.6.0":
        pytest.skip(f"the kernel is for Triton 3.6.0, and this is {installed() or 'none'}")
    with Worker() as worker:
        yield worker
