"""Quantised caches, and quantised q, k and v, through the public operations: layouts of serving engines, graphs,
transforms, handles, plans, warmup."""

from dataclasses import replace
from typing import Any

import msgspec
import opcalls
import pytest
import torch
from graphs import RECORDERS, a_model
from opcalls import given, perform, problem
from support import Device, assert_right, random_call

import portattn
from portattn import ArgumentError
from portattn.api.signatures import request_of
from portattn.api.torch_ops import arguments_of
from portattn.launch import cache
from portattn.planning.registry import parse_target
from portattn.schema.call import Call

OPERANDS = ("attention", "varlen")
CACHED = ("decode", "paged", "ragged", "sparse", "sparse paged", "mla", "mla ragged")
FORMATS = [("e4m3", "none"), ("e5m2", "head"), ("int8", "token"), ("int4", "token")]
OPERAND_CASES = [
    (name, *stored) for name in OPERANDS for stored in (("e4m3", "head"), ("e5m2", "none"), ("int8", "token"))
]
CASES = OPERAND_CASES + [
    (name, *stored) for name in CACHED for stored in FORMATS if stored[0] != "int4" or not name.startswith("mla")
]


def small(name: str) -> dict[str, Any]:
    """Scales of tokens that a mask hides are checked as others are: these calls hide none but by lengths."""
    padding = {"attention": {"leftpad_q": False, "leftpad_k": False}, "varlen": {}}.get(name, {"leftpad_k": False})
    return {"dtype": "bf16", "return_lse": True, **padding}


def call_of(name: str, kind: str, scales: str, **fields: object) -> Call:
    return random_call(problem(name, **(small(name) | {"kv_format": kind, "kv_scales": scales} | fields)), seed=1)


def results(call: Call, found: Any) -> Any:
    out, lse = found
    return (out.transpose(0, 1)[None], lse[None]) if call.problem.packed else (out, lse)


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
@pytest.mark.parametrize(("name", "kind", "scales"), CASES)
def test_the_operations_are_right(name: str, kind: str, scales: str, backend: str) -> None:
    call = call_of(name, kind, scales)
    unread = {"validate": False} if name in OPERANDS else {}
    out, lse = results(call, perform(call.problem.op, given(call), backend=backend, **unread))
    assert out.dtype == torch.bfloat16
    assert_right(call, out, lse)


@pytest.mark.parametrize(
    ("name", "kind", "scales"), [case for case in CASES if case[0] in (*OPERANDS, "decode", "paged")]
)
def test_opcheck(name: str, kind: str, scales: str, device: Device) -> None:
    model, _ = a_model(name, device, **small(name), kv_format=kind, kv_scales=scales)
    request = request_of(model.op, **model.arguments)
    operator = getattr(torch.ops.portattn, model.op).default
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if kind in ("int8", "int4"):  # torch compares arguments for it, which it cannot do with float8
        checks.append("test_schema")
    found = torch.library.opcheck(operator, arguments_of(model.op, *request.parts), test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("recorder", ["torch.export", "make_fx, symbolic"])
@pytest.mark.parametrize(
    ("name", "kind", "scales"),
    [
        *((name, "e4m3", "head") for name in OPERANDS), ("decode", "e4m3", "token"), ("paged", "e4m3", "token"),
        ("paged", "int4", "token"),
    ],
)  # fmt: skip
def test_a_graph_gives_the_eager_result(recorder: str, name: str, kind: str, scales: str, device: Device) -> None:
    model, tensors = a_model(name, device, **small(name), kv_format=kind, kv_scales=scales)
    graph = RECORDERS[recorder](model, tensors)
    torch.testing.assert_close(graph(*tensors), model(*tensors), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "kind", "scales"), [case for case in CASES if case[0] in ("attention", "decode")])
def test_vmap(name: str, kind: str, scales: str) -> None:
    whole = {"seqlens_k": False} | ({"seqlens_q": False} if name == "attention" else {})
    calls = [call_of(name, kind, scales, **whole, return_lse=False) for _ in range(2)]
    op, both = calls[0].problem.op, [{"seqlens_k": None} | given(call) for call in calls]
    names = [n for n in ("q", "k", "v", "k_cache", "v_cache", "k_scale") if n in both[0]]
    shared = {n: value for n, value in both[0].items() if n not in names}
    flipped = "v" if name == "attention" else "q"
    both[1][flipped] = both[1][flipped].flip(2)
    if "k_scale" in names:
        both[1]["k_scale"] = both[1]["k_scale"] * 2.0

    def one(*tensors: torch.Tensor) -> Any:
        return perform(op, shared | dict(zip(names, tensors, strict=True)))

    stacked = [torch.stack([call[n].contiguous() for call in both]) for n in names]
    each = torch.stack([one(*(call[n] for n in names)) for call in both])
    torch.testing.assert_close(torch.vmap(one)(*stacked), each, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "dtype"), [("attention", torch.float16), ("decode", torch.bfloat16)])
