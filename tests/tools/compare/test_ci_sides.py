"""What of a baseline counts in `portattn ci`, and which red cells a change of compiler has lost."""

from __future__ import annotations

import pytest
from handmade import make_cell, make_run

from portattn.planning.registry import Registry
from portattn.testing.findings import Numerics
from portattn.tools.compare.changes import Change, Diff, compare
from portattn.tools.compare.report import _lost
from portattn.tools.compare.sides import CiRequest, Pair, Side, as_planned
from portattn.tools.compare.verdict import RunFinding
from portattn.tools.matrix.cells import snapshot
from portattn.tools.matrix.problems import quick


def seen(*cells):
    return snapshot(*make_run(cells), "x")


def test_as_planned_a_cell_without_a_plan_is_red_and_another_red_one_is_not():
    none = make_cell(status="ERROR", level="declared", reason="no plan: x", plan=None)
    refused = make_cell(status="ERROR", level="declared", reason="refused", target="cuda:sm_80")
    found = as_planned(seen(none, refused, make_cell(target="rocm:gfx942", level="measured")))
    assert [(e.status, e.level, e.reason) for e in found.entries] == [
        ("ERROR", "declared", ""), ("NOT_RUN", "declared", ""), ("NOT_RUN", "declared", ""),
    ]  # fmt: skip


def test_as_planned_nothing_of_what_was_run_can_be_lost():
    ran = make_cell(level="runs", label="sm_80 code on sm_90", interpreter=Numerics(outcome="pass", where="i"))
    planned = make_cell(status="NOT_RUN", level="declared")
    assert compare(as_planned(seen(ran)), seen(planned)).changes == ()
    assert compare(seen(ran), seen(planned)).changes[0].lost


def test_of_a_baseline_the_cells_of_the_compiler_that_is_left_count():
    registry = Registry.load()
    pair = Pair(*(Side(registry.target("cuda:sm_90", f"triton=={v}"), registry) for v in ("3.6.0", "3.9.0")))
    kept = seen(make_cell(), make_cell(toolchain="triton==3.5.1"))
    what = CiRequest(pair.old.target.toolchain, pair.new.target.toolchain, (pair,), tuple(quick()), "quick", kept)
    assert [entry.toolchain for entry in filter(what.counts(), kept.entries)] == ["triton==3.6.0"]


@pytest.mark.parametrize(
    ("kinds", "every", "told"),
    [
        ((), False, False),  # as red as before
        ((), True, True),
        (("new",), False, True),
        (("level",), False, False),  # the lost level says it
        (("level",), True, False),
    ],
)
def test_a_red_cell_is_told_once_and_where_the_compiler_has_lost_it(kinds, every, told):
    place = {"target": "cuda:sm_90", "toolchain": "triton==3.9.0", "name": "dense"}
    change = Change(**place, op="attention", kinds=kinds, told=dict.fromkeys(kinds, "x"))
    diff = Diff(old="a", new="b", compared=1, changes=(change,) if kinds else ())
    finding = RunFinding(kind="red", text="ERROR: refused", **place)
    assert list(_lost([finding], diff, every)) == ([finding] if told else [])
