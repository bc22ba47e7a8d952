"""The scheduled backward of sm_90: when it is planned, that it compiles clean, and its gradients on such a chip."""

import dataclasses
from typing import Any

import msgspec
import pytest
import torch
from gluon_ptx import disassemble, nvdisasm
from support import random_call
from test_copies import PRODUCT, instructions, overwritten
from variantchip import assert_variant_right, device_for

import portattn
from portattn import Problem
from portattn.backends.cuda.hopper_backward import variant as backward
from portattn.backends.cuda.hopper_backward.variant import WIDTHS, BackwardSchedule, BackwardVariant, choice
from portattn.backends.cuda.schedules import ALIBI, BENT, DOCUMENTS, LISTED, PREFIX, TIMED_WITH
from portattn.compile.ensure_compiled import compile_in
from portattn.config import Settings
from portattn.launch import meta_call
from portattn.launch.kernelcall import signatures
from portattn.launch.run import launch_tensors
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.plan import Plan
from portattn.testing import findings
from portattn.testing.findings import KernelFacts
from portattn.testing.tolerance import nan_filled_memory

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
VARIANT = BackwardVariant()
BASE = Problem(
    op="attention_backward", batch=2, heads_q=4, heads_k=2, seq_q=333, seq_k=333, head_dim=128, dtype="bf16",
)  # fmt: skip
PACKED = Problem(
    op="varlen_attention_backward", batch=4, heads_q=4, heads_k=2, seq_q=300, seq_k=300, total_q=700, total_k=700,
    head_dim=128, dtype="bf16",
)  # fmt: skip
LENGTHS: dict[str, Any] = {"seqlens_q": True, "seqlens_k": True}
# With blocks for each multiprocessor many times over.
LARGE = msgspec.structs.replace(BASE, heads_q=16, heads_k=16, seq_q=4096, seq_k=4096)
LARGE_PACKED = msgspec.structs.replace(
    PACKED, heads_q=16, heads_k=8, seq_q=4096, seq_k=4096, total_q=16000, total_k=16000
)


LONG = "t0 f erf score\nt1 f mul t0 score\nt2 f erf t1\nt3 f tanh t2\nout t3"
HIDING = "t0 i sub q_idx kv_idx\nt1 i abs t0\nt2 b gt t1 3\nt3 f mul score 0.5\nt4 f where t2 t3 -inf\nout t4"


def problem(base=BASE, **fields):
    return msgspec.structs.replace(base, **fields)