def test_autocast_leaves_them_as_they_are(name: str, dtype: torch.dtype) -> None:
    call = call_of(name, "e4m3", "head")
    arguments = given(call)
    expected, _ = perform(call.problem.op, arguments)
    arguments |= {"q": arguments["q"].float()} if name == "decode" else {}
    with torch.autocast("cpu", dtype):
        out, _ = perform(call.problem.op, arguments)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [*OPERANDS, *CACHED])
def test_a_handle_runs_with_other_data(name: str) -> None:
    call = call_of(name, *(("e4m3", "head") if name in OPERANDS else ("int8", "token")))
    arguments = given(call)
    handle = portattn.prepare(call.problem.op, **arguments)
    tensors = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    if name in CACHED:
        queries = "q" if "q" in tensors else "q_nope"
        tensors[queries] = tensors[queries] * -0.5
    scale = "kv_scale" if call.problem.op == "mla_attention" else "v_scale"
    tensors[scale] = tensors[scale] * 2.0
    expected = perform(call.problem.op, tensors)
    out = torch.full_like(expected[0], float("nan"))
    found = handle.run(**tensors, out=out)
    assert found[0] is out
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_warmup_takes_specs_in_words() -> None:
    sizes = {"k_scale": "fp32[B,2]", "v_scale": "fp32[B,2]", "sizes": {"B": [1, 4]}}
    spec = sizes | {
        "op": "attention", "q": "e4m3[B,8,64,64]", "k": "e4m3[B,2,64,64]", "v": "e4m3[B,2,64,64]",
        "q_scale": "fp32[B,2]", "out_dtype": "fp16",
    }  # fmt: skip
    cached = {"op": "decode_attention", "q": "bf16[B,8,1,64]", "seqlens_k": None}
    cached |= dict.fromkeys(("k_cache", "v_cache"), "e4m3[B,2,128,64]")
    portattn.warmup([spec, sizes | cached])
    with pytest.raises(ArgumentError, match=r"out_dtype is 'fp8', but must be one of fp16, bf16, fp32"):
        portattn.warmup([spec | {"out_dtype": "fp8"}])


@pytest.mark.parametrize(
    ("name", "kind", "scales", "said"),
    [("attention", "e4m3", "head", "q,k,v e4m3 scales head"), ("paged", "int8", "token", "cache int8 scales token")],
)
def test_the_plan_says_the_format(name: str, kind: str, scales: str, said: str) -> None:
    call = call_of(name, kind, scales)
    text = portattn.explain(call.problem.op, **given(call))
    assert said in text
    assert "sdpa" in text
    assert "kv_format" in text  # why no other path is taken


def test_the_plan_says_how_products_are_computed() -> None:
    asked = problem("attention", dtype="bf16", kv_format="e4m3", kv_scales="head")
    plan = portattn.plan(asked, parse_target("cuda:sm_90", "triton==3.6.0"))
    assert (plan.path, plan.lowering.operands) == ("triton", "widened")


@pytest.mark.parametrize("name", ["attention", "decode"])
def test_a_named_path_that_reads_none_is_an_error(name: str) -> None:
    call = call_of(name, "e4m3", "none")
    with pytest.raises(portattn.PathUnavailable, match="kv_format"):
        perform(call.problem.op, given(call), backend="sdpa")


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"kv_scales": "none"}, "must be head or token"), ({"dtype": "fp32"}, "must be fp16 or bf16"),
    ({"op": "attention_backward"}, "reads keys and values in q's dtype"),
]  # fmt: skip
CHANGES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "attention": [
        *BOTH, ({"kv_format": "e4m3", "kv_scales": "token"}, "must be none or head with q, k and v of e4m3"),
    ],
    "decode": [
        *BOTH, ({"kv_format": "as_q"}, "goes with a kv_format"), ({"kv_format": "mxfp4"}, "must be one of as_q, e4m3"),
        ({"kv_format": "nvfp4", "head_dim_v": 24}, "must be a multiple of 16 with kv_format nvfp4"),
        ({"kv_format": "nvfp4", "head_dim": 32, "head_dim_v": 32, "kv_scales": "token"}, "must be none or head"),
        ({"kv_format": "nvfp4", "op": "attention"}, "attention takes no nvfp4"),
        ({"kv_format": "int4", "kv_scales": "none"}, "must be head or token with kv_format int4"),
        ({"kv_format": "int4", "head_dim": 33}, "must be even with kv_format int4"),
        ({"kv_format": "int4", "head_dim_v": 31}, "must be even with kv_format int4"),
        ({"kv_format": "int4", "op": "attention"}, "attention takes no operands of int4"),
        ({"kv_format": "int4", "op": "mla_attention", "page_size": 8, "heads_q": 4, "heads_k": 1, "leftpad_k": False},
         "takes no latent rows of int4"),
        ({"kv_format": "fp8_ds_mla"}, "reads no latent rows"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "named"), [(name, *one) for name in CHANGES for one in CHANGES[name]])
