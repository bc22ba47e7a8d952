"""The core kernels as tunables: planned as their entry would be, compiled in a child, run and checked."""

import pytest
import torch
from faketunable import SMALL, choice

from portattn.planning.registry import parse_target
from portattn.schema.target import Target
from portattn.tools import lab
from portattn.tools.lab import LabError
from portattn.tools.tune.classes import parse, workload
from portattn.tools.tune.core import plan_choice
from portattn.tools.tune.run import tunables
from portattn.tools.tune.search import PreparedWorkload, facts_of
from portattn.tools.tune.tunable import Choice, CompileResult, NotBuilt, compile_all, programs_a_core, verdict

WIDE = "attention q=2,4,512,128 kv=2,4,512,128 dtype=bf16 causal"


def core(target: Target, name: str):
    return next(one for one in tunables(target) if one.name == name)


def test_a_candidate_is_planned_as_its_entry_would_be_and_what_no_core_kernel_takes_is_not_built(target):
    problem = workload(parse(WIDE)).problem
    asked = Choice(launch={"block_m": 128, "block_n": 32, "num_warps": 8}, lowering={"load": "descriptor"})
    made = plan_choice("dense_forward", problem, asked, target)
    lowering, launch = made.specialised
    assert (made.path, launch.block_m, launch.block_n, launch.num_warps, lowering.load) == (
        "triton", 128, 32, 8, "descriptor",
    )  # fmt: skip
    with pytest.raises(NotBuilt, match="compiles nothing for cuda"):
        plan_choice("dense_forward", problem, Choice(), parse_target("cuda:sm_90", "triton-ascend==3.2.0"))


def test_limits_act_on_candidates_so_some_are_twins_and_a_split_over_keys_is_part_of_one(target):
    """Queries of 20 rows take no tile of 128: both candidates are one of 32."""
    problem = workload(parse(SMALL)).problem
    tunable = core(target, "dense_forward")
    tall, low = (Choice(launch={"block_m": rows, "block_n": 64}) for rows in (128, 64))
    assert tunable.build(problem, tall, target).identity == tunable.build(problem, low, target).identity
    assert tunable.build(problem, choice(32), target).identity != tunable.build(problem, low, target).identity
    problem = workload(parse("decode_attention q=1,32,1,128 kv=1,8,8192,128")).problem
    tunable = core(target, "decode_split")
    one, four = (
        tunable.build(problem, Choice(launch={"block_m": 16, "block_n": 64}, occupancy=n), target) for n in (1, 4)
    )
    assert one.identity != four.identity


def test_programs_a_core(target):
    facts = {"registers": 168, "num_warps": 4, "scratchpad_bytes": 65536}
    assert programs_a_core(facts, target.arch) == 3
    assert programs_a_core(facts | {"registers": 128}, target.arch) == 3
    assert programs_a_core(facts | {"registers": 128, "scratchpad_bytes": 32768}, target.arch) == 4
    assert programs_a_core(facts | {"registers": 255, "scratchpad_bytes": 0}, target.arch) == 2
    one_warp = facts | {"num_warps": 1, "scratchpad_bytes": 0}  # a quarter of them has two of 178, three of 168
    assert [programs_a_core(one_warp | {"registers": number}, target.arch) for number in (178, 168)] == [8, 12]
    assert programs_a_core(facts, parse_target("rocm:gfx942", "triton==3.6.0").arch) is None
    asked = Choice(launch={"maxnreg": 168, "num_warps": 4})
    assert verdict(CompileResult("", facts), asked, target, 0) == ""
    assert "maxnreg" in verdict(CompileResult("", facts | {"scratchpad_bytes": 200_000}), asked, target, 0)
    assert "4 programs" in verdict(CompileResult("", facts), Choice(occupancy=4), target, 0)


@pytest.mark.compiles
@pytest.mark.parametrize(("name", "kernel"), [
    ("cuda:sm_90", "dense_forward"), ("rocm:gfx942", "dense_forward"), ("cuda:sm_90", "dense_backward"),
])  # fmt: skip
def test_a_candidate_compiles_in_a_child(name, kernel):
    """Both kernels of gradients count: 128 rows of one 128 wide and two tiles of scores do not fit four warps."""
    target, trained = parse_target(name), kernel == "dense_backward"
    problem = workload(parse(WIDE.replace("attention", "attention_backward") if trained else WIDE)).problem
    launch = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
    chosen = Choice(launch=launch | ({"num_stages": 1, "rows_m": 128, "rows_n": 64} if trained else {}))
    built = core(target, kernel).build(problem, chosen, target)
    made: dict[str, CompileResult] = {}
    compile_all([(built.code, built)], str(target.toolchain), 1, 120.0, made.__setitem__, {})
    assert made[built.code].failure == ""
    known = facts_of(built, made)
    assert known["registers"] > 32
    assert 0 < known["scratchpad_bytes"] <= target.arch.scratchpad_bytes
    assert (known["spills"] > 0) is trained
    assert ("bytes spilled" in verdict(made[built.code], chosen, target, 0)) is trained
    again: dict[str, CompileResult] = {}
    compile_all([(built.code, built)], str(target.toolchain), 1, 120.0, again.__setitem__, made)
    assert again == {}


def test_a_toolchain_that_is_not_here_is_said_at_once(target, tmp_path, monkeypatch):
    monkeypatch.setattr(lab.folders, "need", lambda name: (_ for _ in ()).throw(LabError(f"no {name}")))
    built = core(target, "dense_forward").build(workload(parse(WIDE)).problem, choice(64), target)
    with pytest.raises(LabError, match=r"triton==3\.2\.0"):
        compile_all([(built.code, built)], "triton==3.2.0", 2, 5.0, lambda code, made: None, {})


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dense_forward", SMALL),
        ("decode_split", "decode_attention q=2,4,1,16 kv=2,2,200,16 dtype=fp16"),
        ("paged_split", "paged_attention q=2,4,1,16 kv=2,2,64,16 page_size=16 dtype=fp16"),
        ("decode_split", "decode_attention q=2,4,1,16 kv=2,2,200,16 dtype=fp16 kv_format=e4m3 kv_scales=head"),
        ("paged_split", "paged_attention q=2,4,1,16 kv=2,2,64,16 page_size=16 dtype=fp16 kv_format=int8"),
        ("dense_backward", SMALL.replace("attention", "attention_backward")),
        ("varlen_backward", "varlen_attention_backward q=2,2,20,16 kv=2,1,20,16 dtype=fp16 causal"),
    ],
)
def test_a_candidate_runs_and_is_checked(name, text):
    """On the CPU the core kernels are interpreted: what starts, fills and checks a candidate is the device's."""
    target, trained = parse_target("cpu:generic"), name.endswith("backward")
    load = workload(parse(text))
    stage = PreparedWorkload(load, torch.device("cpu"))
    rows = {"rows_m": 32, "rows_n": 16} if trained else {}
    chosen = Choice(launch={"block_m": 16, "block_n": 16, "num_stages": 1} | rows)
    begun, errors = stage.first_run(core(target, name).build(load.problem, chosen, target))
    assert not errors.wrong
    assert 0 < errors.mean < errors.largest <= errors.budget
    (stage.call.grad_q if trained else begun.out)[..., -1, -1] += 0.5
    assert stage.checker.errors(begun.out).wrong
    begun.run()
    assert not stage.checker.errors(begun.out).wrong
    if trained:
        stage.call.grad_v[..., -1, 0] = float("nan")
        assert (errors.budget, stage.checker.errors(begun.out).largest) == (1.0, float("inf"))
