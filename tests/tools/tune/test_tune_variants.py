"""The Hopper variants' schedules as candidates."""

import msgspec
import pytest
import torch

from portattn.backends.cuda import schedule_tunables as cuda_tunables
from portattn.backends.cuda.hopper_backward import variant as backward
from portattn.backends.cuda.hopper_backward.variant import BackwardSchedule, BackwardVariant
from portattn.backends.cuda.hopper_forward import variant as forward
from portattn.backends.cuda.schedule_tunables import BackwardTunable, ForwardTunable
from portattn.launch import meta_call
from portattn.planning.registry import parse_target
from portattn.tools.tune.classes import conditions_of, parse, workload
from portattn.tools.tune.run import tunables
from portattn.tools.tune.tunable import Choice, NotBuilt

DENSE = "attention q=1,16,4096,{dim} kv=1,16,4096,{dim} dtype={dtype} causal"
GRADIENTS = "attention_backward q=1,16,4096,{dim} kv=1,16,4096,{dim} dtype={dtype} causal"


@pytest.mark.parametrize("dim", forward.WIDTHS)
@pytest.mark.parametrize(("tunable", "text"), [(ForwardTunable(), DENSE), (BackwardTunable(), GRADIENTS)])
def test_todays_schedule_is_among_the_candidates_and_the_nearest(target, tunable, text, dim):
    problem = workload(parse(text.format(dim=dim, dtype="bf16"))).problem
    today = tunable.today(problem, target)
    assert today is not None
    found = list(tunable.space(problem, target, today))
    assert (found[0], len({choice.key for choice in found})) == (today, len(found))
    built = [tunable.build(problem, choice, target) for choice in found]
    assert len({one.identity for one in built}) == len(found)


def test_no_two_candidates_differ_in_what_the_kernel_does_not_have(target):
    """Of tiles that are all as long, so that in which order heads are taken is no part of the search."""
    tunable = ForwardTunable()
    problem = workload(parse(DENSE.format(dim=256, dtype="bf16").replace(" causal", ""))).problem
    found = list(tunable.space(problem, target, tunable.today(problem, target)))
    assert len({tunable.build(problem, choice, target).code for choice in found}) == len(found)


@pytest.mark.parametrize(("tunable", "text"), [(ForwardTunable(), DENSE), (BackwardTunable(), GRADIENTS)])
def test_what_the_variant_rejects_is_not_built(target, tunable, text):
    problem = workload(parse(text.format(dim=64, dtype="fp32"))).problem
    with pytest.raises(NotBuilt, match="not fp32"):
        tunable.build(problem, tunable.today(problem, target), target)


def test_variants_say_how_they_are_tuned(target):
    cores = {one.name for one in tunables(parse_target("cuda:sm_80", "triton==3.6.0"))}
    assert [one.name for one in tunables(target) if one.name not in cores] == ["gluon_forward", "gluon_backward"]


