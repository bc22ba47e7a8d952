"""Quantised caches through the public operations: layouts of serving engines, graphs, transforms, handles, plans."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import opcalls
import pytest
import torch
from graphs import RECORDERS, a_model
from opcalls import given, perform, problem
from support import Device, assert_right, random_call

import portattn
from portattn import ArgumentError
from portattn.api.request import request_of
from portattn.api.signatures import named_arguments
from portattn.api.torch_ops import arguments_of
from portattn.launch import cache
from portattn.schema.call import Call
from portattn.schema.problem_limits import INTEGERS

NAMES = ("decode", "paged", "ragged", "sparse", "sparse paged", "mla", "mla ragged")
FORMATS = [("e4m3", "none"), ("e5m2", "head"), ("int8", "token"), ("int4", "token")]
# Scales of tokens that a mask hides are checked as others are: these calls hide none but by lengths.
SMALL = {"dtype": "bf16", "return_lse": True, "leftpad_k": False}


def call_of(name: str, kind: str, scales: str, **fields: object) -> Call:
    return random_call(problem(name, **(SMALL | {"kv_format": kind, "kv_scales": scales} | fields)), seed=1)


@pytest.mark.parametrize("backend", ["reference", "interpreter"])
@pytest.mark.parametrize(("name", "kind", "scales"), [
    (name, *stored) for name in NAMES for stored in FORMATS if stored[0] != "int4" or not name.startswith("mla")
])  # fmt: skip
@pytest.mark.interpreter
def test_the_operations_are_right(name: str, kind: str, scales: str, backend: str) -> None:
    call = call_of(name, kind, scales)
    out, lse = perform(call.problem.op, given(call), backend=backend)
    if call.problem.packed:
        out, lse = out.transpose(0, 1)[None], lse[None]
    assert_right(call, out, lse)


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
    p = problem("mla", **SMALL, kv_format="fp8_ds_mla", head_dim=576, head_dim_v=512, page_size=64, seq_k=640)
    plan = portattn.plan(p, portattn.target("cuda:sm_90", "triton==3.6.0"))
    assert (plan.path, plan.kernel) == ("triton", "mla_split")
    assert any("gluon_mla" in note and "kv_format" in note for note in plan.notes), plan.notes


@pytest.mark.parametrize(("kind", "scales"), FORMATS)
@pytest.mark.parametrize("name", ["decode", "paged"])
def test_opcheck(name: str, kind: str, scales: str, device: Device) -> None:
    model, _ = a_model(name, device, **SMALL, kv_format=kind, kv_scales=scales)
    request = request_of(model.op, named_arguments(model.op)(**model.arguments))
    operator = getattr(torch.ops.portattn, model.op).default
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if kind in INTEGERS:  # torch compares arguments for it, which it cannot do with float8
        checks.append("test_schema")
    found = torch.library.opcheck(operator, arguments_of(model.op, *request.parts), test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("recorder", ["torch.export", "make_fx, symbolic"])
@pytest.mark.parametrize(("name", "kind"), [("decode", "e4m3"), ("paged", "e4m3"), ("paged", "int4")])
def test_a_graph_gives_the_eager_result(recorder: str, name: str, kind: str, device: Device) -> None:
    model, tensors = a_model(name, device, **SMALL, kv_format=kind, kv_scales="token")
    graph = RECORDERS[recorder](model, tensors)
    for ours, eager in zip(graph(*tensors), model(*tensors), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "scales"), FORMATS)
def test_vmap(kind: str, scales: str) -> None:
    """Two scales of each kind: one mapped, one that all share."""
    calls = [given(call_of("decode", kind, scales, seqlens_k=False, return_lse=False)) for _ in range(2)]
    names = [name for name in ("q", "k_cache", "v_cache", "k_scale") if name in calls[0]]
    shared = {name: value for name, value in calls[0].items() if name not in names}
    calls[1]["q"] = calls[1]["q"] * 0.5
    if "k_scale" in names:
        calls[1]["k_scale"] = calls[1]["k_scale"] * 2.0

    def one(*tensors: torch.Tensor) -> torch.Tensor:
        return portattn.decode_attention(
            **shared | dict(zip(names, tensors, strict=True)), **{} if "seqlens_k" in shared else {"seqlens_k": None}
        )

    stacked = [torch.stack([call[name].contiguous() for call in calls]) for name in names]
    each = torch.stack([one(*(call[name] for name in names)) for call in calls])
    torch.testing.assert_close(torch.vmap(one)(*stacked), each, rtol=0, atol=0)


def test_autocast_leaves_the_cache_as_it_is() -> None:
    arguments = given(call_of("decode", "e4m3", "head"))
    expected, _ = portattn.decode_attention(**arguments)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = portattn.decode_attention(**arguments | {"q": arguments["q"].float()})
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_handle_runs_with_other_data(name: str) -> None:
    call = call_of(name, "int8", "token")
    arguments = given(call)
    handle = portattn.prepare(call.problem.op, **arguments)
    tensors = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    queries = "q" if "q" in tensors else "q_nope"
    tensors[queries] = tensors[queries] * -0.5
    scale = "kv_scale" if call.problem.op == "mla_attention" else "v_scale"
    tensors[scale] = tensors[scale] * 2.0
    expected = perform(call.problem.op, tensors)
    found = handle.run(**tensors)
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)


def test_warmup_takes_specs_in_words() -> None:
    spec = {
        "op": "decode_attention", "q": "bf16[B,8,1,64]", "k_cache": "e4m3[B,2,128,64]", "v_cache": "e4m3[B,2,128,64]",
        "seqlens_k": None, "k_scale": "fp32[B,2]", "v_scale": "fp32[B,2]", "sizes": {"B": [1, 4]},
    }  # fmt: skip
    portattn.warmup([spec])


def test_the_plan_says_how_the_cache_is_stored() -> None:
    arguments = given(call_of("paged", "int8", "token"))
    text = portattn.explain("paged_attention", **arguments)
    assert "cache int8 scales token" in text
    assert "sdpa" in text
    assert "kv_format" in text


def test_a_named_path_that_reads_none_is_an_error() -> None:
    arguments = given(call_of("decode", "e4m3", "none"))
    with pytest.raises(portattn.PathUnavailable, match="kv_format"):
        portattn.decode_attention(**arguments, backend="sdpa")


def test_problems_of_quantised_caches_are_checked() -> None:
    good = problem("decode", dtype="bf16", kv_format="int8", kv_scales="head")
    for changes, named in (
        ({"kv_scales": "none"}, "must be head or token"), ({"dtype": "fp32"}, "must be fp16 or bf16"),
        ({"kv_format": "as_q"}, "goes with a kv_format"), ({"kv_format": "mxfp4"}, "must be one of as_q, e4m3"),
        ({"kv_format": "nvfp4", "head_dim_v": 24}, "must be a multiple of 16 with kv_format nvfp4"),
        ({"kv_format": "nvfp4", "head_dim": 32, "head_dim_v": 32, "kv_scales": "token"}, "must be none or head"),
        ({"kv_format": "nvfp4", "op": "attention"}, "attention takes no nvfp4"),
        ({"kv_format": "int4", "kv_scales": "none"}, "must be head or token with kv_format int4"),
        ({"kv_format": "int4", "head_dim": 33}, "must be even with kv_format int4"),
        ({"kv_format": "int4", "head_dim_v": 31}, "must be even with kv_format int4"),
        ({"kv_format": "int4", "op": "attention"}, "attention takes no operands of int4"),
        ({"kv_format": "int4", "op": "mla_attention", "page_size": 8, "heads_q": 4, "heads_k": 1, "leftpad_k": False},
         "takes no latent rows of int4"),
        ({"op": "attention_backward"}, "reads keys and values in q's dtype"),
        ({"kv_format": "fp8_ds_mla"}, "reads no latent rows"),
    ):  # fmt: skip
        with pytest.raises(portattn.ArgumentError, match=named):
            msgspec.structs.replace(good, **changes)


@pytest.mark.interpreter
@pytest.mark.parametrize(("name", "kind", "scales"), [
    *((name, "e4m3", scales) for name in NAMES for scales in ("none", "head", "token")),
    *((name, "int4", "token") for name in ("decode", "paged", "ragged", "sparse paged")),
    *((name, "nvfp4", "head") for name in ("decode", "paged", "ragged")),
])  # fmt: skip
def test_a_cached_launch_serves_other_sizes(name: str, kind: str, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors that count as an H100's: the second call is of the first one's class, and neither is fixed."""
    opcalls.pretend_accelerator(monkeypatch)
    cache.forget()
    results = []
    for size in (96, 112):
        page_size = 0 if name in ("decode", "sparse") else 8
        widths = {} if name.startswith("mla") else {"head_dim": 32, "head_dim_v": 32}
        call = call_of(name, kind, scales, seq_k=size, page_size=page_size, **widths)
        with portattn.settings(canary="never"):
            results.append((call, perform(call.problem.op, given(call), backend="triton", scale=0.25)))
            again = perform(call.problem.op, given(call), backend="triton", scale=0.25)
        for first, second in zip(results[-1][1], again, strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=0)
    (kind,) = cache.every_kind()
    assert [one.why_fixed for one in kind.classes] == [""] * len(kind.classes)
    cache.forget()
    for call, (out, lse) in results:
        if call.problem.packed:
            out, lse = out.transpose(0, 1)[None], lse[None]
        assert_right(replace(call, scale=0.25), out, lse)


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