TAKEN: dict[str, Problem] = {
    "plain": BASE, "causal": problem(causal="bottom_right"), "top left": problem(causal="top_left", seq_q=100),
    "window": problem(window_left=40, window_right=3), "padded": problem(**LENGTHS),
    "padded keys": problem(seqlens_k=True), "narrow heads": problem(head_dim=40, head_dim_v=64, layout="bshd"),
    "one key head": problem(heads_k=1), "a gradient of the LSE": problem(grad_lse=True),
    "a negative scale": problem(negative_scale=True), "softcap": problem(softcap=True),
    "a function": problem(score_mod=BENT), "hiding": problem(score_mod=HIDING), "packed": PACKED,
    "repeatable": problem(deterministic=True), "repeatable, in turns": problem(LARGE, deterministic=True),
    "lists": problem(**LISTED, layout="bshd"), "documents": problem(**LISTED, mask_mod=DOCUMENTS, softcap=True),
    "packed, causal, window": problem(PACKED, causal="bottom_right", window_left=40, head_dim=256, head_dim_v=256),
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout": True}, "takes no dropout"), "ALiBi": ({"alibi_slopes": True}, "takes no alibi_slopes"),
    "left padding": ({"leftpad_q": True}, "takes no leftpad_q"), "bias": ({"bias": True}, "takes no bias"),
    "fp32": ({"dtype": "fp32"}, "takes fp16 and bf16, not fp32"),
    "wide heads": ({"head_dim": 288, "head_dim_v": 128}, "takes heads of at most 256 columns, not 288"),
    "wide values": ({"head_dim_v": 264}, "takes heads of at most 256 columns, not 264"),
    "two widths": ({"head_dim_v": 64}, "takes K and V of one width, not 128 and 64"),
    "odd columns": ({"head_dim": 100, "head_dim_v": 100}, "writes through descriptors"),
    "unaligned": ({"aligned": False}, "reads through descriptors"), "empty": ({"seq_k": 0}, "seq_k is 0"),
    "lists, repeatable": (LISTED | {"deterministic": True}, "adds to dQ in any order where blocks are listed"),
    "lists, wide heads": (LISTED | {"head_dim": 136, "head_dim_v": 136}, "of heads of at most 128 columns, not 136"),
    "lists, small blocks": (LISTED | {"block_q": 64}, "takes lists of blocks of a multiple of 128, not (64, 128)"),
    "lists, causal": (LISTED | {"causal": "bottom_right"}, "without causal, window and lengths of sequences"),
    "a mask without lists": ({"mask_mod": PREFIX}, "takes a mask_mod beside lists of blocks alone"),
    "a function with tensors": ({"score_mod": "c0 f 1 0\nt0 f load c0 h\nout t0"}, "score functions that read tensors"),
    "a function's sine": ({"score_mod": "t0 f sin score\nout t0"}, "takes functions without sin"),
    "a function's long derivative": ({"score_mod": LONG}, "whose derivative has at most 16 operations, not 20"),
    "a function and a cap": ({"score_mod": BENT, "softcap": True}, "takes neither a softcap beside a score_mod"),
    "the forward": ({"op": "attention"}, "is for attention_backward and varlen_attention_backward"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_it_is_planned_before_the_core(name):
    assert VARIANT.rejects(TAKEN[name], SM_90) is None
    assert VARIANT.describe(TAKEN[name])["width"] in WIDTHS
    made = plan(TAKEN[name], SM_90)
    assert (made.path, made.fell_back) == ("gluon_backward", False)
    assert plan(TAKEN[name], SM_90, settings=Settings(backend="triton")).path == "triton"


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_and_why(name):
    fields, reason = REFUSED[name]
    no = VARIANT.rejects(problem(**fields), SM_90)
    assert no.path == "gluon_backward"
    assert reason in no.reason
    no = VARIANT.rejects(BASE, parse_target("cuda:sm_100", "triton==3.6.0"))
    assert no.reason == "is for sm_90, and this is sm_100"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"batch": 4, "heads_q": 32, "heads_k": 8, "seq": 4096}, 4),
        ({"batch": 2, "heads_q": 32, "heads_k": 8, "seq": 2048}, 8),
        ({"batch": 16, "heads_q": 16, "heads_k": 2, "seq": 1024}, 16),
        ({"batch": 1, "heads_q": 16, "heads_k": 2, "seq": 16384}, 2),
        ({"batch": 4, "heads_q": 32, "heads_k": 8, "seq": 4096, "window_left": 512}, 32),
        ({"batch": 4, "heads_q": 32, "heads_k": 8, "seq": 4096, "causal": "none"}, 32),
        ({"batch": 4, "heads_q": 16, "heads_k": 16, "seq": 4096}, 8),
    ],
    ids=str,
)  # fmt: skip
def test_heads_side_by_side(fields, expected):
    """Few causal blocks: as many heads as have a block for each of 132 multiprocessors, and four at least."""
    seq = fields.pop("seq")
    given = {"causal": "bottom_right", "head_dim": 128, "head_dim_v": 128, "seq_q": seq, "seq_k": seq} | fields
    p = problem(**given)
    tiles = backward.tiles_of(p.seq_k, p.total_k, p, 128)
    assert backward.together(p, tiles, 132) == expected
    assert p.window_left >= 0 or backward.together(p, tiles, 132, turns=True) >= expected


