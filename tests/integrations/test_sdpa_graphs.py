"""The SDPA drop-in in graphs and transforms: portattn's operator where portattn takes the call, else torch's."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from graphs import RECORDERS, by_jit
from sdpa_cases import path
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as theirs

import portattn
from portattn.integrations import sdpa, sdpa_mapping

ours = sdpa.scaled_dot_product_attention
OURS, BACKWARD = "portattn.attention.default", "portattn.attention_backward.default"
Tensors = tuple[torch.Tensor, ...]


def random(*shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


Q, K = random((2, 4, 3, 8), (2, 4, 5, 8))
Q5, K5, SCORES5 = random((2, 3, 4, 3, 8), (2, 3, 4, 5, 8), (2, 3, 4, 3, 5))

# name -> (what calls F.scaled_dot_product_attention's arguments, its tensors). All of them are portattn's.
CALLS: dict[str, tuple[Callable[..., torch.Tensor], Tensors]] = {
    "plain": (lambda f, q, k: f(q, k, k, is_causal=True), (Q, K)),
    "scale": (lambda f, q, k: f(q, k, k, scale=0.3), (Q, K)),
    "boolean mask": (lambda f, q, k, m: f(q, k, k, m), (Q, K, SCORES5[0, 0, 0] > 0)),
    "floating mask": (lambda f, q, k, m: f(q, k, k, m), (Q, K, SCORES5[0, 0])),
    "GQA": (lambda f, q, k: f(q, k, k, is_causal=True, enable_gqa=True), (Q, K[:, :2].contiguous())),
    "3-D": (lambda f, q, k: f(q, k, k), (Q[0], K[0])), "5-D": (lambda f, q, k, m: f(q, k, k, m), (Q5, K5, SCORES5 > 0)),
    "memory order": (lambda f, q, k: f(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2)),
                     (Q.transpose(1, 2).contiguous(), K.transpose(1, 2).contiguous())),
}  # fmt: skip
WIDE = random((1, 1, 3, 640))[0]
# What portattn does not take, anywhere or in graphs; and a part of the reason.
REFUSED: dict[str, tuple[Callable[..., torch.Tensor], Tensors, str]] = {
    "float64": (lambda f, q, k: f(q, k, k), (Q.double(), K.double()), "query is torch.float64"),
    "wide": (lambda f, q: f(q, q, q), (WIDE,), "more than portattn's 576"),
}


class Model(torch.nn.Module):
    """A program that calls one of these."""

    def __init__(self, call: Callable[..., torch.Tensor], attention: Any = ours) -> None:
        super().__init__()
        self.call, self.attention = call, attention

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.call(self.attention, *tensors)


class Compiled:
    """A program compiled without a graph break, and the attention operators of its graphs, forward and backward."""

    def __init__(self, program: Callable[..., Any], **options: Any) -> None:
        torch._dynamo.reset()
        self.nodes: list[str] = []
        backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)
        self.run = torch.compile(program, fullgraph=True, backend=backend, **options)

    def _keep(self, graph: torch.fx.GraphModule, example: Any) -> Any:
        self.nodes += attention_nodes(graph)
        return make_boxed_func(graph.forward)


def attention_nodes(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if "attention" in str(node.target)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_is_one_node(name: str, dynamic: bool) -> None:
    call, tensors = CALLS[name]
    compiled = Compiled(Model(call), dynamic=dynamic)
    found = compiled.run(*tensors)
    assert path() == "portattn"  # noted while tracing
    eager = call(ours, *tensors)
    assert compiled.nodes == [OURS]
    assert torch.equal(found, eager)
    assert found.stride() == eager.stride()
    torch.testing.assert_close(found, call(theirs, *tensors))


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_call_is_one_node(name: str, recorder: str) -> None:
    call, tensors = CALLS[name]
    recorded, eager = RECORDERS[recorder](Model(call), tensors), call(ours, *tensors)
    found = recorded(*tensors)
    assert torch.equal(found, eager)
    assert found.stride() == eager.stride()
    if isinstance(recorded, torch.fx.GraphModule):
        assert attention_nodes(recorded) == [OURS]
    elif isinstance(recorded, torch.jit.ScriptModule):
        kinds = [node.kind() for node in recorded.inlined_graph.nodes()]
        assert [kind for kind in kinds if "attention" in kind] == ["portattn::attention"]


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
@pytest.mark.parametrize("name", CALLS)
def test_an_exported_call_takes_other_sizes(name: str, strict: bool) -> None:
    call, tensors = CALLS[name]
    sizes = tuple(dict.fromkeys(range(t.ndim - 1), torch.export.Dim.AUTO) for t in tensors)
    program = torch.export.export(Model(call), tensors, strict=strict, dynamic_shapes=(sizes,)).module()
    assert attention_nodes(program) == [OURS]
    assert torch.equal(program(*tensors), call(ours, *tensors))
    if name in ("plain", "3-D", "GQA"):
        longer = (torch.cat([tensors[0]] * 2, -2), torch.cat([tensors[1]] * 3, -2))
        assert torch.equal(program(*longer), call(ours, *longer))


# How a model makes (B, H, S, D) of one of its tensors, with a batch and a length that depend on data.
UNBACKED: dict[str, tuple[tuple[str, ...], Callable[..., torch.Tensor]]] = {
    "slice": (("b", "h", "s", "d"), lambda x, rows, n: x[rows][:, :, :n]),
    "heads after tokens": (("b", "s", "h", "d"), lambda x, rows, n: x[rows][:, :n].contiguous().transpose(1, 2)),
    "permuted": (("d", "b", "h", "s"), lambda x, rows, n: x[:, rows][..., :n].permute(1, 2, 3, 0)),
    "expanded": (("b", "h", "s", "d"), lambda x, rows, n: x[:1, :, :n].expand(rows.shape[0], -1, -1, -1)),
}
UNBACKED_CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "plain": lambda q, k, v, seen: ours(q, k, v),
    "GQA, causal": lambda q, k, v, seen: ours(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True),
    "mask": lambda q, k, v, seen: ours(q, k, v, seen),
    "portattn": lambda q, k, v, seen: portattn.attention(q, k[:, :2], v[:, :2], mask=seen),
}


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("name", UNBACKED_CALLS)
@pytest.mark.parametrize("view", UNBACKED)
def test_sizes_that_depend_on_data_are_exported(view: str, name: str, strict: bool) -> None:
    (axes, shaped), sizes = UNBACKED[view], {"b": 4, "h": 4, "s": 9, "d": 8}
    q, k, v, seen = *random(*[tuple(sizes[axis] for axis in axes)] * 3), random((4, 1, 9, 9))[0] > -0.5

    class Model(torch.nn.Module):
        def forward(self, kept: torch.Tensor, longest_q: torch.Tensor, longest_k: torch.Tensor) -> torch.Tensor:
            rows, n, m = kept.nonzero().squeeze(1), longest_q.item(), longest_k.item()
            torch._check(n <= 9)
            torch._check(m <= 9)
            made = shaped(q, rows, n), shaped(k, rows, m), shaped(v, rows, m)
            return UNBACKED_CALLS[name](*made, seen[rows][:, :, :n, :m])

    def arguments(batch: int, *lengths: int) -> Tensors:
        return torch.arange(4) < batch, *(torch.tensor(length) for length in lengths)

    exported = torch.export.export(Model(), arguments(2, 5, 7), strict=strict)
    assert OURS in exported.graph_module.code
    for given in (arguments(2, 5, 7), arguments(3, 4, 4), arguments(1, 1, 1), arguments(4, 9, 9), arguments(0, 3, 3)):
        torch.testing.assert_close(exported.module()(*given), Model()(*given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_compiled_call_that_is_torchs_has_torchs_operator_and_is_told(name: str) -> None:
    call, tensors, reason = REFUSED[name]
    compiled = Compiled(Model(call))
    with pytest.warns(portattn.FallbackWarning, match=reason):
        found = compiled.run(*tensors)
    assert path() == "torch"
    assert not any("portattn" in node for node in compiled.nodes)
    assert found.shape == tensors[0].shape
    torch.testing.assert_close(found, call(theirs, *tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.run(*tensors)  # warned of while tracing, and once a cause


@pytest.mark.parametrize("recorder", [name for name in RECORDERS if "compile" not in name])
@pytest.mark.parametrize("name", REFUSED)
def test_a_recorded_call_that_is_torchs_has_torchs_operators(name: str, recorder: str) -> None:
    call, tensors, reason = REFUSED[name]
    recorded, route = RECORDERS[recorder](Model(call), tensors), sdpa.last_route()
    assert route.path == "torch"
    assert reason in route.reason
    if isinstance(recorded, torch.fx.GraphModule):
        assert not any("portattn" in str(node.target) for node in recorded.graph.nodes)
        if "export" in recorder:
            assert attention_nodes(recorded) == ["aten.scaled_dot_product_attention.default"]
    torch.testing.assert_close(recorded(*tensors), call(theirs, *tensors))


def test_settings_that_forbid_torchs_operator() -> None:
    """Without a graph break the reason is in dynamo's error; with one, the error is the eager one."""
    call, tensors, _ = REFUSED["float64"]
    with portattn.settings(fallback="error"):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="portattn cannot take this call"):
            Compiled(Model(call)).run(*tensors)
        torch._dynamo.reset()
        with pytest.raises(portattn.PathUnavailable, match=r"query is torch\.float64"):
            torch.compile(Model(call), backend="eager")(*tensors)
        assert torch.equal(Compiled(Model(CALLS["plain"][0])).run(Q, K), ours(Q, K, K, is_causal=True))


