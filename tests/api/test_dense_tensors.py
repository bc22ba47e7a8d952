"""Nested and sparse tensors, in the place of any tensor of any public function: one error that names the argument."""

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import opcalls
import pytest
import torch
from opcalls import CALLS, perform, problem
from support import Device, random_call
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import portattn
from portattn.api import dispatch
from portattn.errors import ArgumentError
from portattn.launch import cache
from portattn.schema.ops import CAPTURED, COMMON, PUBLIC, ROWS, WRITERS


def nested(layout: torch.layout) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(like: torch.Tensor) -> torch.Tensor:
        parts = [torch.zeros((n, *like.shape[2:]), dtype=like.dtype, device=like.device) for n in (2, 3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that they are a prototype
            return torch.nested.nested_tensor(parts, layout=layout)

    return make


def compressed(like: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they are in beta state
        return torch.zeros((4, 6), dtype=like.dtype, device=like.device).to_sparse_csr()


UNUSUAL: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "strided nested": (nested(torch.strided), "is 'a nested tensor'.*to_padded_tensor"),
    "jagged nested": (nested(torch.jagged), "is 'a jagged nested tensor'.*varlen_attention takes packed rows"),
    "coo": (lambda like: like.to_sparse(), r"is 'a torch.sparse_coo tensor'.*to_dense\(\)"),
    "csr": (compressed, r"is 'a torch.sparse_csr tensor'.*to_dense\(\)"),
}
LIMIT = "must be a dense, strided torch.Tensor"
# What of one kind of call another does not have.
MORE: dict[str, dict[str, Any]] = {
    "attention": {"alibi_slopes": True, "sinks": True, "bias": True, "mask": True},
    "decode": {"dtype": "bf16", "kv_format": "int8", "kv_scales": "head"},
    "paged": {"dtype": "bf16", "kv_format": "int8", "kv_scales": "token"}, "sparse": {"log_weights": True},
    "sparse paged": {"magicpig": True}, "mla ragged": {"sinks": True},
}  # fmt: skip


@pytest.fixture(params=list(UNUSUAL))
def unusual(request: pytest.FixtureRequest) -> tuple[Callable[[torch.Tensor], torch.Tensor], str]:
    return UNUSUAL[request.param]


def refused(name: str, said: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError, match=f": {re.escape(name)} {said}") as caught:
        call()
    assert LIMIT in str(caught.value)
    assert caught.value.argument == name


@pytest.mark.parametrize("name", CALLS)
def test_every_tensor_of_every_operation(name: str, unusual: Any) -> None:
    make, said = unusual
    p = problem(name, **MORE.get(name, {}))
    arguments = opcalls.given(random_call(p, seed=1))
    tensors = [n for n, value in arguments.items() if isinstance(value, torch.Tensor)]
    assert set(tensors) <= set(ROWS[p.op].parameters)
    handle = portattn.prepare(p.op, **arguments)
    for argument in tensors:
        given = arguments | {argument: make(arguments[argument])}
        refused(argument, said, lambda given=given: perform(p.op, given))
        refused(argument, said, lambda given=given: portattn.prepare(p.op, **given))
        refused(argument, said, lambda given=given: portattn.plan(p.op, **given))
        refused(argument, said, lambda given=given: portattn.explain(p.op, **given))
        refused(argument, said, lambda given=given: handle.run(**given))


def test_every_parameter_is_among_them() -> None:
    asked: dict[str, set[str]] = {}
    for name in CALLS:
        p = problem(name, **MORE.get(name, {}))
        asked.setdefault(p.op, set()).update(opcalls.given(random_call(p, seed=1)))
    # The same loop over the row's tensors refuses them: these are the ones that the other calls have.
    common = {*COMMON, "magicpig_bits", "magicpig_tables", "dropout_seed"}
    common |= {"q_scale", "k_scale", "v_scale", "kv_scale", "k_block_scale", "v_block_scale", "indices", "topk_length"}
    common |= {*CAPTURED}
    for op in set(PUBLIC) - {*WRITERS, "block_sparse_attention"}:  # theirs: test_cache_writers.py, test_blocks.py
        assert set(ROWS[op].parameters) - asked[op] <= common, op


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("other", ["number", "tensor"])
def test_magicpigs_numbers(place: int, other: str, unusual: Any) -> None:
    make, said = unusual
    arguments = opcalls.given(random_call(problem("sparse"), seed=1))
    heads = torch.full((4,), 3, dtype=torch.int32)
    numbers: list[Any] = [heads, heads] if other == "tensor" else [3, 3]
    numbers[place] = make(heads.expand(2, 2, 4))
    name = ("magicpig's K", "magicpig's L")[place]
    refused(name, said, lambda: perform("sparse_attention", arguments, magicpig=tuple(numbers)))
    mixed = (heads, 3) if place else (3, heads)
    counts = make(arguments["counts"])
    refused("counts", said, lambda: perform("sparse_attention", arguments, magicpig=mixed, counts=counts))


@pytest.mark.parametrize("name", ["paged", "sparse paged", "mla"])
def test_beside_a_page_table(name: str, unusual: Any) -> None:
    """Its lengths are computed of the size of the pages, before anything else is looked at."""
    make, said = unusual
    p = problem(name)
    arguments = opcalls.given(random_call(p, seed=1))
    lengths = arguments.pop("seqlens_k")
    table = arguments["page_table"]
    arguments["page_table"] = portattn.PageTable(table, torch.full_like(lengths, 1), torch.full_like(lengths, 2))
    pages = ROWS[p.op].tensors["k"]
    refused(pages, said, lambda: perform(p.op, arguments, **{pages: make(arguments[pages])}))
    refused("seqlens_k", said, lambda: perform(p.op, arguments, seqlens_k=make(lengths.expand(2, 2, 3))))


def test_page_tables(unusual: Any) -> None:
    make, said = unusual
    ints = torch.zeros(2, dtype=torch.int32)
    fields: dict[str, torch.Tensor] = {"pages": ints[:, None], "counts": ints, "last_page_len": ints}
    rows = {"indptr": torch.zeros(3, dtype=torch.int32), "indices": ints, "last_page_len": ints}
    other = make(torch.zeros(2, 2, dtype=torch.int32))
    for name in fields:
        refused(name, said, lambda name=name: portattn.PageTable(**(fields | {name: other})))
    for name in rows:
        refused(name, said, lambda name=name: portattn.PageTable.from_csr(**(rows | {name: other})))


def test_partial_results(unusual: Any) -> None:
    make, said = unusual
    out, lse = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3)
    odd = make(out)
    refused("outs[1]", said, lambda: portattn.merge_states([out, odd], [lse, lse]))
    refused("outs[0]", said, lambda: portattn.merge_states([odd], [lse]))
    refused("lses[0]", said, lambda: portattn.merge_states([out], [make(lse)]))
    refused("outs", said, lambda: portattn.merge_states(odd, [lse, lse]))
    refused("lses", said, lambda: portattn.merge_states([out, out], odd))


def test_places_for_results(unusual: Any) -> None:
    make, said = unusual
    q = torch.zeros(2, 4, 3, 8)
    handle = portattn.prepare("attention", q, q, q, return_lse=True)
    for name, like in (("out", q), ("lse", q[..., 0])):
        refused(name, said, lambda name=name, like=like: handle.run(q, q, q, return_lse=True, **{name: make(like)}))
    with pytest.raises(ArgumentError, match=r"out is 'int', but must be a torch\.Tensor of"):
        handle.run(q, q, q, return_lse=True, out=3)


def test_specs_of_a_warmup(unusual: Any) -> None:
    make, said = unusual
    spec = {"op": "attention", "q": "fp32[2,4,3,8]", "k": make(torch.zeros(2, 4, 3, 8)), "v": "fp32[2,4,3,8]"}
    refused("specs[0].k", said, lambda: portattn.warmup([spec], device="cpu"))


def test_a_jagged_tensor_as_packed_rows() -> None:
    sequences = [torch.randn(n, 2, 16) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(sequences, layout=torch.jagged)
    rows, beginnings = jagged.values(), jagged.offsets().int()
    out = portattn.varlen_attention(rows, rows, rows, beginnings, beginnings, 5, 5)
    torch.testing.assert_close(out[3:], portattn.attention(*[sequences[1][None]] * 3, layout="bshd")[0])


def test_a_call_like_a_cached_one_is_refused(device, kept, unusual, monkeypatch):
    make, said = unusual
    q = torch.randn(2, 4, 3, 16, device=device.name)
    expected = portattn.attention(q, q, q.clone())
    planned: list[Any] = []
    run = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *given: planned.append(given) or run(*given))
    other = q.clone()
    assert torch.equal(portattn.attention(q, q, other), expected)
    assert not planned, "it is a cached one"
    refused("v", said, lambda: portattn.attention(q, q, make(q)))
    refused("q", said, lambda: portattn.attention(make(q), q, other))


# Tensors that do not simply lie in memory: fake, meta, and views whose negation is still to be done.
def dense(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.randn(2, heads, rows, 16) for heads, rows in ((8, 5), (2, 9), (2, 9)))
    return q.to(device), k.to(device), v.to(device)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view of their negation, which no kernel would see."""
    view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert view.is_neg()
    assert torch.equal(view, tensor)
    return view


class _Counting(TorchDispatchMode):
    """A mode that looks at operators, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("validate", [None, True])
def test_fake_tensors_give_shapes(validate: bool | None) -> None:
    with FakeTensorMode():
        q, k, v = dense()
        lengths = torch.tensor([3, 4], dtype=torch.int32)
        out, lse = portattn.attention(q, k, v, seqlens_k=lengths, return_lse=True, validate=validate)
        assert (tuple(out.shape), tuple(lse.shape), lse.dtype) == ((2, 8, 5, 16), (2, 8, 5), torch.float32)
        by_rows = portattn.attention(*(t.transpose(1, 2) for t in (q, k, v)), layout="bshd")
    assert tuple(by_rows.shape) == (2, 5, 8, 16)
    assert portattn.attention(*dense("meta")).shape == (2, 8, 5, 16)


def test_fake_tensors_never_reach_a_kept_launch(device: Device, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake tensor has the shape of a real one, and an address of 0."""
    real = dense(device.name)
    planned: list[Any] = []
    run = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *given: planned.append(given) or run(*given))
    portattn.attention(*real)
    portattn.attention(*real)
    assert len(planned) == 1, "the second call is a kept one"
    with FakeTensorMode() as mode:
        out = portattn.attention(*(mode.from_tensor(t) for t in real))
    assert isinstance(out, torch._subclasses.FakeTensor)
    portattn.attention(negated(real[0]), *real[1:])
    assert len(planned) == 2, "a view to be negated is no cached call"
    kinds = len(cache.every_kind())
    with _Counting() as counting:
        portattn.attention(*real)
        known = len(planned)
        portattn.attention(*real)
    assert counting.seen == ["portattn.attention.default"] * 2, "a mode sees operators, and a launch is none"
    assert len(planned) == known <= 3, "an operator's calls are kept; they may be of a kind of their own"
    assert len(cache.every_kind()) <= kinds + 1


@pytest.mark.parametrize("path", ["reference", "kernels"])
def test_negated_views_of_q_k_and_v_are_copied(device: Device, path: str) -> None:
    q, k, v = dense(device.name)
    backend = device.path if path == "kernels" else path
    expected = portattn.attention(q, k, v, backend=backend)
    assert torch.equal(portattn.attention(negated(q), negated(k), negated(v), backend=backend), expected)


@pytest.mark.parametrize("name", ["bias", "sinks", "alibi_slopes"])
def test_other_negated_views_are_refused(name: str) -> None:
    shape = (9,) if name == "bias" else (8,)
    with pytest.raises(ArgumentError, match=f"{name} is 'a view to be negated'.*resolve_neg"):
        portattn.attention(*dense(), **{name: negated(torch.randn(shape))})


class _Wrapper(torch.Tensor):
    """A tensor that wraps another, as DTensors do: no memory of its own, and an address of 0."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        size, stride = inner.shape, inner.stride()
        made = torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace == "portattn", f"{func} runs on a tensor without memory"
        return func(*(value.inner if isinstance(value, _Wrapper) else value for value in args))

    def __repr__(self, **other: Any) -> str:  # type: ignore[override]
        return "_Wrapper()"


def given_back(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory was freed under it, as sharded training does with parameters."""
    found = tensor.clone()
    found.untyped_storage().resize_(0)
    return found


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_wrappers_of_tensors_get_the_operator(path: str, device: Device, kept: str) -> None:
    """A kernel would read from address 0: on a device that ends the process's context. A handle, which launches
    without torch's dispatcher, refuses them."""
    q, k, v = dense(device.name)
    lengths = torch.tensor([3, 4], dtype=torch.int32, device=device.name)
    arguments = {"q": q, "k_cache": k, "v_cache": v, "seqlens_k": lengths, "backend": path}
    handle = portattn.prepare("decode_attention", **arguments)
    expected = handle.run(**arguments)
    for name in ("q", "k_cache", "v_cache", "seqlens_k"):
        wrapped = arguments | {name: _Wrapper(arguments[name])}
        with pytest.raises(ArgumentError, match=f"{name} is .* must lie in memory"):
            handle.run(**wrapped)
        assert torch.equal(portattn.decode_attention(**wrapped), expected)
    assert torch.equal(handle.run(**arguments), expected)


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_a_first_call_of_a_tensor_whose_memory_was_freed_is_refused(path: str, device: Device, kept: str) -> None:
    q, k, v = dense(device.name)
    with pytest.raises(ArgumentError, match=r"k is 'a Tensor without memory of its own', but must lie in memory"):
        portattn.attention(q, given_back(k), v, backend=path)


def test_a_prepared_run_of_fake_tensors_gives_shapes(device: Device, kept: str) -> None:
    real = dense(device.name)
    handle = portattn.prepare("attention", *real)
    mode = FakeTensorMode()
    out = handle.run(*(mode.from_tensor(t) for t in real))
    assert (type(out), out.shape) == (torch._subclasses.FakeTensor, real[0].shape)


def test_real_tensors_among_fake_ones_give_shapes(device: Device) -> None:
    """In such a mode what is allocated is fake: a kernel would write to address 0."""
    real = dense(device.name)
    portattn.attention(*real, backend=device.path)
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = portattn.attention(*real, backend=device.path)
    assert (type(out), out.shape) == (torch._subclasses.FakeTensor, real[0].shape)


def test_a_negated_view_is_another_argument_of_a_prepared_call(device: Device, kept: str) -> None:
    """Its memory holds the negated values, and its shape and strides are the prepared tensor's."""
    q, k, v = dense(device.name)
    handle = portattn.prepare("attention", q, k, v)
    with pytest.raises(ArgumentError, match=r"whether k is a view to be negated is True.*prepared with False"):
        handle.run(q, torch._neg_view(k), v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_the_inputs_and_nothing_inside(dtype: torch.dtype) -> None:
    """The reference path's products would be of that type: scores of 10⁵ are infinite in float16. A handle computes
    in the dtypes that it was prepared for."""
    q, k, v = (t * 100 for t in dense())
    prepared = portattn.attention(q, k, v)
    handle = portattn.prepare("attention", q, k, v)
    lower = [t.to(dtype) for t in (q, k, v)]
    expected = portattn.attention(*lower)
    assert expected.isfinite().all()
    asking, cast = q.clone().requires_grad_(), lower[0].clone().requires_grad_()
    [gradient] = torch.autograd.grad(portattn.attention(cast, *lower[1:]).sum(), cast)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(portattn.attention(q, k, v), expected)
        assert torch.equal(handle.run(q, k, v), prepared)
        assert (q @ k[:, :1].transpose(2, 3)).dtype == dtype, "autocast is on again"
        out = portattn.attention(asking, k, v)
    assert torch.equal(torch.autograd.grad(out.sum(), asking)[0], gradient.float())


# attention of jagged nested tensors: each sequence as it would be alone, forward and backward.
QUERIES, KEYS = (3, 5, 0, 2), (4, 1, 3, 6)


def jagged(lengths: tuple[int, ...], heads: int, device: Device, width: int = 16) -> torch.Tensor:
    rows = [torch.randn(n, heads, width, device=device.name) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def with_holes(like: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([1, 2, 0, 1], device=like.device)
    return torch.nested.nested_tensor_from_jagged(like.values().detach(), like.offsets(), lengths=lengths)


def each(tensor: torch.Tensor) -> list[torch.Tensor]:
    ends = itertools.pairwise(tensor.offsets().tolist())
    values = tensor.values()
    return [values[a:b].transpose(0, 1)[None] for a, b in ends]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "values",
    [{}, {"causal": True, "window": (2, 0)}, {"softcap": 3.0, "scale": 0.3}],
    ids=["plain", "window", "softcap"],
)
def test_jagged_tensors(values: dict[str, Any], layout: str, device: Device) -> None:
    q, k, v = jagged(QUERIES, 4, device), jagged(KEYS, 2, device), jagged(KEYS, 2, device, 24)
    k = torch.nested.nested_tensor_from_jagged(k.values().detach(), v.offsets()).requires_grad_()
    sinks = torch.randn(4, device=device.name)
    given = (q, k, v) if layout == "bshd" else tuple(t.transpose(1, 2) for t in (q, k, v))
    out, lse = portattn.attention(*given, **values, sinks=sinks, layout=layout, return_lse=True)
    assert out.is_nested
    assert lse.is_nested
    rows = out if layout == "bshd" else out.transpose(1, 2)
    alone = [
        portattn.attention(*one, **values, sinks=sinks, return_lse=True)
        for one in zip(each(q), each(k), each(v), strict=True)
    ]
    for found, (expected, _) in zip(each(rows), alone, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for found, (_, expected) in zip(each(lse.transpose(1, 2)[..., None]), alone, strict=True):
        torch.testing.assert_close(found[..., 0], expected, atol=1e-5, rtol=1e-5)
    mine = torch.autograd.grad(rows.values().sin().sum(), (q, k, v), retain_graph=True)
    theirs = torch.autograd.grad(sum(o.sin().sum() for o, _ in alone), (q, k, v))
    for g, t in zip(mine, theirs, strict=True):
        torch.testing.assert_close(g.values(), t.values(), atol=1e-5, rtol=1e-4)


def test_the_result_goes_on_with_its_queries(device: Device) -> None:
    """Its sequences are q's: torch adds jagged tensors of the same sequences only."""
    q = jagged(QUERIES, 4, device)
    out = portattn.attention(q, q, q, layout="bshd")
    assert torch.equal((out + q).values(), out.values() + q.values())


def test_jagged_tensors_in_a_compiled_function(device: Device) -> None:
    torch._dynamo.reset()
    q = jagged(QUERIES, 4, device)

    def layer(q: torch.Tensor) -> torch.Tensor:
        return portattn.attention(q.sin(), q, q, causal=True, layout="bshd") * 2

    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(q).values(), layer(q).values())


def test_what_packed_rows_cannot_have_is_named(device: Device) -> None:
    q, k = jagged(QUERIES, 4, device), jagged(KEYS, 2, device)
    dense = torch.randn(4, 5, 4, 16, device=device.name)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mask": torch.ones(5, 5, dtype=torch.bool)}, "mask is .* but goes with dense tensors only"),
        ({"layout": "bhsd"}, r"q is .*ragged at the star"),
        ({"k": dense}, "q is 'a jagged nested tensor', but must be a dense"),
        ({"q": with_holes(q)}, "q is 'jagged with holes', but must have no holes"),
        ({"v": jagged((4, 1, 2, 7), 2, device)}, "v is .* must have the sequences of k"),
    ]
    for change, words in wrong:
        given: dict[str, Any] = {"q": q, "k": k, "v": k, "layout": "bshd"} | change
        with pytest.raises(portattn.ArgumentError, match=words):
            portattn.attention(**given)


def test_a_plan_of_jagged_tensors_is_of_packed_rows(device: Device) -> None:
    q = jagged(QUERIES, 4, device)
    plan = portattn.plan("attention", q, q, q, layout="bshd")
    assert (plan.problem.op, plan.problem.total_q) == ("varlen_attention", sum(QUERIES))
    assert "varlen_attention" in portattn.explain("attention", q, q, q, layout="bshd")