def test_schedules():
    summed = {dim: choice(problem(head_dim=dim, head_dim_v=dim), TIMED_WITH).schedule for dim in WIDTHS}
    assert summed == {
        64: BackwardSchedule(keys=128, stages=2, messages=2, late=True, stagger=8),
        128: BackwardSchedule(keys=128, stages=2, messages=4, stagger=8),
        256: BackwardSchedule(keys=64, stages=2, messages=0),
    }
    assert choice(problem(head_dim=64, head_dim_v=64, causal="bottom_right"), TIMED_WITH).schedule.stages == 3
    grouped = problem(head_dim=128, head_dim_v=128, causal="bottom_right", heads_q=8, heads_k=2)
    assert choice(grouped, TIMED_WITH).schedule == msgspec.structs.replace(summed[128], stagger=0)
    assert VARIANT.describe(problem(head_dim=72, head_dim_v=72))["messages"] == summed[128].messages > 0
    for dim in WIDTHS:  # sums in memory are added in any order
        repeatable = choice(problem(head_dim=dim, head_dim_v=dim, deterministic=True), TIMED_WITH).schedule
        assert repeatable == BackwardSchedule(keys=summed[dim].keys, stages=2, messages=0)
        large = choice(problem(LARGE, head_dim=dim, head_dim_v=dim, deterministic=True), TIMED_WITH)
        if summed[dim].messages:  # except in turns
            assert large.schedule == msgspec.structs.replace(summed[dim], stagger=0, turns=True)
        else:
            assert large.schedule == summed[dim]
    for dim, messages in ((64, 2), (128, 4)):
        apart = choice(problem(LARGE, head_dim=dim, head_dim_v=dim), TIMED_WITH).schedule
        assert apart == BackwardSchedule(keys=128, stages=2, messages=messages, apart=True)
    for fields in ({"messages": 1}, {"late": True}, {"turns": True}, {"stagger": 8}):
        with pytest.raises(ValueError, match="groups apart"):
            BackwardSchedule(**{"keys": 128, "stages": 2, "messages": 2, "apart": True, **fields})
    with pytest.raises(ValueError, match="late"):
        BackwardSchedule(keys=128, stages=2, messages=0, late=True)
    with pytest.raises(ValueError, match="128 keys"):
        BackwardSchedule(keys=64, stages=2, messages=2)
    for fields in ({"messages": 0}, {"messages": 2, "stagger": 8}):
        with pytest.raises(ValueError, match="turns are about dQ that is added"):
            BackwardSchedule(keys=128, stages=2, turns=True, **fields)


@pytest.mark.parametrize(
    ("fields", "turns"),
    [
        ({}, True),
        ({"causal": "bottom_right"}, True),
        ({"heads_k": 2}, True),
        ({"batch": 1, "heads_q": 4, "heads_k": 4}, False),  # all blocks of a head start at once and follow each other
        ({"batch": 1, "heads_q": 4, "heads_k": 4, "causal": "bottom_right"}, True),  # the later ones have less to do
        ({"batch": 1, "heads_q": 4, "heads_k": 4, "causal": "bottom_right", "seq_q": 128}, False),
        ({"batch": 1, "heads_q": 2, "heads_k": 2, "seq_q": 512, "seq_k": 512}, False),
        ({"batch": 1, "seq_q": 16384, "seq_k": 16384, "window_left": 1023, "causal": "bottom_right"}, True),
        ({"batch": 1, "seq_q": 1, "seq_k": 16384}, False),
    ],
)
def test_when_repeatable_gradients_are_added_in_turns(fields, turns):
    p = problem(LARGE, **fields, deterministic=True)
    assert backward.in_turns(p, 128) is turns
    made = plan(p, SM_90)
    assert made.path == "gluon_backward"
    assert made.schedule["turns"] is turns
    assert (made.schedule["messages"] == 0) is not turns
    assert not plan(problem(LARGE, **fields), SM_90).schedule["turns"]  # nobody asked for it


def test_views_are_those_of_a_call():
    names = ("q", "k", "v", "forward_out", "grad_out", "grad_q", "grad_k", "grad_v")
    swapped, packed = (problem(layout="bshd"), (2, 3, 4, 8), (2, 4, 3)), (PACKED, (7, 4, 8), (4, 7))
    for (p, shape, rows), expected in ((swapped, (2, 4, 3, 8)), (packed, (1, 4, 7, 8))):
        given = dict.fromkeys(names, torch.zeros(shape)) | dict.fromkeys(("forward_lse", "out"), torch.zeros(rows))
        seen = VARIANT.views(p, given | {"grad_lse": None, "lse": None})
        assert {tuple(seen[name].shape) for name in names} == {expected}
        assert seen["out"].shape == seen["forward_lse"].shape == expected[:3]
        assert seen["grad_lse"] is None


