"""Training calls: gradients by portattn's kernels through autograd, against those of the reference path."""

from typing import Any

import pytest
import torch
from torch.utils import checkpoint
from training_calls import KERNELS, gradients, leaf, qkv

import portattn
from portattn.api import torch_ops_impl, training


@pytest.fixture(autouse=True)
def on_a_cpu(device):
    if device.path != "interpreter":
        pytest.skip("on an accelerator test_ops_gpu.py has these")


def same(call, inputs, atol=1e-5):
    found, expected = gradients(call, inputs, KERNELS), gradients(call, inputs, "reference")
    assert portattn.last_plan().path == "reference"
    for ours, right, tensor in zip(found, expected, inputs, strict=True):
        assert (ours.shape, ours.dtype) == (tensor.shape, tensor.dtype)
        torch.testing.assert_close(ours, right, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "fields", [{}, {"causal": True}, {"causal": "top_left", "window": (4, 0)}, {"softcap": 3.0, "return_lse": True},
               {"scale": -0.7}], ids=str,
)  # fmt: skip
def test_dense(fields, layout):
    inputs = qkv()

    def call(backend):
        given = inputs if layout == "bhsd" else [t.transpose(1, 2) for t in inputs]
        return portattn.attention(*given, layout=layout, backend=backend, **fields)

    same(call, inputs)


@pytest.mark.parametrize("backend", [KERNELS, "reference"])
@pytest.mark.parametrize("sinks", [False, True])
def test_queries_that_a_mask_hides_from_all_keys_hold_nan(backend, sinks):
    """With a sink such a row attends something. What its query holds changes no bit of any gradient."""
    inputs, mask = [*qkv(), leaf(4)], torch.ones(9, 13, dtype=torch.bool)
    mask[2::5] = False
    given = {"mask": mask, "sinks": inputs[3] if sinks else None, "backend": backend}
    found = []
    for value in (0.0, float("nan")):
        with torch.no_grad():
            inputs[0][:, :, 2::5] = value
        out = portattn.attention(*inputs[:3], **given)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs[:3] + inputs[3:] * sinks)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("backend", [KERNELS, "reference"])
def test_a_sequence_s_nan_is_not_in_the_slopes_gradient_of_others(backend):
    lengths, slopes = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32), leaf(4, 2)
    inputs = [leaf(20, 2, 16), leaf(20, 2, 16), leaf(20, 2, 16)]
    found = []
    for value in (0.5, float("nan")):
        with torch.no_grad():
            inputs[0][7, 1, 3] = value
        out = portattn.varlen_attention(*inputs, lengths, lengths, 8, 8, alibi_slopes=slopes, backend=backend)
        found.append(torch.autograd.grad(out.sum(), slopes)[0])
    right, spoilt = found
    assert spoilt[2, 1].isnan()
    assert (spoilt[1] == 0).all()
    right[2, 1] = spoilt[2, 1] = 0.0
    assert torch.equal(right, spoilt)


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_slopes_and_sinks(shape):
    inputs = [*qkv(1), torch.rand(shape).requires_grad_(), leaf(4)]
    same(
        lambda b: portattn.attention(
            *inputs[:3], alibi_slopes=inputs[3], sinks=inputs[4], return_lse=True, causal=True, backend=b
        ),
        inputs, atol=1e-4,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 4, 9, 13), (9, 13), (1, 4, 1, 13), (4, 1, 1), (2, 1, 9, 1), (1,)], ids=str)
def test_a_bias_of_any_broadcast_shape(shape):
    inputs = [*qkv(), leaf(*shape)]
    same(lambda b: portattn.attention(*inputs[:3], bias=inputs[3], causal=True, backend=b), inputs, atol=3e-5)
    small = leaf(1, 4, 1, 13)  # expanded: the gradient is of the expanded tensor
    q, k, v = (t.detach() for t in inputs[:3])
    same(lambda b: portattn.attention(q, k, v, bias=small.expand(2, 4, 9, 13), backend=b), [small], atol=3e-5)


@pytest.mark.parametrize("slopes", [(4,), (3, 4)], ids=str)
def test_packed(slopes):
    inputs = [leaf(20, 4, 16), leaf(31, 2, 16), leaf(31, 2, 16), torch.rand(slopes).requires_grad_(), leaf(4)]
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 7, 7, 18], [0, 9, 14, 29]))
    same(
        lambda b: portattn.varlen_attention(
            *inputs[:3], cu_q, cu_k, 11, 15, causal=True, alibi_slopes=inputs[3], sinks=inputs[4], return_lse=True,
            backend=b,
        ),
        inputs, atol=1e-4,
    )  # fmt: skip