def test_bad_input_is_torchs_error_while_compiling() -> None:
    for k, v, message in ((K.half(), K.half(), "same dtype"), (K, K[:, :, :4], r"Expected size .*\[8, 5\]")):
        # A TorchRuntimeError up to torch 2.13, Unsupported from 2.14 on.
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=message):
            Compiled(lambda q, k, v: ours(q, k, v)).run(Q, k, v)


def test_a_number_that_is_an_argument_of_what_is_compiled() -> None:
    compiled = Compiled(lambda q, k, scale: ours(q, k, k, scale=scale), dynamic=True)
    for scale in (0.3, 0.5, 0.7):
        torch.testing.assert_close(compiled.run(Q, K, scale), theirs(Q, K, K, scale=scale))
    assert set(compiled.nodes) == {OURS}


def test_a_width_that_is_symbolic_is_refused_as_such() -> None:
    wide = WIDE.clone()
    torch._dynamo.mark_dynamic(wide, 3)
    compiled = Compiled(Model(REFUSED["wide"][0]))
    torch.testing.assert_close(compiled.run(wide), theirs(wide, wide, wide))
    assert OURS not in compiled.nodes


def test_a_causal_marker_made_outside() -> None:
    marker = causal_lower_right(3, 5)
    compiled = Compiled(lambda q, k: ours(q, k, k, marker))
    torch.testing.assert_close(compiled.run(Q, K), theirs(Q, K, K, marker))
    assert compiled.nodes == [OURS]


