"""The Hopper forwards of e4m3 tensors, and of int8 queries and keys: what they take, their launches, and every form of
them compiled for sm_90."""

from typing import Any

import msgspec
import pytest
import test_gluon_forms as wide

from portattn import Problem
from portattn.backends.cuda.hopper_forward.other_variants import Fp8Variant, Int8Variant
from portattn.backends.cuda.hopper_forward.variant import choice
from portattn.compile.ensure_compiled import compile_in
from portattn.config import Settings
from portattn.launch import meta_call
from portattn.launch.kernelcall import signatures
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target

SM_90 = wide.SM_90
VARIANT, INT8 = Fp8Variant(), Int8Variant()
NARROW: dict[str, Any] = {"kv_format": "e4m3", "kv_scales": "head"}
WHOLE: dict[str, Any] = {"kv_format": "int8", "kv_scales": "token"}
WIDE = {"page_size", "score_mod", "block_mask"}  # of forms that 16-bit operands alone have
WITHOUT_PAGES = {name: fields for name, fields in wide.FORMS.items() if not WIDE & {*fields}}
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "e4m3": {name: NARROW | fields for name, fields in WITHOUT_PAGES.items()}
    | {"no scales": {"kv_format": "e4m3"}, "many tiles": NARROW | {"batch": 4, "seq_q": 384, "seq_k": 512}},
    "int8": {name: WHOLE | fields for name, fields in WITHOUT_PAGES.items() if not fields.get("softcap")},
}
# Of a few forms the spills that are allowed, with the release that the schedules were timed with. Of 256 columns e4m3
# spills 624, and of three consumers 96.
FEW = {
    ("e4m3", "plain", 128, "none"): 0, ("e4m3", "ragged", 64, "top_left"): 0,
    ("e4m3", "plain", 128, "bottom_right"): 0, ("e4m3", "packed", 128, "bottom_right"): 0,
    ("e4m3", "padded, window", 128, "none"): 0, ("e4m3", "no scales", 64, "none"): 0,
    ("e4m3", "plain", 256, "none"): 704, ("e4m3", "plain", 192, "bottom_right"): 0,
    ("e4m3", "many tiles", 64, "none"): 128, ("int8", "plain", 128, "none"): 0, ("int8", "ragged", 64, "top_left"): 0,
    ("int8", "packed", 128, "bottom_right"): 0, ("int8", "padded, window", 128, "none"): 0,
}  # fmt: skip
HEADS = {"e4m3": (64, 128, 192, 256), "int8": (64, 128)}
ALL = [
    (kind, form, head_dim, causal) for kind, forms in FORMS.items() for form, fields in forms.items()
    for head_dim in HEADS[kind] for causal in wide.CAUSAL if causal == "none" or "window_right" not in fields
]  # fmt: skip
WIDE = {"head_dim": 256, "head_dim_v": 256}


def problem(form, head_dim=128, causal="none", kind="e4m3"):
    return Problem(**wide.BASE | {"head_dim": head_dim, "causal": causal} | FORMS[kind][form])


@pytest.mark.compiles
@pytest.mark.parametrize(("kind", "form", "head_dim", "causal"), ALL, ids=[" ".join(map(str, one)) for one in ALL])
def test_it_compiles_clean(
    gluon_compiler, gluon_target, request, kind, form, head_dim,
    causal,
):  # fmt: skip
    few = FEW.get((kind, form, head_dim, causal))
    wide.skip_one_of_many(request, few is not None)
    variant = VARIANT if kind == "e4m3" else INT8
    kernels = wide.compiled(gluon_compiler, gluon_target, variant, problem(form, head_dim, causal, kind))
    functions = [kernel.function for kernel in kernels]
    expected = ["transpose_values"] * (kind == "e4m3") + ["scheduled_forward"]
    assert functions[: len(expected)] == expected
    assert (len(functions) > len(expected)) is form.startswith("split")
    if str(gluon_target.toolchain) == str(SM_90.toolchain):
        most = few if few is not None else 2048 if head_dim == 256 else wide.MOST_SPILLED
        assert kernels[len(expected) - 1].facts["spills"] <= most
        assert kind == "int8" or kernels[0].facts["spills"] == 0


