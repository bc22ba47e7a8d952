"""What modes, fake tensors, autocast and checkpoints make of a call; and what a graph cannot have."""

import functools
import warnings

import pytest
import torch
from graphs import RECORDERS, a_model, same
from opcalls import CALLS
from torch._subclasses import FakeTensorMode
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import portattn
from portattn.launch import cache

HANDLES = {n: r for n, r in RECORDERS.items() if "compile" not in n and "strict" not in n}


def qkv(device, rows=6):
    return [torch.randn(2, 4, rows, 16, device=device.name) for _ in range(3)]


@pytest.mark.parametrize("recorder", HANDLES)
def test_a_recorded_run_of_a_handle_raises(recorder, device, kept):
    q, k, v = qkv(device)
    handle = portattn.prepare("attention", q, k, v)
    expected = handle.run(q, k, v)

    class Run(torch.nn.Module):
        def forward(self, *tensors):
            return handle.run(*tensors)

    with pytest.raises(portattn.TracingError, match="cannot record the run of a handle"):
        HANDLES[recorder](Run(), (q, k, v))
    assert torch.equal(handle.run(q, k, v), expected)


def test_a_transformed_run_of_a_handle_raises(device):
    q, k, v = qkv(device)
    handle = portattn.prepare("attention", q, k, v)
    with pytest.raises(portattn.TracingError, match=r"torch\.func cannot transform the run of a handle"):
        torch.func.grad(lambda q: handle.run(q, k, v).sum())(q)


class Counting:
    """A compiler that keeps graphs as they are."""

    def __init__(self):
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph, tensors):
        self.graphs.append(graph)
        return graph


def test_a_run_of_a_handle_divides_a_compiled_graph_in_two(device):
    q, k, v = qkv(device)
    handle, counting = portattn.prepare("attention", q, k, v), Counting()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: handle.run(q.neg(), k, v).sin(), backend=counting)
    assert same(compiled(q), handle.run(q.neg(), k, v).sin())
    assert len(counting.graphs) == 2  # before it and after it: nothing of the run is traced


def test_dropout_is_part_of_a_compiled_graph(device):
    q, k, v = qkv(device)
    counting = Counting()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: portattn.attention(q.neg(), k, v, dropout_p=0.5).sin(), backend=counting)
    torch.manual_seed(3)
    found = compiled(q)
    torch.manual_seed(3)
    assert same(found, portattn.attention(q.neg(), k, v, dropout_p=0.5).sin())
    assert len(counting.graphs) == 1


@pytest.mark.parametrize("recorder", HANDLES)
def test_a_graph_drops_by_the_seed_that_it_is_given(recorder, device):
    class Dropping(torch.nn.Module):
        def forward(self, *tensors):
            *qkv, seed = tensors
            return portattn.attention(*qkv, dropout_p=0.5, dropout_seed=seed)

    first, second = (torch.tensor([n], device=device.name) for n in (11, 12))
    tensors = qkv(device)
    recorded = RECORDERS[recorder](Dropping(), (*tensors, first))
    for seed in (first, second):
        assert same(recorded(*tensors, seed), portattn.attention(*tensors, dropout_p=0.5, dropout_seed=seed))
    assert not same(recorded(*tensors, first), recorded(*tensors, second))


def test_an_unknown_argument_is_answered_inside_of_compile(device):
    q, _, _ = qkv(device)
    torch._dynamo.reset()
    with pytest.raises(portattn.UnknownArgument, match="is_causal=True -> causal"):
        torch.compile(lambda q: portattn.attention(q, q, q, is_causal=True), backend="eager")(q)


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_tell_shapes(name, device):
    model, tensors = a_model(name, device)
    expected = model(*tensors)
    with FakeTensorMode() as mode:
        found = model(*(mode.from_tensor(t) for t in tensors))
    for fake, real in zip(found, expected, strict=True):
        assert isinstance(fake, torch._subclasses.FakeTensor)
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
            real.shape, real.stride(), real.dtype, real.device
        )  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_tell_shapes(name, device):
    model, tensors = a_model(name, device)
    found = model(*(t.to("meta") for t in tensors))
    for meta, real in zip(found, model(*tensors), strict=True):
        assert meta.is_meta
        assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("bad", ["fake", "meta"])
