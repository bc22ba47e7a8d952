"""Schedules of the Gluon variants by release of Triton: entries of the tuning file with a range of compilers."""

from __future__ import annotations

import datetime
import itertools

import msgspec
import pytest
from test_gluon_backward import problem as backward_problem
from test_gluon_forms import problem as forward_problem

from portattn import Plan, Problem, Toolchain
from portattn.backends.cuda import schedules
from portattn.backends.cuda.gluon import TIMED_WITH
from portattn.backends.cuda.hopper_backward import schedule
from portattn.backends.cuda.hopper_forward import variant
from portattn.compile.variants import variant_of
from portattn.launch import meta_call
from portattn.launch.described import signatures
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.tuning import Entry, ProblemFigures, Source, Tuning
from portattn.tools.tune.workloads import parse, workload

NEWER = "triton==3.8.0"
FORWARD = {
    "groups": 2, "keys": 64, "stages": 4, "turns": True, "late": True, "early": False, "pairs": True, "own_out": True,
}  # fmt: skip
BACKWARD = {"keys": 64, "stages": 2, "messages": 0}
FORWARD_PROBLEM = forward_problem("plain", 128, "none")
BACKWARD_PROBLEM = backward_problem(causal="bottom_right")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that 3.8.0 was timed with, in front of those of 3.6.0."""
    source = Source(
        chip="NVIDIA H200", toolchain=NEWER, date=datetime.date(2026, 11, 24), measured=True,
        figures=(ProblemFigures(problem="made up for this test", us=1.0),),
    )  # fmt: skip
    own = tuple(
        Entry(kernel=name, when=("widest<=128",), toolchain={"triton": ">=3.8"}, flags=flags, provenance=source)
        for name, flags in (("gluon_forward", FORWARD), ("gluon_backward", BACKWARD))
    )
    shipped = schedules.tuning()
    changed = Tuning(provenance=shipped.provenance, entry=(*own, *shipped.entry))
    for module in (schedules, variant):
        monkeypatch.setattr(module, "tuning", lambda: changed)


def planned(problem: Problem, release: str) -> Plan:
    made = plan(problem, parse_target("cuda:sm_90", release))
    assert made.path in ("gluon_forward", "gluon_backward"), made.explain()
    return made


def timed(made: Plan) -> list[str]:
    return [note for note in made.notes if note.startswith("chosen by times with")]


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("problem", "flags"), [(FORWARD_PROBLEM, FORWARD), (BACKWARD_PROBLEM, BACKWARD)], ids=["forward", "backward"]
)
def test_a_release_has_rows_of_its_own(problem: Problem, flags: dict[str, int]) -> None:
    old, new, newest = (planned(problem, f"triton=={version}") for version in ("3.6.0", "3.8.0", "3.9.0"))
    assert {name: new.schedule[name] for name in flags} == flags
    assert {name: old.schedule[name] for name in flags} != flags
    assert newest.schedule == new.schedule
    # Each plan says what its schedule was timed with where that is another release.
    assert timed(old) == timed(new) == []
    (said,) = timed(newest)
    assert said.startswith(f"chosen by times with {NEWER}, not with triton==3.9.0")
    (before,) = timed(planned(problem, "triton==3.7.1"))
    assert before.startswith(f"chosen by times with {TIMED_WITH}, not with triton==3.7.1")


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("problem", [FORWARD_PROBLEM, BACKWARD_PROBLEM], ids=["forward", "backward"])
def test_what_is_launched_is_what_the_plan_says(problem: Problem) -> None:
    pytest.importorskip("triton.experimental.gluon")
    for release in ("3.6.0", "3.8.0"):
        made = planned(problem, f"triton=={release}")
        found = variant_of(made)
        assert found is not None
        (main,) = (s for s in signatures(found, meta_call(problem)) if s.function in MAIN)
        assert (main.constants["KEYS"], main.constants["STAGES"]) == (made.schedule["keys"], made.schedule["stages"])


MAIN = ("scheduled_forward", "scheduled_backward")


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.10.0"])
def test_every_backward_has_a_schedule(release: str) -> None:
    toolchain = Toolchain.parse(f"triton=={release}")
    for dim, causal, left, deterministic, rows in itertools.product(
        (8, 64, 72, 128, 136, 256), ("none", "bottom_right", "top_left"), (-1, 40), (False, True), (333, 8192)
    ):
        p = backward_problem(
            head_dim=dim, head_dim_v=dim, causal=causal, window_left=left, deterministic=deterministic, seq_q=rows,
            seq_k=rows, heads_q=16, heads_k=16,
        )  # fmt: skip
        chosen, timed_with = schedule.choice(p, toolchain)
        turns = deterministic and dim <= 128 and schedule.in_turns(p, chosen.keys)
        assert chosen.turns is turns
        assert turns or not (deterministic and dim <= 128 and rows == 8192)
        assert (chosen.messages == 0) is ((deterministic and not turns) or dim > 128)
        if deterministic:  # no release's own schedules: what was searched was not repeatable
            assert (chosen.stages == 3) is (dim <= 64 and chosen.messages > 0 and (causal != "none" or left >= 0))
        assert bool(timed_with) is (not deterministic or dim > 128)


def test_nothing_runs_without_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = schedules.tuning()
    bare = msgspec.structs.replace(shipped, entry=tuple(e for e in shipped.entry if e.kernel != "gluon_backward"))
    monkeypatch.setattr(schedules, "tuning", lambda: bare)
    with pytest.raises(LookupError, match="gluon_backward has no schedule"):
        schedule.choice(BACKWARD_PROBLEM, TIMED_WITH)


def test_a_variant_is_asked_for_a_compiler() -> None:
    made = variant.ForwardVariant()
    assert made.for_toolchain(TIMED_WITH) is made
    other = made.for_toolchain(Toolchain.parse(NEWER))
    assert (other.name, other.toolchain) == (made.name, Toolchain.parse(NEWER))


def test_what_was_timed_takes_the_entry_that_says_so() -> None:
    """An entry behind another that holds for the same problems would never be used, whatever was timed for it."""
    found = schedules.tuning()
    seen = 0
    for entry in found.entry:
        source = entry.provenance
        if not entry.kernel.startswith("gluon_") or source is None:
            continue
        toolchain = Toolchain.parse(source.toolchain)
        for figure in source.figures:
            if not figure.problem.startswith(("attention ", "attention_backward ")):
                continue  # a name of the benchmark's sets
            problem = workload(parse(figure.problem)).problem
            assert found.find(entry.kernel, problem.features(), toolchain, variant=True) is entry, figure.problem
            assert found.timed_with(entry) == source.toolchain
            seen += 1
    assert seen > 50


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_gradients_of_grouped_heads_and_repeatable_ones_have_no_release_of_their_own(release: str) -> None:
    """Which blocks add to dQ at a time depends on both, and neither was searched by release."""
    toolchain, before = Toolchain.parse(f"triton=={release}"), Toolchain.parse("triton==3.6.0")
    for dim, causal, rows, (heads_k, repeats) in itertools.product(
        (64, 128), ("none", "bottom_right"), (512, 1024, 4096, 16384), ((2, False), (16, True), (2, True))
    ):
        p = backward_problem(
            head_dim=dim, head_dim_v=dim, causal=causal, deterministic=repeats, seq_q=rows, seq_k=rows, heads_q=16,
            heads_k=heads_k,
        )  # fmt: skip
        assert schedule.choice(p, toolchain).schedule == schedule.choice(p, before).schedule
