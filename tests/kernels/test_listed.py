"""mla_attention over lists of slots: each query's keys, with holes, lengths and repeated slots, for all heads."""

import itertools
import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from opcalls import assert_right as assert_right_to_caller
from opcalls import given, perform, pretend_accelerator, use_small_tiles, watched
from support import Device, assert_right, random_call, run_core

import portattn
from portattn import Problem, Registry, plan
from portattn.integrations import dtensor
from portattn.launch import cache
from portattn.planning.kernel_specs import CORES
from portattn.reference import blockwise
from portattn.schema.call import Call

LISTED: dict[str, Any] = {
    "op": "mla_attention", "batch": 3, "heads_q": 5, "heads_k": 1, "seq_q": 2, "seq_k": 40, "tokens": 40,
    "head_dim": 48, "head_dim_v": 32, "page_size": 16, "dtype": "fp32", "seqlens_k": True, "return_lse": True,
}  # fmt: skip
PACKED = {"batch": 1, "seq_q": 5, "total_q": 5}
BACKENDS = "reference", pytest.param("interpreter", marks=pytest.mark.interpreter)
CASES: dict[str, dict[str, Any]] = {
    "queries": {},
    "no_lengths_apart": {"seqlens_k": False, "pages_in_line": False, "dtype": "fp16"},
    "tiles_of_heads_bshd": {"heads_q": 20, "dtype": "bf16", "sinks": True, "layout": "bshd", "seq_q": 1},
    "packed": PACKED | {"dtype": "fp16", "page_size": 5},
    "whole_rows": {"head_dim": 32, "softcap": True},
    "negative": {"negative_scale": True, "tokens": 7, "page_size": 1, "return_lse": False},
    "ds_mla": {"dtype": "bf16", "head_dim": 160, "head_dim_v": 128, "kv_format": "fp8_ds_mla", "sinks": True},
    "e4m3_tokens": {"dtype": "bf16", "kv_format": "e4m3", "kv_scales": "token"},
    "int8_head": {"dtype": "fp16", "kv_format": "int8", "kv_scales": "head"} | PACKED,
}


def call_of(name: str = "queries", seed: int = 0, place: str = "cpu", **fields: Any) -> Call:
    scale = -0.2 if name == "negative" else None
    strides = "spare" if name == "no_lengths_apart" else "plain"
    p = Problem(**(LISTED | CASES[name] | fields))
    return random_call(p, seed, device=place, extremes=bool(seed % 2), scale=scale, strides=strides)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_the_oracles_results(device: Device, name: str, seed: int, splits: int) -> None:
    """NaN lies in rows that no list names, in holes' and in places behind topk_length."""
    call = call_of(name, seed, device.name)
    lowering = {"reads": "inside"} if splits > 1 else {}
    assert_right(call, *run_core(device, call, lowering, launch={"splits": splits}))


@pytest.mark.parametrize("elements", [0, 1500])
@pytest.mark.parametrize("name", CASES)
def test_the_reference_takes_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch, name: str, elements: int) -> None:
    if elements:
        monkeypatch.setattr(blockwise, "CPU_SCORE_ELEMENTS", elements)
    call = call_of(name, seed=1)
    assert_right(call, *blockwise.run(call))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_public_calls(monkeypatch: pytest.MonkeyPatch, device: Device, name: str, backend: str) -> None:
    if device.path != "interpreter":
        pytest.skip("both paths of a CPU")
    use_small_tiles(monkeypatch)
    call = call_of(name, seed=1)
    found = perform("mla_attention", given(call), backend=backend)
    assert_right_to_caller(call, *(found if call.problem.return_lse else (found, None)))
    assert portattn.last_plan().path == backend


