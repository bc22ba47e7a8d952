"""Gradients of the blockwise path against those of the float64 oracle, which autograd can follow as well."""

from __future__ import annotations

import msgspec
import pytest
import torch
from reference_cases import CHOSEN, PLACED, TERMS, problem

from portattn.reference import blockwise
from portattn.schema.call import TENSORS, Call
from portattn.testing.oracle import oracle
from portattn.testing.tolerance import random_call

FEATURES = [*TERMS, *PLACED]
CASES = [
    *((op, feature) for op in ("dense", "padded", "varlen", "decode") for feature in FEATURES),
    *((op, feature) for op in ("paged", "paged_packed", "mla") for feature in ("plain", "causal_window", "all")),
    *(("sparse", feature) for feature in (*TERMS, *CHOSEN)),
]
SMALLER = {"batch": 2, "head_dim": 8, "head_dim_v": 12}


def differentiated(call: Call, function, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gradients of a random function of output and LSE, by tensor name, for copies of the call's tensors."""
    leaves = {}
    for name in TENSORS:
        tensor = getattr(call, name)
        if tensor is not None and tensor.is_floating_point() and not (name == "v" and call.q_rope is not None):
            leaves[name] = tensor.detach().clone().to(dtype).requires_grad_()
    call = Call(**{field: getattr(call, field) for field in Call.__dataclass_fields__} | leaves)
    call.problem = msgspec.structs.replace(call.problem, needs_grad=True)
    if call.q_rope is not None:  # the values are the keys' first columns, and no tensor of their own
        call.v = call.k[..., : call.problem.head_dim_v]
    out, lse = function(call)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    lse_weight = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    loss = (out * weight).sum() + (lse.masked_fill(lse == float("-inf"), 0.0) * lse_weight).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.parametrize(("op", "feature"), CASES)
@pytest.mark.parametrize("blocks", ["one", "several"])
def test_gradients_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, op: str, feature: str, blocks: str
) -> None:
    fields = SMALLER if op != "mla" else {"batch": 2}
    call = random_call(problem(op, feature, **fields), seed=1)
    if blocks == "several":
        monkeypatch.setattr(blockwise, "KEY_BLOCK", 7)
        monkeypatch.setattr(blockwise, "SCORE_ELEMENTS", 7 * 5 * call.problem.batch * call.problem.heads_q)
    ours = differentiated(call, blockwise.run, torch.float32)
    exact = differentiated(call, oracle, torch.float64)
    assert set(ours) >= {"q", "k"}
    for name, expected in exact.items():
        assert torch.isfinite(ours[name]).all(), name
        limit = 2e-5 * max(float(expected.abs().max()), 1.0) if expected.numel() else 0.0
        torch.testing.assert_close(ours[name].double(), expected, rtol=0.0, atol=limit, msg=name)


@pytest.mark.parametrize("op", ["varlen", "paged_packed", "mla_packed"])
def test_no_rows_and_no_keys_have_gradients_of_zero(op: str) -> None:
    """All rows belong to no sequence, and so do all keys."""
    call = random_call(problem(op, "sinks"), seed=2)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k"):
        if getattr(call, name) is not None:
            setattr(call, name, torch.zeros_like(getattr(call, name)))
    assert all(not gradient.any() for gradient in differentiated(call, blockwise.run, torch.float32).values())
    out, lse = blockwise.run(call)
    assert not out.any()
    assert torch.isneginf(lse).all()


def test_without_keys_a_sink_alone_has_a_gradient() -> None:
    call = random_call(problem("decode", "sinks", leftpad_k=False), seed=3)
    call.seqlens_k = torch.zeros_like(call.seqlens_k)
    found = differentiated(call, blockwise.run, torch.float32)
    assert found.pop("sinks").all()
    assert all(not gradient.any() for gradient in found.values())
