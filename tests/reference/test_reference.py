"""The reference path: right, differentiable, and with memory that grows with S and not S². And the oracle itself."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from support import CPU, assert_right, largest, poisoned, problem, random_call
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from portattn.reference import blockwise
from portattn.schema.call import Call
from portattn.testing.oracle import oracle

CAUSAL = ("none", "bottom_right", "top_left")
FEATURES = {
    "dense": {},
    "no_lse": {"return_lse": False},
    "gqa_bshd": {"heads_q": 6, "heads_k": 2, "layout": "bshd"},
    "wide_v": {"head_dim": 24, "head_dim_v": 576},
    "padded": {"seqlens_q": True, "seqlens_k": True, "leftpad_q": True, "leftpad_k": True, "batch": 4},
    "decode": {"op": "decode_attention", "heads_q": 4, "seq_q": 2, "seqlens_k": True},
    "no_rows": {"seq_q": 0},
    "no_keys": {"seq_k": 0},
    "no_batch": {"batch": 0},
    "one": {"seq_q": 1, "seq_k": 1, "head_dim": 1},
}


def run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    with poisoned(), torch.no_grad():
        return blockwise.run(call)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_features_are_right(causal: str, features: dict, dtype: str) -> None:
    call = random_call(problem(causal=causal, dtype=dtype, **features), seed=1)
    assert_right(call, *run(call))


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("features", [{}, FEATURES["padded"], FEATURES["gqa_bshd"]], ids=["dense", "padded", "gqa"])
def test_blocks_of_any_size_give_the_same_numbers(monkeypatch, causal: str, features: dict) -> None:
    """Both loops take several turns, with ragged ends."""
    call = random_call(problem(causal=causal, **features), seed=2)
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 8)
    monkeypatch.setattr(blockwise, "SCORE_ELEMENTS", 8 * 5 * call.problem.batch * call.problem.heads_q)
    assert_right(call, *run(call))


@pytest.mark.parametrize(
    "features",
    [{}, FEATURES["padded"], {"op": "varlen_attention", "total_q": 40, "total_k": 70}],
    ids=["dense", "padded", "packed"],
)
@pytest.mark.parametrize("blocks", ["one", "several"])
def test_a_seed_says_what_is_dropped(monkeypatch: pytest.MonkeyPatch, features: dict, blocks: str) -> None:
    """The same in any blocks, at any time."""
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


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0, 300.0])
@pytest.mark.parametrize("strides", ["spare", "transposed", "sliced", "expanded"])
def test_scales_and_strides(scale: float, strides: str) -> None:
    call = random_call(problem(causal="bottom_right", heads_q=4), seed=3, scale=scale, strides=strides)
    assert_right(call, *run(call))


def test_the_oracle_on_numbers_worked_out_by_hand() -> None:
    p = problem(batch=1, heads_q=1, heads_k=1, seq_q=2, seq_k=2, head_dim=1, causal="bottom_right")
    as_tensor = lambda *values: torch.tensor(values).reshape(1, 1, 2, 1)  # noqa: E731
    call = Call(p, as_tensor(1.0, 2.0), as_tensor(0.0, math.log(3.0)), as_tensor(10.0, 20.0), 0.5)
    out, lse = oracle(call)
    # Row 0 sees key 0: score 0. Row 1 sees both: scores 0 and log 3, weights 1/4 and 3/4.
    torch.testing.assert_close(out.flatten(), torch.tensor([10.0, 17.5], dtype=torch.float64))
    torch.testing.assert_close(lse.flatten(), torch.tensor([0.0, math.log(4.0)], dtype=torch.float64))


@pytest.mark.parametrize(
    ("causal", "seq_q", "seq_k", "seen"),
    [
        ("bottom_right", 2, 4, [3, 4]),
        ("bottom_right", 4, 2, [0, 0, 1, 2]),
        ("top_left", 2, 4, [1, 2]),
        ("top_left", 4, 2, [1, 2, 2, 2]),
        ("none", 2, 3, [3, 3]),
    ],
)
def test_how_many_keys_each_row_sees(causal: str, seq_q: int, seq_k: int, seen: list[int]) -> None:
    """With a scale of zero every attended key weighs the same, so the LSE is the log of their number."""
    call = random_call(problem(causal=causal, seq_q=seq_q, seq_k=seq_k), scale=0.0)
    for _, lse in (run(call), oracle(call)):
        torch.testing.assert_close(lse[0, 0].exp().float(), torch.tensor([float(n) for n in seen]))


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


def gradients(call: Call, weight: torch.Tensor) -> list[torch.Tensor]:
    for name in ("q", "k", "v"):
        setattr(call, name, getattr(call, name).detach().requires_grad_())
    call.problem = msgspec.structs.replace(call.problem, needs_grad=True)
    out, _ = blockwise.run(call)
    return list(torch.autograd.grad((out * weight).sum(), (call.q, call.k, call.v)))


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize("heads_q", [2, 4])
def test_gradients_are_sdpas(monkeypatch, causal: str, heads_q: int) -> None:
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 8)
    monkeypatch.setattr(blockwise, "SCORE_ELEMENTS", 8 * 5 * 2 * heads_q)
    call = random_call(problem(causal=causal, heads_q=heads_q, heads_k=2), seed=4)
    weight = torch.randn(2, heads_q, 19, 16)

    def sdpa(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (t.detach().to(dtype).requires_grad_() for t in (call.q, call.k, call.v))
        out = scaled_dot_product_attention(q, k, v, is_causal=causal == "top_left", enable_gqa=True)
        return list(torch.autograd.grad((out * weight.to(dtype)).sum(), (q, k, v)))

    exact, theirs = sdpa(torch.float64), sdpa(torch.float32)
    for ours, ref, same in zip(gradients(call, weight), exact, theirs, strict=True):
        assert largest(ours.double() - ref) <= 2 * largest(same.double() - ref) + 1e-6 * largest(ref)


def test_gradients_of_padding_are_zero_and_nan_does_not_spread() -> None:
    p = problem(seqlens_q=True, seqlens_k=True, leftpad_k=True, causal="bottom_right", batch=4)
    call = random_call(p, seed=5)
    clean = random_call(p, seed=5)
    padding = {n: getattr(call, n).isnan() for n in ("q", "k", "v")}
    assert all(m.any() for m in padding.values())
    clean.q, clean.k, clean.v = (t.nan_to_num(0.25) for t in (clean.q, clean.k, clean.v))
    weight = torch.randn(4, 2, 19, 16)
    for name, ours, same in zip(padding, gradients(call, weight), gradients(clean, weight), strict=True):
        assert torch.isfinite(ours).all(), name
        assert not ours[padding[name]].any(), name
        assert torch.equal(ours, same), name


@pytest.mark.parametrize("sizes", [{"seq_q": 0}, {"seq_k": 0}])
def test_empty_problems_have_gradients_of_zero(sizes: dict) -> None:
    call = random_call(problem(**sizes))
    grads = gradients(call, torch.ones(2, 2, call.problem.seq_q, 16))
    assert all(not g.any() for g in grads)
    assert [g.shape for g in grads] == [call.q.shape, call.k.shape, call.v.shape]


def test_rows_with_nothing_to_attend_have_finite_gradients() -> None:
    call = random_call(problem(seq_q=24, seq_k=5, causal="bottom_right"))
    for grad in gradients(call, torch.ones(2, 2, 24, 16)):
        assert torch.isfinite(grad).all()
    assert not gradients(call, torch.ones(2, 2, 24, 16))[0][:, :, :19].any()


def test_dropout_drops_and_keeps_the_mean() -> None:
    call = random_call(problem(batch=1, seq_k=400, dropout=True), scale=0.0)
    call.v = torch.ones_like(call.v)
    call.dropout_p = 0.25
    torch.manual_seed(0)
    out, lse = run(call)
    assert abs(float(out.mean()) - 1.0) < 0.05
    assert float(out.std()) > 0.01
    torch.testing.assert_close(lse, torch.full_like(lse, 400.0).log())  # the LSE is that of all scores


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_memory_grows_with_s_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 64)
    monkeypatch.setattr(blockwise, "SCORE_ELEMENTS", 64 * 64)
    seen = {}
    for size in (256, 512, 1024):
        call = random_call(problem(batch=1, heads_q=1, heads_k=1, seq_q=size, seq_k=size, causal="bottom_right"))
        with LargestTensor() as watch:
            run(call)
        seen[size] = watch.elements
    assert seen[1024] < 1024 * 1024 / 8
    assert seen[1024] <= 2.1 * seen[512] <= 4.5 * seen[256]


def test_the_watch_sees_a_square() -> None:
    """The test above would fail for a path that holds all scores."""
    call = random_call(problem(batch=1, heads_q=1, heads_k=1, seq_q=256, seq_k=256))
    with LargestTensor() as watch:
        oracle(call)
    assert watch.elements >= 256 * 256


def test_the_path_by_name() -> None:
    import portattn

    call = random_call(problem())
    out = portattn.attention(call.q, call.k, call.v, backend="reference")
    assert portattn.last_plan().path == CPU.path
    torch.testing.assert_close(out, run(call)[0])
