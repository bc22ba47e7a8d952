"""The scheduled indexer of sm_90: when it is planned, that it compiles clean, and its numbers on such a chip."""

from typing import Any

import msgspec
import pytest
import torch
from variantchip import device_for

import portattn
from portattn import Problem
from portattn.backends.cuda.hopper_indexer.variant import IndexerVariant
from portattn.config import Settings
from portattn.launch.run import run_variant
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.testing import findings
from portattn.testing.random_writing import random_writing
from portattn.testing.verdict import judge

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
VARIANT = IndexerVariant()
BASE = Problem(
    op="indexer_logits", batch=1, heads_q=64, heads_k=1, seq_q=9, seq_k=500, head_dim=128, dtype="bf16",
    kv_format="e4m3", kv_scales="token",
)  # fmt: skip
PAGED: dict[str, Any] = {"batch": 3, "seq_q": 2, "seq_k": 448, "page_size": 64, "seqlens_k": True}


def problem(**fields):
    return msgspec.structs.replace(BASE, **fields)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "16 bits": ({"kv_format": "as_q", "kv_scales": "none"}, "takes e4m3 queries and keys, not as_q"),
    "narrow": ({"head_dim": 64, "head_dim_v": 64}, "takes heads of 128 columns, not 64"),
    "heads": ({"heads_q": 16}, "takes 32 or 64 heads, not 16"),
    "pages": (PAGED | {"page_size": 16}, "takes pages of a multiple of 64 rows, not 16"),
    "unaligned": ({"aligned": False}, "reads through descriptors"), "empty": ({"seq_q": 0}, "seq_q is 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_planned_where_it_can_run_and_elsewhere_says_why_not(name):
    assert plan(BASE, SM_90).path == plan(problem(**PAGED), SM_90).path == VARIANT.name
    fields, reason = REFUSED[name]
    made = plan(problem(**fields), SM_90)
    assert made.path == "triton"
    assert any(reason in note for note in made.notes)
    with pytest.raises(portattn.PathUnavailable, match=VARIANT.name):
        plan(problem(**fields), SM_90, settings=Settings(backend=VARIANT.name))


FORMS: dict[str, dict[str, Any]] = {
    "packed": {"seq_q": 100}, "few rows, no scales": {"seq_q": 3, "kv_scales": "none", "heads_q": 32}, "paged": PAGED,
    "pages of 128": PAGED | {"page_size": 128, "seq_k": 384, "seq_q": 70},
}  # fmt: skip


@pytest.mark.compiles
@pytest.mark.parametrize("form", FORMS)
def test_it_compiles_without_spills(gluon_compiler, gluon_target, form):
    p = problem(**FORMS[form])
    (kernel,), failed, _ = findings.compile_variant(VARIANT, plan(p, gluon_target), gluon_target, gluon_compiler, 120.0)
    assert failed is None, failed
    assert (kernel.function, kernel.facts["spills"]) == ("scheduled_index_scores", 0)
    assert "serialized_wgmma" not in kernel.facts
    assert [str(gate) for gate in findings.check_variant(VARIANT, p, gluon_target, (kernel,)) if not gate.passed] == []


@pytest.fixture
def chip(device):
    return device_for(VARIANT, BASE, device)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [{}, {"seq_q": 1}, {"seq_q": 65}, {"seq_k": 64 * 130}, {"seq_k": 128}], ids=str)
def test_numbers(chip, form, sizes):
    """Results start as NaN, and so do keys that no row sees, their scales, and pages behind a sequence's end."""
    for seed in range(2):
        call = random_writing(problem(**FORMS[form] | sizes), seed, device=chip.name)
        run_variant(VARIANT, call)
        facts = judge(call, call.new_out(), None)
        assert facts["wrong"] == 0
        assert facts["error"] <= facts["budget"]


def test_kept_calls_take_other_sizes_and_places(chip):
    q = torch.randn(300, 64, 128, device=chip.name).to(torch.float8_e4m3fn)
    k, weights = torch.randn(900, 128, device=chip.name).to(torch.float8_e4m3fn), torch.rand(300, 64, device=chip.name)
    ends = torch.arange(600, 900, device=chip.name, dtype=torch.int32)
    whole = portattn.indexer_logits(q, k, weights, row_ends=ends)
    for first, end in ((0, 100), (1, 6), (7, 300), (3, 4)):
        part = slice(first, end)
        assert torch.equal(portattn.indexer_logits(q[part], k, weights[part], row_ends=ends[part]), whole[part])
        assert portattn.last_plan().path == VARIANT.name