@pytest.mark.parametrize("name", ["plain", "floating mask", "GQA", "5-D"])
def test_gradients_of_a_compiled_call(name: str) -> None:
    call, tensors = CALLS[name]
    leaves = [[t.clone().requires_grad_(t.is_floating_point()) for t in tensors] for _ in range(2)]
    compiled = Compiled(Model(call))
    compiled.run(*leaves[0]).sin().sum().backward()
    call(theirs, *leaves[1]).sin().sum().backward()
    assert compiled.nodes == [OURS, BACKWARD]
    for mine, right in zip(*leaves, strict=True):
        torch.testing.assert_close(mine.grad, right.grad, atol=1e-5, rtol=1e-4)


def test_autocast_of_a_compiled_call() -> None:
    mask = SCORES5[0, 0]
    compiled = Compiled(lambda q, k, m: ours(q, k, k, m))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, eager = compiled.run(Q, K, mask), ours(Q, K, K, mask)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, eager)
    assert compiled.nodes == [OURS]


@pytest.mark.parametrize("name", ["plain", "boolean mask", "GQA", "5-D"])
def test_the_block_around_a_compiled_call(name: str) -> None:
    call, tensors = CALLS[name]
    with sdpa.replacement():
        compiled = Compiled(lambda *tensors: call(functional.scaled_dot_product_attention, *tensors))
        found = compiled.run(*tensors)
        assert compiled.nodes == [OURS]
    assert torch.equal(found, call(ours, *tensors))


