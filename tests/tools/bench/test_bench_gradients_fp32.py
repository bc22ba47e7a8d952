"""The budget of float32 gradients: float32 kernels are within it, however they add up, and TF32 products are not. What
runs on a chip is simulated: an accumulator that gets eight terms at a time and cuts off what it has no place for, as
tensor cores do, of operands that are as exact as TF32x3 leaves them."""

from __future__ import annotations

import functools

import msgspec
import pytest
import torch

from portattn.testing.tolerance import FRACTION_BITS, round_fraction
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import GradientContender
from portattn.tools.bench.gate import CUT_TERMS, NAMES, ExpectedGradients, GradientGate, Part, attention_mask
from portattn.tools.bench.tensors import Tensors

CPU = torch.device("cpu")
CASE = Case(
    name="fp32", op="attention", batch=1, heads_q=2, heads_k=1, seq_q=384, seq_k=384, head_dim=64, dtype="fp32",
    causal="bottom_right", backward=True,
)  # fmt: skip
PRODUCTS = ("scores", "out", "dp", "dq", "dk", "dv")


@functools.cache
def judge() -> GradientGate:
    return GradientGate(CASE, Tensors.random(CASE, CPU))


def expected(of: GradientGate) -> ExpectedGradients:
    assert of._expected is not None
    return of._expected


def added(a: torch.Tensor, b: torch.Tensor, precision: str, terms: int) -> torch.Tensor:
    """a @ b as tensor cores add it up: so many terms at a time, and towards 0 what float32 cannot hold."""
    a, b = (round_fraction(x.contiguous(), FRACTION_BITS[precision]) for x in (a, b))
    total = torch.zeros(*a.shape[:-1], b.shape[-1])
    for first in range(0, a.shape[-1], terms):
        some = slice(first, first + terms)
        exact = total.double() + a[..., some].double() @ b[..., some, :].double()
        near = exact.float()
        total = torch.where(near.double().abs() > exact.abs(), near.nextafter(torch.zeros(())), near)
    return total


def simulated(low: str = "", terms: int = 8, hidden: int = 0, scale: float = CASE.head_dim**-0.5) -> GradientContender:
    """The gradients by the formulas of FlashAttention-2. low: the product that is computed in TF32; hidden: keys that
    the mask hides too many; scale: of dq alone."""
    t = judge().t
    assert t.grad_out is not None
    (k, v), grad = (t.k.expand_as(t.q), t.v.expand_as(t.q)), t.grad_out

    def product(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return added(a, b, "tf32" if name == low else "tf32x3", terms)

    seen = attention_mask(CASE, 0, CASE.seq_q, CPU).tril(-hidden)
    seen[:, 0] = True
    scores = (product("scores", t.q, k.mT) * CASE.head_dim**-0.5).masked_fill(~seen, -torch.inf)
    p = torch.exp(scores - scores.logsumexp(-1, keepdim=True))
    out = product("out", p, v)
    ds = p * (product("dp", grad, v.mT) - (out * grad).sum(-1, keepdim=True))
    dq = product("dq", ds, k) * scale
    dk, dv = product("dk", ds.mT, t.q) * CASE.head_dim**-0.5, product("dv", p.mT, grad)
    return made(out, dq, dk.sum(1, keepdim=True), dv.sum(1, keepdim=True))


def made(out: torch.Tensor, *gradients: torch.Tensor) -> GradientContender:
    return GradientContender(run=lambda: gradients, out=out, pull=lambda grad: gradients)  # type: ignore[arg-type,return-value]


def test_torchs_own_gradients_are_within_it() -> None:
    q, k, v = (x.detach().requires_grad_() for x in (judge().t.q, judge().t.k, judge().t.v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    found = torch.autograd.grad(out, (q, k, v), judge().t.grad_out)
    assert judge().error(made(out.detach(), *found)) < 0.7


def test_sums_that_are_cut_off_are_within_it() -> None:
    """And are not within what torch's own error alone would allow."""
    found = simulated()
    assert judge().error(found) < 1.0
    whole = [Part(p.sequence, p.head, p.values, p.same, {}) for p in expected(judge()).parts]
    without = ExpectedGradients.of(whole, torch.float32)
    results = zip(NAMES, (found.out, *found.run()), strict=True)
    assert any(off > allowed for name, one in results for off, allowed in judge()._off(name, one, without))


@pytest.mark.parametrize("low", PRODUCTS)
def test_a_product_in_tf32_is_far_over_it(low: str) -> None:
    assert judge().error(simulated(low, terms=64)) > 10.0


@pytest.mark.parametrize(
    ("change", "wrong"), [({"hidden": 1}, "out"), ({"scale": CASE.head_dim**-0.5 * (1 + 1e-4)}, "dq")],
    ids=["mask off by one", "scale off by a ten-thousandth"],
)  # fmt: skip
def test_planted_faults_are_over_it(change: dict, wrong: str) -> None:
    error = judge().error(simulated(terms=64, **change))
    assert error > 3.0
    assert wrong == "out" or judge().refusal(error).startswith(wrong)


@pytest.mark.parametrize("name", ["dk", "dv"])
def test_a_wrong_group_sum_is_over_it(name: str) -> None:
    """A head of the group is left out, of one key alone."""
    found = simulated(terms=64)
    gradients = dict(zip(NAMES[1:], found.run(), strict=True))
    gradients[name] = gradients[name].clone()
    gradients[name][0, 0, 5] *= 0.5
    error = judge().error(made(found.out, *gradients.values()))
    assert error > 10.0
    assert judge().refusal(error).startswith(name)


def test_what_sums_may_lose_grows_with_their_terms() -> None:
    (part,) = expected(judge()).parts
    per_term = {name: part.cut[name] / part.values[name].abs() for name in NAMES}
    rows, keys = per_term["out"][0, 0, :, 0], per_term["dv"][0, 0, :, 0]
    unit = torch.finfo(torch.float32).eps / 2 / CUT_TERMS
    assert (rows[[0, 10, -1]] / unit).tolist() == pytest.approx([1, 11, 384])
    assert (keys[[0, 10, -1]] / unit).tolist() == pytest.approx([2 * 384, 2 * 374, 2])  # of both heads of the group


def test_sixteen_bits_have_no_such_term() -> None:
    """Their budget is that of their own rounding, beside which it would be nothing."""
    case = msgspec.structs.replace(CASE, dtype="bf16", seq_q=20, seq_k=20)
    (part,) = expected(GradientGate(case, Tensors.random(case, CPU))).parts
    assert part.cut == {}