@pytest.mark.compiles
def test_probabilities_stay_in_their_lanes_and_words(gluon_compiler, gluon_target):
    """No byte is moved between registers, and as many words between lanes as the same loop of 16-bit operands moves."""
    p = problem("plain")
    texts = {}
    for variant, asked in ((VARIANT, p), (wide.VARIANT, wide.problem("plain", 128, "none"))):
        signature = next(s for s in signatures(variant, meta_call(asked)) if s.function == "scheduled_forward")
        plan = msgspec.structs.replace(wide.plan_of(asked, gluon_target, VARIANT.name), path=variant.name)
        reply = compile_in(gluon_compiler, signature, plan, gluon_target, 120.0, "text")
        assert reply.outcome == "ok", reply.message
        texts[variant.name] = str(reply.facts["ptx"])
    narrow, halves = texts[VARIANT.name], texts[wide.VARIANT.name]
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in narrow
    assert "prmt" not in narrow
    assert narrow.count("shfl.sync") == halves.count("shfl.sync")
    wide.assert_synchronised(narrow)


@pytest.mark.compiles
def test_scores_are_products_of_whole_numbers(gluon_compiler, gluon_target):
    signature = signatures(INT8, meta_call(problem("plain", kind="int8")))[0]
    made = wide.plan_of(problem("plain", kind="int8"), gluon_target, INT8.name)
    reply = compile_in(gluon_compiler, signature, made, gluon_target, 120.0, "text")
    assert reply.outcome == "ok", reply.message
    ptx = str(reply.facts["ptx"])
    keys = signature.constants["KEYS"]
    assert f"wgmma.mma_async.sync.aligned.m64n{keys}k32.s32.s8.s8" in ptx
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in ptx
    assert "vote.sync.all.pred" in ptx, "tiles of blocks that share a scale are told from others"
    assert "max.s32" in ptx
    wide.assert_synchronised(ptx)


def test_a_launch_transposes_and_one_attends():
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
    assert tuple(map(int, VARIANT.described(call).buffers["transposed"][0])) == (1, 8, 128, 15 * 64)


@pytest.mark.parametrize(
    ("widths", "constants"),
    [
        ((128, 128), (128, 128, 128)), ((144, 144), (256, 64, 192)), ((192, 176), (256, 64, 192)),
        ((144, 208), (256, 64, 256)), ((256, 256), (256, 64, 256)),
    ],
)  # fmt: skip
def test_wide_heads_have_products_of_some_columns(widths, constants):
    """And none of columns that are padding of both q and v."""
    pytest.importorskip("triton.experimental.gluon")
    p = msgspec.structs.replace(problem("plain"), head_dim=widths[0], head_dim_v=widths[1])
    assert VARIANT.rejects(p, SM_90) is None
    forward = signatures(VARIANT, meta_call(p))[1]
    assert tuple(forward.constants[name] for name in ("DIM", "COLUMNS", "USED")) == constants


def test_columns_of_a_product_are_a_quarter_of_the_widest_head():
    chosen = choice(problem("plain", 256), SM_90.toolchain, VARIANT.entries)
    with pytest.raises(ValueError, match="columns is 32, but must be 0"):
        msgspec.structs.replace(chosen.schedule, columns=32)