def test_launches_as_a_compiler_sees_them():
    pytest.importorskip("triton.experimental.gluon")
    first, keys, last = signatures(VARIANT, meta_call(problem(causal="bottom_right")))
    assert [s.function for s in (first, keys, last)] == ["row_statistics", "scheduled_backward", "query_gradients"]
    assert keys.types["statistics_desc"].startswith("tensordesc<fp32[2, 64],NVMMASharedLayout(")
    assert keys.types["dq_desc"].startswith("tensordesc<fp32[8, 256],")
    assert keys.constants["RAGGED"]
    assert not keys.constants["EDGES"]
    assert keys.constants["lengths_q"] is None
    assert keys.types["batches"] == "i32"  # not specialised on
    repeatable = signatures(VARIANT, meta_call(problem(deterministic=True)))
    assert [s.function for s in repeatable] == ["row_statistics", "scheduled_backward", "scheduled_queries"]
    assert repeatable[0].constants["sums"] is None
    assert repeatable[1].constants["dq_desc"] is None
    assert repeatable[1].constants["turns"] is None
    large = signatures(VARIANT, meta_call(problem(LARGE, deterministic=True)))
    assert [s.function for s in large] == ["row_statistics", "scheduled_backward", "query_gradients"]
    assert large[0].types["turns"] == large[1].types["turns"] == "*i32"
    assert (large[1].constants["TURNS"], large[1].constants["STAGGER"]) == (True, 0)
    packed = signatures(VARIANT, meta_call(PACKED))[1]
    assert packed.constants["EDGES"]
    assert packed.types["edge_q_desc"] == packed.types["q_desc"]


@pytest.mark.parametrize(
    ("fields", "edges"),
    [
        ({}, False),
        ({"seqlens_k": True}, False),
        ({"seqlens_k": True, "causal": "bottom_right"}, True),  # more queries than keys: the first see nothing
        ({"seqlens_q": True}, True),
        ({"seq_q": 400, "causal": "bottom_right"}, True),
        ({"seq_q": 400, "causal": "top_left"}, False),
        ({"seq_q": 400, "window_right": 67}, False),
        ({"seq_q": 400, "window_right": 66}, True),
        ({"seq_q": 400, "window_left": 3}, False),
        ({"seq_q": 400, "window_left": 66, "causal": "top_left"}, True),
        ({"seq_q": 400, "window_left": 67, "causal": "top_left"}, False),
    ],
)
def test_where_rows_that_do_not_count_are_kept_apart(fields, edges):
    pytest.importorskip("triton.experimental.gluon")
    assert signatures(VARIANT, meta_call(problem(**fields)))[1].constants["EDGES"] is edges


def plan_of(p, target=SM_90):
    toolchain = str(target.toolchain)
    return Plan(problem=p, target=target.name, toolchain=toolchain, requested=VARIANT.name, path=VARIANT.name)


FORMS: dict[str, Problem] = {
    "64, full": problem(head_dim=64, head_dim_v=64, seq_k=512),
    "64, packed, causal": problem(PACKED, head_dim=64, head_dim_v=64, causal="bottom_right"),
    "128, full": problem(seq_k=512, heads_k=4), "128, causal": problem(causal="bottom_right"),
    "64, apart": problem(LARGE, head_dim=64, head_dim_v=64), "128, apart": LARGE,
    "64, apart, causal, padded": problem(LARGE, **LENGTHS, head_dim=64, head_dim_v=64, causal="bottom_right"),
    "128, apart, causal": problem(LARGE, causal="bottom_right"),
    "128, padded, window": problem(**LENGTHS, window_left=40), "128, repeatable": problem(deterministic=True),
    "128, in turns, causal": problem(LARGE, causal="bottom_right", deterministic=True),
    "64, in turns, packed": problem(LARGE_PACKED, head_dim=64, head_dim_v=64, deterministic=True),
    "256, causal": problem(head_dim=256, head_dim_v=256, causal="bottom_right"),
    "256, packed": problem(PACKED, head_dim=256, head_dim_v=256),
    "64, function": problem(head_dim=64, head_dim_v=64, score_mod=BENT),
    "128, function, causal": problem(causal="bottom_right", score_mod=BENT),
    "128, function, repeatable": problem(score_mod=BENT, deterministic=True),
    "128, softcap, packed": problem(PACKED, softcap=True, window_left=40),
    "64, lists": problem(**LISTED, head_dim=64, head_dim_v=64), "128, lists": problem(**LISTED),
    "64, documents, function": problem(**LISTED, head_dim=64, head_dim_v=64, mask_mod=DOCUMENTS, score_mod=BENT),
    "128, documents": problem(**LISTED, mask_mod=DOCUMENTS, seq_q=384, seq_k=512),
    "128, prefix, softcap": problem(**LISTED, mask_mod=PREFIX, softcap=True),
    "64, apart, lists, prefix": problem(**LISTED | {"seq_k": 640}, head_dim=64, head_dim_v=64, mask_mod=PREFIX),
    "128, apart, lists, documents": problem(**LISTED | {"seq_k": 640}, mask_mod=DOCUMENTS),
    "256, function": problem(head_dim=256, head_dim_v=256, score_mod=BENT),
}  # fmt: skip
MOST_SPILLED = 128  # bytes a thread of all roles: a thread that only moves memory has 24 registers


