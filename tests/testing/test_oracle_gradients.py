"""The oracle's gradients: against numbers worked out by hand, differences of the oracle, and the kernels' formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from reference_cases import PLACED, TERMS, problem

from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.testing.oracle import oracle
from portattn.testing.tolerance import random_call
from portattn.testing.verdict import gradients, judge_gradients, same_dtype_gradients

CASES = [
    *((op, feature) for op in ("dense", "padded", "varlen") for feature in (*TERMS, *PLACED)),
    *((op, "all") for op in ("decode", "paged_packed", "mla", "mla_packed")),
    *((op, "log_weights") for op in ("sparse", "sparse_paged")),
    *((op, "dropout") for op in ("dense", "padded", "varlen")),
]
DROPOUT = 0.3


def call_of(op: str, feature: str, seed: int, **fields: str) -> Call:
    """A random call with the longest and empty sequences; dropout on top of all features."""
    call = random_call(problem(op, "all" if feature == "dropout" else feature, **fields), seed, extremes=True)
    if feature == "dropout":
        call.dropout_p, call.dropout_seed = DROPOUT, torch.tensor([seed])
    return call


def inwards(call: Call, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """grad_out and grad_lse, with NaN in rows that attend nothing."""
    generator = torch.Generator().manual_seed(seed)
    out, lse = oracle(call)
    grad_out = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    grad_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    nothing = torch.isneginf(lse)
    return (
        grad_out.masked_fill(nothing[..., None], float("nan")).to(call.q.dtype),
        grad_lse.masked_fill(nothing, float("nan")).float(),
    )


def value(call: Call, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> float:
    """sum(out·grad_out) + sum(LSE·grad_lse) over the rows that have an LSE."""
    out, lse = oracle(call)
    some = ~torch.isneginf(lse)
    return float((out * grad_out)[some].sum() + (lse * grad_lse)[some].sum())


@pytest.mark.parametrize(("op", "feature"), CASES)
def test_gradients_are_slopes_of_the_oracle(op: str, feature: str) -> None:
    """Along a random direction in all tensors at once, against a central difference."""
    call = call_of(op, feature, seed=3)
    grad_out, grad_lse = inwards(call)
    found = gradients(call, grad_out, grad_lse)
    generator = torch.Generator().manual_seed(1)
    step, moved = 1e-5, []
    directions = {name: torch.randn(g.shape, generator=generator, dtype=torch.float64) for name, g in found.items()}
    for sign in (-1.0, 1.0):
        other = replace(call, **{name: getattr(call, name) + sign * step * d for name, d in directions.items()})
        if "v" not in found:
            other.v = other.k[..., : call.problem.head_dim_v]
        moved.append(value(other, grad_out, grad_lse))
    slope = sum(float((found[name] * directions[name]).sum()) for name in found)
    size = sum(float((found[name] * directions[name]).abs().sum()) for name in found)
    assert size > 1.0
    assert (moved[1] - moved[0]) / (2 * step) == pytest.approx(slope, rel=0, abs=1e-7 * size)


def test_two_keys_by_hand() -> None:
    """Scores 0 and log 3, so P is 1/4 and 3/4; values 10 and 20; grad_out 1: dS = P·(v - 17.5) = ∓1.875."""
    p = Problem(batch=1, heads_q=1, heads_k=1, seq_q=1, seq_k=2, head_dim=1)

    def column(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[None, None, :, None]

    call = Call(p, column(2.0), column(0.0, math.log(3.0)), column(10.0, 20.0), 0.5)
    found = gradients(call, column(1.0))
    torch.testing.assert_close(found["v"], column(0.25, 0.75))
    torch.testing.assert_close(found["k"], column(-1.875, 1.875))  # scale·q is 1
    torch.testing.assert_close(found["q"], column(0.5 * 1.875 * math.log(3.0)))
    # The LSE's own gradient is P.
    found = gradients(call, column(0.0), torch.ones(1, 1, 1))
    torch.testing.assert_close(found["k"], column(0.25, 0.75))
    assert not found["v"].any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("op", "feature"), CASES)
def test_the_formulas_agree_with_autograd(op: str, feature: str, dtype: str) -> None:
    """Within what their dtype's rounding may do, and with zeros where nothing counts."""
    call = call_of(op, feature, seed=2, dtype=dtype)
    grad_out, grad_lse = inwards(call)
    exact, same = gradients(call, grad_out, grad_lse), same_dtype_gradients(call, grad_out, grad_lse)
    assert set(exact) == set(same)
    steps = 64 * torch.finfo(call.q.dtype).eps
    for name, expected in exact.items():
        assert same[name].dtype is getattr(call, name).dtype
        assert torch.isfinite(expected).all(), name
        limit = steps * float(expected.abs().max())
        torch.testing.assert_close(same[name].double(), expected, rtol=0, atol=limit, msg=name)
    facts = judge_gradients(call, same, grad_out, grad_lse)
    assert facts["wrong"] == 0
    assert all(facts[f"error_{name}"] <= facts[f"budget_{name}"] for name in same)
    assert facts["error"] <= facts["budget"]


