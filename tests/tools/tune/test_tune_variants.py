"""The Hopper forward's schedules as candidates."""

from __future__ import annotations

import pytest

from portattn.backends.cuda.hopper_forward import variant as forward
from portattn.backends.cuda.hopper_forward.tuning import ForwardTunable
from portattn.planning.registry import parse_target
from portattn.tools.tune.choice import Choice
from portattn.tools.tune.tunable import NotBuilt
from portattn.tools.tune.tunables import tunables
from portattn.tools.tune.workloads import parse, workload

DENSE = "attention q=1,16,4096,{dim} kv=1,16,4096,{dim} dtype={dtype} causal"


@pytest.mark.parametrize("dim", forward.WIDTHS)
def test_todays_schedule_is_among_the_candidates_and_the_nearest(target, dim):
    tunable, problem = ForwardTunable(), workload(parse(DENSE.format(dim=dim, dtype="bf16"))).problem
    today = tunable.today(problem, target)
    assert today is not None
    found = list(tunable.space(problem, target, today))
    assert found[0] == today
    assert len({choice.key for choice in found}) == len(found)
    built = [tunable.build(problem, choice, target) for choice in found]
    assert len({one.identity for one in built}) == len(found)


def test_what_the_variant_rejects_is_not_built(target):
    tunable, problem = ForwardTunable(), workload(parse(DENSE.format(dim=64, dtype="fp32"))).problem
    with pytest.raises(NotBuilt, match="not fp32"):
        tunable.build(problem, tunable.today(problem, target), target)


def test_a_variant_says_how_it_is_tuned(target, monkeypatch):
    variant = forward.ForwardVariant()
    monkeypatch.setattr(forward.ForwardVariant, "tunable", staticmethod(ForwardTunable), raising=False)
    backend = type("Backend", (), {"core_path": "", "variants": (variant,)})()
    registry = type("Registry", (), {"backends": {"cuda": backend}})()
    assert [one.name for one in tunables(target, registry)] == ["gluon_forward"]
    assert tunables(parse_target("cuda:sm_80", "triton==3.6.0"), registry) == []


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
    assert (
        other.code
        == built.code
        != tunable.build(problem, Choice(flags={**today.flags, "late": not today.flags["late"]}), target).code
    )
    assert other.identity != built.identity


def test_an_entry_that_leaves_flags_out_is_the_schedule_with_them(target):
    tunable, problem = ForwardTunable(), workload(parse(DENSE.format(dim=64, dtype="bf16"))).problem
    today = tunable.today(problem, target)
    short = Choice(flags={n: v for n, v in today.flags.items() if n not in ("parts", "reg_q", "in_turn")})
    assert tunable.build(problem, short, target).identity == tunable.build(problem, today, target).identity


def test_queries_in_registers_need_a_place_of_the_outputs_own(target):
    tunable, problem = ForwardTunable(), workload(parse(DENSE.format(dim=128, dtype="bf16"))).problem
    today = tunable.today(problem, target)
    both = [choice.flags for choice in tunable.space(problem, target, today) if choice.flags["reg_q"]]
    assert both
    assert all(flags["own_out"] for flags in both)
    with pytest.raises(NotBuilt, match="own_out"):
        tunable.build(problem, Choice(flags={**today.flags, "reg_q": True, "own_out": False}), target)
