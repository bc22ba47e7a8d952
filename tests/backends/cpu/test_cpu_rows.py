"""Rows of SDPA on the CPU whose scores are not finite, or that attend nothing, against the float64 oracle."""

import pytest
import torch
from cpu_calls import CPU, INF, NAN, TAKEN, run
from reference_cases import problem
from support import assert_right

import portattn
from portattn.planning.planner import plan
from portattn.schema.call import Call
from portattn.testing.oracle import oracle
from portattn.testing.tolerance import random_call


def plant(call: Call, generator: torch.Generator) -> None:
    """Put NaN and infinity into a random share of the queries, the keys or both: some keys, or all of a head."""
    share = (0.05, 0.3, 1.0)[int(torch.randint(3, (), generator=generator))]
    names = (("q",), ("k",), ("q", "k"))[int(torch.randint(3, (), generator=generator))]
    if call.problem.op == "mla_attention":  # a latent row is key and value at once
        names = ("q",)
    for name in names:
        tensor = getattr(call, name).clone()
        where = torch.rand(tensor.shape[:3], generator=generator) < share
        value = (NAN, NAN, INF, -INF)[int(torch.randint(4, (), generator=generator))]
        tensor[..., 0] = torch.where(where, value, tensor[..., 0])
        setattr(call, name, tensor)


def assert_as_the_oracle(call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """The same elements are finite, the same LSEs -inf, and the finite ones right: over +inf, NaN is right as well."""
    assert_right(call, out, lse)
    expected, expected_lse = oracle(call)
    assert torch.equal(out.isnan(), expected.isnan())
    if lse is not None:
        assert torch.equal(lse.isneginf(), expected_lse.isneginf())
        assert not (expected_lse.isnan() & ~lse.isnan()).any()


@pytest.mark.parametrize(("op", "feature"), TAKEN)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scores_that_are_not_finite(op: str, feature: str, dtype: str) -> None:
    """NaN and infinity in queries and keys, few keys (the kernel's maximum passes over those) and many."""
    for seed, keys in enumerate((1, 3, 8, 29, 29, 29)):
        fields = {"seq_k": keys} if op in ("dense", "padded", "varlen", "decode") else {}
        call = random_call(problem(op, feature, dtype=dtype, **fields), seed)
        plant(call, torch.Generator().manual_seed(seed))
        assert plan(call.problem, CPU).path == "sdpa"
        assert_as_the_oracle(call, *run(call))


@pytest.mark.parametrize("keys", [1, 2, 7, 8, 15, 16, 17, 64, 65, 513])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_nan_in_every_key_of_a_row(keys: int, dtype: str, causal: str) -> None:
    """Whatever the width of a vector: a query of NaN, keys of NaN, and values of NaN beside finite scores."""
    for name in ("q", "k", "v"):
        call = random_call(problem("dense", seq_q=keys, seq_k=keys, dtype=dtype, causal=causal), seed=3)
        getattr(call, name)[0, 0, :, 1] = NAN
        out, lse = run(call)
        if name != "v":
            assert_as_the_oracle(call, out, lse)
            assert out[0, 0].isnan().all()
        else:
            assert out[0, 0, :, 1].isnan().all()
            assert lse.isfinite().all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("with_lse", [True, False])
def test_a_repeated_call_checks_its_rows(layout: str, with_lse: bool) -> None:
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    spoilt = q.clone()
    spoilt[0, 0, 0, 0] = NAN
    for queries in (q, spoilt, spoilt, q):
        result = portattn.attention(queries, k, k, return_lse=with_lse, layout=layout)
        same = portattn.attention(queries, k, k, return_lse=with_lse, layout=layout, backend="reference")
        torch.testing.assert_close(result, same, equal_nan=True)


def test_scores_of_minus_infinity_are_an_empty_row() -> None:
    """Of LSEs of 0 torch's kernel makes no difference between such a row and one whose only score is 0."""
    q, k = torch.full((1, 1, 1, 8), INF), torch.full((1, 1, 3, 8), -1.0)
    v = torch.randn(1, 1, 3, 8)
    out, lse = portattn.attention(q, k, v, return_lse=True)
    assert (out.abs().max(), lse.item()) == (0.0, -INF)
    huge = torch.full((1, 1, 1, 8), 1e20)  # finite, and its scores are not
    out, lse = portattn.attention(huge, -huge.expand(1, 1, 3, 8), v, return_lse=True)
    assert (out.abs().max(), lse.item()) == (0.0, -INF)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("zero", ["q", "k"])
def test_zero_padding_is_computed_by_the_kernel(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, zero: str) -> None:
    """The first row's LSE is 0, and right."""
    from portattn.reference import blockwise

    monkeypatch.setattr(blockwise, "run", None)
    q, k, v = torch.randn(3, 1, 2, 6, 8).to(dtype).unbind()
    {"q": q, "k": k}[zero][:, :, 0] = 0.0
    bias = torch.full((1, 1, 6, 6), torch.finfo(torch.float32).min).triu(1)
    for fields in ({"causal": True}, {"bias": bias}, {"window": (2, 0)}, {"mask": bias == 0}):
        out, lse = portattn.attention(q, k, v, return_lse=True, **fields)
        assert torch.equal(lse[:, :, 0], torch.zeros(1, 2))
        torch.testing.assert_close(out[:, :, 0], v[:, :, 0])
    tensors = [t.requires_grad_() for t in (q, k, v)]
    assert torch.autograd.grad(portattn.attention(*tensors, causal=True).sum(), q)[0].isfinite().all()


def test_merged_parts_keep_nan() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8)
    q[0, 0, 0, 0] = NAN
    parts = [portattn.attention(q, k[:, :, s], k[:, :, s], return_lse=True) for s in (slice(3), slice(3, 6))]
    out, lse = portattn.merge_states([out for out, _ in parts], [lse for _, lse in parts])
    assert out[0, 0, 0].isnan().all()
    assert lse[0, 0, 0].isnan()
    assert out[0, 1].isfinite().all()


@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("causal", [False, True])
def test_in_training_nan_is_in_the_output_too(where: str, causal: bool) -> None:
    found = []
    for backend in ("sdpa", "reference"):
        q, k, v = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0)).unbind()
        {"q": q, "k": k}[where][0, 0, 0, 0] = NAN
        tensors = [t.requires_grad_() for t in (q, k, v)]
        out = portattn.attention(*tensors, causal=causal, backend=backend)
        found.append((out, *torch.autograd.grad(out.sum(), tensors)))
    torch.testing.assert_close(*found, equal_nan=True)
    assert found[0][0][0, 0, 0].isnan().all()


def test_nan_in_graphs_and_transforms() -> None:
    q, k = torch.randn(2, 1, 2, 4, 8), torch.randn(2, 1, 2, 4, 8)
    q[0, 0, 0, 0, 0] = NAN
    expected, expected_lse = portattn.attention(q[0], k[0], k[0], return_lse=True, backend="reference")

    def call(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return portattn.attention(q, k, k, return_lse=True)

    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return call(q, k)

    ways = {
        "compile": lambda: torch.compile(call, backend="eager", fullgraph=True)(q[0], k[0]),
        "export": lambda: torch.export.export(Module(), (q[0], k[0])).module()(q[0], k[0]),
        "vmap": lambda: [t[0] for t in torch.vmap(call)(q, k)],
    }
    for name, way in ways.items():
        out, lse = way()
        torch.testing.assert_close(out, expected, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(lse, expected_lse, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