def test_scales_that_are_not_there_are_no_arguments():
    pytest.importorskip("triton.experimental.gluon")
    forward = signatures(VARIANT, meta_call(problem("no scales")))[1]
    assert forward.constants["q_scale"] is None
    assert "q_scale_b" not in forward.types


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_a_launch_has_the_scales_and_their_strides(form):
    pytest.importorskip("triton.experimental.gluon")
    (forward,) = signatures(INT8, meta_call(problem(form, kind="int8")))
    assert forward.types["q_desc"].startswith("tensordesc<i8[1, 1, 64, 128],NVMMASharedLayout(")
    assert forward.types["v_desc"].startswith("tensordesc<bf16[1, 1, ")
    assert (forward.types["q_scale"], forward.types["k_scale"]) == ("*fp32", "*fp32")
    # Scales of packed tokens lie by tokens: those of a head are apart.
    assert (forward.constants["INT8"], forward.constants["SIDE"]) == (True, form == "plain")
    assert forward.constants["v_scale"] is None


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("e4m3", {"kv_format": "as_q", "kv_scales": "none"}, "is for q, k and v of e4m3, not of 16 or 32 bits"),
        ("e4m3", {"kv_format": "e5m2"}, "is for q, k and v of e4m3, not e5m2"),
        ("e4m3", {"kv_format": "int8"}, "is for q, k and v of e4m3, not int8"),
        ("e4m3", {"head_dim": 72}, "takes heads of a multiple of 16 columns, not 72"),
        ("e4m3", {"head_dim_v": 120}, "takes heads of a multiple of 16 columns, not 120"),
        ("e4m3", {"head_dim": 272}, "takes heads of at most 256 columns, not 272"),
        ("e4m3", {"head_dim": 256, "head_dim_v": 512}, "takes heads of at most 256 columns, not 512"),
        ("e4m3", {"head_dim": 192, "head_dim_v": 128}, "takes K and V of one width, not 192 and 128"),
        ("e4m3", {"head_dim_v": 64}, "takes K and V of one width, not 128 and 64"),
        ("e4m3", {"batch": 65_536}, "takes at most 65535 sequences that are not packed"),
        ("e4m3", WIDE | {"batch": 32_768}, "takes at most 32767 sequences that are not packed"),
        ("e4m3", {"bias": True}, "takes no bias"), ("e4m3", {"negative_scale": True}, "takes no negative_scale"),
        ("e4m3", {"aligned": False}, "reads through descriptors: contiguous rows, bases and strides of 16 bytes"),
        ("int8", {"kv_format": "as_q", "kv_scales": "none"}, "is for q and k of int8"),
        ("int8", {"kv_format": "e4m3", "kv_scales": "head"}, "is for q and k of int8"),
        ("int8", {"kv_scales": "head"}, "takes a scale for each token, not head"),
        ("int8", {"head_dim": 72}, "takes heads of a multiple of 16 columns, not 72"),
        ("int8", {"head_dim": 144}, "takes heads of at most 128 columns, not 144"),
        ("int8", {"head_dim_v": 64}, "takes K and V of one width, not 128 and 64"),
        ("int8", {"softcap": True}, "takes no softcap"), ("int8", {"bias": True}, "takes no bias"),
        ("int8", {"aligned": False}, "reads through descriptors: contiguous rows, bases and strides of 16 bytes"),
    ],
)  # fmt: skip
def test_what_it_does_not_take_is_said(kind, fields, reason):
    variant, p = VARIANT if kind == "e4m3" else INT8, problem("plain", kind=kind)
    p = msgspec.structs.replace(p, **({"head_dim_v": fields.get("head_dim", 128)} | fields))
    assert variant.rejects(p, SM_90).reason == reason
    assert plan(p, SM_90, settings=Settings()).path != variant.name


@pytest.mark.parametrize(
    ("kind", "head_dim", "why"),
    [("e4m3", 128, "its probabilities are e4m3"), ("e4m3", 256, "its probabilities are e4m3"),
     ("int8", 128, "it rounds probabilities to bf16")],
)  # fmt: skip
def test_it_is_planned_where_it_is_asked_for_and_on_its_chip_alone(kind, head_dim, why):
    p, name = problem("packed", head_dim, "bottom_right", kind), (VARIANT if kind == "e4m3" else INT8).name
    assert plan(p, SM_90, settings=Settings(backend=name)).path == name
    made = plan(p, SM_90, settings=Settings())
    assert made.path == "triton"
    assert why in made.explain()
    assert plan(p, parse_target("cuda:sm_100", "triton==3.6.0"), settings=Settings()).path == "triton"


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
def test_a_caller_s_scales_are_turned_as_the_queries_are(layout):
    p = problem("packed" if layout == "packed" else "plain", kind="int8")
    if layout == "bshd":
        p = msgspec.structs.replace(p, layout="bshd")
    call = meta_call(p)
    given = {"q": call.q, "k": call.k, "v": call.v, "q_scale": call.q_scale, "k_scale": call.k_scale}
    if layout == "packed":  # (T, H, …)
        given = {name: tensor[0].transpose(0, 1) for name, tensor in given.items()}
    elif layout == "bshd":
        given = {name: tensor.transpose(1, 2) for name, tensor in given.items()}
    seen = INT8.views(p, given | {"out": given["q"], "lse": None})
    for name in ("q_scale", "k_scale"):
        assert seen[name].shape == seen[name[0]].shape[:3]
        assert seen[name].shape == getattr(call, name).shape
