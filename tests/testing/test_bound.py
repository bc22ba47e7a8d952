"""Bounds on time from machine code: the reader of both languages, the arithmetic by hand, and times of an H200."""

import json
from pathlib import Path

import msgspec
import pytest
from places import tables

from portattn.launch import KernelCall
from portattn.planning.registry import parse_target
from portattn.schema.lowering import Launch
from portattn.testing import bound
from portattn.tools.tune.classes import parse, workload
from portattn.worker.machine_code import instructions_a_megaflop, key_loops, pass_through
from portattn.worker.machine_code import parse as read

TABLES = tables(__file__)

GFX942 = parse_target("rocm:gfx942", "triton==3.6.0")
FIGURES = Path(__file__).parents[2] / "docs" / "performance" / "bound.json"
AMD = TABLES["amd"]
SASS = TABLES["sass"]


def test_the_key_loop_of_amdgcn_and_what_a_branch_may_skip():
    (loop,) = key_loops(AMD)
    assert [one.name for one in loop.instructions if "cndmask" in one.name] == []
    assert [loop.count(unit) for unit in ("matrix", "transcendental", "vector", "scratchpad")] == [2, 1, 2, 1]
    assert loop.operations() == 2 * 32 * 32 * 8 + 2 * 16 * 16 * 16
    assert loop.amount("scratchpad") == 64 * 16
    assert read(AMD.replace("size32 0", "size32 1"))[0][-4].amount == 32 * 16
    # Unrolled, the loop costs the same a product but for its branch; with twice the instructions twice as much.
    body = AMD[AMD.index("\tv_mfma") : AMD.index("\ts_cbranch_scc1 .LBB0_2")]
    texts = (AMD, AMD.replace(body, body * 2), AMD.replace("\tv_exp", "\tv_nop\n" * 9 + "\tv_exp"))
    counted = [round(1e6 * count / loop.operations()) for count in (9, 17 / 2, 18)]
    assert [instructions_a_megaflop(text) for text in texts] == counted


def test_cycles_of_instructions_that_waves_ran_are_summed_by_unit():
    ran = {"s_endpgm": 4, "v_exp_f32_e32": 3, "v_mfma_f32_32x32x8_f16": 2, "v_add_f32": 5, "ds_read_b128": 7}
    # A SIMD has a quarter of the CU's 2,048 operations a cycle: 16,384 are 32 cycles. Others issue in 4.
    assert bound.executed_cycles(ran, GFX942) == 4 * 0 + 3 * 16 + 2 * 32 + 5 * 4 + 7 * 4
    assert bound.executed_cycles(ran, parse_target("rocm:gfx1030", "triton==3.6.0")) == 0, "no rates"


def test_of_two_forms_of_a_tile_one_counts_and_a_guarded_tile_counts():
    product = "\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], 0\n"
    either = f".LA:\n\ts_cbranch_vccnz .LB\n{product}\ts_branch .LC\n.LB:\n{product}.LC:\n\ts_cbranch_scc1 .LA\n"
    guarded = f".LA:\n\ts_cbranch_vccnz .LC\n{product}.LC:\n\ts_cbranch_scc1 .LA\n"
    assert [key_loops(text)[0].operations() for text in (either, guarded)] == [2 * 32 * 32 * 8] * 2


def test_the_key_loop_of_sass():
    (loop,) = key_loops(SASS)
    assert [loop.count(unit) for unit in ("matrix", "transcendental", "half_rate", "scratchpad")] == [2, 1, 1, 1]
    assert loop.operations() == 2 * 16 * 128 * 16 + 2 * 16 * 8 * 16
    assert loop.amount("scratchpad") == 32 * 16


def test_a_warp_waits_for_its_products():
    amd, sass = (key_loops(text)[0] for text in (AMD, SASS))
    cycles = {"issue": 4, "vector": 4, "transcendental": 16, "other": 0}
    # The product of 100 cycles ends after the addition, and the register's reader waits: 100 + 4 + 16 + 4 + its own 4.
    assert pass_through(amd, cycles, lambda one: 100 if one.shape == "32x32" else 0) == 128
    # Without the wait for the group the products' unit alone decides; with it the rest comes after.
    own = {"issue": 1, "transcendental": 8}
    long = pass_through(sass, own, lambda one: 64 if one.kind == "f16" and one.closes else 4)
    short = key_loops(SASS.replace("WARPGROUP.DEPBAR.LE gsb0, 0x0", "NOP"))[0]
    assert long > pass_through(short, own, lambda one: 64 if one.closes else 4) >= 68


def problem_of(text):
    return workload(parse(f"{text} dtype=bf16")).problem


