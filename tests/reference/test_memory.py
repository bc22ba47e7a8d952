"""No tensor of the blockwise path grows with the product of rows and keys, or holds a whole gathered cache."""

from __future__ import annotations

import pytest
import torch
from reference_cases import problem
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
