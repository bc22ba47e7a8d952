"""Backward cases: what is timed of them, and the gate of their gradients, on the CPU."""

import itertools
from dataclasses import replace

import msgspec
import pytest
import torch
from tiny import CASES, distinct

import portattn
from portattn.tools.bench import contenders, gate
from portattn.tools.bench.cases import SETS, Case
from portattn.tools.bench.contenders import OURS, UNORDERED, Contender, GradientContender, ours, own_builds
from portattn.tools.bench.tensors import Tensors

CPU = torch.device("cpu")
KINDS = {case.name: case for case in distinct() if case.backward}
DENSE = CASES["backward bf16 D=64 S=1024 causal"]
GROUPED = CASES["backward gqa 8:1 bf16 D=128 S=4096 causal"]
DROPPED = CASES["backward bf16 D=128 S=4096 causal dropout=0.1"]
ORDERED = CASES["backward bf16 D=128 S=4096 causal deterministic"]
GRADIENTS = ("q", "k", "v")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # SDPA says why each kernel cannot run


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    return KINDS[request.param]


def by_autograd(case: Case, t: Tensors) -> list[torch.Tensor]:
    q, k, v = (x.double().requires_grad_() for x in (t.q, t.k, t.v))
    keys, values = (x.repeat_interleave(case.group, dim=1) for x in (k, v))
    scores = q @ keys.mT * case.head_dim**-0.5
    if case.causal != "none":
        hidden = torch.ones(case.seq_q, case.seq_k, dtype=torch.bool).triu(1 + case.seq_k - case.seq_q)
        scores = scores.masked_fill(hidden, float("-inf"))
    out = scores.softmax(-1) @ values
    return [out, *torch.autograd.grad(out, (q, k, v), t.grad_out.double())]


def test_flops_are_two_and_a_half_forwards():
    for of_backward, of_forward in zip(SETS["backward18"], SETS["dense18"], strict=True):
        assert of_backward.flops() == 2.5 * of_forward.flops()
    assert next(iter(SETS["backward18"])).flops() == 5 * 2 * 16 * 32 * 1024**2 * 64


def test_portattn_passes(case):
    tensors = Tensors.random(case, CPU)
    admitted = gate.admit(case, tensors, own_builds(case, tensors))
    assert admitted.refused == {}
    assert list(admitted.contenders) == ([OURS, UNORDERED] if case.deterministic else [OURS])
    assert admitted.budget == 1.0
    assert all(0 < error <= 1.0 for error in admitted.errors.values())


@pytest.mark.parametrize("case", [DENSE, GROUPED], ids=lambda case: case.name)
def test_the_expected_gradients_are_autograds(case, monkeypatch):
    monkeypatch.setattr(gate, "BLOCK_PAIRS", 3 * case.seq_k * case.group)
    tensors = Tensors.random(case, CPU)
    whole = by_autograd(case, tensors)
    for sequence, head in itertools.product(range(case.batch), range(case.heads_k)):
        one, part = tensors.part(case, sequence, head)
        found = gate.gradients(one, part, torch.float64)
        group = slice(head * case.group, (head + 1) * case.group)
        for name, expected in zip(gate.NAMES, whole, strict=True):
            heads = group if name in ("out", "dq") else slice(head, head + 1)
            torch.testing.assert_close(found[name], expected[sequence : sequence + 1, heads], rtol=1e-12, atol=1e-12)


def right(case: Case, tensors: Tensors) -> GradientContender:
    made = own_builds(case, tensors)[OURS]()
    assert isinstance(made, GradientContender)
    return made