def test_compiled_inside_and_outside() -> None:
    compiled = Compiled(lambda q, k: functional.scaled_dot_product_attention(q * 2, k, k, is_causal=True) + 1)
    right = theirs(Q * 2, K, K, is_causal=True) + 1
    for turn in range(2):
        torch.testing.assert_close(compiled.run(Q, K), right)
        assert compiled.nodes.count(OURS) == turn
        with sdpa.replacement():
            torch.testing.assert_close(compiled.run(Q, K), right)
        assert compiled.nodes.count(OURS) == 1  # each is kept


def test_a_block_inside_of_what_is_compiled() -> None:
    """Its beginning and its end are not traced: the graph breaks there."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def block(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        with sdpa.replacement():
            out = functional.scaled_dot_product_attention(q, k, k, is_causal=True)
        return out + 1

    assert torch.equal(block(Q, K), ours(Q, K, K, is_causal=True) + 1)
    assert functional.scaled_dot_product_attention is theirs


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("kind", ["MultiheadAttention", "TransformerEncoderLayer"])
def test_models_of_torch_compiled_and_trained(kind: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    model: Any
    if kind == "MultiheadAttention":
        model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        arguments = {"key": x, "value": x, "key_padding_mask": padding, "need_weights": False}
        program: Callable[..., torch.Tensor] = lambda x: model(x, **arguments)[0]  # noqa: E731
    else:
        model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        program = lambda x: model(x, src_key_padding_mask=padding)  # noqa: E731
    parameters, right = list(model.parameters()), program(x)
    right_grads = torch.autograd.grad(right.sin().sum(), parameters)
    with sdpa.replacement():
        compiled = Compiled(program, dynamic=dynamic)
        found = compiled.run(x)
        grads = torch.autograd.grad(found.sin().sum(), parameters)
    assert [node for node in compiled.nodes if "multi_head" not in node] == [OURS, BACKWARD]
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(grads, right_grads, atol=1e-4, rtol=1e-4)


def test_a_layer_that_drops_out_is_portattns_when_it_is_compiled() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    x = torch.randn(2, 5, 16)
    with sdpa.replacement():
        compiled = Compiled(layer)
        compiled.run(x).sum().backward()
    assert [node for node in compiled.nodes if "portattn" in node] == [OURS, BACKWARD]


@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_recorded_call_drops_anew_in_each_run_and_as_often_as_asked(recorder: str) -> None:
    """With the unit matrix as value the output is the probabilities: the generator of the run says which are left."""
    unit = torch.eye(32).expand(2, 4, 32, 32).contiguous()
    q, k = torch.randn(2, 4, 32, 8), torch.randn(2, 4, 32, 8)
    recorded = RECORDERS[recorder](Model(lambda f, q, k, v: f(q, k, v, dropout_p=0.25)), (q, k, unit))
    torch.manual_seed(5)
    first, second = recorded(q, k, unit), recorded(q, k, unit)
    torch.manual_seed(5)
    assert torch.equal(recorded(q, k, unit), first)
    assert not torch.equal(second, first)
    weights = torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1)
    kept = first != 0
    torch.testing.assert_close(first[kept], (weights / 0.75)[kept])
    assert 0.7 < kept.float().mean() < 0.8


def test_what_dynamo_sees_whole_is_not_compiled_again_outside_of_the_block() -> None:
    """torch.nn.MultiheadAttention calls one function that dynamo does not look into: docs/integrations.md says so."""
    model, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    with sdpa.replacement():
        compiled = Compiled(lambda x: model(x, x, x, need_weights=False)[0])
        inside, before = compiled.run(x), list(compiled.nodes)
    torch.testing.assert_close(compiled.run(x), inside)
    assert compiled.nodes == before


def vjp_of_ones(f: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    made: Any = torch.func.vjp(f, Q)
    out, pull = made
    return out, pull(torch.ones_like(out))


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda f: torch.vmap(lambda q, k: f(q, k, k, is_causal=True))(Q5, K5),
    "vmap of the queries": lambda f: torch.vmap(lambda q: f(q, K5[0], K5[0]))(Q5),
    "vmap with a mask": lambda f: torch.vmap(lambda q, k, m: f(q, k, k, m))(Q5, K5, SCORES5),
    "vmap with GQA": lambda f: torch.vmap(lambda q, k: f(q, k, k, enable_gqa=True))(Q5, K5[:, :, :2]),
    "vmap of 5-D": lambda f: torch.vmap(lambda q, k: f(q, k, k))(Q5[None], K5[None]),
    "grad": lambda f: torch.func.grad(lambda q, k: f(q, k, k).sin().sum(), argnums=(0, 1))(Q, K),
    "grad of a mask": lambda f: torch.func.grad(lambda m: f(Q5, K5, K5, m).sin().sum())(SCORES5),
    "vjp": lambda f: vjp_of_ones(lambda q: f(q, K, K, is_causal=True)),
    "jacrev": lambda f: torch.func.jacrev(lambda q: f(q, K, K).sum((0, 1, 2)))(Q),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda q, k: f(q, k, k).sin().sum()))(Q5, K5),
    "functionalize": lambda f: torch.func.functionalize(lambda q: f(q, K, K))(Q),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transformed_call(transform: str, compiled: bool) -> None:
    f = TRANSFORMS[transform]
    if compiled and transform == "functionalize":
        pytest.skip("dynamo does not trace it")
    if compiled:
        program = Compiled(lambda: f(ours))
        found = program.run()
        assert program.nodes.count(OURS) == 1
        assert set(program.nodes) <= {OURS, BACKWARD}
    else:
        sdpa_mapping.note(None)
        found = f(ours)
        assert path() == "portattn"
    torch.testing.assert_close(found, f(theirs), atol=2e-5, rtol=1e-4)


def test_route_tells_of_what_is_transformed() -> None:
    told: list[tuple[str, str]] = []

    def program(q: torch.Tensor) -> torch.Tensor:
        for dropout_p in (0.0, 0.3):
            route = sdpa.route(q, q, q, dropout_p=dropout_p)
            ours(q, q, q, dropout_p=dropout_p)
            told.append((route.path, path()))
        return q

    torch.vmap(program, randomness="different")(Q5)
    assert told == [("portattn", "portattn"), ("portattn", "portattn")]


def test_forward_mode_is_torchs() -> None:
    """Where torch's kernel has none it says so, and no tangent is dropped."""
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward AD"):
        ours(forward_ad.make_dual(Q, Q), K, K)
    found = []
    for f in (ours, theirs):
        with sdpa_kernel(SDPBackend.MATH):
            found.append(torch.func.jvp(lambda q, f=f: f(q, K, K), (Q,), (Q,)))
    assert path() == "torch"
    torch.testing.assert_close(*found)