def test_padding_may_hold_nan():
    q, k, v = qkv()
    lengths = {
        "seqlens_q": torch.tensor([9, 5], dtype=torch.int32), "seqlens_k": torch.tensor([6, 13], dtype=torch.int32),
    }  # fmt: skip
    with torch.no_grad():
        q[1, :, 5:], k[0, :, 6:], v[0, :, 6:] = (float("nan"),) * 3
    found = gradients(lambda b: portattn.attention(q, k, v, causal=True, backend=b, **lengths), [q, k, v], KERNELS)
    assert all(torch.isfinite(gradient).all() for gradient in found)
    assert not found[0][1, :, 5:].any()
    assert not found[1][0, :, 6:].any()
    assert not found[2][0, :, 6:].any()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_tensor_without_axes_is_named(place):
    """Also after a call that was trained: what is known of that one is asked first."""
    tensors = [torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3)]
    portattn.attention(*tensors, backend=KERNELS).sum().backward()
    tensors[place] = torch.zeros((), requires_grad=True)
    with pytest.raises(portattn.ArgumentError, match=f"{'qkv'[place]}.ndim is 0"):
        portattn.attention(*tensors, backend=KERNELS)


def test_a_node_has_the_tensors_that_are_given_alone(monkeypatch):
    """torch handles each argument of a node by itself; gradients come back in the right places all the same."""
    seen: list[int] = []
    apply = training.TrainingNode.apply

    def counted(about, *given):
        seen.append(len(given))
        return apply(about, *given)

    monkeypatch.setattr(training.TrainingNode, "apply", staticmethod(counted))
    q, k, v = (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, requires_grad=True)  # its place is far from theirs
    portattn.attention(q, k, v, sinks=sinks, backend=KERNELS).sum().backward()
    assert seen == [4]
    ours = [t.grad for t in (q, k, v, sinks)]
    for tensor in (q, k, v, sinks):
        tensor.grad = None
    portattn.attention(q, k, v, sinks=sinks, backend="reference").sum().backward()
    for mine, tensor in zip(ours, (q, k, v, sinks), strict=True):
        torch.testing.assert_close(mine, tensor.grad, atol=1e-5, rtol=1e-4)


def test_gradients_are_asked_of_some_alone():
    q, k, v = qkv()
    for inputs in ([q], [k], [v], [q, v]):
        for tensor in (q, k, v):
            tensor.requires_grad_(any(tensor is one for one in inputs))
        same(lambda b: portattn.attention(q, k, v, causal=True, backend=b), inputs)


@pytest.mark.usefixtures("nan_in_new_memory")
def test_the_gradient_of_the_lse_alone():
    q, k, v = qkv()
    same(lambda b: portattn.attention(q, k, v, causal=True, return_lse=True, backend=b)[1], [q, k])