def latents(pages: int = 6) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 3, 32), (2, 2, 3, 16), (pages, 4, 48))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def int32(*rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


ATTEND = {"scale": 0.2, "layout": "bshd", "return_lse": True}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_list_of_a_sequences_slots_is_that_sequence(backend: str) -> None:
    """Holes among them change nothing, and a slot that is listed twice counts twice."""
    q_nope, q_rope, pages = latents()
    table, lengths = int32([3, 1, 5], [0, 4, 2]), int32(10, 7)
    slots = (table[:, :, None] * 4 + torch.arange(4, dtype=torch.int32)).flatten(1)
    slots = torch.where(torch.arange(12) < lengths[:, None], slots, -1)
    slots = torch.cat([torch.full_like(slots[:, :3], -7), slots], dim=1)[:, None].expand(2, 2, 15).contiguous()
    paged = portattn.mla_attention(q_nope, q_rope, pages, table, lengths, backend="reference", **ATTEND)
    listed = portattn.mla_attention(q_nope, q_rope, pages, indices=slots, backend=backend, **ATTEND)
    torch.testing.assert_close(paged, listed, atol=2e-6, rtol=2e-6)
    twice = torch.cat([slots, slots[..., 3:4]], dim=2)
    found = portattn.mla_attention(q_nope, q_rope, pages, indices=twice, backend=backend, **ATTEND)
    bias = torch.zeros(2, 1, 1, 12)
    bias[..., 0] = math.log(2.0)
    weighted = portattn.mla_attention(q_nope, q_rope, pages, table, lengths, bias=bias, backend="reference", **ATTEND)
    torch.testing.assert_close(weighted, found, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_without_a_key_give_0_and_minus_infinity(backend: str) -> None:
    q_nope, q_rope, pages = latents()
    pages.fill_(float("nan"))
    slots, lengths = torch.full((2, 2, 9), -1, dtype=torch.int32), int32([9, 0], [3, 9])
    slots[0, 1], slots[1, 0, 3:] = 5, 5
    named: dict[str, Any] = {"indices": slots, "topk_length": lengths, "backend": backend, **ATTEND}
    out, lse = portattn.mla_attention(q_nope, q_rope, pages, **named)
    assert not out.any()
    assert lse.eq(float("-inf")).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_scales_of_lists_of_holes(backend: str) -> None:
    q_nope, q_rope, pages = latents()
    named: dict[str, Any] = {"kv_scale": torch.ones(6, 4), "indices": torch.full((2, 2, 9), -1, dtype=torch.int32)}
    stored = pages.to(torch.float8_e4m3fn)
    out, _ = portattn.mla_attention(q_nope.half(), q_rope.half(), stored, **named, backend=backend, **ATTEND)
    assert not out.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_without_rows_and_lists_in_a_wider_buffer(backend: str) -> None:
    q_nope, q_rope, pages = latents()
    for batch, rows in ((0, 2), (2, 0)):
        shape = (batch, rows, 9)
        out = portattn.mla_attention(q_nope[:batch, :rows], q_rope[:batch, :rows], pages, scale=0.2, layout="bshd",
                                     indices=torch.zeros(shape, dtype=torch.int32), backend=backend)  # fmt: skip
        assert out.shape == (batch, rows, 3, 32)
    buffer = torch.randint(24, (2, 32), dtype=torch.int32)
    named: dict[str, Any] = {"backend": backend, **ATTEND}
    wide = portattn.mla_attention(q_nope[:, :1], q_rope[:, :1], pages, indices=buffer[:, None, :8], **named)
    own = portattn.mla_attention(q_nope[:, :1], q_rope[:, :1], pages, indices=buffer[:, None, :8].contiguous(), **named)
    assert torch.equal(wide[0], own[0])


def test_one_split_gives_the_same_bits_in_every_batch(device: Device) -> None:
    call = call_of(place=device.name, heads_q=20, num_splits=1, layout="bshd", seqlens_k=False, dtype="bf16")
    whole, _ = run_core(device, call)
    for b, row in itertools.product(range(3), range(2)):
        at, of = (slice(b, b + 1), slice(None), slice(row, row + 1)), call.problem
        alone = replace(
            call, problem=msgspec.structs.replace(of, batch=1, seq_q=1), q=call.q[at], q_rope=call.q_rope[at],  # type: ignore[index]
            indices=call.indices[b : b + 1, row : row + 1],
        )  # fmt: skip
        assert torch.equal(run_core(device, alone)[0], whole[at])
    target = Registry.load().target("cuda:sm_90", "triton==3.6.0")
    sizes = ({"batch": 1, "seq_q": 1}, {"batch": 64, "seq_q": 4}, {"batch": 1, "seq_q": 4096, "total_q": 4096})
    wide = LISTED | {"dtype": "bf16", "heads_q": 128, "head_dim": 576, "head_dim_v": 512, "num_splits": 1}
    plans = [plan(Problem(**wide | size), target).specialised for size in sizes]
    choices = {tuple(getattr(lowering, name) for name in CORES["mla_attention"].choices) for lowering, _ in plans}
    assert len(choices) == len({launch for _, launch in plans}) == 1


def test_wild_numbers_that_nothing_validates_stay_inside(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.path != "interpreter":
        pytest.skip("addresses are watched under the interpreter")
    use_small_tiles(monkeypatch)
    q_nope, q_rope, pages = latents()
    wild = torch.tensor([2**31 - 1, 24, -(2**31), 23, 2**30, -1], dtype=torch.int32).repeat(2, 2, 7)
    for lengths in (int32([2**31 - 1, 43], [-5, -(2**31)]), None):
        with watched(monkeypatch) as kernels:
            arguments: dict[str, Any] = {"indices": wild, "topk_length": lengths, "validate": False, **ATTEND}
            out, _ = portattn.mla_attention(q_nope, q_rope, pages, backend="interpreter", **arguments)
        assert kernels == ["decode_split"]
        expected, _ = portattn.mla_attention(q_nope, q_rope, pages, backend="reference", **arguments)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


SLOTS, LENGTHS = int32([[0, 3], [-1, 23]], [[1, 1], [2, 2]]), int32([2, 1], [0, 2])
TABLE = int32([0, 1], [2, 3])
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "slot": ({"indices": SLOTS + 1, "topk_length": None}, r"indices\[0, 1, 1\] is 24, but must be below 24, the slots"),
    "length": ({"topk_length": LENGTHS + 1}, r"topk_length\[0, 0\] is 3, but must be in 0..2"),
    "table": ({"page_table": TABLE}, r"page_table is \(2, 2\), but must be absent with indices"),
    "lengths": ({"seqlens_k": int32(1, 2)}, r"seqlens_k is \(2,\), but must be absent with indices"),
    "causal": ({"causal": True}, "causal is True, but must be absent with indices"),
    "window": ({"window": (3, 0)}, r"window is \(3, 0\), but must be absent with indices"),
    "axes": ({"indices": SLOTS[0]}, r"indices.ndim is 2, but must be 3: \(batch, seq_q, topk\)"),
    "shape": ({"indices": SLOTS[:1]}, r"indices.shape is \(1, 2, 2\), but must be \(batch, seq_q, topk\), \(2, 2, 2\)"),
    "places": ({"indices": SLOTS[..., :0]}, r"indices.shape\[-1\] is 0, but must be from 1 to"),
    "dtype": ({"indices": SLOTS.long()}, "indices.dtype is torch.int64, but must be torch.int32"),
    "apart": (
        {"indices": SLOTS.transpose(0, 1).contiguous().transpose(0, 1)},
        r"indices.stride\(0\) is 2, but must be",
    ),
    "of_a_length": (
        {"topk_length": LENGTHS[0]},
        r"topk_length.shape is \(2,\), but must be \(batch, seq_q\), \(2, 2\)",
    ),
    "alone": ({"indices": None}, r"topk_length is \(2, 2\), but goes with indices"),
    "no_pages": ({"kv_pages": torch.zeros(0, 4, 48)}, "kv_pages's pages is 0, but must be at least 1 with indices"),
    "whole": ({"q_rope": None}, "q_rope is 'NoneType', but must be a torch.Tensor: kv_pages have 48 columns, and"),
    "dtypes": ({"q_rope": torch.zeros(2, 2, 3, 16).half()}, "q_rope.dtype is torch.float16, but must be"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_argument_value_and_limit(name: str) -> None:
    q_nope, q_rope, pages = latents()
    changes, message = ERRORS[name]
    named = {"q_nope": q_nope, "q_rope": q_rope, "kv_pages": pages, "indices": SLOTS, "topk_length": LENGTHS}
    portattn.mla_attention(**named, **ATTEND)
    with pytest.raises(portattn.ArgumentError, match=message):
        portattn.mla_attention(**(named | ATTEND | changes))


@pytest.mark.parametrize("name", ["queries", "packed", "whole_rows", "ds_mla"])
def test_a_kept_call_serves_other_sizes(device: Device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend_accelerator(monkeypatch)
    first = call_of(name, seed=1)
    assert_right_to_caller(first, *perform("mla_attention", given(first)))
    more = {"total_q": 9} if first.problem.packed else {"batch": 5}
    other = call_of(name, seed=3, seq_q=9 if first.problem.packed else 2, tokens=56, **more)
    assert_right_to_caller(other, *perform("mla_attention", given(other)))
    classes = [cached for kind in cache.every_kind() for cached in kind.classes]
    assert {cached.why_fixed for cached in classes} == {""}
    cache.forget()


@pytest.mark.parametrize("name", ["queries", "packed"])
def test_operators_fakes_and_transforms(name: str) -> None:
    arguments = given(call_of(name, seed=1))
    expected = portattn.mla_attention(**arguments)
    compiled = torch.compile(lambda named: portattn.mla_attention(**named), backend="aot_eager", fullgraph=True)
    mapped = torch.vmap(lambda q: portattn.mla_attention(**(arguments | {"q_nope": q})))
    for found in (compiled(arguments), [each[0] for each in mapped(arguments["q_nope"][None])]):
        torch.testing.assert_close(expected, found, equal_nan=True)
    named = arguments | {"k": None}
    assert dtensor._axes(named, "indices", arguments["indices"]) == (None if name == "packed" else 0, None)


def test_gradients_of_the_reference_are_those_of_gathered_rows() -> None:
    leaves = [tensor.requires_grad_() for tensor in latents(pages=3)]
    q_nope, q_rope, pages = leaves
    slots = torch.tensor([3, 7, -1, 3, 11], dtype=torch.int32).expand(2, 2, 5).contiguous()
    out, lse = portattn.mla_attention(q_nope, q_rope, pages, indices=slots, backend="reference", **ATTEND)
    found = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
    rows = pages.flatten(0, 1)[[3, 7, 3, 11]].expand(2, 1, 4, 48)
    queries = torch.cat([q_nope, q_rope], dim=-1).transpose(1, 2)
    out, lse = portattn.attention(queries, rows, rows[..., :32], scale=0.2, return_lse=True)
    torch.testing.assert_close(found, torch.autograd.grad(out.square().sum() + lse.sum(), leaves), atol=1e-5, rtol=1e-5)


def test_plans_split_few_queries_and_other_paths_say_why_not() -> None:
    target = Registry.load().target("cuda:sm_90", "triton==3.6.0")
    wide = LISTED | {"dtype": "bf16", "head_dim": 576, "head_dim_v": 512, "page_size": 64, "tokens": 2048}
    for heads, rows in itertools.product((16, 32, 128), (1, 16)):
        made = plan(Problem(**wide | {"heads_q": heads, "batch": rows, "seq_q": 1}), target)
        assert made.kernel == "mla_split"
        assert made.specialised[1].splits > 1
        assert any("gluon_mla: it takes pages that follow each other in memory" in note for note in made.notes)
    assert plan(Problem(**wide | {"heads_q": 128, "batch": 1, "seq_q": 4096}), target).specialised[1].splits == 1
    with pytest.raises(portattn.ArgumentError, match="causal is True, but goes without tokens"):
        Problem(**LISTED | {"causal": "bottom_right"})
