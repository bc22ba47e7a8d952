"""Training calls that are like an earlier one: on a CPU they are cached, and a first one is built and planned once."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from threads import run_threads
from training_calls import KERNELS

import portattn
from portattn.api import backward, dispatch, request
from portattn.api.out_argument import into
from portattn.api.signatures import arguments_as_parts

ASKED: list[dict[str, Any]] = [
    {}, {"causal": True}, {"layout": "bshd"}, {"softcap": 2.0}, {"window": (2, 1), "return_lse": True}, {"scale": -0.4},
    {"causal": True, "backend": "reference"},
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(device):
    if device.path != "interpreter":
        pytest.skip("on an accelerator test_ops_gpu.py has training calls")
    dispatch.forget_plans()
    yield
    dispatch.forget_plans()


@pytest.fixture
def built(monkeypatch):
    found: list[str] = []
    build = request.build_call
    monkeypatch.setattr(request, "build_call", lambda op, *rest: found.append(op) or build(op, *rest))
    return found


@pytest.fixture
def planned(monkeypatch):
    found: list[portattn.Problem] = []
    plan = dispatch.plan
    monkeypatch.setattr(
        dispatch, "plan", lambda problem, *rest, **more: found.append(problem) or plan(problem, *rest, **more)
    )
    return found


def leaves(count=3):
    return [torch.randn(2, 2, 8, 16, requires_grad=True) for _ in range(count)]


def trained(call, inputs):
    found = call()
    results = found if isinstance(found, tuple) else (found,)
    return [*results, *torch.autograd.grad(sum(each.square().sum() for each in results), inputs)]


@pytest.mark.parametrize("given", ASKED, ids=str)
def test_a_cached_call_is_the_first_one_again(given, built):
    inputs = leaves()
    first, plan = trained(lambda: portattn.attention(*inputs, **given), inputs), portattn.last_plan()
    others = leaves()
    portattn.attention(*others, **given)  # other tensors
    dispatch.set_last_plan(None)
    again = trained(lambda: portattn.attention(*inputs, **given), inputs)
    assert built == ["attention"]
    assert portattn.last_plan() is plan
    for ours, right in zip(again, first, strict=True):
        assert torch.equal(ours, right)
        assert ours.stride() == right.stride()


@pytest.mark.parametrize("wanted", [(0,), (1, 2), (2,), (0, 1, 2)], ids=str)
def test_each_set_of_tensors_that_require_gradients_is_a_call_of_its_own(wanted):
    portattn.attention(*leaves())
    for _ in range(2):
        inputs = [tensor.detach().requires_grad_(place in wanted) for place, tensor in enumerate(leaves())]
        portattn.attention(*inputs).sum().backward()
        assert [tensor.grad is not None for tensor in inputs] == [place in wanted for place in range(3)]


def test_the_grad_mode_is_part_of_the_call():
    inputs = leaves()
    for _ in range(2):
        assert portattn.attention(*inputs).grad_fn is not None
        with torch.no_grad():
            assert not portattn.attention(*inputs).requires_grad
        with torch.inference_mode():
            assert not portattn.attention(*inputs).requires_grad


def test_settings_and_arguments_are_part_of_the_call():
    inputs = leaves()
    for _ in range(2):
        portattn.attention(*inputs)
        assert portattn.last_plan().path == "sdpa"
        portattn.attention(*inputs, backend="reference")
        assert portattn.last_plan().path == "reference"
        with portattn.settings(backend="reference"):
            portattn.attention(*inputs)
        assert portattn.last_plan().path == "reference"
        with pytest.raises(portattn.ArgumentError, match="return_lse"):
            portattn.attention(*inputs, return_lse=1)
    with portattn.settings(validate="always"):
        assert portattn.attention(*inputs).grad_fn is not None


@pytest.mark.parametrize("backend", ["auto", KERNELS])
def test_a_call_under_autocast_has_gradients_in_the_dtypes_of_its_tensors(backend):
    inputs = leaves()
    found = []
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = portattn.attention(*inputs, causal=True, backend=backend)
        assert out.dtype is torch.bfloat16
        found.append(torch.autograd.grad(out.float().square().sum(), inputs))
        expected = portattn.attention(*inputs, causal=True, backend=backend)
        assert expected.dtype is torch.float32
    expected = torch.autograd.grad(expected.square().sum(), inputs)
    torch.testing.assert_close(found[-1], expected, atol=0.05, rtol=0.05)
    assert all(gradient.dtype is torch.float32 for gradient in found[-1])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))


def test_scores_that_are_nan_go_to_the_reference_each_time():
    inputs = leaves()
    portattn.attention(*inputs)
    with torch.no_grad():
        inputs[0][0, 0, 0, 0] = float("nan")
    first = trained(lambda: portattn.attention(*inputs), inputs)
    dispatch.forget_plans()
    torch.testing.assert_close(first, trained(lambda: portattn.attention(*inputs), inputs), equal_nan=True)
    assert first[0][0, 0, 0].isnan().all()


def test_torch_checks_what_a_cached_call_saved():
    inputs = leaves()
    portattn.attention(*inputs)
    out = portattn.attention(*inputs)
    (first,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"not implemented|does not require grad"):
        first.sum().backward()
    with torch.no_grad():
        inputs[1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_run_and_a_module_s_copy_is_trained_by_itself():
    layer = torch.nn.Linear(16, 16)
    x = torch.randn(1, 2, 8, 16)
    seen: list[str] = []
    for _ in range(2):
        q = layer(x)
        q.register_hook(lambda gradient: seen.append("q"))
        portattn.attention(q, q, q).sum().backward()
    assert seen == ["q", "q"]
    other = copy.deepcopy(layer)
    other.zero_grad()
    q = other(x)
    before = layer.weight.grad.clone()
    portattn.attention(q, q, q).sum().backward()
    assert torch.equal(layer.weight.grad, before)
    assert other.weight.grad.any()


@pytest.mark.parametrize("backend", ["auto", KERNELS])
def test_one_tensor_in_several_places_is_a_call_of_its_own(backend):
    x, (q, k, v) = torch.randn(2, 2, 8, 16, requires_grad=True), leaves()
    for _ in range(2):
        (joint,) = torch.autograd.grad(portattn.attention(x, x, x, backend=backend).sum(), [x])
        for part in (q, k, v):
            part.data = x.detach().clone()
        parts = torch.autograd.grad(portattn.attention(q, k, v, backend=backend).sum(), [q, k, v])
        torch.testing.assert_close(joint, sum(parts))


def test_transforms_and_compiled_calls_keep_their_graph_beside_a_cached_call():
    inputs = leaves()
    expected = trained(lambda: portattn.attention(*inputs, causal=True), inputs)
    portattn.attention(*inputs, causal=True)
    slope = torch.func.grad(lambda q: portattn.attention(q, *inputs[1:], causal=True).square().sum())(inputs[0])
    torch.testing.assert_close(slope, expected[1])

    def loss(factor):
        return (factor * portattn.attention(*inputs, causal=True)).sum()

    torch.testing.assert_close(torch.func.grad(loss)(torch.tensor(2.0)), expected[0].sum())
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *given: portattn.attention(*given, causal=True), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(trained(lambda: compiled(*inputs), inputs), expected)


@pytest.mark.parametrize("backend", ["auto", KERNELS])
def test_a_forward_that_a_backward_pass_computes_anew_is_no_cached_call(backend):
    inputs = leaves()
    for _ in range(2):
        backward.by_torch(request.request_from("attention", *arguments_as_parts("attention")(*inputs, backend=backend)))
        assert portattn.last_plan().path == "sdpa"
    portattn.attention(*inputs, backend=backend)
    assert portattn.last_plan().path == ("sdpa" if backend == "auto" else KERNELS)


def test_a_place_for_the_result_is_refused_beside_gradients_each_time():
    inputs, place = leaves(), torch.zeros(2, 2, 8, 16)
    portattn.attention(*inputs)
    for _ in range(2):
        with pytest.raises(portattn.ArgumentError, match="requires_grad is True"):
            into(place, "attention", *inputs)
        assert not place.any()
        assert not place.requires_grad


def test_a_cached_call_holds_no_tensor():
    inputs = leaves()
    portattn.attention(*inputs, layout="bshd").sum().backward()
    seen = [weakref.ref(tensor) for tensor in inputs]
    del inputs
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


def test_threads_train_by_one_cached_call():
    inputs = leaves()
    expected = trained(lambda: portattn.attention(*inputs), inputs)
    found: list[Any] = []

    def run():
        results = [trained(lambda: portattn.attention(*inputs), inputs) for _ in range(5)]
        found.append((results, portattn.last_plan().path))

    run_threads(*[run] * 4)
    assert len(found) == 4
    for results, path in found:
        assert path == "sdpa"
        assert all(torch.equal(a, b) for result in results for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("given", [{}, {"layout": "bshd", "causal": True}, {"return_lse": True}], ids=str)
def test_a_first_call_is_built_and_planned_once(given, built, planned):
    """By the interpreter, which takes the way of every kernel of portattn's."""
    inputs = leaves()
    found = portattn.attention(*inputs, **given, backend=KERNELS)
    assert (built, [problem.op for problem in planned].count("attention")) == (["attention"], 1)
    results = found if isinstance(found, tuple) else (found,)
    sum(each.sum() for each in results).backward()
    assert built == ["attention", "attention_backward"]
    assert sorted(problem.op for problem in planned) == ["attention", "attention_backward"]
    problem = next(each for each in planned if each.op == "attention")
    assert (problem.needs_grad, problem.return_lse) == (False, True)
    expected = portattn.attention(*(tensor.detach() for tensor in inputs), **given, backend="reference")
    torch.testing.assert_close(results, expected if isinstance(expected, tuple) else (expected,), atol=1e-5, rtol=1e-4)


def test_a_first_call_without_a_kernel_for_its_gradients_is_built_once(monkeypatch, built):
    monkeypatch.setattr(backward, "has_kernel", lambda *given: False)
    monkeypatch.setattr(backward, "may_have_kernels", lambda *given: True)
    assert portattn.attention(*leaves()).grad_fn is not None
    assert built == ["attention"]
    assert portattn.last_plan().problem.needs_grad