def test_fake_tensors_and_counters() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode() as mode:
        found = ours(mode.from_tensor(Q), mode.from_tensor(K), mode.from_tensor(K), is_causal=True)
    assert (found.shape, path()) == (Q.shape, "portattn")
    with FlopCounterMode(display=False) as counter:
        ours(Q, K, K)
    assert counter.get_total_flops() == 2 * 2 * Q.numel() * K.shape[-2]  # two products


@pytest.fixture
def mesh() -> Iterator[Any]:
    """One process that is a mesh by itself: what is distributed over it is whole."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", CALLS)
def test_distributed_tensors(name: str, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    call, tensors = CALLS[name]
    given = [distribute_tensor(t, mesh, [Replicate()]).requires_grad_(t.is_floating_point()) for t in tensors]
    found = call(ours, *given)
    assert isinstance(found, DTensor)
    assert path() == "portattn"
    torch.testing.assert_close(found.full_tensor(), call(theirs, *tensors))
    (grad,) = torch.autograd.grad(found.sin().sum(), given[0])
    q = tensors[0].clone().requires_grad_()
    (right,) = torch.autograd.grad(call(theirs, q, *tensors[1:]).sin().sum(), q)
    assert isinstance(grad, DTensor)
    torch.testing.assert_close(grad.full_tensor(), right, atol=1e-5, rtol=1e-4)


def test_a_call_recorded_inside_of_the_block() -> None:
    with sdpa.replacement():
        traced = by_jit(Model(lambda f, q, k: functional.scaled_dot_product_attention(q, k, k)), (Q, K))
    assert torch.equal(traced(Q, K), ours(Q, K, K))
