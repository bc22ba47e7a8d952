"""Canaries run in the model: what `portattn verify --target rocm:… --emulate` does, on chips of 64 and of 32 lanes.
test_emulated_plans.py runs each canary's machine code of every chip."""

from __future__ import annotations

import pytest
import support

from portattn.backends.rocm.emulator.executor import EmulatorExecutor
from portattn.config import Settings
from portattn.planning.registry import parse_target
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.verify import verify

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(support.TRITON is None, reason="Triton is not installed")]


@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])  # of 64 lanes and of 32
def test_a_canary_by_both_means(arch: str) -> None:
    target = parse_target(f"rocm:{arch}", str(installed_toolchain()))
    if lacks := EmulatorExecutor(60.0).lacks(target):
        pytest.skip(lacks)
    said: list[str] = []
    rows = list(verify(["sparse_attention"], target, Settings(), 120.0, said.append, emulate=True))
    assert len(rows) == len(said) == 2
    for row in rows:
        assert row.seen["emulated"].outcome == "pass", row.seen["emulated"].reason
        assert f"a model of {arch}" in row.seen["emulated"].where
        assert row.verdict == "agree", row.sentence