@pytest.mark.parametrize("wrong", range(3), ids=GRADIENTS)
def test_the_wrong_are_refused(case, wrong):
    """One wrong value at the end of one gradient, NaN there, another scale, another shape: each is seen."""
    tensors = Tensors.random(case, CPU)
    good = right(case, tensors)

    def spoiled(change):
        def run_():
            found = [x.clone() for x in good.run()]
            found[wrong] = change(found[wrong])
            return tuple(found)

        return lambda: replace(good, run=run_)

    def last_value(value):
        def change(x):
            x[(-1,) * x.ndim] += value
            return x

        return change

    builds = {
        "off by one value": spoiled(last_value(9.0)), "NaN": spoiled(last_value(float("nan"))),
        "scaled": spoiled(lambda x: x * 1.5), "of another shape": spoiled(lambda x: x[..., :-1]), "right": lambda: good,
    }  # fmt: skip
    admitted = gate.admit(case, tensors, builds)
    assert list(admitted.contenders) == ["right"]
    name = f"d{GRADIENTS[wrong]}"
    assert admitted.refused["scaled"].startswith(f"{name}: error ")
    assert "is over the budget" in admitted.refused["off by one value"]
    assert admitted.refused["NaN"] == f"{name}: not finite somewhere: not timed"
    assert admitted.refused["of another shape"].startswith(f"returns {name} of shape")


@pytest.mark.parametrize("wrong", range(3), ids=GRADIENTS)
def test_small_gradients_of_late_rows_are_seen(wrong):
    """Off by less than the first rows and keys of a causal case may be, and more than the last ones may."""
    case = msgspec.structs.replace(DENSE, batch=1, heads_q=1, heads_k=1, seq_q=2048, seq_k=2048, head_dim=64)
    tensors = Tensors.random(case, CPU)
    good = right(case, tensors)
    first, *_, last = gate.GradientGate(case, tensors)._expected.budgets[gate.NAMES[1 + wrong]]
    assert 3 * last < first
    found = [x.clone() for x in good.run()]
    found[wrong][:, :, -128:] += 2.5 * last
    late = replace(good, run=lambda: tuple(found))
    admitted = gate.admit(case, tensors, {"late": lambda: late, "right": lambda: good})
    assert list(admitted.contenders) == ["right"]
    assert admitted.refused["late"].startswith(f"d{GRADIENTS[wrong]}: error")


@pytest.mark.parametrize("wrong", range(3), ids=GRADIENTS)
def test_nan_where_nothing_is_compared_is_seen(wrong):
    """What a kernel has not written is anywhere, and only some heads are compared."""
    case = msgspec.structs.replace(DENSE, batch=5, heads_q=4, heads_k=4)
    tensors = Tensors.random(case, CPU)
    good, judge = right(case, tensors), gate.GradientGate(case, tensors)
    assert judge.checked == "8 of 20 sequences and key/value heads, every row and key"
    missed = next(place for place in itertools.product(range(5), range(4)) if place not in gate.sample_gradients(case))
    found = [x.clone() for x in good.run()]
    found[wrong][missed][3, 2] = float("nan")
    assert judge.error(replace(good, run=lambda: tuple(found))) == float("inf")
    assert judge.refusal(0.0) == f"d{GRADIENTS[wrong]}: not finite somewhere: not timed"
    assert judge.error(good) <= 1.0


@pytest.mark.parametrize(("rows", "sizes"), [(20, [20]), (255, [255]), (256, [128, 128]), (379, [190, 189])])
def test_no_segment_is_short(rows, sizes):
    assert [piece.shape[2] for piece in gate.segments(torch.empty(1, 2, rows, 3))] == sizes


@pytest.mark.parametrize("mistake", ["no scale", "a head of the group left out", "mask off by one"])
def test_planted_bugs_are_refused(mistake):
    """What a backward kernel may get wrong, in gradients that are otherwise autograd's."""
    tensors = Tensors.random(GROUPED, CPU)
    good = right(GROUPED, tensors)
    dq, dk, dv = good.run()
    if mistake == "no scale":
        dq = dq / GROUPED.head_dim**-0.5
    elif mistake == "a head of the group left out":
        silent = tensors.grad_out.clone()
        silent[:, 0] = 0
        _, dk, dv = good.pull(silent)
    else:
        later = msgspec.structs.replace(GROUPED, seq_k=GROUPED.seq_k - 1)
        short = replace(tensors, k=tensors.k[:, :, :-1], v=tensors.v[:, :, :-1])
        dk, dv = dk.clone(), dv.clone()
        dk[:, :, :-1], dv[:, :, :-1] = right(later, short).run()[1:]
    admitted = gate.admit(GROUPED, tensors, {mistake: lambda: replace(good, run=lambda: (dq, dk, dv))})
    assert "is over the budget" in admitted.refused[mistake]


