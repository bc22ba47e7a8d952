"""Plans of training calls: which path computes the gradients, what is said of it, and what is refused."""

import types

import msgspec
import pytest
import torch
from threads import run_threads
from training_calls import KERNELS, gradients, qkv

import portattn
from portattn.api import backward, dispatch, training
from portattn.api.request import request_from
from portattn.config import Settings, current
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.ops import BACKWARD, ROWS


@pytest.fixture(autouse=True)
def on_a_cpu(device):
    if device.path != "interpreter":
        pytest.skip("on an accelerator test_ops_gpu.py has these")


def test_the_settings_of_the_call_hold_in_its_backward_pass():
    """Torch runs a backward pass in threads of its own, and a block of settings is a thread's."""
    q, k, v = qkv()
    with portattn.settings(backend=KERNELS, canary="never"):
        out = portattn.attention(q, k, v)
    assert current().backend != KERNELS
    seen: list[str] = []

    def run():
        out.sum().backward()
        seen.append(portattn.last_backward_plan().path)

    run_threads(run)
    assert seen == [KERNELS]


def test_a_backward_pass_has_a_plan_of_its_own_in_whatever_thread():
    """And last_plan stays that of the last call, as it does where autograd's thread is another one."""
    for _ in range(3):  # the later ones are cached
        dispatch.forget_backward()
        q, k, v = qkv()
        out = portattn.attention(q, k, v, causal=True, backend=KERNELS)
        assert portattn.last_backward_plan() is None
        out.sum().backward()
        of_call, of_backward = portattn.last_plan(), portattn.last_backward_plan()
        assert (of_call.problem.op, of_call.path) == ("attention", KERNELS)
        assert (of_backward.problem.op, of_backward.path) == (BACKWARD["attention"], KERNELS)
        assert of_backward.problem.causal == "bottom_right"
    assert portattn.last_backward_plan() is of_backward
    out = portattn.attention(q, k, v, window=(2, 0), backend=KERNELS)
    run_threads(lambda: out.sum().backward())
    assert portattn.last_backward_plan().problem.window_left == 2
    assert portattn.last_plan().problem.op == "attention"


def test_the_plan_of_a_backward_pass_is_what_the_forwards_plan_says():
    q, k, v = qkv()
    note = portattn.plan("attention", q, k, v, backend=KERNELS).notes[-1]
    portattn.attention(q, k, v, backend=KERNELS).sum().backward()
    assert note == f"gradients by {portattn.last_backward_plan().path}"
    before = portattn.last_backward_plan()
    portattn.attention(q, k, v, backend="reference").sum().backward()
    assert portattn.last_backward_plan() is before, "torch differentiates the reference"


def test_the_backward_of_a_graph_has_a_plan():
    dispatch.forget_backward()
    q, k, v = qkv()

    def loss(q):
        return portattn.attention(q, k.detach(), v.detach(), backend=KERNELS).sum()

    torch.compile(loss, backend="aot_eager")(q).backward()
    assert portattn.last_backward_plan().problem.op == BACKWARD["attention"]


def test_explain_names_dropout():
    q, k, v = qkv()
    assert " dropout" in portattn.explain("attention", q, k, v, dropout_p=0.2).splitlines()[0]
    assert "dropout" not in portattn.explain("attention", q, k, v).splitlines()[0]


def test_explain_says_what_computes_the_gradients():
    q, k, v = qkv()
    assert "gradients by interpreter" in portattn.explain("attention", q, k, v, backend=KERNELS)
    with torch.no_grad():
        assert "gradients by" not in portattn.explain("attention", q, k, v, backend=KERNELS)


def test_where_no_kernel_runs_the_backward_pass_the_reference_does(monkeypatch):
    inputs = qkv()
    expected = gradients(lambda b: portattn.attention(*inputs, causal=True, backend="reference"), inputs, "")
    out = portattn.attention(*inputs, causal=True, backend=KERNELS)
    monkeypatch.setattr(backward, "own_path", lambda *given: "auto")  # of a CPU, where auto has no kernel
    monkeypatch.setattr(backward, "_WAYS", {op: backward._Way(op) for op in BACKWARD})
    found = gradients(lambda b: out, inputs, "")
    made = portattn.last_backward_plan()
    assert (made.path, made.problem.op) == ("reference", BACKWARD["attention"])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_class_without_kernels_is_planned_for_other_sizes(monkeypatch):
    """No kernel for the gradients of some sizes says nothing about others: their graph would be lost."""
    training.forget()
    request = request_from("attention", *_parts(qkv()))
    none = types.SimpleNamespace(key="")
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "plan_call", lambda *given: none)
        assert not training.is_planned(request)
    assert training.is_planned(request)


def _parts(inputs):
    row = ROWS["attention"]
    given = {"q": inputs[0], "k": inputs[1], "v": inputs[2]}
    values = {"causal": "bottom_right", "return_lse": False, "layout": "bhsd", "dropout_p": 0.0}
    fixed = (*(values.get(name) for name in row.fixed), KERNELS, None)
    return tuple(given.get(name) for name in row.tensors), fixed, ()


def test_a_result_that_would_have_no_graph_is_an_error(monkeypatch):
    monkeypatch.setattr(training, "plan_training", lambda request: (None, None))
    with pytest.raises(RuntimeError, match="records no gradients"):
        portattn.attention(*qkv(), causal="bottom_right", backend=KERNELS)


def test_gradients_of_calls_with_sinks_are_the_cores():
    """A variant tells rows that attend nothing by their LSE, which is the sink there."""
    fields = {"batch": 1, "heads_q": 2, "heads_k": 2, "seq_q": 100, "seq_k": 70, "head_dim": 64, "dtype": "bf16"}
    problem = portattn.Problem(op="attention", **fields, causal="bottom_right", needs_grad=True, return_lse=True)
    target = parse_target("cuda:sm_90", "triton==3.6.0")
    with_sinks = msgspec.structs.replace(problem, sinks=True)
    assert "gradients by gluon_backward" in plan(problem, target, settings=Settings()).notes
    assert "gradients by triton" in plan(with_sinks, target, settings=Settings()).notes
