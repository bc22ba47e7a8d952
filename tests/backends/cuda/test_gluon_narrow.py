"""The Hopper forward of e4m3 tensors: what it takes, its launches, and every form of it compiled for sm_90."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import test_gluon_forms as wide

from portattn import Problem
from portattn.backends.cuda.hopper_forward.narrow_variant import NarrowVariant
from portattn.backends.cuda.hopper_forward.variant import choice
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
VARIANT = NarrowVariant()
NARROW: dict[str, Any] = {"kv_format": "e4m3", "kv_scales": "head"}
FORMS: dict[str, dict[str, Any]] = {
    name: NARROW | fields for name, fields in wide.FORMS.items() if "page_size" not in fields
} | {"no scales": {"kv_format": "e4m3"}, "many tiles": NARROW | {"batch": 4, "seq_q": 384, "seq_k": 512}}
FEW = (
    ("plain", 128, "none"), ("ragged", 64, "top_left"), ("plain", 128, "bottom_right"),
    ("packed", 128, "bottom_right"), ("padded, window", 128, "none"), ("no scales", 64, "none"),
    ("plain", 256, "none"), ("plain", 192, "bottom_right"), ("many tiles", 64, "none"),
)  # fmt: skip
ALL = [
    (form, head_dim, causal)
    for form, fields in FORMS.items()
    for head_dim in (64, 128, 192, 256)
    for causal in wide.CAUSAL
    if causal == "none" or "window_right" not in fields
]
WIDE = {"head_dim": 256, "head_dim_v": 256}
# Of FEW's forms: of 256 columns, which spills 624, and of three consumers, which spills 96.
FEW_SPILLED = {("plain", 256): 704, ("many tiles", 64): 128}
MOST_SPILLED = {64: 256, 128: 256, 192: 256, 256: 2048}  # bytes a thread; of 256 columns 16 to 33 registers a tile


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
    transposing, main, *merging = kernels
    assert (transposing.function, main.function) == ("transpose_values", "scheduled_forward")
    assert bool(merging) is form.startswith("split")
    if str(gluon_target.toolchain) == str(SM_90.toolchain):
        most = MOST_SPILLED[head_dim]
        if (form, head_dim, causal) in FEW:
            most = FEW_SPILLED.get((form, head_dim), 0)
        assert main.facts["spills"] <= most
        assert transposing.facts["spills"] == 0
    assert "serialized_wgmma" not in main.facts
    assert variants.broken(variants.check(VARIANT, p, gluon_target, kernels)) == []


@pytest.mark.compiles
def test_probabilities_stay_in_their_lanes_and_words(gluon_compiler: Worker, gluon_target: Target) -> None:
    """No byte is moved between registers, and as many words between lanes as the same loop of 16-bit operands moves."""
    p = problem("plain")
    texts = {}
    for variant, asked in ((VARIANT, p), (wide.VARIANT, wide.problem("plain", 128, "none"))):
        signature = next(s for s in signatures(variant, meta_call(asked)) if s.function == "scheduled_forward")
        plan = msgspec.structs.replace(plan_of(asked, gluon_target), path=variant.name)
        reply = compile_in(gluon_compiler, signature, plan, gluon_target, 120.0, "text")
        assert reply.outcome == "ok", reply.message
        texts[variant.name] = str(reply.facts["ptx"])
    narrow, halves = texts[VARIANT.name], texts[wide.VARIANT.name]
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in narrow
    assert "prmt" not in narrow
    assert narrow.count("shfl.sync") == halves.count("shfl.sync")
    wide.assert_synchronised(narrow)


def test_a_launch_transposes_and_one_attends() -> None:
    pytest.importorskip("triton.experimental.gluon")
    call = meta_call(problem("packed", 128, "bottom_right"))
    transposing, forward = signatures(VARIANT, call)
    assert (transposing.function, forward.function) == ("transpose_values", "scheduled_forward")
    assert transposing.types["out"] == "*i8"
    assert transposing.constants["PACKED"] is True
    assert forward.types["q_desc"].startswith("tensordesc<i8[1, 1, 64, 128],NVMMASharedLayout(")
    assert forward.types["v_desc"].startswith("tensordesc<i8[1, 1, 128, 64],NVMMASharedLayout(")
    assert forward.types["o_desc"].startswith("tensordesc<bf16[1, 1, 64, 128],NVMMASharedLayout(")
    assert forward.types["k_scale"] == "*fp32"
    assert (forward.constants["FP8"], forward.constants["PAGE"]) == (True, 0)
    # 700 rows are at most 700 // 64 + 4 + 1 tiles, each sequence at the edge of one
    buffers = VARIANT.described(call).buffers
    assert tuple(map(int, buffers["transposed"][0])) == (1, 8, 128, 15 * 64)


@pytest.mark.parametrize(
    ("widths", "constants"),
    [
        ((128, 128), (128, 128, 128)),
        ((144, 144), (256, 64, 192)),
        ((192, 176), (256, 64, 192)),
        ((144, 208), (256, 64, 256)),
        ((256, 256), (256, 64, 256)),
    ],
)
def test_wide_heads_have_products_of_some_columns(widths: tuple[int, int], constants: tuple[int, ...]) -> None:
    """And none of columns that are padding of both q and v."""
    pytest.importorskip("triton.experimental.gluon")
    p = msgspec.structs.replace(problem("plain"), head_dim=widths[0], head_dim_v=widths[1])
    assert VARIANT.rejects(p, SM_90) is None
    forward = signatures(VARIANT, meta_call(p))[1]
    assert tuple(forward.constants[name] for name in ("DIM", "COLUMNS", "USED")) == constants


def test_columns_of_a_product_are_a_quarter_of_the_widest_head() -> None:
    chosen = choice(problem("plain", 256), SM_90.toolchain, VARIANT.entries)
    assert chosen is not None
    with pytest.raises(ValueError, match="columns is 32, but must be 0"):
        msgspec.structs.replace(chosen.schedule, columns=32)


def test_scales_that_are_not_there_are_no_arguments() -> None:
    pytest.importorskip("triton.experimental.gluon")
    forward = signatures(VARIANT, meta_call(problem("no scales")))[1]
    assert forward.constants["q_scale"] is None
    assert "q_scale_b" not in forward.types


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_format": "as_q", "kv_scales": "none"}, "is for q, k and v of e4m3, not of 16 or 32 bits"),
        ({"kv_format": "e5m2"}, "is for q, k and v of e4m3, not e5m2"),
        ({"kv_format": "int8"}, "is for q, k and v of e4m3, not int8"),
        ({"head_dim": 72}, "takes heads of a multiple of 16 columns, not 72"),
        ({"head_dim_v": 120}, "takes heads of a multiple of 16 columns, not 120"),
        ({"head_dim": 272}, "takes heads of at most 256 columns, not 272"),
        ({"head_dim": 256, "head_dim_v": 512}, "takes heads of at most 256 columns, not 512"),
        ({"head_dim": 192, "head_dim_v": 128}, "takes K and V of one width, not 192 and 128"),
        ({"head_dim_v": 64}, "takes K and V of one width, not 128 and 64"),
        ({"batch": 65_536}, "takes at most 65535 sequences that are not packed"),
        (WIDE | {"batch": 32_768}, "takes at most 32767 sequences that are not packed"),
        ({"bias": True}, "takes no bias"),
        ({"negative_scale": True}, "takes no negative_scale"),
        ({"aligned": False}, "reads through descriptors: contiguous rows, bases and strides of 16 bytes"),
    ],
)
def test_what_it_does_not_take_is_said(fields: dict[str, Any], reason: str) -> None:
    p = msgspec.structs.replace(problem("plain"), **({"head_dim_v": fields.get("head_dim", 128)} | fields))
    no = VARIANT.rejects(p, SM_90)
    assert no is not None
    assert no.reason == reason
    made = plan(p, SM_90, settings=Settings())
    assert made.path != VARIANT.name


@pytest.mark.parametrize("head_dim", [128, 256])
def test_it_is_planned_where_it_is_asked_for_and_on_its_chip_alone(head_dim: int) -> None:
    p = problem("packed", head_dim, "bottom_right")
    made = plan(p, SM_90, settings=Settings(backend=VARIANT.name))
    assert made.path == VARIANT.name
    made = plan(p, SM_90, settings=Settings())
    assert made.path == "triton"
    assert "its probabilities are e4m3" in made.explain()
    other = plan(p, parse_target("cuda:sm_100", "triton==3.6.0"), settings=Settings())
    assert other.path == "triton"
