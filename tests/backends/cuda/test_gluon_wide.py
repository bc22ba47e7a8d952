"""The scheduled forward of wide heads: when it is planned, its code, and its numbers on a chip."""

import math
from typing import Any

import msgspec
import pytest
import torch
from support import random_call
from variantchip import assert_variant_right, device_for

import portattn
from portattn import Problem
from portattn.backends.cuda.hopper_forward.other_variants import WideVariant
from portattn.config import Settings
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.testing import findings

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
VARIANT = WideVariant()
BASE = Problem(
    op="attention", batch=2, heads_q=4, heads_k=2, seq_q=300, seq_k=333, head_dim=512, dtype="bf16", return_lse=True,
)  # fmt: skip
PACKED: dict[str, Any] = {
    "op": "varlen_attention", "batch": 4, "seq_q": 300, "seq_k": 300, "total_q": 700, "total_k": 700,
}  # fmt: skip
LENGTHS: dict[str, Any] = {"seqlens_q": True, "seqlens_k": True}
CAUSAL: dict[str, Any] = {"causal": "bottom_right"}


def problem(**fields):
    head_dim = fields.get("head_dim", 512)
    return msgspec.structs.replace(BASE, **{"head_dim_v": head_dim} | fields)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "narrow": ({"head_dim": 256}, "takes heads of 257 to 512 columns, not 256"),
    "wider": ({"head_dim": 520}, "takes heads of 257 to 512 columns, not 520"),
    "values": ({"head_dim_v": 256}, "takes K and V of one width, not 512 and 256"),
    "columns": ({"head_dim": 260}, "takes heads of a multiple of 8 columns, not 260"),
    "window": ({"window_left": 8}, "takes no window"), "sinks": ({"sinks": True}, "takes no sinks"),
    "gradients": ({"needs_grad": True}, "takes no needs_grad"), "fp32": ({"dtype": "fp32"}, "takes fp16 and bf16"),
    "unaligned": ({"aligned": False}, "reads through descriptors"), "empty": ({"seq_k": 0}, "seq_k is 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_planned_where_it_can_run_and_elsewhere_says_why_not(name):
    assert plan(problem(), SM_90).path == plan(problem(**PACKED, head_dim=264), SM_90).path == VARIANT.name
    fields, reason = REFUSED[name]
    assert reason in VARIANT.rejects(problem(**fields), SM_90).reason
    assert plan(problem(**fields), SM_90).path != VARIANT.name
    with pytest.raises(portattn.PathUnavailable, match=VARIANT.name):
        plan(problem(**fields), SM_90, settings=Settings(backend=VARIANT.name))


FORMS: dict[str, dict[str, Any]] = {
    "whole": {}, "causal": CAUSAL, "packed": PACKED, "packed, causal": PACKED | CAUSAL,
    "padded": LENGTHS | {"causal": "top_left"}, "narrow": CAUSAL | {"head_dim": 320, "return_lse": False},
}  # fmt: skip
# A predicated pair of the producer's uniform registers, which ptxas carries over its loop: once a tile.
SPILLS = {"packed, causal": 16}


@pytest.mark.compiles
@pytest.mark.parametrize("form", FORMS)
def test_it_compiles_without_spills_in_its_loops(gluon_compiler, gluon_target, form):
    p = problem(**FORMS[form])
    (kernel,), failed, _ = findings.compile_variant(VARIANT, plan(p, gluon_target), gluon_target, gluon_compiler, 120.0)
    assert failed is None, failed
    assert kernel.function == "wide_forward"
    assert kernel.facts["spills"] <= SPILLS.get(form, 0)
    assert "serialized_wgmma" not in kernel.facts
    assert [str(gate) for gate in findings.check_variant(VARIANT, p, gluon_target, (kernel,)) if not gate.passed] == []


@pytest.fixture
def chip(device):
    return device_for(VARIANT, BASE, device)


@pytest.mark.parametrize("head_dim", [264, 320, 384, 512])
@pytest.mark.parametrize("form", FORMS)
def test_numbers(chip, form, head_dim):
    for seed, dtype in enumerate(("bf16", "fp16")):
        p = problem(**FORMS[form] | {"head_dim": head_dim, "dtype": dtype})
        assert_variant_right(VARIANT, random_call(p, seed, device=chip.name, extremes=True))
    assert_variant_right(VARIANT, random_call(p, 2, device=chip.name, scale=0.0))


@pytest.mark.parametrize("rows", [1, 64, 65, 128, 129, 2100])
@pytest.mark.parametrize("keys", [1, 63, 64, 129, 2100])
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_lengths_at_tiles_edges(chip, rows, keys, causal):
    p = problem(seq_q=rows, seq_k=keys, causal=causal, layout="bshd")
    assert_variant_right(VARIANT, random_call(p, rows + keys, device=chip.name))


def test_the_public_call_takes_it_keeps_it_and_replays_it(chip):
    q, k, v = (torch.randn(2, h, 300, 512, device=chip.name, dtype=torch.bfloat16) for h in (4, 2, 2))
    lengths = torch.tensor([300, 77], device=chip.name, dtype=torch.int32)
    first = portattn.attention(q, k, v, causal=True, seqlens_k=lengths)
    assert portattn.last_plan().path == VARIANT.name
    assert torch.equal(first, portattn.attention(q, k, v, causal=True, seqlens_k=lengths))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = portattn.attention(q, k, v, causal=True, seqlens_k=lengths)
    lengths.copy_(torch.tensor([0, 299], dtype=torch.int32))
    for _ in range(2):
        held.fill_(math.nan)
        graph.replay()
        assert torch.equal(held, portattn.attention(q, k, v, causal=True, seqlens_k=lengths))
