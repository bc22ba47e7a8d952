"""The scheduled latent kernel of sm_90: when it is planned, that it compiles clean, and its numbers on such a chip."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from support import random_call
from variantchip import assert_variant_right, device_for

import portattn
from portattn import Problem
from portattn.backends.cuda.hopper_latent.variant import KEYS, LatentVariant, row_tile, split_count
from portattn.config import Settings
from portattn.launch.run import run_variant
from portattn.planning.kernel_specs import ceil_div
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.call import TENSORS, Call
from portattn.testing import findings

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
VARIANT = LatentVariant()
BASE = Problem(
    op="mla_attention", batch=4, heads_q=16, heads_k=1, seq_q=1, seq_k=192, head_dim=576, head_dim_v=512, dtype="bf16",
    page_size=64, pages_in_line=True, seqlens_k=True, return_lse=True,
)  # fmt: skip


def problem(**fields):
    return msgspec.structs.replace(BASE, **fields)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": True}, "takes no softcap"), "window": ({"window_left": 8}, "takes no window"),
    "packed": ({"total_q": 7}, "takes no packed"), "gradients": ({"needs_grad": True}, "takes no needs_grad"),
    "small pages": ({"page_size": 16}, "takes pages of a multiple of 64 rows, not 16"),
    "scattered pages": ({"pages_in_line": False}, "takes pages that follow each other"),
    "unaligned": ({"aligned": False}, "reads through descriptors"),
    "another rank": ({"head_dim": 320, "head_dim_v": 256}, "takes rows of 512 + 64 columns, not 256 + 64"),
    "fp32": ({"dtype": "fp32"}, "takes fp16 and bf16, not fp32"),
    "top left": ({"causal": "top_left"}, "aligns causal masks at the bottom right"),
    "empty": ({"batch": 0}, "batch is 0"),
    "bytes": ({"kv_format": "fp8_ds_mla"}, "takes no rows of fp8_ds_mla without lists"),
    "listed e4m3": ({"kv_format": "e4m3", "tokens": 70}, "takes no rows of e4m3"),
    "listed sinks": ({"sinks": True, "tokens": 70}, "takes no sinks"),
}  # fmt: skip


def test_it_is_planned_where_it_can_run_and_only_there():
    assert plan(BASE, SM_90).path == "gluon_mla"
    assert plan(problem(causal="bottom_right", seq_q=3, layout="bshd", num_splits=2), SM_90).path == "gluon_mla"
    assert not plan(BASE, SM_90).fell_back
    assert plan(BASE, SM_90, settings=Settings(backend="triton")).path == "triton"
    for fields in ({}, {"kv_format": "fp8_ds_mla"}, {"total_q": 9, "batch": 1}, {"page_size": 1, "heads_q": 128}):
        assert plan(problem(tokens=2048, **fields), SM_90).path == "gluon_mla"
    other = plan(BASE, parse_target("cuda:sm_90", "flagtree==3.6.0"))
    assert (other.path, other.fell_back) == ("triton", False)
    assert any("not gluon_mla: it needs Triton 3.6 or newer" in note for note in other.notes)
    for target in ("cuda:sm_80", "cuda:sm_100", "rocm:gfx942"):
        made = plan(BASE, parse_target(target, "triton==3.6.0"))
        assert (made.path, [n for n in made.notes if "gluon" in n]) == ("triton", [])


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_runs_elsewhere_and_says_so(name):
    fields, reason = REFUSED[name]
    assert reason in VARIANT.rejects(problem(**fields), SM_90).reason
    if name == "gradients":  # no path has them
        with pytest.raises(portattn.PathUnavailable, match="mla_attention has no gradient"):
            plan(problem(**fields), SM_90)
        return
    made = plan(problem(**fields), SM_90)
    assert made.path != "gluon_mla"
    if made.path == "triton":
        assert any(reason in note for note in made.notes)
    with pytest.raises(portattn.PathUnavailable, match="gluon_mla"):
        plan(problem(**fields), SM_90, settings=Settings(backend="gluon_mla"))


def test_rows_and_splits():
    assert [row_tile(n) for n in (1, 2, 3, 64, 80)] == [(64, 1), (32, 2), (16, 4), (1, 64), (1, 64)]
    assert split_count(2, 128, 4096, 132) == 1  # 256 blocks fill the chip
    assert split_count(2, 1, 32768, 132) == 64  # two row tiles: 128 of 132 cores, 8 of 512 tiles each
    assert split_count(1, 1, 0, 132) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("seq_q", [1, 2, 3, 64, 80, 300])
def test_blocks_bring_what_their_rows_see_and_no_more(monkeypatch, seq_q, splits, causal):
    """The kernel's own division of the work, on plain numbers."""
    kernel = pytest.importorskip("portattn.backends.cuda.hopper_latent.kernel")
    heads, queries = row_tile(seq_q)
    head_tiles, query_tiles = ceil_div(5, heads), ceil_div(seq_q, queries)
    monkeypatch.setattr(kernel, "_KEYS", KEYS)
    monkeypatch.setattr(kernel, "LatentWork", lambda *fields: SimpleNamespace(**dict(zip(WORK, fields, strict=True))))
    for length in (0, 1, 63, 64, 65, 299, 300, 704):
        rows = []
        for tile in range(head_tiles * query_tiles):
            seen, shares = 0, []
            for split in range(splits):
                at, of = (tile, split, Number(1)), (head_tiles * query_tiles, splits, 2)
                numbers = SimpleNamespace(
                    program_id=at.__getitem__, num_programs=of.__getitem__, minimum=min, maximum=max, cdiv=ceil_div,
                    load=lambda lengths: lengths, int64=int,
                )  # fmt: skip
                monkeypatch.setattr(kernel, "gl", numbers)
                work = kernel._work.fn(100, 7, length - 1, 4096, head_tiles, seq_q, heads, queries, causal, False)
                assert (work.table, work.batch, work.length) == (107, 1, length)
                assert work.tiles >= 0
                assert work.first == seen or work.tiles == 0
                seen += work.tiles
                shares.append(work.tiles)
            rows.append((work.head, work.query))
            ends = [length - (seq_q - 1) + query if causal else length
                    for query in range(work.query, min(work.query + queries, seq_q))]  # fmt: skip
            ends = [min(max(end, 0), length) for end in ends]
            assert seen * KEYS >= ends[-1]
            assert max(work.unmasked, 0) <= ends[0]
            if len(ends) == queries:
                assert (seen - 1) * KEYS < max(ends[-1], 1), "a tile that no row sees"
            assert max(shares) <= ceil_div(seen, splits)
        assert sorted(rows) == sorted((h * heads, q * queries) for h in range(head_tiles) for q in range(query_tiles))


