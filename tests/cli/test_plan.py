"""`portattn plan`."""

import inspect

import msgspec
import pytest
import torch
from places import tables

import portattn as library
from portattn.planning.registry import parse_target
from portattn.schema.ops import COMMON, ROWS
from portattn.schema.plan import Plan
from portattn.schema.problem_limits import OPS
from portattn.testing import bound

TABLES = tables(__file__)

SHAPES = ("--q", "8,64,1024,64", "--kv", "8,16,1024,64", "--dtype", "fp16", "--causal")


@pytest.mark.parametrize(
    ("target", "toolchain"),
    [("ascend:ascend910b2", "triton-ascend==3.1.0"), ("rocm:gfx942", "triton==3.6.0"), ("cuda:sm_89", "triton==3.9.0")],
)  # fmt: skip
def test_any_target_is_planned_from_anywhere(portattn, target, toolchain):
    line = ("plan", "attention", "--target", target, "--toolchain", toolchain, *SHAPES)
    made = msgspec.convert(portattn(*line, "--json", exits=0).json, Plan)
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


@pytest.mark.parametrize(("given", "causal"), TABLES["causal_may_stand_alone_anywhere"])
def test_causal_may_stand_alone_anywhere(portattn, given, causal):
    rest = ("--target", "cuda:sm_90", "--toolchain", "triton==3.6.0", *SHAPES[:-1], "--json")
    for line in (("plan", *given, "attention", *rest), ("plan", "attention", *rest, *given)):
        assert portattn(*line).json["problem"].get("causal", "none") == causal


WHERE = ("--target", "cuda:sm_90", "--toolchain", "triton==3.6.0")
CACHE = ("--q", "2,8,1,128", "--kv", "2,8,512,128", "--dtype", "bf16")


@pytest.mark.parametrize(("op", "given", "kind", "scales"), TABLES["options_of_quantised_tensors_reach_the_problem"])
def test_options_of_quantised_tensors_reach_the_problem(portattn, op, given, kind, scales):
    problem = portattn("plan", op, *WHERE, *CACHE, "--kv-format", *given, "--json").json["problem"]
    assert (problem["dtype"], problem["kv_format"], problem.get("kv_scales", "none")) == ("bf16", kind, scales)


# Parameters of the public operations by the option that stands for them, where the names differ.
PARAMETERS = {
    "total_q": "cu_seqlens_q", "total_k": "cu_seqlens_k", "page_size": "page_table", "tokens": "indices",
    "kv_format": "k_scale", "kv_scales": "v_scale", "rotary": "cos", "rotary_dim": "sin",
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "given", "expected"),
    [
        ("attention", ("--grad", "--dropout"), {"needs_grad": True, "dropout": True}),
        ("attention_backward", ("--dropout",), {"dropout": True}),
        ("attention_backward", ("--deterministic", "--lse"), {"deterministic": True, "grad_lse": True}),
    ],
)
def test_a_training_call_s_options_reach_the_problem(portattn, op, given, expected):
    called = portattn("plan", op, "--target", "cuda:sm_90", "--toolchain", "triton==3.6.0", *SHAPES, *given, "--json")
    problem = called.json["problem"]
    assert {name: problem.get(name) for name in expected} == expected
    assert not problem.get("return_lse")


@pytest.mark.parametrize("op", OPS)
def test_an_op_takes_the_options_that_its_function_has_parameters_for(op):
    parameters = set(inspect.signature(getattr(library, ROWS[op].gradient_of or op)).parameters)
    if "slot_mapping" in parameters:  # which says the pages, too
        parameters.add("page_table")
    if {"logits", "block_indices"} & parameters:  # k is the number of places
        parameters.add("indices")
    known = {name for row in ROWS.values() for name in row.options}
    found = {name for name in known if PARAMETERS.get(name, name) in parameters}
    if {"kv_scale", "weights"} & parameters:  # of latent rows, which are keys and values, and of an indexer's keys
        found |= {"kv_format", "kv_scales"}
    lacking = {"kv_format", "kv_scales", "num_splits", *COMMON} if ROWS[op].gradient_of else set()
    assert found - lacking <= set(ROWS[op].options) <= found


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape):
    return meta(*shape, dtype=torch.int32)


def floats(*shape):
    return meta(*shape, dtype=torch.float32)