@pytest.mark.parametrize("result", ["out", "lse"])
def test_gradients_that_are_views_to_be_negated(result):
    q, k, v = qkv()
    results = portattn.attention(q, k, v, return_lse=True, backend=KERNELS)
    chosen = results[0] if result == "out" else results[1]
    towards = torch.randn(chosen.shape)
    view = torch._neg_view(towards)
    assert view.is_neg()
    assert view.is_contiguous()
    found, expected = (torch.autograd.grad(chosen, (q, k), g, retain_graph=True) for g in (view, -towards))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_a_sum_has_a_gradient_without_strides(result):
    q, k, v = qkv()
    found, expected = (
        torch.autograd.grad(portattn.attention(q, k, v, return_lse=True, backend=b)[result].sum(), (q, k))
        for b in (KERNELS, "reference")
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.fixture
def nan_in_new_memory():
    """torch fills what it allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("is_packed", [False, True])
def test_keys_without_queries_have_gradients_of_zero(is_packed):
    assert torch.utils.deterministic.fill_uninitialized_memory
    rows = (13,) if is_packed else (2,)
    axes = (2,) if is_packed else (2, 13)
    k, v, slopes, sinks, bias = leaf(*rows, *axes, 16), leaf(*rows, *axes, 8), leaf(2, 4), leaf(4), leaf(2, 4, 1, 13)
    given: dict[str, Any] = {"alibi_slopes": slopes, "sinks": sinks, "return_lse": True, "backend": KERNELS}
    if is_packed:
        none, some = torch.tensor([0, 0, 0], dtype=torch.int32), torch.tensor([0, 9, 13], dtype=torch.int32)
        out, lse = portattn.varlen_attention(leaf(0, 4, 16), k, v, none, some, 0, 9, **given)
    else:
        out, lse = portattn.attention(leaf(2, 4, 0, 16), k, v, bias=bias, **given)
    inputs = (k, v, slopes, sinks) if is_packed else (k, v, slopes, sinks, bias)
    for gradient, tensor in zip(torch.autograd.grad(out.sum() + lse.sum(), inputs), inputs, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(tensor))


def test_second_derivatives_are_refused_by_name():
    q, k, v = qkv()
    (first,) = torch.autograd.grad(portattn.attention(q, k, v, backend=KERNELS).sin().sum(), [q], create_graph=True)
    with pytest.raises(portattn.TracingError, match=r"attention: second derivatives .* backend='reference'"):
        first.square().sum().backward()


def test_dropout_drops_what_its_seed_says_forward_and_backward():
    inputs, seed = qkv(), torch.tensor([41])
    same(lambda b: portattn.attention(*inputs, dropout_p=0.4, dropout_seed=seed, causal=True, backend=b), inputs)
    mask = portattn.dropout_mask(seed, 0.4, 2, 4, 9, 13)
    q, k, v = (t.detach() for t in inputs)
    v = v[:, :1].expand(2, 2, 13, 16)
    p = torch.softmax(q @ k.repeat_interleave(2, 1).transpose(2, 3) / 4.0, -1) * mask / 0.6
    found = portattn.attention(q, k, v, dropout_p=0.4, dropout_seed=seed, backend=KERNELS)
    torch.testing.assert_close(found, p @ v.repeat_interleave(2, 1), atol=1e-5, rtol=1e-4)


def test_a_seed_is_drawn_from_torchs_generator():
    inputs = qkv()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(portattn.attention(*inputs, dropout_p=0.5, backend=KERNELS))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "fields",
    [{}, {"dropout_p": 0.3}, {"softcap": 3.0}, *({"dropout_p": 0.5, "backend": b} for b in (KERNELS, "reference"))],
    ids=str,
)
def test_a_checkpoint_on_a_cpu_has_the_calls_gradients(fields, reentrant):
    q, k, v = qkv()

    def call(q, k, v):
        return portattn.attention(q, k, v, causal=True, **fields)

    found = []
    for run in (call, lambda *given: checkpoint.checkpoint(call, *given, use_reentrant=reentrant)):
        q.grad = k.grad = v.grad = None
        torch.manual_seed(5)
        run(q, k, v).square().sum().backward()
        found.append([t.grad for t in (q, k, v)])
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", [KERNELS, "reference"])
def test_what_is_kept_for_the_backward_pass_is_fetched_once(backend):
    """A hook may have moved it elsewhere: each time that it is fetched costs as much as the first."""
    q, k, v = qkv()
    packed: list[torch.Tensor] = []
    unpacked: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: unpacked.append(t) or t):
        out = portattn.attention(q, k, v, softcap=3.0, backend=backend)
    out.sum().backward()
    assert len(packed) == len(unpacked) > 0


def test_a_compiled_call_has_the_eager_ones_gradients(monkeypatch):
    inputs = qkv()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *t: portattn.attention(*t, causal=True, backend=KERNELS), fullgraph=True, backend="aot_eager"
    )
    expected = gradients(lambda b: portattn.attention(*inputs, causal=True, backend=KERNELS), inputs, "")
    monkeypatch.setattr(torch_ops_impl, "gradient_builds", None)  # would compute the forward once more
    found = gradients(lambda b: compiled(*inputs), inputs, "")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", [KERNELS, "reference"])
def test_gradients_of_several_results_at_once(backend):
    """torch maps the backward pass over them, as it does for a Jacobian."""
    q, k, v = qkv()
    dropped = {"dropout_p": 0.4, "dropout_seed": torch.tensor([3])}
    out, lse = portattn.attention(q, k, v, causal=True, return_lse=True, backend=backend, **dropped)
    towards, of_lse = torch.randn(3, *out.shape), torch.randn(3, *lse.shape)
    found = torch.autograd.grad((out, lse), (q, k, v), (towards, of_lse), is_grads_batched=True, retain_graph=True)
    for i in range(3):
        expected = torch.autograd.grad((out, lse), (q, k, v), (towards[i], of_lse[i]), retain_graph=True)
        for ours, right in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[i], right, atol=1e-5, rtol=1e-4)


def test_a_training_call_keeps_its_inputs_its_result_and_an_lse():
    q, k, v = qkv()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = portattn.attention(q, k, v, causal=True, backend=KERNELS)
    kept = [t for t in saved if t is not None]
    assert sum(t.numel() for t in kept) == q.numel() + k.numel() + v.numel() + out.numel() + 2 * 4 * 9


def test_a_seed_of_another_kind_is_refused():
    q, k, v = qkv()
    for seed, words in (
        (7, r"dropout_seed is 'int', but must be an int64 torch\.Tensor"),
        (torch.tensor([7], dtype=torch.int32), r"dropout_seed\.dtype is torch\.int32"),
        (torch.tensor(7), r"dropout_seed\.shape is \(\), but must be \(1,\)"),
    ):
        with pytest.raises(portattn.ArgumentError, match=words):
            portattn.attention(q, k, v, dropout_p=0.1, dropout_seed=seed)


def test_a_run_of_a_handle_has_gradients():
    inputs = qkv()
    handle = portattn.prepare("attention", *inputs, causal=True, backend=KERNELS)
    found = gradients(lambda b: handle.run(*inputs, causal=True, backend=KERNELS), inputs, "")
    expected = gradients(lambda b: portattn.attention(*inputs, causal=True, backend=KERNELS), inputs, "")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_leaves_inside_a_transform_of_other_tensors_keep_their_graph():
    """Parameters that a function closes over, while torch.func differentiates by something else."""
    inputs = qkv()

    def loss(factor):
        out = portattn.attention(*inputs, causal="bottom_right", backend=KERNELS)
        return (factor * out).sum(), out

    slope, out = torch.func.grad(loss, has_aux=True)(torch.tensor(2.0))
    assert out.grad_fn is not None
    with torch.no_grad():
        expected = portattn.attention(*inputs, causal="bottom_right", backend="reference").sum()
    torch.testing.assert_close(slope, expected, atol=1e-4, rtol=1e-4)