@pytest.mark.parametrize("dim", forward.WIDTHS)
def test_schedules_of_gradients_add_dq_in_parts_or_leave_it_to_a_kernel_of_its_own(target, dim):
    """A part is a message of TMA's: DIM / 4 rows of 256 numbers are divided without a rest."""
    tunable, problem = BackwardTunable(), workload(parse(GRADIENTS.format(dim=dim, dtype="bf16"))).problem
    found = [choice.flags for choice in tunable.space(problem, target, tunable.today(problem, target))]
    assert all(flags["messages"] == 0 or dim // 4 % flags["messages"] == 0 for flags in found)
    assert any(flags["messages"] == 0 for flags in found)
    assert any(flags["messages"] > 0 for flags in found) == (dim <= 128)
    assert not any(flags["turns"] for flags in found)
    assert {flags["stagger"] for flags in found if flags["messages"]} == ({0, 4, 8, 16} if dim <= 128 else set())
    with pytest.raises(NotBuilt, match="messages must not be 0"):
        tunable.build(problem, Choice(flags={**found[0], "apart": False, "messages": 0, "late": True}), target)


def test_a_schedule_of_two_problems_is_not_one_candidate_and_repeatable_gradients_have_none(target):
    """Their schedule is made of the other's: what is not repeatable must not be timed for them."""
    tunable, problem = BackwardTunable(), workload(parse(GRADIENTS.format(dim=64, dtype="bf16"))).problem
    today = tunable.today(problem, target)
    with pytest.raises(NotBuilt, match="same bits"):
        tunable.build(msgspec.structs.replace(problem, deterministic=True), today, target)
    other = msgspec.structs.replace(problem, causal="none")
    assert tunable.build(problem, today, target).identity != tunable.build(other, today, target).identity


@pytest.mark.parametrize("name", ["q", "k", "v", "grad_out"])
def test_what_is_broadcast_is_copied_for_a_candidate(target, monkeypatch, name):
    """Whether a descriptor takes a stride of 0 is not documented: a candidate reads what a call would."""
    problem = workload(parse(GRADIENTS.format(dim=64, dtype="bf16"))).problem
    seen = []
    monkeypatch.setattr(backward, "steps_of", lambda call, schedule: lambda t: seen.append(t[name].stride()))
    monkeypatch.setattr(cuda_tunables, "bind_launcher", lambda launch, call: launch)
    monkeypatch.setattr(cuda_tunables, "described_by", lambda toolchain: False)
    call = meta_call(problem)
    whole = getattr(call, name)
    setattr(call, name, torch.empty((1, 1, *whole.shape[2:]), device="meta", dtype=whole.dtype).expand(whole.shape))
    tunable = BackwardTunable()
    launch = tunable.build(problem, tunable.today(problem, target), target).start(call)
    launch({each: getattr(call, each) for each in ("q", "k", "v", "grad_out")})
    assert seen
    assert 0 not in seen[0]


@pytest.mark.parametrize("release", ["3.6.0", "3.8.0", "3.9.0"])
def test_todays_schedule_is_the_releases(release):
    where = parse_target("cuda:sm_90", f"triton=={release}")
    problem = workload(parse("attention_backward q=4,16,4096,128 kv=4,16,4096,128 dtype=bf16")).problem
    expected = BackwardVariant().for_toolchain(where.toolchain).describe(problem)
    assert BackwardTunable().today(problem, where).flags == {n: v for n, v in expected.items() if n != "width"}


@pytest.mark.parametrize(("repeats", "word"), [(True, "deterministic"), (False, "!deterministic")])
def test_classes_of_a_variants_gradients_say_whether_they_repeat(repeats, word):
    problem = workload(parse(GRADIENTS.format(dim=64, dtype="bf16"))).problem
    problem = msgspec.structs.replace(problem, deterministic=repeats)
    assert word in conditions_of(problem, several_ops=True, variant=True)
    assert "!gqa" in conditions_of(problem, several_ops=True, variant=True)
    core = conditions_of(problem)
    assert not {"deterministic", "!deterministic", "gqa", "!gqa"} & set(core), "the core's repeat whatever is asked for"


@pytest.mark.compiles
def test_a_schedule_of_gradients_is_compiled_without_the_chip(gluon_compiler, target):
    """The facts are those of the kernel with the products, and the schedule is in its code."""
    tunable, problem = BackwardTunable(), workload(parse(GRADIENTS.format(dim=64, dtype="bf16"))).problem
    today = tunable.today(problem, target)
    made = tunable.build(problem, today, target).compile(gluon_compiler, 120.0)
    assert made.failure == ""
    assert made.facts["wgmma"] > 0
    codes = {tunable.build(problem, choice, target).code for choice in tunable.space(problem, target, today)}
    assert len(codes) == len(list(tunable.space(problem, target, today)))
    assert msgspec.convert(today.flags, BackwardSchedule).messages


@pytest.mark.compiles
def test_a_schedule_is_compiled_without_the_chip(gluon_compiler, target):
    """What a candidate's code takes is known before it runs; in which order heads are taken is no part of the code."""
    tunable, problem = ForwardTunable(), workload(parse(DENSE.format(dim=64, dtype="bf16"))).problem
    today = tunable.today(problem, target)
    built = tunable.build(problem, today, target)
    made = built.compile(gluon_compiler, 120.0)
    assert made.failure == ""
    assert made.facts["registers"] > 100
    assert made.facts["wgmma"] > 0
    other = tunable.build(problem, Choice(flags={**today.flags, "in_turn": not today.flags["in_turn"]}), target)
    late = tunable.build(problem, Choice(flags={**today.flags, "late": not today.flags["late"]}), target)
    assert other.code == built.code != late.code
    assert other.identity != built.identity


def test_flags_that_an_entry_leaves_out_are_todays_and_queries_in_registers_need_a_place_of_the_outputs_own(target):
    tunable = ForwardTunable()
    narrow, problem = (workload(parse(DENSE.format(dim=dim, dtype="bf16"))).problem for dim in (64, 128))
    today = tunable.today(narrow, target)
    short = Choice(flags={n: v for n, v in today.flags.items() if n not in ("parts", "reg_q", "in_turn")})
    assert tunable.build(narrow, short, target).identity == tunable.build(narrow, today, target).identity
    today = tunable.today(problem, target)
    both = [choice.flags for choice in tunable.space(problem, target, today) if choice.flags["reg_q"]]
    assert both
    assert all(flags["own_out"] for flags in both)
    with pytest.raises(NotBuilt, match="own_out"):
        tunable.build(problem, Choice(flags={**today.flags, "reg_q": True, "own_out": False}), target)
