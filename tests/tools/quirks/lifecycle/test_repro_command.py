"""A specialisation as a line of options: what the line says is what it was made of, or there is no line."""

import msgspec
import pytest

from portattn import Problem
from portattn.config import Settings
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.tools.matrix.problems import full, quick
from portattn.tools.quirks import probe_plans
from portattn.tools.quirks.probe_plans import Specialisation, plan_line, problem_words

TARGET = "rocm:gfx942"


def specialised(problem, registry: Registry, **launch) -> Specialisation:
    target = registry.target(TARGET, "triton==3.6.0")
    lowering, chosen = plan(problem, target, registry, settings=Settings(backend="triton")).specialised
    return Specialisation(problem=problem, lowering=lowering, launch=chosen.changed(launch))


# What no option says: which gradients are asked for beside those of q, k and v, and dropout.
UNSAID = ("grad_lse", "grad_bias", "grad_slopes", "dropout")


def test_every_problem_of_the_matrix_has_options() -> None:
    for named in full():
        if any(getattr(named.problem, name) for name in UNSAID):
            continue
        op, *rest = problem_words(named.problem)
        line = " ".join(["plan:", op, "--target", TARGET, *rest])
        assert probe_plans.parse(line).problem == named.problem, named.name


# A command line has no option for functions.
SAID = [named for named in quick() if not named.problem.mask_mod]


@pytest.mark.parametrize("named", SAID, ids=lambda named: named.name)
def test_a_line_leads_back_to_the_specialisation(named, registry) -> None:
    target = registry.target(TARGET, "triton==3.6.0")
    plain = specialised(named.problem, registry)
    line = plan_line(plain, target, registry)
    assert line
    assert "--start" not in line, "what the plan does by itself is not said"
    changed = specialised(named.problem, registry, num_stages=2 if plain.launch.num_stages == 1 else 1)
    line = plan_line(changed, target, registry)
    assert f"num_stages={changed.launch.num_stages}" in line
    stated = probe_plans.parse(line)
    made = plan(
        stated.problem, target, probe_plans.with_start_values(registry, stated, target),
        settings=Settings(backend="triton"),
    )  # fmt: skip
    assert (made.launch, made.lowering) == (changed.launch, changed.lowering)


@pytest.mark.parametrize("words", [False, True])
def test_a_line_says_whether_rows_are_whole_words(words: bool) -> None:
    """On sm_90 other kernels read those."""
    p = Problem(
        op="decode_attention", batch=2, heads_q=8, heads_k=2, seq_q=1, seq_k=512, head_dim=128, dtype="bf16",
        kv_format="e4m3", kv_scales="token", aligned=False, word_aligned=words,
    )  # fmt: skip
    op, *rest = problem_words(p)
    stated = probe_plans.parse(" ".join(["plan:", op, "--target", "cuda:sm_90", *rest]))
    assert stated.problem == p
    made = plan(stated.problem, Registry.load().target("cuda:sm_90", "triton==3.6.0"), settings=Settings())
    assert made.lowering.unpack == ("ptx" if words else "bytes")


@pytest.mark.parametrize("field", ["needs_grad", "large", "negative_scale", "dropout"])
def test_what_no_option_says_has_no_line(field: str, registry) -> None:
    target, what = registry.target(TARGET, "triton==3.6.0"), specialised(quick()[0].problem, registry)
    problem = msgspec.structs.replace(what.problem, **{field: True})
    assert plan_line(msgspec.structs.replace(what, problem=problem), target, registry) == ""
    assert plan_line(msgspec.structs.replace(what, env={"AMDGCN_USE_BUFFER_OPS": "0"}), target, registry) == ""


@pytest.mark.parametrize("field", UNSAID)
def test_gradients_that_no_option_asks_for_have_no_line(field: str, registry) -> None:
    target = registry.target(TARGET, "triton==3.6.0")
    found = next(n.problem for n in full() if n.problem.op == "attention_backward" and getattr(n.problem, field))
    assert plan_line(specialised(found, registry), target, registry) == ""
    assert plan_line(specialised(msgspec.structs.replace(found, **{field: False}), registry), target, registry)


def test_a_line_that_a_quirk_would_change_needs_it_off(registry) -> None:
    """gfx950 on 3.6.0 takes three stages at most: four are planned only without the entry that says so."""
    target = registry.target("rocm:gfx950", "triton==3.6.0")
    what = specialised(quick()[0].problem, registry, num_stages=4)
    what = msgspec.structs.replace(what, launch=what.launch.changed({"block_m": 64, "block_n": 32}))
    assert plan_line(what, target, registry) == ""
    assert "num_stages=4" in plan_line(what, target, registry, ("rocm-0001-four-stages",))


def test_a_line_states_the_values_of_both_kernels_of_gradients(registry) -> None:
    target = registry.target(TARGET, "triton==3.6.0")
    problem = next(n.problem for n in full() if n.problem.op == "attention_backward" and n.problem.head_dim == 64)
    problem = msgspec.structs.replace(problem, **dict.fromkeys(UNSAID, False))
    what = specialised(problem, registry, block_m=32, block_n=64, rows_m=64, rows_stages=2)
    line = plan_line(what, target, registry)
    assert ("rows_m=64" in line, "rows_n" in line) == (True, False)
    stated = probe_plans.parse(line)
    made = plan(
        stated.problem, target, probe_plans.with_start_values(registry, stated, target),
        settings=Settings(backend="triton"),
    )  # fmt: skip
    assert made.launch == what.launch