@pytest.mark.compiles
@pytest.mark.parametrize("form", FORMS)
def test_it_compiles_clean(gluon_compiler, gluon_target, form):
    p = FORMS[form]
    kernels, failed, _ = findings.compile_variant(
        VARIANT, plan_of(p, gluon_target), gluon_target, gluon_compiler, 120.0
    )
    assert failed is None, failed
    assert len(kernels) == 3 + bool(p.mask_mod)
    for kernel in kernels:
        assert "serialized_wgmma" not in kernel.facts, kernel.function
        most = MOST_SPILLED * (6 if p.mask_mod else 2 if p.score_mod else 1)  # two groups, each with its operands
        assert kernel.facts["spills"] <= most, kernel.function
        assert kernel.facts["scratchpad_bytes"] <= (SM_90.arch.scratchpad_bytes or 0), kernel.function
    assert kernels[-2].facts["wgmma"] > 0
    if VARIANT.timed_with(p):
        assert findings.broken_gates(findings.check_variant(VARIANT, p, gluon_target, kernels)) == []


def test_a_variant_needs_matrix_instructions_in_one_of_its_kernels():
    facts: dict[str, Any] = {"scratchpad_bytes": 100, "registers": 32, "spills": 0}
    rows = KernelFacts(function="row_statistics", facts=facts)
    keys = KernelFacts(function="scheduled_backward", facts=facts | {"wgmma": 12})
    for kernels, passed in (((rows, keys), True), ((rows, rows), False)):
        assert all(gate.passed for gate in findings.check_variant(VARIANT, BASE, SM_90, kernels)) is passed


@pytest.mark.compiles
@pytest.mark.parametrize(
    "form",
    ["64, full", "128, causal", "128, repeatable", "128, in turns, causal", "128, function, causal", "128, documents"],
)
def test_a_left_operand_stays_until_its_product_has_ended(gluon_compiler, gluon_target, tmp_path, form):
    """Quirk cuda-0018: P and dS are operands in registers, and more than one product runs."""
    disassembler = nvdisasm(gluon_target)
    p = FORMS[form]
    for signature in signatures(VARIANT, meta_call(p)):
        if not signature.function.startswith("scheduled_"):
            continue
        reply = compile_in(gluon_compiler, signature, plan_of(p), SM_90, 120.0, "text")
        assert reply.outcome == "ok", reply.message
        code = instructions(disassemble(disassembler, str(reply.facts["ptx"]), tmp_path))
        assert any((found := PRODUCT.search(line)) and found.group(3).startswith("R") for line in code)
        assert overwritten(code) == []


def test_what_overwrites_is_seen():
    one = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0 ;"
    other = "HGMMA.64x64x16.F32.BF16 R120, gdesc[UR4], R120, gsb0 ;"
    write, wait = "F2FP.BF16.F32.PACK_AB R90, R5, R4 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x{} ;"
    assert len(overwritten([one, write])) == 1
    assert len(overwritten([one, other, wait.format(2), write])) == 1
    assert overwritten([one, other, wait.format(1), write]) == []
    assert overwritten([one, wait.format(0), write]) == []


@pytest.fixture
def chip(device):
    return device_for(VARIANT, BASE, device)


