"""Quantised q, k and v through the public operations: layouts, graphs, transforms, handles, plans, warmup."""

from __future__ import annotations

from typing import Any

import msgspec
import opcalls
import pytest
import torch
from graphs import RECORDERS, a_model
from opcalls import given, perform, problem
from support import Device, assert_right, random_call

import portattn
from portattn.api.request import request_of
from portattn.api.signatures import named_arguments
from portattn.api.torch_ops import arguments_of
from portattn.launch import cache
from portattn.planning.registry import parse_target
from portattn.schema.call import Call

NAMES = ("attention", "varlen")
FORMATS = [("e4m3", "head"), ("e5m2", "none"), ("int8", "token")]
SMALL: dict[str, Any] = {"dtype": "bf16", "return_lse": True, "leftpad_q": False, "leftpad_k": False}


def call_of(name: str, kind: str, scales: str, **fields: object) -> Call:
    small = SMALL if name == "attention" else {"dtype": "bf16", "return_lse": True}
    return random_call(problem(name, **(small | {"kv_format": kind, "kv_scales": scales} | fields)), seed=1)


def results(call: Call, found: Any) -> Any:
    out, lse = found
    return (out.transpose(0, 1)[None], lse[None]) if call.problem.packed else (out, lse)


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
@pytest.mark.parametrize(("kind", "scales"), FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_the_operations_are_right(name: str, kind: str, scales: str, backend: str) -> None:
    call = call_of(name, kind, scales)
    out, lse = results(call, perform(call.problem.op, given(call), backend=backend, validate=False))
    assert out.dtype == torch.bfloat16
    assert_right(call, out, lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_layout_and_the_dtype_of_the_result(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 9, heads, 16).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
    out = portattn.attention(q, k, v, layout="bshd", out_dtype=dtype)
    other = portattn.attention(*(t.transpose(1, 2) for t in (q, k, v)), out_dtype=dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out, other.transpose(1, 2), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "scales"), FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, kind: str, scales: str, device: Device) -> None:
    fields = SMALL if name == "attention" else {"dtype": "bf16", "return_lse": True}
    model, _ = a_model(name, device, **fields, kv_format=kind, kv_scales=scales)
    request = request_of(model.op, named_arguments(model.op)(**model.arguments))
    operator = getattr(torch.ops.portattn, model.op).default
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if kind == "int8":  # torch compares arguments for it, which it cannot do with float8
        checks.append("test_schema")
    found = torch.library.opcheck(operator, arguments_of(model.op, *request.parts), test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("recorder", ["torch.export", "make_fx, symbolic"])
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_gives_the_eager_result(recorder: str, name: str, device: Device) -> None:
    fields = SMALL if name == "attention" else {"dtype": "bf16", "return_lse": True}
    model, tensors = a_model(name, device, **fields, kv_format="e4m3", kv_scales="head")
    graph = RECORDERS[recorder](model, tensors)
    for ours, eager in zip(graph(*tensors), model(*tensors), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "scales"), FORMATS)
def test_vmap(kind: str, scales: str) -> None:
    """Two scales of each kind: one mapped, those that all share."""
    calls = [given(call_of("attention", kind, scales, seqlens_q=False, seqlens_k=False, return_lse=False))
             for _ in range(2)]  # fmt: skip
    names = [name for name in ("q", "k", "v", "k_scale") if name in calls[0]]
    shared = {name: value for name, value in calls[0].items() if name not in names}
    calls[1]["v"] = calls[1]["v"].flip(2)
    if "k_scale" in names:
        calls[1]["k_scale"] = calls[1]["k_scale"] * 2.0

    def one(*tensors: torch.Tensor) -> torch.Tensor:
        return portattn.attention(**shared | dict(zip(names, tensors, strict=True)))

    stacked = [torch.stack([call[name].contiguous() for call in calls]) for name in names]
    each = torch.stack([one(*(call[name] for name in names)) for call in calls])
    torch.testing.assert_close(torch.vmap(one)(*stacked), each, rtol=0, atol=0)


def test_autocast_leaves_them_as_they_are() -> None:
    arguments = given(call_of("attention", "e4m3", "head"))
    expected, _ = portattn.attention(**arguments)
    with torch.autocast("cpu", torch.float16):
        out, _ = portattn.attention(**arguments)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_handle_runs_with_other_data(name: str) -> None:
    call = call_of(name, "e4m3", "head")
    arguments = given(call)
    handle = portattn.prepare(call.problem.op, **arguments)
    tensors = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    tensors["v_scale"] = tensors["v_scale"] * 2.0
    expected = perform(call.problem.op, tensors)
    out = torch.full_like(expected[0], float("nan"))
    found = handle.run(**tensors, out=out)
    assert found[0] is out
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def test_jagged_tensors_may_be_quantised() -> None:
    offsets = torch.tensor([0, 5, 14])
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(torch.randn(14, 2, 16).to(torch.float8_e4m3fn), offsets).transpose(1, 2)
        for _ in range(3)
    )
    scale = torch.tensor([[0.5, 0.25], [2.0, 1.0]])
    out = portattn.attention(q, k, v, q_scale=scale, k_scale=scale, v_scale=scale, out_dtype=torch.float16)
    packed = [t.transpose(1, 2).values() for t in (q, k, v)]
    expected = portattn.varlen_attention(
        *packed, offsets.int(), offsets.int(), 9, 9, q_scale=scale, k_scale=scale, v_scale=scale,
        out_dtype=torch.float16,
    )  # fmt: skip
    torch.testing.assert_close(out.transpose(1, 2).values(), expected, rtol=0, atol=0)


