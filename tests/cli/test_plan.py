"""`portattn plan`."""

from __future__ import annotations

import msgspec
import pytest

from portattn.planner import Plan

SHAPES = ("--q", "8,64,1024,64", "--kv", "8,16,1024,64", "--dtype", "fp16", "--causal")


@pytest.mark.parametrize(
    ("target", "toolchain"),
    [
        ("ascend:ascend910b2", "triton-ascend==3.1.0"),
        ("rocm:gfx942", "triton==3.6.0"),
        ("cuda:sm_90", "triton==3.9.0"),
    ],
)
def test_any_target_is_planned_from_anywhere(portattn, target, toolchain):
    line = ("plan", "attention", "--target", target, "--toolchain", toolchain, *SHAPES)
    called = portattn(*line, "--json")
    assert called.status == 0
    made = msgspec.convert(called.json, Plan)
    assert (made.target, made.toolchain) == (target, toolchain)
    assert (made.problem.heads_q, made.problem.heads_k, made.problem.causal) == (64, 16, "bottom_right")
    # The core kernel's lowering is named also where another path is the better plan.
    core = made if made.path == "triton" else made.rejected[0].choice
    assert core.lowering is not None
    assert core.launch is not None
    for quirk in (*made.quirks, *core.quirks):
        assert quirk.sentence
    text = portattn(*line).out
    assert f"on {target} with {toolchain}: {made.path} path" in text
    assert "lowering" in text
    assert all(quirk.id in text for quirk in (*made.quirks, *core.quirks))


def test_ascend_names_its_quirks(portattn):
    where = ("--target", "ascend:ascend910b2", "--toolchain", "triton-ascend==3.1.0")
    made = portattn("plan", "attention", *where, *SHAPES, "--json").json
    named = {q["id"] for q in made["quirks"]} | {
        q["id"] for no in made["rejected"] for q in (no.get("choice") or {}).get("quirks", ())
    }
    assert "ascend-0001-k-block-order" in named


@pytest.mark.parametrize(
    ("given", "causal"),
    [
        (("--causal",), "bottom_right"),
        (("--causal", "top-left"), "top_left"),
        (("--causal=top_left",), "top_left"),
        (("--causal", "none"), "none"),
        ((), "none"),
    ],
)
def test_causal_may_stand_alone_anywhere(portattn, given, causal):
    rest = ("--target", "cuda:sm_90", "--toolchain", "triton==3.6.0", *SHAPES[:-1], "--json")
    for line in (("plan", *given, "attention", *rest), ("plan", "attention", *rest, *given)):
        assert portattn(*line).json["problem"].get("causal", "none") == causal


def test_every_option_reaches_the_problem(portattn):
    called = portattn(
        "plan", "attention", "--target", "cuda:sm_90", "--toolchain", "triton==3.6.0", "--q", "2,4,8,192",
        "--kv", "2,4,8,192", "--dv", "128", "--dtype", "bf16", "--seqlens-q", "--seqlens-k", "--leftpad-q",
        "--leftpad-k", "--lse", "--layout", "bshd", "--unaligned", "--json",
    )  # fmt: skip
    problem = called.json["problem"]
    for flag in ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k", "return_lse"):
        assert problem[flag] is True
    assert (problem["head_dim_v"], problem["dtype"], problem["layout"], problem["aligned"]) == (
        128,
        "bf16",
        "bshd",
        False,
    )


def test_without_a_target_it_is_this_machines(portattn):
    from portattn.machine import this_target

    assert portattn("plan", "attention", *SHAPES, "--json").json["target"] == this_target().name


def test_a_named_path_that_cannot_run_is_status_1(portattn):
    line = ("plan", "attention", "--target", "cpu:generic", *SHAPES, "--backend", "vendor")
    called = portattn(*line)
    assert called.status == 1
    assert "cannot run this on cpu:generic" in called.err
    assert portattn(*line, "--json").json["error"]["rejected"][0]["path"] == "vendor"


def test_a_quirk_can_be_switched_off(portattn):
    line = ("plan", "attention", "--target", "ascend:ascend910b2", "--toolchain", "triton-ascend==3.1.0", *SHAPES)
    assert "ascend-0002-slow-prefill" in portattn(*line).out
    assert "ascend-0002-slow-prefill" not in portattn(*line, "--quirks", "-ascend-0002-slow-prefill").out