def test_problems_of_quantised_tensors_are_checked(name: str, changes: dict[str, Any], named: str) -> None:
    good = problem(name, dtype="bf16", kv_format="int8", kv_scales="head")
    with pytest.raises(ArgumentError, match=named):
        msgspec.structs.replace(good, **changes)


@pytest.mark.interpreter
@pytest.mark.parametrize(("name", "kind", "scales"), [
    *OPERAND_CASES,
    *((name, "e4m3", scales) for name in CACHED for scales in ("none", "head", "token")),
    *((name, "int4", "token") for name in ("decode", "paged", "ragged", "sparse paged")),
    *((name, "nvfp4", "head") for name in ("decode", "paged", "ragged")),
])  # fmt: skip
def test_a_cached_launch_serves_other_sizes(name: str, kind: str, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors that count as an H100's: the second call is of the first one's class, and neither is fixed."""
    opcalls.pretend_accelerator(monkeypatch)
    cache.forget()
    made = []
    fields: dict[str, Any] = {} if name.startswith("mla") else {"head_dim": 32, "head_dim_v": 32}
    if name in CACHED:
        fields["page_size"] = 0 if name in ("decode", "sparse") else 8
    for size in (96, 112):
        sizes = {"seq_k": size} | ({"total_k": 2 * size} if name == "varlen" else {})
        call = call_of(name, kind, scales, **sizes, **fields)
        arguments = given(call) | {"scale": 0.25}
        with portattn.settings(canary="never"):
            made.append((call, perform(call.problem.op, arguments, backend="triton")))
            again = perform(call.problem.op, arguments, backend="triton")
        torch.testing.assert_close(made[-1][1], again, rtol=0, atol=0)
    (known,) = cache.every_kind()
    assert [one.why_fixed for one in known.classes] == [""] * len(known.classes)
    cache.forget()
    for call, found in made:
        assert_right(replace(call, scale=0.25), *results(call, found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_layout_and_the_dtype_of_the_result(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 9, heads, 16).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
    out = portattn.attention(q, k, v, layout="bshd", out_dtype=dtype)
    other = portattn.attention(*(t.transpose(1, 2) for t in (q, k, v)), out_dtype=dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out, other.transpose(1, 2), rtol=0, atol=0)


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


def inline(kind: torch.dtype, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache whose rows are [K | scale] in bytes, as vLLM's per_token_head types have them: numbers and scales as
    views of it, and what they stand for."""
    pages, size, heads, width = rows.shape
    cache = torch.zeros(pages, size, heads, width + 4, dtype=torch.uint8)
    scale = rows.abs().amax(dim=-1) / 100.0
    numbers = cache[..., :width].view(kind)
    numbers.copy_((rows / scale[..., None]).to(kind))
    scales = cache[..., width:].view(torch.float32)[..., 0]
    scales.copy_(scale)
    return numbers, scales, numbers.float() * scale[..., None]


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_scales_inside_the_rows_of_a_cache(kind: torch.dtype, backend: str) -> None:
    """vLLM: content [K | fp32 scale]. The scales are a strided view, which is all that a call needs."""
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn(6, 16, 2, 32, generator=generator) for _ in range(2))
    (k_pages, k_scale, k_is), (v_pages, v_scale, v_is) = inline(kind, k), inline(kind, v)
    q = torch.randn(2, 4, 1, 32, generator=generator).bfloat16()
    table = torch.tensor([[4, 1, 2], [5, 0, 3]], dtype=torch.int32)
    lengths = torch.tensor([40, 17], dtype=torch.int32)
    assert k_scale.data_ptr() == k_pages.data_ptr() + 32
    out = portattn.paged_attention(q, k_pages, v_pages, table, lengths, k_scale=k_scale, v_scale=v_scale,
                                   backend=backend)  # fmt: skip
    whole = portattn.paged_attention(q.float(), k_is, v_is, table, lengths, backend="reference")
    torch.testing.assert_close(out.float(), whole, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", ["reference", "interpreter"])
@pytest.mark.interpreter
def test_rows_of_vllm_are_read_as_they_are(backend: str) -> None:
    """fp8_ds_mla as DeepSeek's models have it, 656 bytes a token, in an engine's cache of more bytes a page."""
    call = call_of("mla", "fp8_ds_mla", "none", head_dim=576, head_dim_v=512, batch=2)
    rows = given(call)["kv_pages"]
    cache = torch.full((rows.shape[0], rows.shape[1] + 1, 656), 0x7F, dtype=torch.uint8)
    cache[:, :-1] = rows
    out, lse = perform("mla_attention", given(call) | {"kv_pages": cache[:, :-1]}, backend=backend)
    assert_right(call, out, lse)


def test_the_variant_for_latent_rows_rejects_a_quantised_cache() -> None:
    p = problem("mla", **small("mla"), kv_format="fp8_ds_mla", head_dim=576, head_dim_v=512, page_size=64, seq_k=640)
    plan = portattn.plan(p, portattn.target("cuda:sm_90", "triton==3.6.0"))
    assert (plan.path, plan.kernel) == ("triton", "mla_split")
    assert any("gluon_mla: it takes no rows of fp8_ds_mla without lists" in note for note in plan.notes), plan.notes


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("method", ["e4m3", "sage"])
def test_quantize_is_traced_whole(method: str, dynamic: bool) -> None:
    def numbers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = portattn.quantize(q, k, v, method)
        return made.q, made.k, made.q_scale, made.k_scale

    q, k, v = torch.randn(3, 1, 2, 70, 32, dtype=torch.bfloat16).unbind()
    torch._dynamo.reset()
    traced = torch.compile(numbers, fullgraph=True, backend="eager", dynamic=dynamic)(q, k, v)
    for found, right in zip(traced, numbers(q, k, v), strict=True):
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


def test_scales_of_keys_and_of_values_may_have_other_strides(device: Device) -> None:
    """One for each head beside one for each sequence and head: each is read by strides of its own."""
    torch.manual_seed(0)
    q = torch.randn(3, 4, 1, 16, dtype=torch.float16, device=device.name)
    k, v = torch.randint(-127, 128, (2, 3, 2, 33, 16), dtype=torch.int8, device=device.name).unbind()
    of_heads = torch.tensor([0.002, 0.02], device=device.name)
    of_all = torch.rand(3, 2, device=device.name) * 0.02 + 0.001
    for k_scale, v_scale in ((of_heads, of_all), (of_all, of_heads), (of_all.T.contiguous().T, of_heads[:1])):
        wide_k, wide_v = (
            t.double() * scale.double().expand(3, 2)[..., None, None] for t, scale in ((k, k_scale), (v, v_scale))
        )
        wide_k, wide_v = (t.repeat_interleave(2, 1) for t in (wide_k, wide_v))
        exact = (q.double() @ wide_k.mT / 4).softmax(-1) @ wide_v
        for backend in ("reference", device.path):
            out = portattn.decode_attention(q, k, v, None, k_scale=k_scale, v_scale=v_scale, backend=backend)
            torch.testing.assert_close(out.double(), exact, rtol=4e-3, atol=2e-3)


def test_bad_scales_of_tokens_after_a_left_padding_are_seen() -> None:
    """The last of a sequence that begins late counts; those before its first and behind its last may hold anything."""
    q, cache = torch.randn(1, 1, 1, 16).half(), torch.ones(1, 1, 10, 16, dtype=torch.int8)
    lengths = {"seqlens_k": torch.tensor([4], dtype=torch.int32), "leftpad_k": torch.tensor([3], dtype=torch.int32)}
    for place in range(10):
        scale = torch.ones(1, 1, 10)
        scale[..., place] = float("nan")
        given = (q, cache, cache)
        if 3 <= place < 7:
            with pytest.raises(ArgumentError, match=f"k_scale.*token {place}"):
                portattn.decode_attention(*given, **lengths, k_scale=scale, v_scale=scale.nan_to_num())
        else:
            assert portattn.decode_attention(*given, **lengths, k_scale=scale, v_scale=scale).isfinite().all()


def test_numbers_below_the_normal_ones_are_stored_alike(device: Device) -> None:
    """The interpreter widened a bfloat16 below 2^-126 to another number."""
    tokens = torch.full((1, 1, 16), 5e-39, dtype=torch.bfloat16, device=device.name)
    scale, slots = torch.tensor(1e-40, device=device.name), torch.tensor([0], device=device.name)
    stored = []
    for backend in ("reference", device.path):
        cache = torch.zeros(1, 1, 1, 16, dtype=torch.int8, device=device.name)
        portattn.write_pages(tokens, tokens, cache, cache.clone(), slots, k_scale=scale, v_scale=scale, backend=backend)
        stored.append(cache)
    assert torch.equal(*stored)
    assert stored[0].unique().tolist() == [50]