def test_a_wrong_forward_is_refused_and_what_autograd_does_not_record_has_no_gradient():
    tensors = Tensors.random(DENSE, CPU)
    good = right(DENSE, tensors)
    admitted = gate.admit(DENSE, tensors, {"wrong": lambda: replace(good, out=good.out * 1.2)})
    assert admitted.refused["wrong"].startswith("out: error")

    def detached() -> Contender:
        plain = ours(DENSE, tensors)
        return Contender(lambda: plain.run().detach())

    admitted = gate.admit(DENSE, tensors, contenders.with_gradients(tensors.leaves(), {"x": detached}, ordered=False))
    assert admitted.refused == {"x": "autograd does not record its call: it has no gradient"}


def test_the_forward_is_not_timed_and_nothing_is_added_up(monkeypatch):
    calls = []
    forward = portattn.attention
    monkeypatch.setattr(portattn, "attention", lambda *args, **named: calls.append(1) or forward(*args, **named))
    tensors = Tensors.random(DENSE, CPU)
    contender = own_builds(DENSE, tensors)[OURS]()
    assert len(calls) == 1
    first, second = contender.run(), contender.run()
    assert len(calls) == 1
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert contender.result_bytes == sum(x.nbytes for x in first)
    assert tensors.q.grad is None
    assert not tensors.q.requires_grad


