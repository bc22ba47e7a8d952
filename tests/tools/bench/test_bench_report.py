"""Sets' summaries, tables, and what changed between two results: figures worked out by hand."""

import msgspec
import pytest
from benchfakes import a_result, figures, host, made

from portattn.tools.bench import report
from portattn.tools.bench.cases import SETS
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.report import document, summaries


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
    assert document(a_result(*rows))["summaries"] == [line]
    assert report.geomean([1.0, 4.0]) == pytest.approx(2.0)


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
    for part in ("GEMM 800 TFLOP/s, copy 4.00 TB/s", "no result after 9 s"):
        assert part in text
    assert len({line.replace("\\|", "").count("|") for line in report.set_table([row]).splitlines()}) == 1
