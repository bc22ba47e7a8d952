"""Tensors of every kind of case, portattn's calls of them, and the gate, on the CPU."""

import functools

import msgspec
import pytest
import torch
from tiny import CASES, distinct

from portattn.testing.tolerance import FRACTION_BITS, round_fraction
from portattn.tools.bench import gate
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import CORE, OURS, PREPARED, Contender, GradientContender, ours, own, plan_of
from portattn.tools.bench.gate import CUT_TERMS, NAMES, ExpectedGradients, GradientGate, Part, attention_mask
from portattn.tools.bench.tensors import Tensors

CPU = torch.device("cpu")
KINDS = {case.name: case for case in distinct() if not case.backward}  # those: test_bench_backward.py


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    return KINDS[request.param]


def test_portattn_passes(case):
    tensors = Tensors.random(case, CPU)
    admitted = gate.admit(case, tensors, own(case, tensors))
    assert admitted.refused == {}
    assert list(admitted.contenders) == ([OURS, PREPARED] if case.reads_cache else [OURS])
    assert all(0 <= error <= admitted.budget for error in admitted.errors.values())
    assert plan_of(case, tensors).problem.op == case.op


def test_the_wrong_are_refused(case):
    """One wrong value in the last row of the last sequence's last head is seen, and so is what is nearly right."""
    tensors = Tensors.random(case, CPU)
    right = ours(case, tensors)

    def spoiled(value: float) -> Contender:
        def run() -> torch.Tensor:
            out = right.shaped(right.run()).clone()
            last = (-1, -1, 0) if case.packed else (-1, -1, case.queries[-1] - 1, 0)
            out[last] += value
            return out

        return Contender(run)

    def fails() -> Contender:
        raise RuntimeError("no kernel here\nsecond line")

    builds = {
        "off by one value": lambda: spoiled(0.5), "NaN": lambda: spoiled(float("nan")),
        "scaled": lambda: Contender(lambda: right.shaped(right.run()) * 1.5),
        "of another shape": lambda: Contender(lambda: right.shaped(right.run())[..., :-1]), "failing": fails,
        "right": lambda: right,
    }  # fmt: skip
    admitted = gate.admit(case, tensors, builds)
    assert (list(admitted.contenders), admitted.refused["failing"]) == (["right"], "no kernel here")
    assert "over the budget" in admitted.refused["off by one value"]
    assert admitted.refused["NaN"] == "not finite somewhere: not timed"
    assert admitted.refused["of another shape"].startswith("returns (")


def test_a_part_is_a_case_of_its_own(case):
    """The oracle of one sequence and head is what the op gives for them in the whole case."""
    tensors = Tensors.random(case, CPU)
    one, part = tensors.part(case, case.batch - 1, case.heads_k - 1)
    assert (one.batch, one.heads_k, one.packed, one.queries, one.keys) == (
        1, 1, False, case.queries[-1:], case.keys[-1:],
    )  # fmt: skip
    assert part.k.data_ptr() >= tensors.k.data_ptr()
    assert part.k.untyped_storage().data_ptr() == tensors.k.untyped_storage().data_ptr()
    assert gate.admit(one, part, own(one, part)).refused == {}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.page_size])
def test_every_page_has_one_owner(name):
    case = CASES[name]
    table = Tensors.random(case, CPU).page_table
    owned = [
        page for row, keys in zip(table.tolist(), case.keys, strict=True) for page in row[: -(-keys // case.page_size)]
    ]
    assert (sorted(owned), len(owned)) == (list(range(len(owned))), Tensors.random(case, CPU).k.shape[0])


def test_chosen_tokens_differ_and_exist():
    case = msgspec.structs.replace(CASES["seed sparse"], batch=2, lengths_k=(70, 9))
    tensors = Tensors.random(case, CPU)
    for keys, heads in zip(case.keys, tensors.indices.tolist(), strict=True):
        for tokens in heads:
            assert len(set(tokens)) == case.tokens
            assert all(0 <= token < keys for token in tokens)


def test_the_sample_is_small_and_reaches_both_ends():
    large = msgspec.structs.replace(CASES["seed decode"], batch=128, heads_q=32, heads_k=8, lengths_k=())
    pairs = gate.sample(large)
    assert len(pairs) == len(set(pairs)) == gate.CHECKED_PARTS
    assert (pairs[0], pairs[-1]) == ((0, 0), (127, 7))
    assert {head for _, head in pairs} == set(range(8))
    assert gate.sample(msgspec.structs.replace(large, batch=1, heads_q=1, heads_k=1)) == [(0, 0)]


def test_a_lost_device_is_told_with_who_ran():
    case = CASES["seed decode"]
    tensors = Tensors.random(case, CPU)

    def breaks():
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(gate.DeviceLost, match=r"breaker: an illegal memory access.*lost to this process: gone") as lost:
        gate.admit(case, tensors, {"breaker": breaks}, lambda: "gone")
    assert lost.value.name == "breaker"


def test_the_context_is_around_the_call():
    case, inside = CASES["seed decode"], []

    class Around:
        def __enter__(self):
            inside.append(True)

        def __exit__(self, *_):
            inside.pop()

    tensors = Tensors.random(case, CPU)
    right = ours(case, tensors)

    def run():
        assert inside
        return right.run()

    admitted = gate.admit(case, tensors, {"within": lambda: Contender(run, right.shaped, Around)})
    assert list(admitted.contenders) == ["within"]
    assert not inside


def test_the_core_is_a_contender_when_it_is_asked_for():
    case = CASES["seed decode"]
    tensors = Tensors.random(case, CPU)
    assert CORE not in own(case, tensors)
    admitted = gate.admit(case, tensors, own(case, tensors, core=True))
    assert list(admitted.contenders) == [OURS, PREPARED]
    assert "triton" in admitted.refused[CORE]  # there is no device for it here
    assert admitted.contenders[OURS].path == plan_of(case, tensors).path == "sdpa"


def test_the_path_is_the_one_that_ran(monkeypatch):
    """A kernel that does not compile here: what was planned before the call is not what ran."""
    case = next(case for case in KINDS.values() if case.op == "attention")
    tensors = Tensors.random(case, CPU)
    planned = plan_of(case, tensors)
    elsewhere = msgspec.structs.replace(planned, path="triton")
    monkeypatch.setattr("portattn.tools.bench.contenders.plan_of", lambda *given: elsewhere)
    assert ours(case, tensors).path == "triton"
    admitted = gate.admit(case, tensors, {OURS: lambda: ours(case, tensors)})
    assert admitted.contenders[OURS].path == planned.path != "triton"


# The budget of float32 gradients: float32 kernels are within it, however they add up, and TF32 products are not. What
# runs on a chip is simulated: an accumulator that gets eight terms at a time and cuts off what it has no place for, as
# tensor cores do, of operands that are as exact as TF32x3 leaves them.


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