def test_bad_arguments_are_named_without_data(bad, device):
    q = torch.empty(2, 4, 6, 16, device="meta" if bad == "meta" else device.name)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.raises(portattn.ArgumentError, match="k's batch is 1, but must be q's, 2"):
        portattn.attention(q, q[:1], q)


FLOPS = {  # pairs of query and key rows, in all heads; D = 16 and Dv = 24, of latent rows 24 and 16
    "attention": 3 * 4 * 19 * 37, "decode": 3 * 4 * 3 * 37,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_flops_are_counted(name, device):
    model, tensors = a_model(name, device)
    given = dict(zip(model.names, tensors, strict=True))
    if name == "varlen":
        pairs = 4 * int((given["cu_seqlens_q"].diff().long() * given["cu_seqlens_k"].diff()).sum())
    elif name.startswith("sparse"):
        pairs = int(given["counts"].sum())
    elif "ragged" in name:
        pairs = 4 * int((given["cu_seqlens_q"].diff().long() * given["seqlens_k"]).sum())
    elif name in FLOPS:
        pairs = FLOPS[name]
    else:
        pairs = 4 * 3 * int(given["seqlens_k"].sum())
    with FlopCounterMode(display=False) as counter:
        model(*tensors)
    assert counter.get_total_flops() == 2 * pairs * (16 + 24)
    assert pairs > 0


def test_flops_of_the_backward_pass_and_of_fakes(device):
    """torch's own convention: scores are computed again, five products in all; causal masks are passed over."""
    q, k, v = (t.requires_grad_() for t in qkv(device))
    with FlopCounterMode(display=False) as counter:
        portattn.attention(q, k, v, causal=True).sum().backward()
    product = 2 * 2 * 4 * 6 * 6 * 16
    assert counter.get_total_flops() == (2 + 5) * product
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, FlopCounterMode(display=False) as counter:
        portattn.attention(*(mode.from_tensor(t.detach()) for t in (q, k, v)))
    assert counter.get_total_flops() == 2 * product


CASTS = {"float32": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}


@pytest.mark.parametrize("dtype", CASTS)
def test_autocast_is_as_of_torchs_attention(dtype, device):
    q, k, v = (t.to(getattr(torch, dtype)) for t in qkv(device))
    bias = torch.randn(6, 6, device=device.name)
    with torch.autocast(device.name, dtype=torch.bfloat16):
        found = portattn.attention(q, k, v, bias=bias)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert found.dtype == theirs.dtype == torch.bfloat16
    assert same(found, portattn.attention(*[t.bfloat16() for t in (q, k, v)], bias=bias))
    torch.testing.assert_close(found, theirs, atol=0.05, rtol=0.05)


def test_autocast_of_gradients_and_of_compiled_calls(device):
    def call(q, k, v):
        with torch.autocast(device.name, dtype=torch.bfloat16):
            return portattn.attention(q, k, v, causal=True)

    torch._dynamo.reset()
    q, k, v = (t.requires_grad_() for t in qkv(device))
    gradients = []
    for f in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        out = f(q, k, v)
        assert out.dtype == torch.bfloat16
        gradients.append(torch.autograd.grad(out.float().sin().sum(), (q, k, v)))
        assert all(g.dtype == torch.float32 for g in gradients[-1])
    torch.testing.assert_close(gradients[1], gradients[0], atol=0.02, rtol=0.02)


def test_autocast_leaves_what_may_be_float32_alone(device):
    """Slopes and weights are taken in float32 only; a latent cache stays one tensor, read once."""
    for name in ("attention", "sparse", "mla"):
        model, tensors = a_model(name, device, alibi_slopes=True, sinks=True)
        with torch.autocast(device.name, dtype=torch.bfloat16):
            out, lse = model(*tensors)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        assert portattn.last_plan().problem.dtype == "bf16"


@pytest.mark.parametrize("guards", ["torch's", "plain"])
def test_autocast_of_a_call_that_is_kept(guards, device, monkeypatch):
    """A kept call of float32 is none of autocast's, and one that autocast cast is none of float32's."""
    if guards == "plain":
        monkeypatch.setattr("portattn.launch.torch_compat._usable", lambda: False)
    cache.forget()
    q, k, v = qkv(device)
    wide, narrow = portattn.attention(q, k, v), portattn.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    for _ in range(3):
        assert torch.equal(portattn.attention(q, k, v), wide)
        with torch.autocast(device.name, dtype=torch.bfloat16):
            assert torch.equal(portattn.attention(q, k, v), narrow)
        with torch.autocast(device.name, dtype=torch.float16):
            assert portattn.attention(q.bfloat16(), k, v).dtype == torch.float16
    cache.forget()


def test_autocast_switched_off_inside_is_off(device):
    q, k, v = qkv(device)
    with torch.autocast(device.name, dtype=torch.bfloat16), torch.autocast(device.name, enabled=False):
        assert portattn.attention(q, k, v).dtype == torch.float32


def test_selective_checkpointing_names_the_operator(device):
    q, k, v = qkv(device)
    seen: dict[bool, list[str]] = {True: [], False: []}

    def policy(context, operator, *args, **kwargs):
        seen[context.is_recompute].append(str(operator))
        if operator == torch.ops.portattn.attention.default:
            return checkpoint.CheckpointPolicy.MUST_SAVE
        return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    def layer(q):
        return portattn.attention(q.sin(), k, v).cos()

    contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)
    leaf, plain = q.clone().requires_grad_(), q.clone().requires_grad_()
    checkpoint.checkpoint(layer, leaf, use_reentrant=False, context_fn=contexts).sum().backward()
    layer(plain).sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad)
    assert seen[False].count("portattn.attention.default") == 1