class Number(int):
    def to(self, dtype):
        return dtype(self)


WORK = ("table", "batch", "head", "query", "length", "unmasked", "first", "tiles", "LISTED")
FORMS: dict[str, dict[str, Any]] = {
    "split": {"num_splits": 2}, "whole": {"num_splits": 1},
    "causal": {"num_splits": 2, "seq_q": 2, "causal": "bottom_right"},
    "lists": {"num_splits": 2, "tokens": 300},
    "lists of bytes": {"num_splits": 1, "tokens": 300, "kv_format": "fp8_ds_mla"},
}  # fmt: skip


@pytest.mark.compiles
@pytest.mark.parametrize("form", FORMS)
def test_it_compiles_without_spills(gluon_compiler, gluon_target, form):
    """For sm_90, which need not be here: registers, local memory and ptxas's own warnings."""
    p = problem(**FORMS[form])
    made = plan(p, gluon_target)
    assert made.path == VARIANT.name
    kernels, failed, _ = findings.compile_variant(VARIANT, made, gluon_target, gluon_compiler, 120.0)
    assert failed is None, failed
    assert kernels[0].function == "latent_decode"
    assert (len(kernels) == 2) is (FORMS[form]["num_splits"] > 1)  # and the one that merges
    for kernel in kernels:
        assert kernel.facts["spills"] == 0, kernel.function
        assert "serialized_wgmma" not in kernel.facts, kernel.function
    assert [str(gate) for gate in findings.check_variant(VARIANT, p, gluon_target, kernels) if not gate.passed] == []


@pytest.fixture
def chip(device):
    """A device that the kernel is for."""
    return device_for(VARIANT, BASE, device)


def assert_right(call):
    assert_variant_right(VARIANT, call)


SIZES: dict[str, dict[str, Any]] = {
    "one query": {}, "128 heads": {"heads_q": 128, "batch": 2}, "few heads": {"heads_q": 5},
    "two queries, causal": {"seq_q": 2, "causal": "bottom_right", "heads_q": 40},
    "three queries": {"seq_q": 3, "causal": "bottom_right"},
    "a chunk of prefill": {"seq_q": 80, "causal": "bottom_right", "heads_q": 2, "batch": 2},
    "a long chunk of prefill": {"seq_q": 300, "seq_k": 704, "causal": "bottom_right", "heads_q": 3, "batch": 2},
    "pages of 128": {"page_size": 128, "seq_k": 384}, "pages of 256": {"page_size": 256, "seq_k": 512, "dtype": "fp16"},
    "bshd": {"layout": "bshd", "seq_q": 2, "causal": "bottom_right"}, "no lse": {"return_lse": False},
    "lists": {"tokens": 300, "seq_q": 3, "dtype": "fp16"}, "lists, 128 heads": {"tokens": 77, "heads_q": 128},
    "lists, packed": {"tokens": 200, "batch": 1, "seq_q": 9, "total_q": 9, "page_size": 5},
    "lists, bshd, no lengths": {"tokens": 64, "layout": "bshd", "seq_q": 2, "seqlens_k": False},
    "lists of bytes": {"tokens": 300, "kv_format": "fp8_ds_mla", "heads_q": 70},
    "lists of bytes, short": {"tokens": 3, "kv_format": "fp8_ds_mla", "page_size": 1, "seq_q": 4},
}  # fmt: skip


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_numbers(chip, name, splits):
    p = problem(**SIZES[name], num_splits=splits)
    for seed in range(2):
        assert_right(random_call(p, seed, device=chip.name, extremes=True))
    assert_right(random_call(p, 2, device=chip.name, scale=0.0))


