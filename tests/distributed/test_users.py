"""Context parallel as users meet it: DTensors, torch.compile, autocast, plans, and what is sent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")

REFUSED = {
    "head_dim": "q.placements is (Shard(dim=3),), but must be Shard(2), of the rows, or Shard(1), of the heads",
    "copies": "q.placements is (Replicate(),), but must be Shard(2), of the rows, or Shard(1), of the heads",
    "mixed": "k is 'Tensor', but q, k and v must all be DTensors, or none of them",
    "differ": "k.placements is (Replicate(),), but must be q's, (Shard(dim=2),)",
    "mesh": "but must have the dimensions that context_parallel was given",
    "uneven": "q.shape[2] is 30, but must be a multiple of 4, the ranks over which it is sharded",
}


def test_dtensors_and_what_is_sent(tmp_path: Path) -> None:
    found = run("users", 4, tmp_path, "dtensors", "refused_dtensors", "traffic", "memory")
    for by_placement in found["dtensors"].values():
        assert len(by_placement) == 7
        assert max(by_placement.values()) < 2e-6, by_placement
    for said in found["refused_dtensors"].values():
        assert said.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert text in said[name], (name, said[name])
    sent = found["traffic"]
    for rank in range(4):
        # To each of the others all keys; under a causal mask those that come before its rows; within a window the
        # last 7 of 32 to the next rank, of zig-zag pieces (16 rows) to the ranks that have the next pieces.
        assert sent[rank]["contiguous: full"] == sent[rank]["zigzag: full"] == 3
        assert sent[rank]["contiguous: causal"] == 3 - rank
        assert sent[rank]["contiguous: window"] == (7 / 32 if rank < 3 else 0)
        assert sent[rank]["zigzag: causal"] == rank + (3 - rank) / 2
        neighbours = {0: 1, 1: 2, 2: 2, 3: 1}[rank]
        assert sent[rank]["zigzag: window"] == pytest.approx(neighbours * 7 / 32)
    for most in found["memory"].values():
        # Three blocks of k and v (6), the partial results (1), a local result (1), and what an LSE needs.
        assert 7 < most["forward"] < 8.5, most
        # The blocks (6); gradients of the own rows (3), of messages (4) and of a local call (3).
        assert 12 < most["backward"] < 16.5, most


def test_compiled_calls_autocast_plans_and_shards(tmp_path: Path) -> None:
    found = run("users", 2, tmp_path, "compiled", "seen")
    for rank, said in found["compiled"].items():
        assert max(said["furthest"]) < 1e-5, said
        assert said["says why"], rank
    assert found["seen"][0]["rows"] == [*range(8), *range(24, 32)]
    assert found["seen"][1]["rows"] == [*range(8, 24)]
    for said in found["seen"].values():
        assert said["dtypes"] == ["torch.bfloat16"] * 2
        assert said["gradient"] == "torch.float32"
        assert said["plan"] in ("sdpa", "reference")
