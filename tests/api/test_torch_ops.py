"""Every operation as one torch operator: in each kind of graph the eager result, bit for bit, by one node."""

import shutil
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from graphs import RECORDERS, Model, a_model, same
from opcalls import CALLS, differentiable

import portattn
from portattn.api.signatures import request_of
from portattn.api.torch_ops import SIGNATURES, arguments_of
from portattn.schema.ops import ROWS


def operator_call(name, device, gradients=False, **fields):
    model, _ = a_model(name, device, **fields)
    more = differentiable(model.op) if gradients else {}
    request = request_of(model.op, **model.arguments, **more)
    return getattr(torch.ops.portattn, model.op).default, arguments_of(model.op, *request.parts)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"return_lse": False}, "lse": {}, "featured": {"alibi_slopes": True, "sinks": True, "softcap": True},
}  # fmt: skip


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, features, gradients, device):
    operator, arguments = operator_call(name, device, gradients, **FEATURES[features])
    if gradients:
        arguments = [
            a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in arguments
        ]
    found = torch.library.opcheck(operator, arguments)
    assert (set(found.values()), len(found)) == ({"SUCCESS"}, 4)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_graph_gives_the_eager_result(recorder, name, device):
    model, tensors = a_model(name, device)
    expected = model(*tensors)
    graph = RECORDERS[recorder](model, tensors)
    assert same(graph(*tensors), expected)
    again = tuple(t * -0.5 if t.is_floating_point() else t for t in tensors)
    assert same(graph(*again), model(*again))  # nothing of the first data is in it


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("recorder", ["torch.export", "make_fx, symbolic"])
def test_a_graph_has_one_node_of_the_call(recorder, name, device):
    model, tensors = a_model(name, device)
    graph = RECORDERS[recorder](model, tensors)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function" and "getitem" not in node.name]
    computing = [target for target in called if "detach" not in str(target) and "_guards" not in str(target)]
    assert computing == [getattr(torch.ops.portattn, model.op).default]


def test_an_exported_program_takes_other_sizes(device):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return portattn.attention(q.sin(), k, v, causal=True, window=(30, 0)) + 1

    def tensors(batch, rows, keys):
        sizes = ((4, rows), (2, keys), (2, keys))
        return tuple(torch.randn(batch, heads, n, 16, device=device.name) for heads, n in sizes)

    batch, rows, keys = (torch.export.Dim(name, min=2, max=4096) for name in ("batch", "rows", "keys"))
    of_keys = {0: batch, 2: keys}
    program = torch.export.export(
        Layer(), tensors(2, 9, 21), dynamic_shapes=({0: batch, 2: rows}, of_keys, of_keys), strict=False
    )
    for sizes in ((2, 9, 21), (3, 40, 70), (5, 17, 17)):
        given = tensors(*sizes)
        assert same(program.module()(*given), Layer()(*given))


def test_a_compiled_call_is_compiled_once_for_all_sizes(device):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, tensors):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda q, k: portattn.attention(q, k, k, causal=True), backend=backend, fullgraph=True)
    for length in (16, 33, 64, 100, 7):
        q, k = torch.randn(2, 4, length, 16, device=device.name), torch.randn(2, 2, length, 16, device=device.name)
        assert same(compiled(q, k), portattn.attention(q, k, k, causal=True))
    assert len(graphs) == 2  # of fixed sizes, then of any


SAVED = """
    {first}
    import {second}
    import torch
    program = torch.export.load({path!r})
    inputs, expected = torch.load({data!r})
    found = program.module()(*inputs)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    print([str(n.target) for n in program.graph.nodes if "portattn" in str(n.target)])
"""


@pytest.mark.parametrize("order", [("import portattn", "torch"), ("import torch", "portattn")], ids=str)
def test_a_saved_program_runs_in_another_process(order, tmp_path, device):
    model, tensors = a_model("attention", device)
    path, data = str(tmp_path / "program.pt2"), str(tmp_path / "data.pt")
    torch.export.save(torch.export.export(model, tensors, strict=False), path)
    torch.save((tensors, model(*tensors)), data)
    program = textwrap.dedent(SAVED.format(first=order[0], second=order[1], path=path, data=data))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['portattn.attention.default']"