def test_the_gradient_has_the_strides_of_the_result():
    """A peer that computes in (B, S, H, D) is handed its gradient so, and copies nothing."""
    tensors = Tensors.random(DENSE, CPU)
    leaves, seen = tensors.leaves(), []

    class Copying(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return q.transpose(1, 2).contiguous()

        @staticmethod
        def backward(ctx, grad):
            seen.append(grad.is_contiguous())
            return (grad.transpose(1, 2),) * 3

    def build() -> Contender:
        return Contender(lambda: Copying.apply(leaves.q, leaves.k, leaves.v), lambda out: out.transpose(1, 2))

    contender = contenders.with_gradients(leaves, {"x": build}, ordered=False)["x"]()
    assert torch.equal(contender.run()[0], tensors.grad_out)
    assert seen == [True]


def test_deterministic_mode_is_around_all_calls_and_is_taken_back():
    leaves, seen = Tensors.random(ORDERED, CPU).leaves(), []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            seen.append(torch.are_deterministic_algorithms_enabled())
            return q.clone()

        @staticmethod
        def backward(ctx, grad):
            filled = torch.utils.deterministic.fill_uninitialized_memory
            seen.append(torch.are_deterministic_algorithms_enabled() and not filled)
            return (grad,) * 3

    def build() -> Contender:
        return Contender(lambda: Told.apply(leaves.q, leaves.k, leaves.v))

    for ordered in (True, False):
        contender = contenders.with_gradients(leaves, {"x": build}, ordered)["x"]()
        with contender.around():
            contender.run()
        assert seen == [ordered, ordered]
        seen.clear()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_deterministic_runs_that_differ_are_refused():
    tensors = Tensors.random(ORDERED, CPU)
    good, count = right(ORDERED, tensors), itertools.count()

    def wavering():
        dq, dk, dv = good.run()
        dq = dq.clone()
        dq[0, 0, 0, 0] = torch.nextafter(dq[0, 0, 0, 0], torch.tensor(9.0, dtype=dq.dtype) * (-1) ** next(count))
        return dq, dk, dv

    builds = {
        "ordered": lambda: replace(good, run=wavering), "free": lambda: replace(good, run=wavering, ordered=False),
    }  # fmt: skip
    admitted = gate.admit(ORDERED, tensors, builds)
    assert list(admitted.contenders) == ["free"]
    assert admitted.refused == {"ordered": "two deterministic runs differ: not timed"}


def with_dropout(leaves: Tensors, case: Case, mask: torch.Tensor, of_backward: torch.Tensor | None = None) -> Contender:
    """Attention that keeps the pairs of a mask, and in its backward those of another one if that is given."""

    def attend(q, k, v, kept):
        scores = (q @ k.mT * case.head_dim**-0.5).masked_fill(
            ~gate.attention_mask(case, 0, case.seq_q, CPU), -torch.inf
        )
        return (scores.softmax(-1) * kept / (1 - case.dropout)) @ v

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return attend(q, k, v, mask)

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                saved = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                out = attend(*saved, mask if of_backward is None else of_backward)
            return torch.autograd.grad(out, saved, grad)

    return Contender(lambda: Masked.apply(leaves.q, leaves.k, leaves.v))


def test_dropout_is_compared_under_the_contenders_own_mask():
    tensors = Tensors.random(DROPPED, CPU)
    leaves, case = tensors.leaves(), DROPPED
    generator = torch.Generator().manual_seed(5)
    shape = (case.batch, case.heads_q, case.seq_q, case.seq_k)
    one, other = (torch.rand(shape, generator=generator) >= case.dropout for _ in range(2))
    few = torch.rand(shape, generator=generator) >= 0.4
    builds = {
        "right": lambda: with_dropout(leaves, case, one),
        "another mask in the backward": lambda: with_dropout(leaves, case, one, other),
        "keeps too few": lambda: with_dropout(leaves, case, few),
        "drops none": lambda: with_dropout(leaves, case, torch.ones(shape, dtype=torch.bool)),
    }
    given = contenders.with_gradients(leaves, builds, ordered=False)
    found = gate.kept_pairs(case, given["right"](), [(2, 1)])[0]
    seen = gate.attention_mask(case, 0, case.seq_q, CPU)
    assert torch.equal(found & seen, one[2, 1] & seen)
    admitted = gate.admit(case, tensors, given)
    assert list(admitted.contenders) == ["right"]
    assert admitted.refused["another mask in the backward"].startswith("out: error")
    assert admitted.refused["drops none"] == "keeps 1.0000 of the pairs, not 0.9000"
    assert admitted.refused["keeps too few"].startswith("keeps 0.6")
    grouped = msgspec.structs.replace(GROUPED, dropout=0.1)
    with pytest.raises(ValueError, match="dense cases without groups"):
        gate.GradientGate(grouped, Tensors.random(grouped, CPU))


def test_the_sample_is_bounded_by_pairs():
    by_name = {case.name: case for case in SETS["backward18"]}
    for name, count in (("D=64 S=1024", 8), ("D=64 S=4096", 8), ("D=64 S=16384", 2), ("D=256 S=16384 causal", 2)):
        case = by_name[f"backward bf16 {name}"]
        places = gate.sample_gradients(case)
        assert len(places) == len(set(places)) == count
        assert (places[0], places[-1]) == ((0, 0), (case.batch - 1, case.heads_k - 1))
    long = msgspec.structs.replace(by_name["backward bf16 D=64 S=16384"], seq_q=1 << 17, seq_k=1 << 17)
    assert gate.sample_gradients(long) == [(0, 0)]


def test_the_plan_is_that_of_the_backward_where_portattn_computes_it():
    """And none where torch differentiates the forward's path, whatever another backward told before."""
    tensors = Tensors.random(DENSE, CPU)
    leaves = tensors.leaves()
    builds = {OURS: lambda: ours(DENSE, leaves, "interpreter")}
    kernels = contenders.with_gradients(leaves, builds, ordered=False)[OURS]()
    assert (kernels.path, kernels.plan.problem.op) == ("interpreter", "attention_backward")
    other = right(DENSE, tensors)
    assert (other.path, other.plan) == ("", None)
