"""Whether a run is all right: what is red by itself, what --fail-on adds, and what is excused."""

import datetime

import msgspec
import pytest

from portattn.errors import ArgumentError
from portattn.testing.findings import KernelFacts, Numerics
from portattn.tools.compare.changes import compare
from portattn.tools.compare.verdict import FAIL_ON, STATUSES, ExpectedFailure, of_run, words
from portattn.tools.matrix.cells import PlanSummary

TODAY = datetime.date(2026, 11, 23)
EXPECTED = ExpectedFailure(
    target="cuda:sm_80", problem="*", signature="refused", reason="known", owner="kernels", line=1,
    expires=datetime.date(2026, 11, 30),
)  # fmt: skip


@pytest.fixture
def cells(cell):
    refused = cell(target="cuda:sm_80", status="ERROR", level="declared", reason="refused", log="\x1b[31mred\x00</a>")
    spilled = cell(target="cuda:sm_89", status="NOTE", level="declared", reason="96 bytes spilled")
    absent = cell(target="cuda:sm_100", status="NOT_RUN", level="declared", reason="not compiled here")
    return [msgspec.structs.replace(c, index=i) for i, c in enumerate([cell(), refused, spilled, absent])]


def kinds(verdict):
    return sorted(finding.kind for finding in verdict.findings)


def test_red_cells_are_red_and_the_rest_where_it_is_asked_for(run_of, cells):
    made, cells = run_of(cells)
    assert kinds(of_run(made, cells)) == ["red"]
    assert kinds(of_run(made, cells, fail_on={"note"})) == ["note", "red"]
    assert kinds(of_run(made, cells, fail_on={"not_run"})) == ["not_run", "red"]
    assert str(of_run(made, cells).findings[0]).endswith("ERROR: refused")
    assert of_run(made, cells, fail_on={"note"}).findings[0].text == "96 bytes spilled"


def test_expected_failures_excuse_their_cells_and_their_lost_level(run_of, cells, seen, cell):
    made, cells = run_of(cells)
    passed = Numerics(outcome="pass", where="interpreter")
    changes = compare(seen([cell(target="cuda:sm_80", interpreter=passed)]), seen(cells))
    assert kinds(of_run(made, cells, changes=changes, today=TODAY)) == ["interpreter", "level", "red"]
    verdict = of_run(made, cells, expected=[EXPECTED], changes=changes, today=TODAY)
    assert (kinds(verdict), list(verdict.expected)) == ([], [cells[1].id])
    late = of_run(made, cells, expected=[EXPECTED], changes=changes, today=datetime.date(2026, 12, 1))
    assert kinds(late) == ["expired", "interpreter", "level"]
    # Without a day it is today's: the entry's day is over long before this test is read, or the clock is wrong.
    old = msgspec.structs.replace(EXPECTED, expires=datetime.date(2026, 1, 1))
    assert kinds(of_run(made, cells, expected=[old])) == ["expired"]
    idle = of_run(made, cells[:1], expected=[EXPECTED], today=TODAY, whole=False)
    assert (idle.findings, idle.notes) == ((), ("the expected failure at line 1 is about no cell of this run",))


def test_expected_failures_excuse_no_path_and_no_figures(run_of, cell, seen):
    """The compiler is expected to refuse; that the kernel is not the one of before was not said."""
    variant = PlanSummary(path="gluon_forward", core_taken=False, schedule={"x": 1})
    core = PlanSummary(path="triton", kernel="dense_forward")
    reference = PlanSummary(path="reference", core_taken=False)
    red = {"target": "cuda:sm_80", "status": "ERROR", "level": "declared", "reason": "refused"}

    def kinds_of(was, now, **changes):
        made, cells = run_of([cell(**red | now)])
        found = compare(seen([cell(target="cuda:sm_80", **was)]), seen(cells))
        return kinds(of_run(made, cells, expected=[EXPECTED], changes=found, today=TODAY, **changes))

    assert kinds_of({"plan": variant}, {"plan": core}) == ["variant"]
    assert kinds_of({"plan": core}, {"plan": reference}) == ["core"]
    spills = [(KernelFacts(function="dense_forward", facts={"spills": n}),) for n in (0, 8)]
    figures = {"kernels": spills[0]}, {"kernels": spills[1]}
    assert (kinds_of(*figures), kinds_of(*figures, fail_on={"facts"})) == ([], ["facts"])


def test_losses_are_red_and_other_changes_where_it_is_asked_for(run_of, cell, seen):
    made, cells = run_of([cell(), cell(target="rocm:gfx942")])
    changes = compare(seen([cell(level="runs"), cell(target="cuda:sm_80")]), seen(cells))
    assert kinds(of_run(made, cells, changes=changes)) == ["gone", "level"]
    assert kinds(of_run(made, cells, changes=changes, fail_on={"new"})) == ["gone", "level", "new"]
    level = next(f for f in of_run(made, cells, changes=changes).findings if f.kind == "level")
    assert level.text == "runs → compiles"
    spilled = [msgspec.structs.replace(cells[0], status="NOTE", level="declared", reason="96 bytes spilled"), cells[1]]
    (lost,) = (f for f in of_run(made, spilled, changes=compare(seen(cells), seen(spilled))).findings)
    assert lost.text == "compiles → NOTE: 96 bytes spilled"
    assert level.causes == ("nothing that is recorded differs: the same code, data and compilers gave another result",)


def test_words_of_fail_on():
    assert words(["note,NOT-RUN", " red "], "matrix run", FAIL_ON) == {"note", "not_run", "red"}
    with pytest.raises(ArgumentError, match=r"--fail-on is 'nott', but must be one of note, not_run, red"):
        words(["nott"], "matrix report", STATUSES)


def test_cells_that_are_missing_are_red_in_a_finished_run(run_of, cell):
    made, cells = run_of([cell(), cell(target="rocm:gfx942")])
    assert kinds(of_run(made, cells[:1])) == ["interrupted"]
    assert kinds(of_run(made, cells[:1], whole=False)) == []