PACKAGED = """
    import faulthandler
    import torch, portattn
    faulthandler.enable()

    class Layer(torch.nn.Module):
        def forward(self, q, k):
            return {layer}

    def tensors(rows):
        return tuple(torch.randn(2, heads, rows, 16, device={device!r}) for heads in (4, 2))

    rows = torch.export.Dim("rows", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(Layer(), tensors(33), dynamic_shapes=({{2: rows}}, {{2: rows}}))
        print("exported", flush=True)
        path = torch._inductor.aoti_compile_and_package(program, package_path={path!r})
        print("compiled", flush=True)
        packaged = torch._inductor.aoti_load_package(path)
        print("loaded", flush=True)
        for count in (33, 70):
            given = tensors(count)
            torch.testing.assert_close(packaged(*given), Layer()(*given), atol=1e-6, rtol=1e-6)
            print("right", flush=True)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_package_compiled_ahead_of_time_calls_the_operator(tmp_path, device):
    """In a process of its own: machine code that dies there says where, and takes no other test with it."""
    done = packaged("portattn.attention(q * 2, k, k, causal=True) + 1", device, tmp_path)
    if done.returncode < 0:
        plain = packaged("(q * 2).sin() + k.sum()", device, tmp_path / "plain")
        if (plain.returncode, plain.stdout) == (done.returncode, done.stdout):
            reached = plain.stdout.split()
            pytest.skip(f"a package without portattn is ended by signal {-plain.returncode} too, after {reached}")
    assert done.returncode == 0, f"ended with {done.returncode} after {done.stdout.split()}: {done.stderr[-3000:]}"
    assert done.stdout.split() == ["exported", "compiled", "loaded", "right", "right"]


def packaged(layer, device, folder):
    folder.mkdir(exist_ok=True)
    program = PACKAGED.format(layer=layer, device=device.name, path=str(folder / "layer.pt2"))
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=140)


def test_the_operators_are_there_without_a_call():
    program = f"import portattn, torch; print([hasattr(torch.ops.portattn, op) for op in {list(ROWS)}])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == str([True] * len(ROWS)), done.stderr


@pytest.mark.parametrize("op", SIGNATURES)
def test_a_signature_writes_and_reads_the_same(op):
    signature = SIGNATURES[op]
    row = ROWS[op]
    special: dict[str, Any] = {"causal": "top_left", "window": (3, -1), "magicpig": (4, 5), "block_size": (64, 32)}
    values = tuple(special.get(name, name) for name in (*row.fixed, "backend", "validate"))
    tensors = tuple(row.parameters)
    assert signature.split(arguments_of(op, tensors, values, row.lengths)) == (tensors, values, row.lengths)


def test_a_window_without_limits_and_flags_are_written_as_the_schema_has_them(device):
    q = torch.randn(1, 2, 8, 16, device=device.name)

    def call(q):
        return portattn.attention(q, q, q, window=(None, 2), causal=True)

    graph = RECORDERS["make_fx, real"](call, (q,))
    (node,) = (n for n in graph.graph.nodes if n.target is torch.ops.portattn.attention.default)
    assert [-1, 2] in [list(a) for a in node.args if isinstance(a, (list, tuple))]
    assert "bottom_right" in node.args
    assert same(graph(q), call(q))


def test_a_page_table_may_be_in_a_graph(device):
    ints = [torch.tensor(v, dtype=torch.int32, device=device.name) for v in ([[3, 1], [0, -1]], [2, 1], [3, 2])]
    table = portattn.PageTable(*ints)
    pages, q = torch.randn(4, 8, 2, 16, device=device.name), torch.randn(2, 4, 1, 16, device=device.name)

    def call(q, pages):
        return portattn.paged_attention(q, pages, pages, table)

    torch._dynamo.reset()
    for graph in (
        torch.compile(call, backend="aot_eager", fullgraph=True),
        RECORDERS["make_fx, real"](call, (q, pages)),
    ):
        assert same(graph(q, pages), call(q, pages))


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_a_compiled_call(name, device):
    """And memory that a gradient was not written to is none of them: NaN everywhere before."""
    model, tensors = a_model(name, device, sinks=True)
    model.arguments |= differentiable(model.op)
    torch._dynamo.reset()
    found = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
        out, lse = call(*leaves)
        (out.float().sin().sum() + lse[lse.isfinite()].sum()).backward()
        found.append({name: t.grad for name, t in zip(model.names, leaves, strict=True) if t.is_floating_point()})
    for key, expected in found[0].items():
        assert expected is not None, key
        assert found[1][key] is not None, key
        torch.testing.assert_close(found[1][key], expected, msg=lambda text, key=key: f"{key}: {text}")


def test_only_what_needs_a_gradient_gets_one(device):
    q, k, v = (torch.randn(1, 2, 8, 16, device=device.name) for _ in range(3))
    v.requires_grad_()
    torch._dynamo.reset()
    torch.compile(portattn.attention, backend="aot_eager", fullgraph=True)(q, k, v).sum().backward()
    assert q.grad is None
    assert k.grad is None
    torch.testing.assert_close(v.grad, torch.autograd.grad(portattn.attention(q, k, v).sum(), v)[0])


def test_bad_arguments_are_named_while_compiling(device):
    q = torch.randn(2, 2, 8, 16, device=device.name)
    for call, words in (
        (lambda q: portattn.attention(q, q[:1], q), "k's batch is 1, but must be q's, 2"),
        (lambda q: portattn.attention(q, q, q, causal="left"), "causal is 'left', but must be"),
    ):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=words):
            torch.compile(call, backend="eager", fullgraph=True)(q)
        with pytest.raises(portattn.ArgumentError, match=words):
            RECORDERS["make_fx, real"](call, (q,))


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("way", ["tensor", "item", "NumPy"])
def test_a_scale_that_a_graph_holds_is_read(way, captures, device):
    q = torch.randn(1, 2, 5, 16, device=device.name)

    def attend(q, scale):
        return portattn.attention(q, q, q, scale=scale.item() if way == "item" else scale)

    with torch._dynamo.config.patch(capture_scalar_outputs=captures):
        torch._dynamo.reset()
        broken = torch.compile(attend, backend="eager")
        for scale in (0.1, 0.2):
            given = np.float32(scale) if way == "NumPy" else torch.tensor(scale)
            assert torch.equal(broken(q, given), portattn.attention(q, q, q, scale=scale))
        if captures or way != "item":
            torch._dynamo.reset()
            with pytest.raises(torch._dynamo.exc.Unsupported, match=r"multiply q by it, with scale=1\.0"):
                torch.compile(attend, backend="eager", fullgraph=True)(q, given)


def test_the_model_of_the_tests_gives_its_tensors_anew(device):
    model, tensors = a_model("attention", device)
    assert isinstance(model, Model)
    assert not same(model(*(t * 2 if t.is_floating_point() else t for t in tensors)), model(*tensors))


LATE = {
    "looked up before": "import portattn, importlib.util; importlib.util.find_spec('torch'); import torch",
    "imported by another thread meanwhile": """
        import sys, threading, time
        thread = threading.Thread(target=lambda: __import__("torch"))
        thread.start()
        while "torch" not in sys.modules:
            time.sleep(0)
        import portattn
        thread.join()
        import torch
        import wave  # any import that follows
    """,
    "reloaded": "import torch, portattn, importlib; importlib.reload(portattn)",
}


@pytest.mark.parametrize("way", LATE)
def test_the_operators_are_there_however_torch_was_imported(way):
    program = "import warnings\nwarnings.simplefilter('error', RuntimeWarning)\n" + textwrap.dedent(LATE[way])
    program += "\nprint(torch.ops.portattn.attention.default)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "portattn.attention.default", done.stderr
