"""prepare(): planned once, run many times with other data, into memory that is there before."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from opcalls import CALLS, assert_right, changed, given, perform, pretend_accelerator, problem
from support import Device, poisoned, random_call

import portattn
from portattn import PageTable
from portattn.api import dispatch
from portattn.schema.call import Call

NAN = float("nan")


@pytest.fixture(params=["host", "kept"])
def place(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device of prepared calls: a CPU, or a CPU that counts as an accelerator, with cached launches."""
    if request.param == "host":
        return "cpu"
    if device.path == "interpreter":
        pretend_accelerator(monkeypatch)
    return device.name


def a_call(name: str, where: str, **fields: Any) -> Call:
    fields |= {} if name.startswith("sparse") else {"causal": "bottom_right"}
    return random_call(problem(name, softcap=True, sinks=True, **fields), seed=1, device=where)


def results(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for out and LSE as the operation's documentation shapes them, holding NaN."""
    p = call.problem
    batch, rows = p.query_rows
    if p.packed:
        shapes = (rows, p.heads_q, p.head_dim_v), (p.heads_q, rows)
    else:
        out = (batch, rows, p.heads_q) if p.layout == "bshd" else (batch, p.heads_q, rows)
        shapes = (*out, p.head_dim_v), (batch, p.heads_q, rows)
    like = call.q
    return like.new_full(shapes[0], NAN), like.new_full(shapes[1], NAN, dtype=torch.float32)


def ran(op: str) -> str:
    return f"prepare({op!r}).run"


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


LAID_OUT = [(name, "bhsd") for name in CALLS] + [
    (name, "bshd") for name in ("attention", "decode", "paged", "sparse", "sparse paged", "mla")
]


@pytest.mark.parametrize(("name", "layout"), LAID_OUT)
def test_it_runs_with_other_data(place: str, name: str, layout: str) -> None:
    call = a_call(name, place, layout=layout)
    op, arguments = call.problem.op, given(call)
    handle = portattn.prepare(op, **arguments)
    assert portattn.last_plan() is None, "nothing has run"
    assert handle.plan == portattn.plan(op, **arguments)
    with poisoned():
        found = handle.run(**arguments)
    assert portattn.last_plan() == handle.plan
    assert_right(call, *found)
    for data in (changed(arguments), arguments):
        out, lse = results(call)
        given_out, given_lse = handle.run(**data, out=out, lse=lse)
        assert given_out is out
        assert given_lse is lse
        same((out, lse), perform(op, data))
    same((out, lse), found)


@pytest.mark.parametrize("name", ["attention", "ragged", "sparse"])
def test_either_result_can_have_a_place(place: str, name: str) -> None:
    call = a_call(name, place)
    arguments = given(call)
    handle = portattn.prepare(call.problem.op, **arguments)
    expected = handle.run(**arguments)
    out, lse = results(call)
    found = handle.run(**arguments, out=out)
    assert found[0] is out
    same(found, expected)
    found = handle.run(**arguments, lse=lse)
    assert found[1] is lse
    same(found, expected)
    without = arguments | {"return_lse": False}
    handle = portattn.prepare(call.problem.op, **without)
    out, _ = results(call)
    assert handle.run(**without, out=out) is out
    assert torch.equal(out, expected[0])
    assert torch.equal(handle.run(**without), expected[0])


def test_arguments_may_come_by_place(place: str) -> None:
    q, k, v = (torch.randn(2, 2, 5, 16, device=place) for _ in range(3))
    handle = portattn.prepare("decode_attention", q, k, v, None, causal=True)
    assert torch.equal(
        handle.run(q, k, v, seqlens_k=None, causal=True), portattn.decode_attention(q, k, v, None, causal=True)
    )


SPLIT = ["decode", "paged", "ragged", "sparse", "sparse paged", "mla", "mla ragged"]


@pytest.mark.parametrize("name", SPLIT)
def test_partial_results_are_the_handles(device: Device, kept: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    call = a_call(name, device.name, num_splits=3)
    arguments = given(call)
    handle = portattn.prepare(call.problem.op, **arguments)
    assert handle.plan.launch.splits == 3
    buffers = handle._cached.buffers(handle._memory, handle._sizes)
    batch, rows = call.problem.query_rows
    shape = (3, batch, 4, rows)
    # Of each row a maximum and a sum, and its columns.
    assert sorted(tuple(t.shape) for t in buffers.values()) == sorted([(*shape, 2), (*shape, call.problem.head_dim_v)])
    assert {t.dtype for t in buffers.values()} == {torch.float32}
    expected = handle.run(**arguments)
    for buffer in buffers.values():
        assert buffer.any(), "partial results went into it"
        buffer.fill_(NAN)
    out, lse = results(call)
    with monkeypatch.context() as patch:
        without = dataclasses.replace(handle._cached._runtime, empty=lambda *shape: pytest.fail("a run allocates"))
        patch.setattr(handle._cached, "_runtime", without)
        handle.run(**arguments, out=out, lse=lse)
    same((out, lse), expected)
    assert all(buffer.any() and not buffer.isnan().any() for buffer in buffers.values()), "the same memory again"


def test_two_handles_share_nothing(device: Device, kept: str) -> None:
    call = a_call("decode", device.name, num_splits=2)
    one, other = (portattn.prepare(call.problem.op, **given(call)) for _ in range(2))
    assert one._memory.data_ptr() != other._memory.data_ptr()


# What an operation's other arguments can be changed to.
VALUES = {
    "scale": 0.7, "causal": False, "window": (3, None), "chunk": 3, "softcap": 2.0, "dropout_p": 0.1,
    "return_lse": False, "layout": "bshd", "num_splits": 2, "page_layout": "hpd", "max_seqlen_q": 77,
    "max_seqlen_k": 77,
}  # fmt: skip
TAKEN = {
    "attention": ("scale", "causal", "window", "chunk", "softcap", "dropout_p", "return_lse", "layout"),
    "varlen": ("scale", "causal", "window", "chunk", "softcap", "return_lse", "max_seqlen_q", "max_seqlen_k"),
    "decode": ("scale", "causal", "window", "chunk", "softcap", "num_splits", "return_lse", "layout"),
    "ragged": ("scale", "causal", "window", "chunk", "softcap", "num_splits", "return_lse", "layout", "page_layout",
               "max_seqlen_q"),
    "sparse paged": ("scale", "softcap", "num_splits", "return_lse", "layout", "page_layout"),
    "mla ragged": ("scale", "causal", "window", "chunk", "softcap", "num_splits", "return_lse", "layout",
                   "max_seqlen_q"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_another_value_is_named(place: str, name: str) -> None:
    call = a_call(name, place)
    op, arguments = call.problem.op, given(call)
    handle = portattn.prepare(op, **arguments)
    for value in TAKEN[name]:
        with pytest.raises(portattn.ArgumentError) as error:
            handle.run(**(arguments | {value: VALUES[value]}))
        was = arguments.get(value, "phd" if value == "page_layout" else None)
        if value not in ("dropout_p", "layout"):
            limit = f"the call was prepared with {was!r}"
            assert str(error.value) == f"{ran(op)}: {value} is {VALUES[value]!r}, but {limit}"
        assert str(error.value).startswith(f"{ran(op)}: {value} is {VALUES[value]!r}, but the call was prepared with ")
    handle.run(**arguments)


def test_values_of_other_types_and_other_settings_are_named(place: str) -> None:
    """Values that do not even compare; 5 == 5.0 and 1 == True: the operation refuses them, and so does its handle."""
    q, k, v = (torch.randn(1, 2, 3, 16, device=place) for _ in range(3))
    taken = {"causal": True, "scale": 1.0, "window": (5, 1)}
    handle = portattn.prepare("attention", q, k, v, **taken)
    for changes, what in (
        ({"causal": torch.ones(3, 3, dtype=torch.bool)}, "causal is tensor("),
        ({"causal": 1}, "causal is 1, but the call was prepared with True"),
        ({"scale": 1}, "scale is 1, but the call was prepared with 1.0"), ({"scale": torch.ones(2)}, "scale is tens"),
        ({"window": [5, 1]}, "window is [5, 1], but the call was prepared with (5, 1)"),
        ({"window": (5, True)}, "window"), ({"window": (5.0, 1)}, "window"),
        ({"backend": "reference"}, "backend is 'reference', but the call was prepared with 'auto'"),
        ({"validate": False}, "validate is 'never', but the call was prepared with 'auto'"),
    ):  # fmt: skip
        with pytest.raises(portattn.ArgumentError) as error:
            handle.run(q, k, v, **(taken | changes))
        assert str(error.value).startswith(f"{ran('attention')}: {what}")
    handle.run(q, k, v, **taken)
    silent = "fallback is 'silent', but the call was prepared with"
    with portattn.settings(fallback="silent"), pytest.raises(portattn.ArgumentError, match=silent):
        handle.run(q, k, v, **taken)
    with portattn.settings(fallback="silent"):
        portattn.prepare("attention", q, k, v, backend="reference").run(q, k, v, backend="reference")


FEATURED = {
    "attention": ("bias", "mask", "alibi_slopes"), "varlen": ("alibi_slopes",), "decode": ("bias", "mask"),
    "paged": ("bias", "mask", "alibi_slopes"), "ragged": ("alibi_slopes",),
    "sparse paged": ("log_weights", "magicpig", "alibi_slopes"), "mla": ("bias", "mask"), "mla ragged": (),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURED)
def test_another_tensor_is_named(place: str, name: str) -> None:
    """By the name that the caller knows it by: of another shape, stride or dtype, elsewhere, absent, or there."""
    call = a_call(name, place, **dict.fromkeys(FEATURED[name], True))
    op, arguments = call.problem.op, given(call)
    handle = portattn.prepare(op, **arguments)
    tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    assert set(FEATURED[name]) <= {*tensors, "magicpig"}

    def refused(changes: dict[str, Any], what: str) -> None:
        with pytest.raises(portattn.ArgumentError) as error:
            handle.run(**(arguments | changes))
        message = str(error.value)
        assert message.startswith(f"{ran(op)}: {what}"), message
        assert "but the call was prepared with " in message

    for n, t in tensors.items():
        longer = torch.cat([t, t])
        refused({n: longer}, f"{n} is ({tuple(longer.shape)}, ")
        spread = torch.empty_strided(t.shape, [2 * s for s in t.stride()], dtype=t.dtype, device=t.device)
        refused({n: spread}, f"{n} is ({tuple(t.shape)}, {spread.stride()}, ")
        other = torch.empty_strided(t.shape, t.stride(), dtype=torch.float64, device=t.device)
        refused({n: other}, f"{n} is ({tuple(t.shape)}, {t.stride()}, torch.float64)")
        refused({n: t.to("meta")}, f"{n}.device is 'meta'" if t.stride() == t.to("meta").stride() else f"{n} is (")
        refused({n: None}, f"{n} is 'NoneType'")
        refused({n: [1.0]}, f"{n} is 'list'")
    if "magicpig" in arguments:
        bits, tables = arguments["magicpig"]
        refused({"magicpig": (torch.cat([bits, bits]), tables)}, "magicpig's K is ((8,), ")
        refused({"magicpig": (bits, torch.cat([tables, tables]))}, "magicpig's L is ((8,), ")
        refused({"magicpig": None}, "magicpig's K is 'NoneType'")
    plain = portattn.prepare(op, **{n: v for n, v in arguments.items() if n != "sinks"})
    with pytest.raises(portattn.ArgumentError, match=r"sinks is \(\(4,\).*prepared with 'NoneType'"):
        plain.run(**arguments)


def test_another_alignment_is_named(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled for pointers that are, or are not, multiples of 16 bytes."""
    if device.path == "interpreter":
        pytest.skip("on a CPU nothing is compiled")
    q, k, v = (torch.randn(1, 2, 3, 16, device=device.name) for _ in range(3))
    handle = portattn.prepare("attention", q, k, v)
    shifted = torch.randn(97, device=device.name)[1:].view(1, 2, 3, 16)
    with pytest.raises(portattn.ArgumentError, match="k's address, modulo 16 is 4, but the call was prepared with 0"):
        handle.run(q, shifted, v)


def test_gradients_that_were_not_prepared_for_are_named(place: str) -> None:
    """A kernel has no backward: its results would look like constants."""
    q, k, v = (torch.randn(1, 2, 3, 16, device=place) for _ in range(3))
    handle = portattn.prepare("attention", q, k, v)
    asking = q.clone().requires_grad_()
    with pytest.raises(portattn.ArgumentError) as error:
        handle.run(asking, k, v)
    told = "whether gradients are asked for is True, but the call was prepared with False"
    assert str(error.value) == f"{ran('attention')}: {told}"
    with torch.no_grad():
        handle.run(asking, k, v)
    with_gradients = portattn.prepare("attention", asking, k, v, backend="reference")
    [found] = torch.autograd.grad(with_gradients.run(asking, k, v, backend="reference").sum(), asking)
    [expected] = torch.autograd.grad(portattn.attention(asking, k, v, backend="reference").sum(), asking)
    assert torch.equal(found, expected)


# Of a call whose out is (3, 4, 3, 24) and LSE (3, 4, 3): which, made by zeros(*shape), the value and the limit.
OUT, LSE = (
    "must be a torch.Tensor of (3, 4, 3, 24), torch.float32", "must be a torch.Tensor of (3, 4, 3), torch.float32",
)  # fmt: skip
BAD_RESULTS: list[tuple[str, Any, str, str]] = [
    ("out", lambda zeros: zeros(3, 4, 24, 3), "((3, 4, 24, 3), torch.float32)", OUT),
    ("out", lambda zeros: zeros(3, 4, 3, 24).half(), "((3, 4, 3, 24), torch.float16)", OUT),
    ("out", lambda zeros: [1.0], "'list'", OUT),
    ("out", lambda zeros: zeros(4, 3, 3, 24).transpose(0, 1), "('{device}', (72, 216, 24, 1))", "contiguous on "),
    ("out", lambda zeros: zeros(3 * 4 * 3 * 24 + 1)[1:].view(3, 4, 3, 24), "('{device}', (288, 72, 24, 1))",
     "from a multiple of 16 bytes on"),
    ("out", lambda zeros: zeros(3, 4, 3, 24).to("meta"), "('meta', (288, 72, 24, 1))", "contiguous on {device}"),
    ("lse", lambda zeros: zeros(3, 4), "((3, 4), torch.float32)", LSE),
    ("lse", lambda zeros: zeros(3, 4, 3).bfloat16(), "((3, 4, 3), torch.bfloat16)", LSE),
    ("lse", lambda zeros: zeros(3, 4, 6)[..., ::2], "('{device}', (24, 6, 2))", "must be contiguous on {device}"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_RESULTS, ids=lambda bad: f"{bad[0]} is {bad[2]}")
def test_a_bad_place_for_a_result_is_named(place: str, bad: tuple[str, Any, str, str]) -> None:
    name, make, what, limit = bad
    call = a_call("decode", place)
    handle = portattn.prepare("decode_attention", **given(call))
    with pytest.raises(portattn.ArgumentError) as error:
        handle.run(**given(call), **{name: make(functools.partial(torch.zeros, device=place))})
    message, device = str(error.value), str(call.q.device)
    assert message.startswith(f"{ran('decode_attention')}: {name} is {what.format(device=device)}"), message
    assert limit.format(device=device) in message.partition(", but ")[2], message


def test_no_lse_is_computed_where_none_is_asked_for(place: str) -> None:
    call = a_call("decode", place)
    arguments = given(call) | {"return_lse": False}
    handle = portattn.prepare("decode_attention", **arguments)
    _, lse = results(call)
    with pytest.raises(portattn.ArgumentError) as error:
        handle.run(**arguments, lse=lse)
    told = "lse is (3, 4, 3), but return_lse is False: none is computed"
    assert str(error.value) == f"{ran('decode_attention')}: {told}"
    assert lse.isnan().all()


def test_results_of_packed_and_half_calls_have_their_own_shape_and_dtype(place: str) -> None:
    call = a_call("ragged", place, dtype="bf16")
    arguments = given(call)
    handle = portattn.prepare("paged_attention", **arguments)
    out, lse = results(call)
    assert (tuple(out.shape), out.dtype, tuple(lse.shape), lse.dtype) == (
        (33, 4, 24), torch.bfloat16, (4, 33), torch.float32,
    )  # fmt: skip
    handle.run(**arguments, out=out, lse=lse)
    assert_right(call, out, lse)
    with pytest.raises(portattn.ArgumentError, match="out is"):
        handle.run(**arguments, out=out.float())


def test_validated_runs_are_validated(place: str) -> None:
    q, k, v = (torch.randn(2, 2, 3, 16, device=place) for _ in range(3))
    lengths = torch.tensor([3, 1], dtype=torch.int32, device=place)
    careful = portattn.prepare("attention", q, k, v, seqlens_k=lengths, validate=True)
    careless = portattn.prepare("attention", q, k, v, seqlens_k=lengths, validate=False)
    careful.run(q, k, v, seqlens_k=lengths, validate=True)
    lengths[1] = 4
    with pytest.raises(portattn.ArgumentError, match=r"seqlens_k\[1\] is 4"):
        careful.run(q, k, v, seqlens_k=lengths, validate=True)
    clamped = careless.run(q, k, v, seqlens_k=lengths, validate=False)
    torch.testing.assert_close(clamped, portattn.attention(q, k, v), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["paged", "ragged", "sparse paged", "mla"])
def test_it_takes_page_tables(place: str, name: str) -> None:
    call = a_call(name, place)
    op, arguments = call.problem.op, given(call)

    def table(counts: list[int], last: list[int]) -> PageTable:
        indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int().to(place)
        indices = torch.arange(sum(counts), dtype=torch.int32, device=place) % call.k.shape[0]
        return PageTable.from_csr(indptr, indices, torch.tensor(last, dtype=torch.int32, device=place), max_pages=5)

    arguments |= {"page_table": table([2, 1, 3], [1, 8, 3]), "seqlens_k": None}
    for n in ("k_pages", "v_pages", "k_cache", "v_cache", "kv_pages"):
        if n in arguments:
            arguments[n] = arguments[n].nan_to_num(0.5)
    handle = portattn.prepare(op, **arguments)
    for other in (table([2, 1, 3], [1, 8, 3]), table([5, 0, 1], [8, 4, 4])):
        changes = arguments | {"page_table": other}
        same(handle.run(**changes), perform(op, changes))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_q": 0}, {"seq_k": 0}], ids=str)
def test_nothing_can_be_prepared_too(place: str, sizes: dict[str, int]) -> None:
    call = random_call(problem("decode", **sizes), device=place)
    arguments = given(call)
    handle = portattn.prepare("decode_attention", **arguments)
    out, lse = results(call)
    assert handle.run(**arguments, out=out, lse=lse)[0] is out
    assert not out.any()
    assert torch.isneginf(lse).all()


def test_shapes_can_be_prepared_without_data() -> None:
    q = torch.zeros(2, 4, 3, 16, device="meta")
    k = torch.zeros(2, 2, 5, 16, device="meta")
    out, lse = portattn.prepare("attention", q, k, k, return_lse=True).run(q, k, k, return_lse=True)
    assert (tuple(out.shape), tuple(lse.shape), out.device.type) == ((2, 4, 3, 16), (2, 4, 3), "meta")


def test_a_handle_names_op_problem_and_path() -> None:
    q = torch.zeros(1, 2, 3, 16)
    handle = portattn.prepare("attention", q, q, q, causal=True, backend="reference")
    shown = repr(handle)
    assert shown == f"<portattn.Prepared {handle.plan.problem} on {handle.plan.target}: reference path>"
    assert "Prepared attention q (1,2,3,16)" in shown


def test_preparing_raises_what_the_call_raises() -> None:
    q = torch.zeros(1, 2, 3, 16)
    with pytest.raises(portattn.ArgumentError, match="scale is nan"):
        portattn.prepare("attention", q, q, q, scale=NAN)
    with pytest.raises(portattn.ArgumentError, match=r"seqlens_k\[0\] is 4"):
        portattn.prepare("attention", q, q, q, seqlens_k=torch.tensor([4], dtype=torch.int32))
    with pytest.raises(portattn.ArgumentError, match="dropout_seed is None"):
        portattn.prepare("attention", q, q, q, dropout_p=0.5)
    handle = portattn.prepare("attention", q, q, q)
    with pytest.raises(TypeError, match="is_causal"):
        handle.run(q, q, q, is_causal=True)


def test_what_does_not_compile_takes_the_next_path(device, monkeypatch, sm_90, core_only, compiler):
    if device.path != "interpreter":
        pytest.skip("another device is pretended here")
    from portattn.api.request import Request

    requests = compiler("error")
    monkeypatch.setattr(Request, "_on_accelerator", lambda request: True)
    q, k, v = (torch.randn(2, 4, 33, 64, generator=torch.Generator().manual_seed(i)).half() for i in range(3))
    handle = portattn.prepare("attention", q, k, v)
    assert (handle.plan.path, handle.plan.fell_back) == ("sdpa", True)
    with pytest.warns(portattn.FallbackWarning, match="attention runs on the sdpa path, not triton"):
        found = handle.run(q, k, v)
    assert torch.equal(found, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert len(requests.read_text().splitlines()) == 1
    with portattn.settings(fallback="error"), pytest.raises(portattn.PathUnavailable, match="PassManager::run failed"):
        portattn.prepare("attention", q, k, v)


def test_a_prepared_call_does_not_plan(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = a_call("decode", place)
    handle = portattn.prepare("decode_attention", **given(call))
    if handle._cached is None:
        assert place == "cpu"
        return
    for name in ("plan_call", "run", "kernel_calls", "_planned"):
        monkeypatch.setattr(dispatch, name, lambda *a: pytest.fail("it plans again"))
    handle.run(**given(call))
