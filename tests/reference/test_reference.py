"""The reference path: right, differentiable, and with memory that grows with S and not S². And the oracle itself."""

from dataclasses import replace

import msgspec
import pytest
import torch
from reference_cases import CASES, OPS
from reference_cases import problem as named_problem
from support import assert_right, poisoned, problem, random_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from portattn.reference import blockwise
from portattn.schema.call import Call
from portattn.testing.oracle import oracle

CAUSAL = ("none", "bottom_right", "top_left")
FEATURES = {
    "no_lse": {"return_lse": False}, "gqa_bshd": {"heads_q": 6, "heads_k": 2, "layout": "bshd"},
    "wide_v": {"head_dim": 24, "head_dim_v": 576}, "one": {"seq_q": 1, "seq_k": 1, "head_dim": 1},
}  # fmt: skip
PADDED = {"seqlens_q": True, "seqlens_k": True, "leftpad_q": True, "leftpad_k": True, "batch": 4}


def run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    with poisoned(), torch.no_grad():
        return blockwise.run(call)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_features_are_right(causal: str, features: dict, dtype: str) -> None:
    call = random_call(problem(causal=causal, dtype=dtype, **features), seed=1)
    assert_right(call, *run(call))


@pytest.mark.parametrize("features", [{}, PADDED, {"op": "varlen_attention", "total_q": 40, "total_k": 70}], ids=str)
@pytest.mark.parametrize("blocks", ["one", "several"])
def test_a_seed_says_what_is_dropped(monkeypatch: pytest.MonkeyPatch, features: dict, blocks: str) -> None:
    call = random_call(problem(causal="bottom_right", **features), seed=2)
    call.dropout_p, call.dropout_seed = 0.3, torch.tensor([5])
    if blocks == "several":
        monkeypatch.setattr(blockwise, "KEY_BLOCK", 8)
        monkeypatch.setattr(blockwise, "SCORE_ELEMENTS", 8 * 5 * call.problem.batch * call.problem.heads_q)
    found = run(call)
    assert_right(call, *found)
    assert torch.equal(found[0], run(call)[0])
    call.dropout_seed = torch.tensor([6])
    assert not torch.allclose(found[0], run(call)[0], atol=1e-3)


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_the_oracle_agrees_with_sdpa(causal: str) -> None:
    call = random_call(problem(causal=causal, heads_q=4))
    k, v = call.k, call.v
    if causal == "top_left":  # what no query attends is NaN here
        k, v = k[:, :, : call.q.shape[2]], v[:, :, : call.q.shape[2]]
    theirs = scaled_dot_product_attention(
        call.q.double(), k.double(), v.double(), is_causal=causal == "top_left", enable_gqa=True
    )
    torch.testing.assert_close(oracle(call)[0], theirs)


def test_dropout_drops_and_keeps_the_mean() -> None:
    call = random_call(problem(batch=1, seq_k=400, dropout=True), scale=0.0)
    call.v = torch.ones_like(call.v)
    call.dropout_p = 0.25
    torch.manual_seed(0)
    out, lse = run(call)
    assert abs(float(out.mean()) - 1.0) < 0.05
    assert float(out.std()) > 0.01
    torch.testing.assert_close(lse, torch.full_like(lse, 400.0).log())  # the LSE is that of all scores


@pytest.mark.parametrize(("op", "feature"), CASES)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_features_are_right_of_every_op(op: str, feature: str, seed: int) -> None:
    call = random_call(named_problem(op, feature), seed, extremes=seed == 1)
    assert_right(call, *run(call))


@pytest.mark.parametrize(("op", "feature"), CASES)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bit_dtypes_are_right(op: str, feature: str, dtype: str) -> None:
    call = random_call(named_problem(op, feature, dtype=dtype), seed=4)
    assert_right(call, *run(call))


@pytest.mark.parametrize(("op", "feature"), CASES)
def test_blocks_of_any_size_are_right(monkeypatch: pytest.MonkeyPatch, op: str, feature: str) -> None:
    call = random_call(named_problem(op, feature), seed=5)
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 5)
    monkeypatch.setattr(blockwise, "SCORE_ELEMENTS", 5 * 4 * call.problem.batch * call.problem.heads_q)
    assert_right(call, *run(call))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("strides", "scale"), {"spare": -0.7, "transposed": 0.0, "sliced": 3.0, "expanded": 300.0}.items()
)
@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
def test_strides_and_scales(op: str, strides: str, scale: float, page_layout: str) -> None:
    call = random_call(named_problem(op, page_layout=page_layout), seed=6, strides=strides, scale=scale)
    # By a large factor what float32 rounds of a score decides, and torch's own error, the budget, may be luck.
    extra = torch.finfo(torch.float32).eps * abs(scale) * call.problem.head_dim
    assert_right(call, *run(call), extra)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation creates. A view creates none."""

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


def test_the_watch_sees_a_square() -> None:
    with LargestTensor() as watch:
        oracle(random_call(problem(batch=1, heads_q=1, heads_k=1, seq_q=256, seq_k=256)))
    assert watch.elements >= 256 * 256


def largest(op: str, feature: str, **sizes: int) -> int:
    call = random_call(named_problem(op, feature, batch=1, heads_q=1, heads_k=1, head_dim_v=16, **sizes), seed=0)
    for name in ("seqlens_k", "counts"):
        if getattr(call, name) is not None:
            setattr(call, name, torch.full_like(getattr(call, name), 2**30))
    with LargestTensor() as watch, torch.no_grad():
        blockwise.run(call)
    return watch.elements


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 32)
    monkeypatch.setattr(blockwise, "SCORE_ELEMENTS", 32 * 32)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("feature", ["plain", "all"])
@pytest.mark.parametrize("op", ["dense", "varlen"])
def test_scores_grow_with_the_rows(op: str, feature: str) -> None:
    seen = {}
    for size in (256, 512):
        sizes = {"seq_q": size, "seq_k": size}
        seen[size] = largest(op, feature, **sizes, **({"total_q": size, "total_k": size} if op == "varlen" else {}))
    assert seen[512] <= 2.1 * seen[256]
    assert seen[512] < 512 * 512 / 8


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(
    ("op", "feature", "size"),
    [
        ("decode", "all", "seq_k"), ("paged", "plain", "seq_k"), ("paged", "all", "seq_k"), ("mla", "plain", "seq_k"),
        ("sparse", "all", "tokens"), ("sparse_paged", "all", "tokens"),
    ],
)  # fmt: skip
def test_a_cache_is_read_block_by_block(op: str, feature: str, size: str) -> None:
    sizes = {"head_dim": 16} if op != "mla" else {}
    assert largest(op, feature, **sizes, **{size: 512}) == largest(op, feature, **sizes, **{size: 1024})


class LiveBytes(TorchDispatchMode):
    """Most bytes that are held at a time, of storages that operations have made, those of the backward pass included.
    What a process is given by its system would count the allocator's habits as well."""

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
    sizes = {"batch": 1, "heads_q": 2, "heads_k": 1, "head_dim_v": 16, "seq_q": size, "seq_k": size}
    if op == "varlen":
        sizes |= {"total_q": size, "total_k": size}
    call = random_call(named_problem(op, feature, **sizes), seed=0)
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
    assert held(monkeypatch, "dense", "plain", 512, dropout_p=0.5) > 2 * 2 * 512 * 512 * 4
