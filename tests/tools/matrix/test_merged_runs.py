"""Runs of several machines made one: nothing is lost, nothing counts twice, and what contradicts is said."""

import datetime

import msgspec
import pytest

from portattn.errors import ArgumentError
from portattn.testing.findings import KernelFacts, Numerics
from portattn.tools.matrix.cells import PlanSummary
from portattn.tools.matrix.problems import decode
from portattn.tools.matrix.results import conflicts, merge

COMMAND = "portattn matrix merge"


def merged(*runs):
    return merge(runs, [f"run {n}" for n, _ in enumerate(runs)], COMMAND)


@pytest.fixture
def other():
    return decode("GQA", dtype="bf16", head_dim=128)


def test_three_machines_make_one_run(run_of, cell, other):
    runs = [
        run_of([cell(), cell(named=other)], host="nvidia"),
        run_of([cell(target="rocm:gfx942"), cell(target="rocm:gfx942", named=other)], host="amd"),
        run_of([cell(target="cuda:sm_80")], host="old"),
    ]
    made = merged(*runs)
    assert made.conflicts == ()
    assert [(c.target, c.name) for c in made.cells] == [
        ("cuda:sm_90", cell().name), ("cuda:sm_90", other.name), ("cuda:sm_80", cell().name),
        ("rocm:gfx942", cell().name), ("rocm:gfx942", other.name),
    ]  # fmt: skip
    assert ([c.index for c in made.cells], made.run.cells) == ([0, 1, 2, 3, 4], tuple(c.id for c in made.cells))
    hosts = {identity.id: identity.host.name for identity in made.run.identities}
    assert [hosts[c.origin] for c in made.cells] == ["nvidia", "nvidia", "old", "amd", "amd"]
    assert not any(c.others for c in made.cells)


def test_the_higher_evidence_or_the_newest_of_the_same_stands_and_the_other_is_kept(run_of, cell):
    low, high = run_of([cell(key="a")], host="laptop"), run_of([cell(level="runs", key="b")], host="chip")
    for pair in ((low, high), (high, low)):
        made = merged(*pair)
        (one,) = made.cells
        assert (one.level, [o.level for o in one.others]) == ("runs", ["compiles"])
        assert ({i.id for i in made.run.identities}, made.conflicts) == ({one.origin, one.others[0].origin}, ())
    was, now = cell().date, cell().date + datetime.timedelta(days=1)
    old = run_of([cell(key="a", date=was, reason="old")], host="a")
    new = run_of([cell(key="b", date=now, reason="new")], host="b")
    assert [merged(*runs).cells[0].reason for runs in ((old, new), (new, old))] == ["new", "new"]
    # A red cell is not taken back by another machine.
    red = run_of([cell(status="FAIL", level="declared", reason="wrong", key="a")], host="chip")
    made = merged(run_of([cell(level="emulated", key="b")], host="laptop"), red)
    assert (made.cells[0].status, made.cells[0].others[0].level) == ("FAIL", "emulated")


def test_different_results_under_the_same_conditions_are_a_conflict(run_of, cell):
    one = run_of([cell(key="same", level="emulated")], host="a")
    made = merged(one, run_of([cell(key="same", status="NOTE", level="declared", reason="spills")], host="b"))
    (conflict,) = made.conflicts
    expected = "emulated, path triton on a (Linux x86_64), but NOTE, path triton on b (Linux x86_64)"
    assert (conflict.text, made.cells[0].conflict) == (f"{expected}, under the same conditions", conflict.text)
    assert merged(one, run_of([cell(key="other", status="NOTE", level="declared")], host="b")).conflicts == ()
    assert merged(one, run_of([cell(key="same", level="emulated", seconds=9.0)], host="b")).conflicts == ()


def test_a_conflict_is_not_hidden_by_a_better_result_of_another_key(run_of, cell):
    best = run_of([cell(key="other", level="measured")], host="chip")
    red = run_of([cell(key="other", level="declared", status="FAIL", reason="wrong")], host="chip")
    one = run_of([cell(key="same", level="emulated")], host="a")
    two = run_of([cell(key="same", level="compiles")], host="b")
    text = "emulated, path triton on a (Linux x86_64), but compiles, path triton on b (Linux x86_64)"
    for runs in ((best, one, two), (one, two, best), (two, red, one)):
        (conflict,) = merged(*runs).conflicts
        assert conflict.text == f"{text}, under the same conditions"
    # It stays one when its run is merged again.
    made = merged(one, two)
    for runs in ([(made.run, made.cells)], [(made.run, made.cells), best], [best, (made.run, made.cells), one]):
        assert [conflict.text for conflict in merged(*runs).conflicts] == [made.conflicts[0].text]
    assert conflicts(made.cells) == made.conflicts


@pytest.mark.parametrize(
    "changes",
    [
        {"label": "sm_80 code on sm_90"}, {"interpreter": Numerics(outcome="fail", where="interpreter")},
        {"kernels": (KernelFacts(function="dense_forward", facts={"spills": 8}),)},
        {"plan": PlanSummary(path="gluon_forward", core_taken=False, schedule={"x": 1})}, {"level": "emulated"},
        {"status": "NOTE"},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_whatever_of_a_result_is_not_its_time_must_be_the_same(run_of, cell, changes):
    same = {"key": "same", "level": "runs", "kernels": (KernelFacts(function="dense_forward", facts={"spills": 0}),)}
    one = run_of([cell(**same)], host="a")
    assert merged(one, run_of([cell(**same, seconds=9.0)], host="b")).conflicts == ()
    assert len(merged(one, run_of([cell(**same | changes)], host="b")).conflicts) == 1


def test_merging_again_changes_nothing_and_counts_nothing_twice(run_of, cell):
    one, two = run_of([cell(key="a")], host="a"), run_of([cell(key="b", level="runs")], host="b")
    once = merged(one, two)
    twice = merged((once.run, once.cells), one, two)
    assert twice.cells == once.cells
    assert [i.id for i in twice.run.identities] == [i.id for i in once.run.identities]


def test_a_cell_that_nobody_finished_is_missing_in_the_merged_run(run_of, cell, other):
    made, cells = run_of([cell(), cell(named=other)])
    done = merged((made, cells[:1]), run_of([cell(target="rocm:gfx942")], host="amd"))
    assert [c.target for c in done.cells] == ["cuda:sm_90", "rocm:gfx942"]
    assert (len(done.run.cells), done.run.cells[-1]) == (3, cells[1].id)


def test_runs_of_other_or_unknown_code_are_refused_where_both_depend_on_it(run_of, cell):
    one = run_of([cell()])
    for part in ("kernels", "code", "quirks/any", "quirks/cuda"):
        with pytest.raises(ArgumentError, match=rf"run 1.*its {part} \(new\) are not those of run 0"):
            merged(one, run_of([cell(level="runs")], digests={part: "new"}))
    assert merged(one, run_of([cell()], digests={"quirks/rocm": "new"})).cells, "no cell of either depends on it"
    assert len(merged(one, run_of([cell(target="rocm:gfx942")], digests={"quirks/rocm": "new"})).cells) == 2
    made, cells = one
    with pytest.raises(ArgumentError, match="does not say what its cells depend on"):
        merged((msgspec.structs.replace(made, identities=()), cells))