def test_fewer_bits_of_fp32_operands_have_a_wider_budget() -> None:
    call = random_call(problem("dense"), seed=2)
    grad_out, _ = inwards(call)
    found = same_dtype_gradients(call, grad_out)
    ieee, tf32 = (judge_gradients(call, found, grad_out, precision=name) for name in ("ieee", "tf32"))
    for name in found:
        assert ieee[f"error_{name}"] == tf32[f"error_{name}"]
        assert 30 * ieee[f"budget_{name}"] < tf32[f"budget_{name}"]


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "alibi_slopes"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_gradient_is_judged(name: str, dtype: str) -> None:
    """One that is a tenth too large is over its budget, and leads the verdict."""
    call = random_call(problem("padded", "all", dtype=dtype), seed=2)
    grad_out, grad_lse = inwards(call)
    found = gradients(call, grad_out, grad_lse)
    found[name] = found[name] * 1.1
    facts = judge_gradients(call, {n: g.to(getattr(call, n).dtype) for n, g in found.items()}, grad_out, grad_lse)
    assert facts["wrong"] == 0
    assert facts["error"] == facts[f"error_{name}"] > facts["budget"] == facts[f"budget_{name}"]
    assert all(facts[f"error_{other}"] <= facts[f"budget_{other}"] for other in found if other != name)


@pytest.mark.parametrize("op", ["padded", "varlen"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_must_be_zero_is_judged(op: str, name: str) -> None:
    """The smallest number in one row or key of padding, and a NaN in one."""
    call = random_call(problem(op), seed=2, extremes=True, poison="k" if name != "v" else "v")
    grad_out, _ = inwards(call)
    found = gradients(call, grad_out)
    poisoned = getattr(call, name).isnan() if name != "q" else found["q"] == 0
    where = poisoned.nonzero()[0].tolist()
    for number in (1e-30, float("nan")):
        spoilt = found[name].clone()
        spoilt[tuple(where)] = number
        assert judge_gradients(call, found | {name: spoilt}, grad_out)["wrong"] == 1
    kept = (found[name] != 0).nonzero()[0].tolist()
    spoilt = found[name].clone()
    spoilt[tuple(kept)] = float("inf")
    assert judge_gradients(call, found | {name: spoilt}, grad_out)["wrong"] == 1


def test_what_is_not_a_gradient_of_the_call_is_refused() -> None:
    call = random_call(problem("dense"), seed=2)
    grad_out, _ = inwards(call)
    found = gradients(call, grad_out)
    with pytest.raises(ValueError, match="sinks"):
        judge_gradients(call, {"sinks": torch.zeros(4)}, grad_out)
    with pytest.raises(ValueError, match="gradient of k is"):
        judge_gradients(call, found | {"k": found["k"][:, :1]}, grad_out)


def test_magicpig_has_no_formula() -> None:
    call = random_call(problem("sparse", "magicpig"), seed=2)
    grad_out, _ = inwards(call)
    assert gradients(call, grad_out)["q"].any()
    with pytest.raises(ValueError, match="MagicPIG"):
        same_dtype_gradients(call, grad_out)