def test_inference_mode(device):
    q, k, v = qkv(device)
    with torch.inference_mode():
        found = portattn.attention(q, k, v)
        assert found.is_inference()
    assert same(found.clone(), portattn.attention(q, k, v))


def test_dropout_runs_where_a_mode_only_looks_on(device):
    q, k, v = (t.requires_grad_() for t in qkv(device))
    torch.manual_seed(5)
    expected = portattn.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    with FlopCounterMode(display=False):
        found = portattn.attention(q, k, v, dropout_p=0.5)
    torch.testing.assert_close(found, expected)


def test_plans_are_of_what_autocast_casts(device):
    q, k, v = qkv(device)
    with torch.autocast(device.name, dtype=torch.bfloat16):
        assert portattn.plan("attention", q, k, v).problem.dtype == "bf16"
    assert portattn.plan("attention", q, k, v).problem.dtype == "fp32"


def test_a_compiled_call_warns_where_its_caches_are_views_of_one_tensor():
    """torch gives wrong numbers then, without a word, and not in each case: the test is of the warning alone."""
    tokens, slots = torch.randn(3, 2, 16), torch.tensor([1, 5, 9])

    def fill(k_pages, v_pages):
        portattn.write_pages(tokens, tokens, k_pages, v_pages, slots)
        return k_pages.sum()

    def views(cache):
        return fill(cache[:, 0], cache[:, 1])

    both = torch.zeros(4, 2, 4, 2, 16)
    for function, given in ((views, (both,)), (fill, (both[:, 0], both[:, 1]))):
        torch.compiler.reset()
        with pytest.warns(portattn.TracingWarning, match="k_pages and v_pages are views of one tensor"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(*given)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", portattn.TracingWarning)
        torch.compile(fill, backend="aot_eager", fullgraph=True)(torch.zeros(4, 4, 2, 16), torch.zeros(4, 4, 2, 16))
        fill(both[:, 0], both[:, 1])