def test_warmup_takes_specs_in_words() -> None:
    spec = {
        "op": "attention", "q": "e4m3[B,8,64,64]", "k": "e4m3[B,2,64,64]", "v": "e4m3[B,2,64,64]",
        "q_scale": "fp32[B,2]", "k_scale": "fp32[B,2]", "v_scale": "fp32[B,2]", "out_dtype": "fp16",
        "sizes": {"B": [1, 4]},
    }  # fmt: skip
    portattn.warmup([spec])
    with pytest.raises(portattn.ArgumentError, match=r"out_dtype is 'fp8', but must be one of fp16, bf16, fp32"):
        portattn.warmup([spec | {"out_dtype": "fp8"}])


def test_the_plan_says_the_format_and_how_products_are_computed() -> None:
    arguments = given(call_of("attention", "e4m3", "head"))
    text = portattn.explain("attention", **arguments)
    assert "q,k,v e4m3 scales head" in text
    assert "kv_format" in text  # why no other path is taken
    asked = problem("attention", dtype="bf16", kv_format="e4m3", kv_scales="head")
    plan = portattn.plan(asked, parse_target("cuda:sm_90", "triton==3.6.0"))
    assert plan.path == "triton"
    assert plan.lowering is not None
    assert plan.lowering.operands == "widened"


def test_a_named_path_that_reads_none_is_an_error() -> None:
    arguments = given(call_of("attention", "e4m3", "none"))
    with pytest.raises(portattn.PathUnavailable, match="kv_format"):
        portattn.attention(**arguments, backend="sdpa")


def test_problems_of_quantised_operands_are_checked() -> None:
    good = problem("attention", dtype="bf16", kv_format="int8", kv_scales="head")
    for changes, named in (
        ({"kv_scales": "none"}, "must be head or token"), ({"dtype": "fp32"}, "must be fp16 or bf16"),
        ({"kv_format": "e4m3", "kv_scales": "token"}, "must be none or head with q, k and v of e4m3"),
        ({"op": "attention_backward"}, "reads keys and values in q's dtype"),
    ):  # fmt: skip
        with pytest.raises(portattn.ArgumentError, match=named):
            msgspec.structs.replace(good, **changes)


@pytest.mark.interpreter
@pytest.mark.parametrize(("kind", "scales"), FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_a_cached_launch_serves_other_sizes(name: str, kind: str, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors that count as an H100's: the second call is of the first one's class, and neither is fixed."""
    opcalls.pretend_accelerator(monkeypatch)
    cache.forget()
    made = []
    for size in (96, 112):
        sizes = {"seq_k": size} | ({"total_k": 2 * size} if name == "varlen" else {})
        call = call_of(name, kind, scales, **sizes, head_dim=32, head_dim_v=32)
        arguments = given(call) | {"scale": 0.25}
        with portattn.settings(canary="never"):
            made.append((call, perform(call.problem.op, arguments, backend="triton")))
            again = perform(call.problem.op, arguments, backend="triton")
        for first, second in zip(made[-1][1], again, strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=0)
    (known,) = cache.every_kind()
    assert [one.why_fixed for one in known.classes] == [""] * len(known.classes)
    cache.forget()
    for call, found in made:
        call.scale = 0.25
        assert_right(call, *results(call, found))


# Lengths of queries and of keys, and heads of both: scales of tokens have the shape of those of sequences.
ALIKE = {
    "as many rows as sequences": ((2, 0), (2, 0), 2, 2), "one row, grouped": ((1,), (1,), 4, 2),
    "one row over seven": ((1,), (7,), 2, 2), "a row a sequence": ((1, 1, 1), (2, 3, 4), 2, 2),
    "as many keys as sequences": ((4, 1, 0), (1, 1, 1), 2, 2),
}  # fmt: skip


@pytest.mark.parametrize("path", ["reference", "core"])
@pytest.mark.parametrize("name", ALIKE)
def test_scales_of_packed_tokens_are_not_taken_for_those_of_sequences(device: Device, name: str, path: str) -> None:
    """What `quantize` makes is attended with its scales, however many rows there are."""
    queries, keys, heads_q, heads_k = ALIKE[name]
    torch.manual_seed(0)
    q = torch.randn(sum(queries), heads_q, 16, dtype=torch.float16)
    k, v = torch.randn(2, sum(keys), heads_k, 16, dtype=torch.float16).unbind()
    q = (q * torch.logspace(-1, 1, len(q))[:, None, None]).half()  # a scale for each token matters
    ends = {f"cu_seqlens_{n}": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for n, lengths in (("q", queries), ("k", keys))}  # fmt: skip
    q, k, v = (t.to(device.name) for t in (q, k, v))
    ends = {name: end.to(device.name) for name, end in ends.items()}
    backend = device.path if path == "core" else path
    made = portattn.quantize(q, k, v, "sage", block=1, smooth_k=False, **ends)
    out = portattn.varlen_attention(
        **made.arguments(), **ends, max_seqlen_q=max(queries), max_seqlen_k=max(keys), backend=backend
    )
    wide_q, wide_k = (t.double() * s.double()[..., None] for t, s in ((made.q, made.q_scale), (made.k, made.k_scale)))
    begin_q, begin_k = 0, 0
    for rows, length in zip(queries, keys, strict=True):
        a, b = wide_q[begin_q : begin_q + rows], wide_k[begin_k : begin_k + length]
        w = v[begin_k : begin_k + length].double()
        b, w = (t.repeat_interleave(heads_q // heads_k, 1) for t in (b, w))
        exact = torch.einsum("hij,jhd->ihd", (torch.einsum("ihd,jhd->hij", a, b) / 4).softmax(-1), w)
        torch.testing.assert_close(out[begin_q : begin_q + rows].double(), exact, rtol=2e-3, atol=2e-3)
        begin_q, begin_k = begin_q + rows, begin_k + length
