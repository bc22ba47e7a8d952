"""What plans show of a lowering: the choices that the kernel's code of that problem reads, and no others."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from places import ROOT

import portattn
from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan as plan_problem
from portattn.planning.registry import parse_target
from portattn.schema.compile_record import CompileRecord
from portattn.schema.lowering import Lowering

H100 = parse_target("cuda:sm_90", "triton==3.6.0")
SIZES: dict[str, Any] = {
    "batch": 8,
    "heads_q": 32,
    "heads_k": 8,
    "seq_q": 1,
    "seq_k": 4096,
    "head_dim": 128,
    "dtype": "bf16",
}
UNREAD_BY_WORDS = {"k_tile", "block_order", "q_operand", "dot_precision"}


def shown(op: str = "decode_attention", **fields: Any) -> tuple[portattn.Plan, set[str]]:
    """The plan, and the names of the choices that its text has."""
    plan = portattn.plan(portattn.Problem(op=op, **SIZES | fields), H100)
    (line,) = [line for line in plan.explain().splitlines() if line.startswith("  lowering ")]
    return plan, {word.partition("=")[0] for word in line.split()[1:]}


@pytest.mark.parametrize(("op", "fields"), [("decode_attention", {}), ("paged_attention", {"page_size": 16})])
def test_words_have_no_tiles_of_keys(op: str, fields: dict[str, Any]) -> None:
    plan, found = shown(op, kv_format="e4m3", kv_scales="token", **fields)
    assert plan.lowering is not None
    assert plan.lowering.unpack == "ptx"
    assert set(CORES[op].choices) - found == UNREAD_BY_WORDS
    for part in ("attend_packed16.py", "paged_addressing.py", "unpack_int4.py"):
        source = (ROOT / "portattn" / "kernels" / part).read_text(encoding="utf-8")
        assert not [name for name in UNREAD_BY_WORDS if name.upper() in source], part


def test_warps_apart_have_one_way_to_read_keys() -> None:
    plan, found = shown()
    assert plan.lowering is not None
    assert plan.lowering.warps == "apart"
    assert set(CORES["decode_attention"].choices) - found == UNREAD_BY_WORDS


def test_warps_apart_of_dense_float32_show_their_products() -> None:
    sizes = {"batch": 2, "heads_q": 8, "heads_k": 8, "seq_q": 64, "seq_k": 64, "head_dim": 64, "dtype": "fp32"}
    plan, found = shown("attention", **sizes)
    assert plan.lowering is not None
    assert plan.lowering.warps == "apart"
    unread = {"k_tile", "block_order", "q_operand", "select", "operands", "drops"}
    assert set(CORES["attention"].choices) - found == unread


@pytest.mark.parametrize(
    ("op", "fields", "kernel"),
    [
        ("decode_attention", {}, "decode_split"),
        ("paged_attention", {"page_size": 16}, "paged_split"),
    ],
)
def test_a_plan_names_the_form_that_runs(op: str, fields: dict[str, Any], kernel: str) -> None:
    """As the launch does; a plan of warps that share their products names the kernel alone."""
    for more, form in (({}, "warps_apart"), ({"softcap": True}, "")):
        plan, _ = shown(op, **fields, **more)
        assert (plan.kernel, plan.form) == (kernel, form)
        first, *_ = kernel_calls(plan, meta_call(plan.problem), H100.arch.cores)[0]
        assert first.function == (form or "decode_split")
        assert first.function in CORES[op].functions
        said = f"  kernel   {kernel}, in its form {form}" if form else f"  kernel   {kernel}"
        assert said in plan.explain().splitlines()


def test_a_kernel_that_is_not_taken_is_named_with_its_form() -> None:
    problem = portattn.Problem(op="decode_attention", **SIZES)
    key = plan_problem(problem, H100).key
    failed = CompileRecord(
        key=key, kernel="decode_split", target=H100.name, toolchain=str(H100.toolchain), level="declared",
        passed=False, date=datetime.date(2026, 11, 27),
    )  # fmt: skip
    plan = plan_problem(problem, H100, records={key: failed})
    assert (plan.kernel, plan.form) == ("", "")
    assert "    would be kernel   decode_split, in its form warps_apart" in plan.explain().splitlines()


def test_latent_rows_have_no_other_form() -> None:
    kernel = CORES["mla_attention"]
    assert kernel.functions == ("decode_split",)
    assert kernel.form(Lowering(warps="apart")) == ""


OTHERS: list[dict[str, Any]] = [
    {"softcap": True},
    {"kv_format": "e4m3", "kv_scales": "token", "seq_q": 32},
    {"kv_format": "int8", "kv_scales": "token", "aligned": False, "word_aligned": False},
]


@pytest.mark.parametrize("fields", OTHERS)
def test_others_have_them_all(fields: dict[str, Any]) -> None:
    plan, found = shown(**fields)
    assert plan.lowering is not None
    assert plan.lowering.unpack == "bytes"
    assert found == set(CORES["decode_attention"].choices)


@pytest.mark.parametrize(("kind", "scales"), [("int4", "token"), ("nvfp4", "head")])
def test_rows_of_pairs_are_transposed_in_one_way(kind: str, scales: str) -> None:
    _, found = shown(kv_format=kind, kv_scales=scales, seq_q=32)
    assert set(CORES["decode_attention"].choices) - found == {"k_tile", "block_order"}


@pytest.mark.parametrize(
    ("op", "fields", "expected"),
    [
        ("attention", {"seq_q": 4096, "softcap": True}, set()),
        ("attention", {"seq_q": 4096, "dropout": True}, {"drops"}),
        ("attention_backward", {"seq_q": 4096, "dropout": True}, {"drops"}),
        ("attention_backward", {"seq_q": 4096, "dtype": "fp32"}, {"parts"}),
    ],
)
def test_dropout_and_parts_are_shown_where_they_are(op: str, fields: dict[str, Any], expected: set[str]) -> None:
    problem = portattn.Problem(op=op, **SIZES | fields)
    plan = plan_problem(problem, H100, settings=Settings(backend="triton"))
    (line,) = [line for line in plan.explain().splitlines() if line.startswith("  lowering ")]
    assert {word.partition("=")[0] for word in line.split()[1:]} & {"drops", "parts"} == expected
