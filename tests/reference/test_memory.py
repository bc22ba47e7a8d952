"""No tensor of the blockwise path grows with the product of rows and keys, or holds a whole gathered cache.

What is held at a time, in training as well, grows with the rows.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from reference_cases import problem
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from portattn.reference import blockwise
from portattn.testing.tolerance import random_call


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation creates. Views of what there was create none."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in old:
                self.elements = max(self.elements, tensor.numel())
        return result


def largest(op: str, feature: str, **sizes: int) -> int:
    call = random_call(problem(op, feature, batch=1, heads_q=1, heads_k=1, head_dim_v=16, **sizes), seed=0)
    for name in ("seqlens_k", "counts"):
        if getattr(call, name) is not None:
            setattr(call, name, torch.full_like(getattr(call, name), 2**30))
    with LargestTensor() as watch, torch.no_grad():
        blockwise.run(call)
    return watch.elements


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 32)
    monkeypatch.setattr(blockwise, "SCORE_ELEMENTS", 32 * 32)


@pytest.mark.parametrize("feature", ["plain", "all"])
@pytest.mark.parametrize("op", ["dense", "varlen"])
def test_scores_grow_with_the_rows(op: str, feature: str) -> None:
    seen = {}
    for size in (256, 512):
        sizes = {"seq_q": size, "seq_k": size}
        seen[size] = largest(op, feature, **sizes, **({"total_q": size, "total_k": size} if op == "varlen" else {}))
    assert seen[512] <= 2.1 * seen[256]
    assert seen[512] < 512 * 512 / 8


@pytest.mark.parametrize(
    ("op", "feature", "size"),
    [
        ("decode", "all", "seq_k"),
        ("paged", "plain", "seq_k"),
        ("paged", "all", "seq_k"),
        ("mla", "plain", "seq_k"),
        ("sparse", "all", "tokens"),
        ("sparse_paged", "all", "tokens"),
    ],
)
def test_a_cache_is_read_block_by_block(op: str, feature: str, size: str) -> None:
    """What is held at a time does not depend on how much there is."""
    sizes = {"head_dim": 16} if op != "mla" else {}
    assert largest(op, feature, **sizes, **{size: 512}) == largest(op, feature, **sizes, **{size: 1024})


class LiveBytes(TorchDispatchMode):
    """Most bytes that are held at a time, of storages that operations have made, those of the backward pass included.

    What a process is given by its system would count the allocator's habits as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.held[StorageWeakRef(storage)] = storage.nbytes()
        self.held = {storage: size for storage, size in self.held.items() if not storage.expired()}
        self.most = max(self.most, sum(self.held.values()))
        return result


def held(monkeypatch: pytest.MonkeyPatch, op: str, feature: str, size: int, **fields: float | torch.Tensor) -> int:
    """Bytes held at a time by a forward and a backward pass over as many rows and keys."""
    sizes = {"batch": 1, "heads_q": 2, "heads_k": 1, "head_dim_v": 16, "seq_q": size, "seq_k": size}
    if op == "varlen":
        sizes |= {"total_q": size, "total_k": size}
    call = random_call(problem(op, feature, **sizes), seed=0)
    call = replace(call, problem=msgspec.structs.replace(call.problem, needs_grad=True), **fields)
    # Larger blocks than above: thousands of tiles take minutes.
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 128)
    monkeypatch.setattr(blockwise, "SCORE_ELEMENTS", 2 * 64 * 128)
    names = ("q", "k", "v", "sinks", "alibi_slopes")
    leaves = [tensor.requires_grad_() for name in names if (tensor := getattr(call, name)) is not None]
    with LiveBytes() as watch:
        out, lse = blockwise.run(call)
        torch.autograd.grad([out.sum() + lse.masked_fill(lse == float("-inf"), 0.0).sum()], leaves)
    return watch.most


@pytest.mark.parametrize("feature", ["plain", "causal", "softcap", "alibi", "dropout"])
@pytest.mark.parametrize("op", ["dense", "varlen"])
def test_training_holds_no_matrix_of_scores(monkeypatch: pytest.MonkeyPatch, op: str, feature: str) -> None:
    """Twice the rows and keys hold twice as much, which is less than one matrix of scores."""
    fields = {}
    if feature == "dropout":
        feature, fields = "plain", {"dropout_p": 0.5, "dropout_seed": torch.tensor([1])}
    small, large = (held(monkeypatch, op, feature, size, **fields) for size in (512, 1024))
    assert large <= 2.2 * small
    assert large < 2 * 1024 * 1024 * 4 / 3


def test_recorded_steps_hold_every_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the meter sees: drawn dropout is not computed anew."""
    assert held(monkeypatch, "dense", "plain", 512, dropout_p=0.5) > 2 * 2 * 512 * 512 * 4