# Options, and the arguments of a call that has this problem.
SAME = {
    "attention": (
        "--q 2,4,8,64 --kv 2,2,16,64 --dv 32 --window 7,0 --softcap --alibi --sinks --bias --mask-by-key",
        (meta(2, 4, 8, 64), meta(2, 2, 16, 64), meta(2, 2, 16, 32)),
        {
            "window": (7, 0), "softcap": 5.0, "alibi_slopes": floats(4), "sinks": floats(4),
            "bias": floats(1, 1, 8, 16), "mask": meta(2, 1, 1, 16, dtype=torch.bool),
        },
    ),
    "varlen_attention": (
        "--q 3,4,8,64 --kv 3,2,16,64 --total-q 20 --total-k 40 --window 99,2 --chunk 5 --lse",
        (meta(20, 4, 64), meta(40, 2, 64), meta(40, 2, 64), integers(4), integers(4), 8, 16),
        {"window": (99, 2), "chunk": 5, "return_lse": True},
    ),
    "decode_attention": (
        "--q 2,4,1,64 --kv 2,2,16,64 --seqlens-k --leftpad-k --num-splits 3 --layout bshd",
        (meta(2, 1, 4, 64), meta(2, 16, 2, 64), meta(2, 16, 2, 64), integers(2)),
        {"leftpad_k": integers(2), "num_splits": 3, "layout": "bshd"},
    ),
    "paged_attention": (
        "--q 2,4,3,64 --kv 2,2,64,64 --page-size 16 --page-layout hpd --causal --window 7,3",
        (meta(2, 4, 3, 64), meta(9, 2, 16, 64), meta(9, 2, 16, 64), integers(2, 4), integers(2)),
        {"page_layout": "hpd", "causal": True, "window": (7, 3)},
    ),
    "paged_attention, of a cache with both": (
        "--q 2,4,3,64 --kv 2,2,64,64 --page-size 16 --pages-apart",
        (meta(2, 4, 3, 64), meta(9, 2, 16, 2, 64)[:, 0], meta(9, 2, 16, 2, 64)[:, 1], integers(2, 4), integers(2)), {},
    ),
    "paged_attention, packed": (
        "--q 2,4,3,64 --kv 2,2,64,64 --page-size 16 --total-q 5 --causal",
        (meta(5, 4, 64), meta(9, 16, 2, 64), meta(9, 16, 2, 64), integers(2, 4), integers(2)),
        {"cu_seqlens_q": integers(3), "max_seqlen_q": 3, "causal": True},
    ),
    "sparse_attention": (
        "--q 2,4,1,64 --kv 2,2,64,64 --tokens 12 --log-weights --softcap",
        (meta(2, 4, 1, 64), meta(2, 2, 64, 64), meta(2, 2, 64, 64), integers(2, 4, 12), integers(2, 4)),
        {"log_weights": floats(2, 4, 12), "softcap": 5.0},
    ),
    "sparse_attention, paged": (
        "--q 2,4,1,64 --kv 2,2,64,64 --tokens 12 --magicpig --page-size 16 --seqlens-k",
        (meta(2, 4, 1, 64), meta(9, 16, 2, 64), meta(9, 16, 2, 64), integers(2, 4, 12), integers(2, 4)),
        {"magicpig": (10, 150), "page_table": integers(2, 4), "seqlens_k": integers(2)},
    ),
    "block_sparse_attention": (
        "--q 2,4,8,64 --kv 2,2,64,64 --tokens 2 --causal",  # blocks of 64 keys
        (meta(2, 4, 8, 64), meta(2, 2, 64, 64), meta(2, 2, 64, 64), integers(2, 2, 8, 2)), {"causal": True},
    ),
    "mla_attention": (
        "--q 2,16,2,576 --kv 2,1,128,576 --dv 512 --page-size 64 --causal",
        (meta(2, 16, 2, 512), meta(2, 16, 2, 64), meta(9, 64, 576), integers(2, 2), integers(2)),
        {"scale": 0.07, "causal": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_options_make_the_problem_of_a_call(portattn, case):
    options, arguments, keywords = SAME[case]
    op = case.partition(",")[0]
    called = portattn("plan", op, *WHERE, *options.split(), "--dtype", "bf16", "--json", exits=0)
    expected = library.plan(op, *arguments, **keywords).problem
    assert msgspec.convert(called.json, Plan).problem == expected


def test_packed_sequences_are_as_long_as_the_longest_unless_options_say_otherwise(portattn):
    line = ("plan", "varlen_attention", *WHERE, "--q", "3,4,8,64", "--kv", "3,4,16,64", "--dtype", "bf16", "--json")
    problem = portattn(*line).json["problem"]
    assert (problem["total_q"], problem["total_k"]) == (24, 48)
    problem = portattn("plan", "varlen_attention_backward", *line[2:]).json["problem"]
    assert (problem["total_q"], problem["total_k"]) == (24, 48)
    problem = portattn(*line, "--total-q", "24", "--total-k", "16").json["problem"]  # the most and the least
    assert (problem["total_q"], problem["total_k"]) == (24, 16)


def test_a_call_may_have_packed_rows_that_are_nobodys():
    """As engines have, which pad them to the sizes of their graphs: on the command line alone there is a most."""
    rows, ends = torch.zeros(99, 4, 64), torch.tensor([0, 8, 16], dtype=torch.int32)
    problem = library.plan("varlen_attention", rows, rows, rows, ends, ends, 8, 8).problem
    assert (problem.total_q, problem.batch * problem.seq_q) == (99, 16)


def test_without_a_target_it_is_this_machines(portattn):
    from portattn.planning.registry import this_target

    assert portattn("plan", "attention", *SHAPES, "--json").json["target"] == this_target().name


def test_a_named_path_that_cannot_run_is_status_1(portattn):
    line = ("plan", "attention", "--target", "cpu:generic", *SHAPES, "--backend", "triton")
    assert "cannot run this on cpu:generic" in portattn(*line, exits=1).err
    assert portattn(*line, "--json").json["error"]["rejected"][0]["path"] == "triton"


def test_a_quirk_can_be_switched_off(portattn):
    line = ("plan", "attention", "--target", "ascend:ascend910b2", "--toolchain", "triton-ascend==3.1.0", *SHAPES)
    assert "ascend-0002-slow-prefill" in portattn(*line).out
    assert "ascend-0002-slow-prefill" not in portattn(*line, "--quirks", "-ascend-0002-slow-prefill").out
    for given in ("+x", "x"):
        unknown = portattn(*line, "--quirks", given, exits=2)
        assert f"plan: --quirks is {given!r}, but must be +ID,-ID of known quirks (" in unknown.err


def test_a_plan_may_start_from_other_values_than_the_tuning_s(portattn):
    line = ("plan", "attention", "--target", "rdna4", "--toolchain", "triton==3.8.0", *SHAPES)
    made = portattn(*line, "--start", "num_warps=2,block_n=16", "--start", "exp=exp", "--json").json
    assert len(made) == 2  # both chips of the family
    assert all((one["launch"]["num_warps"], one["launch"]["block_n"]) == (2, 16) for one in made)
    assert all(one["lowering"]["exp"] == "exp" for one in made)
    for start, told in (("block_z=1", "must be NAME=VALUE, with one of block_m"), ("block_m=63", "power of two")):
        assert told in portattn(*line, "--start", start, exits=2).err


SMALL = ("--q", "1,2,16,64", "--kv", "1,2,16,64", "--dtype", "fp16")


@pytest.mark.parametrize("target", ["h200", "sm_90", "cuda:sm_90"])
def test_a_target_may_be_a_chip(portattn, target):
    line = ("plan", "attention", "--target", target, "--toolchain", "triton==3.6.0", *SMALL, "--json")
    assert portattn(*line).json["target"] == "cuda:sm_90"


def test_a_family_is_answered_with_its_members(portattn):
    line = ("plan", "attention", "--toolchain", "triton==3.6.0", *SMALL, "--target")
    made = portattn(*line, "rdna4", "--json").json
    assert [one["target"] for one in made] == ["rocm:gfx1200", "rocm:gfx1201"]
    text = portattn(*line, "rocm:rdna4").out
    assert [part for part in text.splitlines() if part.startswith("on ")] == [
        f"on rocm:{arch} with triton==3.6.0: triton path" for arch in ("gfx1200", "gfx1201")
    ]
    assert portattn(*line, "hopper", "--json").json["target"] == "cuda:sm_90"


@pytest.mark.parametrize(("toolchain", "told"), TABLES["a_release_that_nobody_knows_is_said_and_planned_for"])
def test_a_release_that_nobody_knows_is_said_and_planned_for(portattn, toolchain, told):
    called = portattn("plan", "attention", *WHERE[:2], "--toolchain", toolchain, *SMALL, "--json", exits=0)
    assert called.json["toolchain"] == ("triton==3.6.0" if toolchain == "triton==3.6" else toolchain)
    assert called.err == (f"portattn: {told} plans go by its number alone\n" if told else "")


def test_the_other_commands_say_it_too(portattn, tmp_path):
    assert "3.6.99 is no known release" in portattn("quirks", "why", "h100", "--toolchain", "triton==3.6.99").err
    line = ("matrix", "run", "--out", str(tmp_path), "--targets", "910b", "--ops", "dense*fp16*")
    called = portattn(*line, "--toolchain", "triton-ascend==9.9.9", "--json")
    assert called.status == 3  # its environment is not there
    assert "portattn: triton-ascend==9.9.9 is no known release" in called.err


def test_a_quirk_is_switched_off_by_its_number(portattn):
    where = ("--target", "ascend:ascend910b2", "--toolchain", "triton-ascend==3.1.0")
    whole = portattn("plan", "attention", *where, *SHAPES, "--quirks=-ascend-0001-k-block-order").out
    assert "ascend-0001-k-block-order" in portattn("plan", "attention", *where, *SHAPES).out
    assert portattn("plan", "attention", *where, *SHAPES, "--quirks=-ascend-0001").out == whole
    assert "ascend-0001" not in whole


def test_the_cpu_says_why_each_other_path_is_not_taken(portattn):
    line = ("plan", "attention", "--target", "cpu", "--toolchain", "triton==3.6.0", *SMALL)
    assert "not interpreter: " in portattn(*line).out
    assert not msgspec.convert(portattn(*line, "--json").json, Plan).fell_back
    assert "not interpreter" not in portattn(*line, "--backend", "reference").out
    q = torch.zeros(1, 2, 16, 64, dtype=torch.float16)
    assert "not interpreter: " in library.explain("attention", q, q, q)


def test_a_plan_that_takes_the_vendors_path_says_why_each_variant_is_passed_over(portattn):
    line = ("plan", "attention", *WHERE[:2], "--toolchain", "none", *SMALL, "--mask")
    made = msgspec.convert(portattn(*line, "--json").json, Plan)
    assert made.path not in ("triton", "gluon_forward")
    assert any(note.startswith("not gluon_forward: ") for note in made.notes)
    assert "triton" in [no.path for no in made.rejected]


def test_the_form_of_a_kernel_is_named(portattn):
    line = ("plan", "decode_attention", *WHERE, "--q", "8,32,1,128", "--kv", "8,8,4096,128", "--dtype", "bf16")
    made = portattn(*line, "--json").json
    assert (made["kernel"], made["form"]) == ("decode_split", "warps_apart")
    assert "kernel   decode_split, in its form warps_apart\n" in portattn(*line).out
    assert portattn(*line, "--softcap", "--json").json["form"] == ""


@pytest.mark.parametrize("target", ["rocm:gfx942", "cuda:sm_90"])
def test_plan_says_the_bound_of_real_code(portattn, target):
    shapes = ("--q", "4,16,4096,64", "--kv", "4,16,4096,64", "--dtype", "bf16")
    line = ("plan", "attention", "--target", target, "--toolchain", "triton==3.6.0", *shapes, "--bound")
    found = msgspec.convert(portattn(*line, "--json", exits=0).json["bound"], bound.LowerBound)
    rates = bound.rates_of(parse_target(target, "triton==3.6.0"))
    cores = {"rocm:gfx942": 304, "cuda:sm_90": 132}[target]
    operations = 4 * 4 * 16 * 4096 * 4096 * 64
    assert found.us >= 0.99 * operations / rates.products["f16"] / cores / rates.clock_mhz
    text = portattn(*line).out
    assert f"at least {found.us:.1f} µs, by {found.binding}" in text
    assert ("chosen by a bound, never timed" in text) == (target == "rocm:gfx942")


def test_plan_without_rates_or_compiler_is_one_error(portattn):
    shapes = ("--q", "1,1,64,64", "--kv", "1,1,64,64", "--dtype", "fp16", "--bound")
    for target, toolchain, says in (
        ("ascend910b2", "triton-ascend==3.2.0", "ascend910b2 has no rates"),
        ("gfx942", "triton==3.3.0", "its lab environment is not there"),
    ):
        found = portattn("plan", "attention", "--target", target, "--toolchain", toolchain, *shapes, exits=2)
        assert says in found.err
        assert len(found.err.strip().splitlines()) == 1