# Rows and keys that attend nothing, in every tile; rows that see other keys in each sequence and head.
HOLES = "t0 i positive_mod q_idx 3\nt1 b ne t0 0\nt2 i positive_mod kv_idx 5\nt3 b ne t2 2\nt4 b and t1 t3\nout t4"
VARIED = "t0 i sub q_idx kv_idx\nt1 i mul h 64\nt2 b le t0 t1\nt3 i mul b 99\nt4 b ge kv_idx t3\nt5 b and t2 t4\nout t5"
LISTS: dict[str, dict[str, Any]] = {
    "lists": LISTED | {"seq_q": 450, "seq_k": 700}, "prefix, cap": LISTED | {"mask_mod": PREFIX, "softcap": True},
    "documents": LISTED | {"mask_mod": DOCUMENTS, "seq_q": 520, "seq_k": 700, "grad_lse": True},
    "holes": LISTED | {"mask_mod": HOLES, "seq_k": 700}, "varied": LISTED | {"mask_mod": VARIED, "score_mod": ALIBI},
    "wide blocks": LISTED | {"mask_mod": PREFIX, "block_q": 256, "block_k": 384, "seq_q": 700, "heads_k": 1},
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "square": {}, "one row": {"seq_q": 1}, "one key": {"seq_k": 1}, "more queries": {"seq_q": 700, "seq_k": 130},
    "more keys": {"seq_q": 100, "seq_k": 711}, "whole tiles": {"seq_q": 256, "seq_k": 512, "heads_k": 4},
    "one key head": {"heads_q": 5, "heads_k": 1}, "padded": LENGTHS | {"batch": 5},
    "padded keys": {"seqlens_k": True, "batch": 3}, "window": {"window_left": 70},
    "padded, window": LENGTHS | {"window_left": 20}, "a gradient of the LSE": {"grad_lse": True},
    "fp16, bshd": {"dtype": "fp16", "layout": "bshd"}, "repeatable": {"deterministic": True, "seq_q": 450},
    "softcap": LENGTHS | {"softcap": True}, "function": {"score_mod": BENT, "seq_q": 450},
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 200, 256])
@pytest.mark.parametrize("name", SIZES)
def test_gradients(chip, name, head_dim, causal):
    p = problem(**SIZES[name] | {"head_dim": head_dim, "head_dim_v": head_dim, "causal": causal})
    assert_variant_right(VARIANT, random_call(p, 1, device=chip.name))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("name", LISTS)
def test_gradients_of_lists(chip, name, head_dim):
    p = problem(**LISTS[name] | {"head_dim": head_dim, "head_dim_v": head_dim})
    for seed in range(2):
        assert_variant_right(VARIANT, random_call(p, seed, device=chip.name))


@pytest.mark.parametrize("mask", ["", PREFIX])
def test_statistics_are_of_whole_blocks_of_listed_queries(mask):
    """And tell which tiles have rows that attend nothing, where a function decides it."""
    pytest.importorskip("triton.experimental.gluon")
    p = problem(**LISTED | {"block_q": 256}, mask_mod=mask, seq_q=300)
    call = meta_call(p)
    *finding, first, keys, _ = signatures(VARIANT, call)
    assert [one.function for one in finding] == ["find_hidden_keys"] * bool(mask)
    assert (first.constants["IDLE"], "turns" in keys.types) == (bool(mask), bool(mask))
    tensors, launch = launch_tensors(call), VARIANT.described(call)
    statistics, by_keys, _ = launch.steps({**VARIANT.views(p, tensors), **launch.fresh(call.q)})[-3:]
    assert statistics.grid == (8 * 2 * 4,)  # two blocks of four tiles
    assert by_keys.arguments["list_k"] == call.block_queries.stride(2)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [-1, 30])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_packed(chip, head_dim, causal, window, deterministic):
    fields = {"head_dim": head_dim, "head_dim_v": head_dim, "causal": causal, "window_left": window}
    for seed in range(2):
        p = problem(PACKED, **fields, deterministic=deterministic, grad_lse=seed == 1)
        assert_variant_right(VARIANT, random_call(p, seed, device=chip.name))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, -0.2, 3.0])
