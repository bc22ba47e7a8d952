"""Verdicts on the goals, sets' summaries, and what changed between two results: figures worked out by hand."""

import msgspec
import pytest
from benchfakes import a_result, figures, host, made

from portattn.tools.bench import report
from portattn.tools.bench.cases import SETS
from portattn.tools.bench.firstcall import CASES as FIRST
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.report import GOALS, Goal, document, goal_results, summaries


def dense18(*ratios, core=0.9):
    """A result with one row a case: FA3 takes 1 ms and cuDNN 1.25, ours a ratio's part of 1."""
    return a_result(
        *(
            made(
                "dense18", case, figures("portattn", 1 / r), figures("portattn core", 1.25 / core),
                figures("fa3/vllm", 1.0), figures("sdpa-cudnn", 1.25), figures("flashinfer", 0.1),
            )
            for case, r in zip(SETS["dense18"], ratios, strict=False)
        )
    )  # fmt: skip


def verdict(result, name):
    return next(v for v in goal_results(result) if v.goal.name == name)


@pytest.mark.parametrize(
    ("ratios", "every", "mean"),
    [
        ([1.1] * 18, "met", "met"), ([0.98] + [1.1] * 17, "done", "met"), ([0.96] + [1.1] * 17, "missed", "met"),
        ([1.06] * 18, "met", "done"), ([1.01] * 18, "met", "missed"), ([1.1] * 17, "incomplete", "incomplete"),
        ([0.9], "missed", "missed"), ([], "not measured", "not measured"),
    ],
)  # fmt: skip
def test_dense_goals(ratios, every, mean):
    result = dense18(*ratios)
    assert verdict(result, "dense forward, every cell").status == every
    assert verdict(result, "dense forward, geomean").status == mean


def test_a_verdict_says_where_and_why():
    found = verdict(dense18(0.9, 0.95, 1.2), "dense forward, every cell")
    assert found.value == pytest.approx(0.9)
    assert (found.cells, found.of) == (3, 18)
    assert found.worst.case == SETS["dense18"][0].name
    assert found.worst.peer == "fa3/vllm"  # not flashinfer, which the goal does not name
    assert [value.case for value in found.under] == [case.name for case in SETS["dense18"][:2]]
    assert found.missing == ("cells not run",)
    core = verdict(dense18(*[1.0] * 18, core=0.88001), "portable core, geomean")
    assert (core.status, core.value) == ("met", pytest.approx(0.88, abs=1e-3))
    assert verdict(dense18(*[1.0] * 18, core=0.8), "portable core, geomean").status == "missed"


def test_who_was_refused_has_no_figure():
    case = SETS["decode"][0]
    ours = msgspec.structs.replace(figures("portattn"), refused="error is over the budget")
    found = verdict(a_result(made("decode", case, ours, figures("fa3/vllm", 1.0))), "decode")
    assert (found.status, found.missing[0]) == ("not measured", "portattn refused: error is over the budget")
    found = verdict(a_result(made("seed", SETS["seed"][0], figures("portattn", 1.0))), "the seed's kernels, each")
    assert found.missing == ("no figures of seed", "cells not run")


def test_times_have_to_be_at_most():
    """Of enqueueing: a call that SDPA has nothing for counts against its shortest in the set."""
    attention, decode, paged = SETS["host"]
    rows = [
        made("host", attention, figures("portattn", host_us=host(8.0)), figures("sdpa", host_us=host(16.0))),
        made("host", decode, figures("portattn", host_us=host(9.0)), figures("sdpa", host_us=host(12.0))),
        made("host", paged, figures("portattn", host_us=host(11.0)), figures("fa3/vllm", host_us=host(1.0))),
    ]
    found = verdict(a_result(*rows), "enqueue time, µs")
    assert (found.status, found.value, found.worst.case) == ("missed", 11.0, "host paged")
    below = verdict(a_result(*rows), "enqueue time below SDPA's")
    assert (below.status, below.value) == ("met", pytest.approx(12 / 11))
    assert verdict(a_result(*rows[:1]), "enqueue time, µs").status == "incomplete"
    # Of first calls the longest counts.
    calls = [
        FirstCall(case=case.name, run=0, empty_s=2.0 + i, kept_s=1.0, second_s=0.1) for i, case in enumerate(FIRST)
    ]
    found = verdict(a_result(first_calls=calls), "first call, s")
    assert (found.status, found.value) == ("missed", 4.0)
    assert verdict(a_result(first_calls=calls[:2]), "first call, s").status == "incomplete"
    goal = Goal(name="", sets=("host",), metric="host_us", limit=10.0, done=12.0)
    rows = [made("host", case, figures("portattn", host_us=host(11.0))) for case in SETS["host"]]
    assert [one.status for one in goal_results(a_result(*rows), [goal])] == ["done"]


