"""The Hopper forward of int8 queries and keys: what it takes, its launch, and forms of it compiled for sm_90."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import test_gluon_forms as wide

from portattn import Problem
from portattn.backends.cuda.hopper_forward.whole_variant import WholeVariant
from portattn.compile.compile_check import compile_in
from portattn.config import Settings
from portattn.launch import meta_call
from portattn.launch.described import signatures
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.plan import Plan
from portattn.schema.target import Target
from portattn.tools.matrix import variants
from portattn.worker.client import Worker

SM_90 = wide.SM_90
VARIANT = WholeVariant()
WHOLE: dict[str, Any] = {"kv_format": "int8", "kv_scales": "token"}
FORMS: dict[str, dict[str, Any]] = {
    name: WHOLE | fields
    for name, fields in wide.FORMS.items()
    if "page_size" not in fields and not fields.get("softcap")
}
FEW = (
    ("plain", 128, "none"), ("ragged", 64, "top_left"), ("packed", 128, "bottom_right"),
    ("padded, window", 128, "none"),
)  # fmt: skip
ALL = [
    (form, head_dim, causal)
    for form, fields in FORMS.items()
    for head_dim in (64, 128)
    for causal in wide.CAUSAL
    if causal == "none" or "window_right" not in fields
]


def problem(form: str, head_dim: int = 128, causal: str = "none") -> Problem:
    return Problem(**wide.BASE | {"head_dim": head_dim, "causal": causal} | FORMS[form])


def plan_of(p: Problem, target: Target = SM_90) -> Plan:
    toolchain = str(target.toolchain)
    return Plan(problem=p, target=target.name, toolchain=toolchain, requested=VARIANT.name, path=VARIANT.name)


@pytest.mark.compiles
@pytest.mark.parametrize(("form", "head_dim", "causal"), ALL, ids=[" ".join(map(str, one)) for one in ALL])
def test_it_compiles_clean(
    gluon_compiler: Worker,
    gluon_target: Target,
    request: pytest.FixtureRequest,
    form: str,
    head_dim: int,
    causal: str,
) -> None:
    if (form, head_dim, causal) not in FEW and not request.config.getoption("--forms"):
        pytest.skip("one of many forms: --forms compiles it")
    p = problem(form, head_dim, causal)
    assert VARIANT.rejects(p, gluon_target) is None
    kernels, failed, _ = variants.compile_variant(
        VARIANT, plan_of(p, gluon_target), gluon_target, gluon_compiler, 120.0
    )
    assert failed is None, failed
    main, *merging = kernels
    assert main.function == "scheduled_forward"
    assert bool(merging) is form.startswith("split")
    if str(gluon_target.toolchain) == str(SM_90.toolchain):
        assert main.facts["spills"] <= (0 if (form, head_dim, causal) in FEW else wide.MOST_SPILLED)
    assert "serialized_wgmma" not in main.facts
    assert variants.broken(variants.check(VARIANT, p, gluon_target, kernels)) == []


@pytest.mark.compiles
def test_scores_are_products_of_whole_numbers(gluon_compiler: Worker, gluon_target: Target) -> None:
    signature = signatures(VARIANT, meta_call(problem("plain")))[0]
    reply = compile_in(gluon_compiler, signature, plan_of(problem("plain"), gluon_target), gluon_target, 120.0, "text")
    assert reply.outcome == "ok", reply.message
    ptx = str(reply.facts["ptx"])
    keys = signature.constants["KEYS"]
    assert f"wgmma.mma_async.sync.aligned.m64n{keys}k32.s32.s8.s8" in ptx
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in ptx
    assert "vote.sync.all.pred" in ptx, "tiles of blocks that share a scale are told from others"
    assert "max.s32" in ptx
    wide.assert_synchronised(ptx)


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_a_launch_has_the_scales_and_their_strides(form: str) -> None:
    pytest.importorskip("triton.experimental.gluon")
    p = problem(form)
    (forward,) = signatures(VARIANT, meta_call(p))
    assert forward.types["q_desc"].startswith("tensordesc<i8[1, 1, 64, 128],NVMMASharedLayout(")
    assert forward.types["v_desc"].startswith("tensordesc<bf16[1, 1, ")
    assert (forward.types["q_scale"], forward.types["k_scale"]) == ("*fp32", "*fp32")
    # Scales of packed tokens lie by tokens: those of a head are apart.
    assert (forward.constants["INT8"], forward.constants["SIDE"]) == (True, form == "plain")
    assert forward.constants["v_scale"] is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_format": "as_q", "kv_scales": "none"}, "is for q and k of int8"),
        ({"kv_format": "e4m3", "kv_scales": "head"}, "is for q and k of int8"),
        ({"kv_scales": "head"}, "takes a scale for each token, not head"),
        ({"head_dim": 72}, "takes heads of a multiple of 16 columns, not 72"),
        ({"head_dim": 144}, "takes heads of at most 128 columns, not 144"),
        ({"head_dim_v": 64}, "takes K and V of one width, not 128 and 64"),
        ({"softcap": True}, "takes no softcap"),
        ({"bias": True}, "takes no bias"),
        ({"aligned": False}, "reads through descriptors: contiguous rows, bases and strides of 16 bytes"),
    ],
)
def test_what_it_does_not_take_is_said(fields: dict[str, Any], reason: str) -> None:
    p = msgspec.structs.replace(problem("plain"), **({"head_dim_v": fields.get("head_dim", 128)} | fields))
    no = VARIANT.rejects(p, SM_90)
    assert no is not None
    assert no.reason == reason
    assert plan(p, SM_90, settings=Settings()).path != VARIANT.name


def test_it_is_planned_where_it_is_asked_for_and_on_its_chip_alone() -> None:
    p = problem("packed", 128, "bottom_right")
    assert plan(p, SM_90, settings=Settings(backend=VARIANT.name)).path == VARIANT.name
    made = plan(p, SM_90, settings=Settings())
    assert made.path == "triton"
    assert "it rounds probabilities to bf16" in made.explain()
    other = parse_target("cuda:sm_100", "triton==3.6.0")
    assert plan(p, other, settings=Settings()).path == "triton"


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
def test_a_caller_s_scales_are_turned_as_the_queries_are(layout: str) -> None:
    p = problem("packed" if layout == "packed" else "plain")
    if layout == "bshd":
        p = msgspec.structs.replace(p, layout="bshd")
    call = meta_call(p)
    given = {"q": call.q, "k": call.k, "v": call.v, "q_scale": call.q_scale, "k_scale": call.k_scale}
    if layout == "packed":  # (T, H, …)
        given = {name: tensor[0].transpose(0, 1) for name, tensor in given.items()}
    elif layout == "bshd":
        given = {name: tensor.transpose(1, 2) for name, tensor in given.items()}
    seen = VARIANT.views(p, given | {"out": given["q"], "lse": None})
    for name in ("q_scale", "k_scale"):
        assert seen[name].shape == seen[name[0]].shape[:3]
        assert seen[name].shape == getattr(call, name).shape