def test_any_scale(chip, scale):
    for head_dim in (64, 128, 256):
        p = problem(head_dim=head_dim, head_dim_v=head_dim, causal="bottom_right", negative_scale=scale < 0)
        assert_variant_right(VARIANT, random_call(p, 3, device=chip.name, scale=scale))


def assert_repeats(call, times):
    tensors, launch = launch_tensors(call), VARIANT.launcher(call)
    launch(tensors)
    names = ("grad_q", "grad_k", "grad_v")
    first = [tensors[name].clone() for name in names]
    for _ in range(times):
        with nan_filled_memory():
            launch(tensors)
        assert all(torch.equal(tensors[name], one) for name, one in zip(names, first, strict=True))


@pytest.fixture(params=["in turns", "two kernels"])
def form(request, monkeypatch):
    """How dQ is made repeatable, whatever the sizes ask for."""
    monkeypatch.setattr(backward, "in_turns", lambda p, keys: request.param == "in turns")
    return str(request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeatable_gradients_are_bit_equal(chip, form, head_dim):
    p = problem(head_dim=head_dim, head_dim_v=head_dim, batch=4, heads_q=16, seq_q=1024, seq_k=1024, deterministic=True)
    assert_repeats(random_call(p, 5, device=chip.name), 50)


def sized(name, **fields):
    if name in SIZES:
        return problem(**SIZES[name] | fields)
    return problem(PACKED, **fields, window_left=30 if "window" in name else -1)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("name", [*SIZES, "packed", "packed, window"])
def test_gradients_in_turns(chip, monkeypatch, name, head_dim, causal):
    monkeypatch.setattr(backward, "in_turns", lambda p, keys: True)
    p = sized(name, head_dim=head_dim, head_dim_v=head_dim, causal=causal, deterministic=True)
    assert choice(p, TIMED_WITH).schedule.turns
    call = random_call(p, 1, device=chip.name)
    assert_variant_right(VARIANT, call)
    assert_repeats(call, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("name", [name for name in SIZES if name not in ("softcap", "function", "hiding function")])
def test_gradients_of_groups_apart(chip, monkeypatch, name, head_dim, causal):
    """Also of problems that have another schedule: the fewest steps, every mask, and lengths within a tile.
    Three programs have many blocks of keys each."""
    monkeypatch.setattr(backward, "multiprocessors", lambda device: 3)
    schedule = BackwardSchedule(keys=128, stages=2, messages=2 if head_dim <= 64 else 4, apart=True)
    monkeypatch.setattr(backward, "choice", lambda p, toolchain: backward.TimedBackwardSchedule(schedule, ""))
    p = sized(name, head_dim=head_dim, head_dim_v=head_dim, causal=causal, deterministic=False)
    assert_variant_right(VARIANT, random_call(p, 1, device=chip.name))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_more_blocks_of_a_head_than_run_at_a_time(chip, monkeypatch, causal):
    """157 blocks of one head, which wait for each other: they end, and say what two kernels say."""
    p = problem(batch=1, heads_q=1, heads_k=1, seq_q=20000, seq_k=20000, causal=causal, deterministic=True)
    call = dataclasses.replace(meta_call(p), **inputs_of(p, chip.name))
    found = []
    for turns in (True, False):
        monkeypatch.setattr(backward, "in_turns", lambda p, keys, turns=turns: turns)
        assert_repeats(call, 3)
        found.append(call.grad_q.float())
    assert (found[0] - found[1]).norm() < 4e-3 * found[1].norm()


def inputs_of(p, device):
    """Tensors of a gradient's call whose reference would take too long; the result and its LSE by the public call."""
    generator = torch.Generator(device).manual_seed(3)
    shape = (p.batch, p.heads_q, p.seq_q, p.head_dim)
    q, k, v, grad = (torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(4))
    out, lse = portattn.attention(q, k, v, causal=p.causal != "none", return_lse=True)
    given = {"q": q, "k": k, "v": v, "forward_out": out, "forward_lse": lse, "grad_out": grad}
    return given | {name: torch.empty_like(q) for name in ("grad_q", "grad_k", "grad_v")}


@pytest.mark.gpu
def test_gradients_that_are_broadcast(chip):
    call = random_call(problem(), 6, device=chip.name)
    call.grad_out = call.grad_out[:, :1].expand(call.grad_out.shape)
    assert_variant_right(VARIANT, call)