def test_every_goal_names_sets_and_cells_that_there_are():
    for goal in GOALS:
        assert goal.cells, goal.name
        assert goal.done is None or (goal.done <= goal.limit) != goal.at_most
    counts = {goal.name: len(goal.cells) for goal in GOALS}
    assert (counts["small, fp32"], counts["small, fp16"], counts["the seed's kernels, each"]) == (3, 3, 6)
    assert report.geomean([1.0, 4.0]) == pytest.approx(2.0)


def test_summaries():
    rows = [
        made("decode", SETS["decode"][0], figures("portattn", 1.0), figures("fa3/vllm", 2.0)),
        made("decode", SETS["decode"][1], figures("portattn", 1.0), figures("fa3/vllm", 0.5)),
        made("decode", SETS["decode"][2], msgspec.structs.replace(figures("portattn"), refused="no")),
    ]
    (line,) = summaries(a_result(*rows))
    assert (line.set, line.name, line.cells, line.of) == ("decode", "portattn", 2, 3)
    assert line.ratio == pytest.approx(1.0)
    assert (line.worst, line.worst_case) == (pytest.approx(0.5), SETS["decode"][1].name)
    told = document(a_result(*rows))
    assert (told["summaries"], len(told["goals"])) == ([line], len(GOALS))


def test_changes_are_those_of_ratios():
    case = SETS["decode"][0]
    before = a_result(made("decode", case, figures("portattn", 1.0), figures("fa3", 1.2), figures("flex", 1.0)))
    after = a_result(made("decode", case, figures("portattn", 2.0), figures("fa3", 2.4), figures("sdpa-flash", 0.1)))
    (change,) = report.changes(before, after)
    assert (change.peer, change.before, change.after) == ("fa3", pytest.approx(1.2), pytest.approx(1.2))
    assert (change.change, change.ms) == (pytest.approx(1.0), (1.0, 2.0))
    worse = a_result(made("decode", case, figures("portattn", 1.1), figures("fa3", 1.2)))
    found = report.changes(before, worse)
    assert (report.slower(found, 0.03), report.slower(found, 0.1)) == (found, [])
    assert [(s.set, s.cells, round(s.change, 3)) for s in report.by_set(found)] == [("decode", 1, 0.909)]
    alone = report.changes(a_result(made("decode", case, figures("portattn", 1.0))), after)
    assert (alone[0].peer, alone[0].change, report.changes(a_result(), after)) == ("", None, [])


def test_tables_hold_every_figure():
    case = SETS["decode"][0]
    row = made(
        "decode", case, figures("portattn", 0.02, 0.022, graph_ms=(0.019,), host_us=host(4.0), path="triton"),
        figures("fa3/vllm", 0.018, 0.018), msgspec.structs.replace(figures("flex"), refused="no | none"),
    )  # fmt: skip
    calls = [FirstCall(case="first decode", run=0, failed="no result after 9 s")]
    text = report.as_markdown(a_result(row, first_calls=calls))
    line = next(line for line in text.splitlines() if line.startswith(f"| {case.name} "))
    for part in ("21.0 µs, 1.60 TB/s", "0.86 ± 0.65× fa3/vllm", "19.0 µs"):
        assert part in line
    for part in ("GEMM 800 TFLOP/s, copy 4.00 TB/s", "no result after 9 s", "| decode | best peer | every ≥ 1 |"):
        assert part in text
    assert len({line.replace("\\|", "").count("|") for line in report.set_table([row]).splitlines()}) == 1
    lines = report.as_csv(a_result(row)).splitlines()
    assert (len(lines), lines[3].split(",")[10:12]) == (4, ["flex", ""])
    assert "no | none" in lines[3]