@pytest.mark.parametrize("lengths", [(0, 1, 2, 3), (63, 64, 65, 192), (0, 0, 0, 0), (191, 128, 127, 129)])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_lengths_at_tiles_edges(chip, lengths, dtype):
    call = random_call(problem(dtype=dtype), 4, device=chip.name)
    pages = call.k.shape[0]
    call.k = torch.randn(pages, 1, 64, 576, device=chip.name, dtype=call.k.dtype)
    call.v = call.k[..., :512]
    call.page_table = torch.arange(12, device=chip.name, dtype=torch.int32).view(4, 3).flip(1) % pages
    call.seqlens_k = torch.tensor(lengths, dtype=torch.int32, device=chip.name)
    for splits in (1, 2, 3):
        call.problem = problem(dtype=dtype, num_splits=splits)
        assert_right(call)


def test_the_public_call_takes_it_keeps_it_and_replays_it(chip):
    call = random_call(problem(return_lse=False), 5, device=chip.name)
    arguments = (call.q, call.q_rope, call.k[:, 0], call.page_table, call.seqlens_k)
    first = portattn.mla_attention(*arguments, scale=call.scale)
    assert portattn.last_plan().path == "gluon_mla"
    again = portattn.mla_attention(*arguments, scale=call.scale)
    assert torch.equal(first, again)
    core = portattn.mla_attention(*arguments, scale=call.scale, backend="triton")
    assert portattn.last_plan().path == "triton"
    torch.testing.assert_close(first, core, atol=2e-2, rtol=2e-2)
    swapped = portattn.mla_attention(
        call.q.transpose(1, 2), call.q_rope.transpose(1, 2), *arguments[2:], scale=call.scale, layout="bshd"
    )
    for _ in range(2):
        again = portattn.mla_attention(
            call.q.transpose(1, 2), call.q_rope.transpose(1, 2), *arguments[2:], scale=call.scale, layout="bshd"
        )
        assert torch.equal(swapped, again)
    assert torch.equal(swapped.transpose(1, 2), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = portattn.mla_attention(*arguments, scale=call.scale)
    call.seqlens_k.copy_(torch.tensor([7, 0, 100, 65], dtype=torch.int32)[: len(call.seqlens_k)])
    graph.replay()
    assert torch.equal(held, portattn.mla_attention(*arguments, scale=call.scale))


def test_strides_of_axes_of_one_element_are_anything(chip):
    call = random_call(problem(batch=1, heads_q=128), 8, device=chip.name)
    expected = run_variant(VARIANT, call)[1]
    call.q = torch.empty(128, 1, 512, 1, device=chip.name, dtype=call.q.dtype).permute(3, 0, 1, 2).copy_(call.q)
    assert call.q.stride()[0] % 8
    assert torch.equal(run_variant(VARIANT, call)[1], expected)


def test_queries_that_are_broadcast(chip):
    call = random_call(problem(), 9, device=chip.name)
    call.q, call.q_rope = (t[:1].expand(t.shape) for t in (call.q, call.q_rope))
    assert_right(call)


def test_prepared_runs_are_the_same(chip):
    call = random_call(problem(return_lse=True), 6, device=chip.name)
    arguments = (call.q, call.q_rope, call.k[:, 0], call.page_table, call.seqlens_k)
    handle = portattn.prepare("mla_attention", *arguments, scale=call.scale, return_lse=True)
    expected = portattn.mla_attention(*arguments, scale=call.scale, return_lse=True)
    out = torch.empty_like(expected[0])
    for _ in range(3):
        found = handle.run(*arguments, scale=call.scale, return_lse=True, out=out)
        assert found[0] is out
        assert torch.equal(out, expected[0])
        assert torch.equal(found[1], expected[1])


def test_repeats_are_bit_equal(chip):
    call = random_call(problem(batch=64, heads_q=128, seq_k=2048, return_lse=False), 7, device=chip.name)
    _, first, _ = run_variant(VARIANT, call)
    different = 0
    for _ in range(300):
        _, out, _ = run_variant(VARIANT, call)
        different += int(not torch.equal(out, first))
    assert different == 0


def test_tensors_are_those_of_a_call():
    views = VARIANT.views(problem(layout="bshd"), {name: torch.zeros(2, 3, 4, 5) for name in (*TENSORS, "out", "lse")})
    assert set(views) <= {field.name for field in dataclasses.fields(Call)} | {"out", "lse"}
    assert views["q"].shape == (2, 4, 3, 5)
    assert KEYS == 64
