"""2, 4 and 8 processes with gloo against one process in float64: forward and gradients, under the error budget."""

import os
from pathlib import Path

import pytest
import rank_cases
from cases import cases
from ranks import run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_feature_and_layout(ranks: int, tmp_path: Path) -> None:
    found = run("rank_cases", ranks, tmp_path, "all_cases")["all_cases"]
    assert len(found) == ranks
    judged = {name: wrong for rank in found.values() for name, wrong in rank.items()}
    assert sorted(judged) == sorted(case["name"] for case in cases(ranks))
    assert {name: wrong for name, wrong in judged.items() if wrong} == {}


# Context parallel as users meet it: DTensors, torch.compile, autocast, plans, and what is sent.
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
    assert (found["seen"][0]["rows"], found["seen"][1]["rows"]) == ([*range(8), *range(24, 32)], [*range(8, 24)])
    for said in found["seen"].values():
        assert (said["dtypes"], said["gradient"]) == (["torch.bfloat16"] * 2, "torch.float32")
        assert said["plan"] in ("sdpa", "reference")


# Ranks that disagree, calls that are refused, ranks that are gone: an error on every rank, and no endless wait.
UNEVEN = "q.shape is (1, 4, 16, 8) on ranks 0 to 2, (1, 4, 12, 8) on rank 3, but must be the same on every rank"
DTYPE = "dtype is torch.float32 on ranks 0, 2, 3, torch.bfloat16 on rank 1, but must be the same on every rank"
FLAT = "q.shape is (4, 16, 8), but must have four axes (rank 2)"
TRITON = "context_parallel.attention: backend is 'triton', but cannot run here: attention: backend='triton' cannot run"
EXPECTED = {
    "ring: uneven shards": UNEVEN, "ring: dtype": DTYPE, "ring: one rank's own error": FLAT,
    "both: uneven shards": UNEVEN, "both: dtype": DTYPE, "both: one rank's own error": FLAT,
    "causal": "causal is True on ranks 0, 1, False on ranks 2, 3, but must be the same on every rank",
    "key's rows": "k.shape[2] is 8, but must be q's, 16: queries and keys are of the same rows, cut alike",
    "gradients": "whether gradients of q are asked for is True on rank 0, False on ranks 1 to 3",
    "ring: gradients of another tensor": "whether gradients of q are asked for is True on rank 0, False on ranks 1 to",
    "ulysses: gradients of another tensor": "whether gradients of q are asked for is True on rank 0, False on ranks 1",
    "gradients of sinks alone": "whether gradients of v are asked for is False on rank 0, True on ranks 1 to 3",
    "documents": "cu_seqlens is (0, 21, 64) on rank 0, (0, 20, 64) on ranks 1 to 3, but must be the same",
    "documents too long": "cu_seqlens[-1] is 65, but must be at most 64, the rows of all ranks together",
    "documents fall": "cu_seqlens is (0, 9, 5), but must begin with 0 and never fall",
    "odd shards": "q.shape[2] is 15, but must be a multiple of 2: zigzag shards over 4 ranks",
    "length": "shard: tensor.shape[2] is 60, but must be a multiple of 8: zigzag shards over 4 ranks",
    "heads": "q's heads is 2, but must be a multiple of 4, the ranks that Ulysses shares them out to",
    "dropout": "dropout_p is 0.1, but must be 0: dropout is not computed over several ranks",
    "bias": "bias is (16, 64), but must be None over several ranks: portattn.attention takes it",
    "chunk": "chunk is 4, but must be None over several ranks: portattn.attention takes it",
    "packed chunk": "chunk is 4, but must be None over several ranks: portattn.attention takes it",
    "mask": "mask is (16, 64), but must be None over several ranks: portattn.attention takes it",
    "slopes": "alibi_slopes.requires_grad is True, but must be False: a ring does not compute the slopes' gradient",
    "window": "window's left is -3, but must be an integer ≥ 0",
    "layout": "layout is 'sbhd', but must be one of bhsd, bshd",
    "layout of one rank": "layout is [1], but must be one of bhsd, bshd (rank 1)",
    "dropout of one rank": "dropout_p is tensor([0., 0.]), but must be 0: dropout is not computed over several ranks",
    "unshard of nothing": "unshard: tensor is 'NoneType', but must be a torch.Tensor (rank 0)",
    "unshard along a name": "unshard: dim is 'x', but must be an integer (rank 3)",
    "no tensor": "k is 'NoneType', but must be a torch.Tensor",
    "quantised": "k.dtype is torch.float8_e4m3fn, but must be q's, torch.float32",
    "all quantised": "q.dtype is torch.float8_e4m3fn, but must be float16, bfloat16 or float32 over several ranks",
    "ring: backend": TRITON, "ulysses: backend": TRITON, "both: backend": TRITON,
    "backend of packed rows": "varlen_attention: backend is 'triton', but cannot run here: attention: backend=",
    "unknown backend": "attention: backend is 'cutlass', but cpu knows auto, vendor, reference",
    "one rank's backend": "(rank 1)", "unshard with gradients": "tensor.requires_grad is True, but must be False",
    "unshard of other shapes": "tensor.shape is (1, 4, 16, 8) on ranks 0, 1, 3, (1, 1, 16, 8) on rank 2",
    "made differently": "layout is 'zigzag' on ranks 0, 2, 3, 'contiguous' on rank 1, but must be the same",
    "unknown layout": "layout is 'striped', but must be one of zigzag, contiguous",
    "unknown method": "method is 'alltoall', but must be one of ring, ulysses",
    "two methods": "method is 'ring', but must be None of a mesh of two dimensions",
    "no group": "mesh is 'cuda', but must be a ProcessGroup, a DeviceMesh or None",
}  # fmt: skip


def test_every_rank_raises_the_same_error(tmp_path: Path) -> None:
    found = run("refusals", 4, tmp_path, "all_refusals")["all_refusals"]
    assert found[0].keys() == EXPECTED.keys()
    for name, text in EXPECTED.items():
        said = {rank[name] for rank in found.values()}
        assert len(said) == 1, (name, said)
        assert text in said.pop(), (name, found[0][name])


GONE = ("killed_between_calls", "killed_inside_a_call", "never_comes", "differ_after_the_first_check")
LONG = 60.0  # seconds; the time-out of the process groups is 8


def test_a_rank_that_is_gone_or_does_something_else_is_an_error_on_the_others(tmp_path: Path) -> None:
    for name, found in run("refusals", 3, tmp_path, *GONE).items():
        assert sorted(found) == ([0, 2] if name.startswith("killed") else [0, 1, 2])
        for rank, said in found.items():
            if (name, rank) == ("never_comes", 1):
                continue
            assert said["raised"] not in ("", "ArgumentError"), (name, rank, said)
            assert said["seconds"] < LONG, (name, rank, said)


# Gradients where ranks compute different losses: each still answers the others' messages.
@pytest.mark.parametrize(("method", "world"), [("ulysses", 2), ("ulysses", 3), ("ring", 3)])
def test_a_rank_may_leave_out_or_the_lse_out_of_its_loss(ranks, method, world):
    for found in ranks(world).run(rank_cases.losses_that_differ, method):
        assert max(found.values()) < 1e-5, found