def costs_of(target: str, text: str, **facts):
    constants = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_D": 64, "BLOCK_TAIL": 0, "BLOCK_DV": 64, "DOT_PRECISION": "ieee"}
    call = KernelCall("", "dense_forward", (1,), {}, constants, Launch())
    return bound.costs(text, call, {"num_warps": 4, **facts}, parse_target(target, "triton==3.6.0"))


def test_a_steps_costs_and_a_launchs_bound_are_the_arithmetic():
    costs = costs_of("rocm:gfx942", AMD, occupancy=2)
    # 16,384 operations at 2,048 a cycle and CU are 32 cycles of one of four SIMDs, and 8,192 are 16.
    assert costs.cycles == {"matrix": 48, "vector": 2 * 4 + 16, "scratchpad": 64 * 16 * 4 / 128}
    assert costs.programs == 2
    costs = msgspec.structs.replace(costs, alone=3000.0)
    full, causal = (problem_of(f"attention q=4,16,4096,64 kv=4,16,4096,64{mask}") for mask in ("", " causal"))
    launch = Launch(block_m=128, block_n=64)
    found = bound.lower_bound(full, launch, costs, GFX942)
    programs = 4 * 16 * 32
    assert (found.programs, found.steps) == (programs, programs * 64)
    share = -(-programs // 304)  # of the busiest CU
    assert found.times["matrix"] == pytest.approx(share * 64 * 48 / 2100)
    assert (found.binding, found.us) == ("occupancy", pytest.approx(-(-share // 2) * 64 * 3000 / 2100))
    assert found.bytes == 4 * 4 * 16 * 4096 * 64 * 2
    half = bound.lower_bound(causal, launch, costs, GFX942)
    assert half.steps == 4 * 16 * sum(2 * tile + 2 for tile in range(32))
    # A split over keys shares out the steps of a row, and changes no byte.
    decode = problem_of("decode_attention q=2,8,1,64 kv=2,2,1000,64")
    parts = bound.lower_bound(decode, Launch(block_m=16, block_n=64, splits=5), costs, GFX942)
    assert (parts.programs, parts.steps) == (2 * 2 * 5, 2 * 2 * 16)


@pytest.mark.parametrize(("op", "rows", "keys", "mask", "attended", "steps"), [
    ("attention", 128, 65536, "window=128,0", 256, 4), ("attention", 128, 65536, "window=128,7", 256, 4),
    ("attention", 128, 256, "window=64,-1", 192, 3), ("varlen_attention", 128, 1024, "causal=top_left", 128, 2),
    ("varlen_attention", 128, 1024, "window=64,0", 192, 3), ("decode_attention", 4, 1000, "window=100,5", 104, 2),
    ("paged_attention", 1, 1024, "page_size=16 window=63,0", 64, 1),
    ("attention", 257, 1, "window=9,0 causal=top_left", 1, 1),  # rows behind the keys attend none
])  # fmt: skip
def test_hidden_keys_cost_no_step_and_no_byte(op, rows, keys, mask, attended, steps):
    problem, costs = problem_of(f"{op} q=2,1,{rows},64 kv=2,1,{keys},64 {mask}"), costs_of("rocm:gfx942", AMD)
    found = bound.lower_bound(problem, Launch(block_m=128, block_n=64), costs, GFX942)
    assert (found.bytes, found.steps) == (2 * 2 * 2 * 64 * (rows + attended), 2 * steps)


def test_what_has_no_bound_says_why():
    with pytest.raises(bound.NoBound, match="sm_70 has no rates"):
        bound.rates_of(parse_target("cuda:sm_70", "triton==3.2.0"))
    with pytest.raises(bound.NoBound, match="no matrix instructions"):
        costs_of("rocm:gfx942", AMD.replace("v_mfma", "v_none"))
    chunks = msgspec.structs.replace(problem_of("attention q=1,1,64,64 kv=1,1,64,64"), chunk=16)
    with pytest.raises(bound.NoBound, match="with chunks"):
        bound.lower_bound(chunks, Launch(), costs_of("rocm:gfx942", AMD), GFX942)
    with pytest.raises(bound.NoBound, match="no products of f8"):
        costs_of("rocm:gfx90a", AMD.replace("16x16x16_f16", "16x16x32_fp8_fp8"))


def test_no_bound_exceeds_a_time_of_an_h200():
    rows = json.loads(FIGURES.read_text())["rows"]
    timed = [one for one in rows if "bound" in one]
    assert len(timed) > 150
    assert [one for one in timed if one["bound"] > 1.03 * one["us"]] == []
