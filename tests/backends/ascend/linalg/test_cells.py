"""Ascend's cells of the matrix: what execution and lints make of their status, level and footnotes."""

import pytest

from portattn.backends.ascend.linalg.executor import LinalgExecutor
from portattn.testing.findings import KernelFacts, Lint, Numerics
from portattn.tools.matrix import run, select
from portattn.tools.matrix.cells import Cell
from portattn.tools.matrix.problems import NamedProblem, decode, dense
from portattn.tools.matrix.run import Checkers, Options, Workers, make_cell
from portattn.worker.client import Reply

pytestmark = pytest.mark.compiles  # plans need an installed Triton


class Standing(LinalgExecutor):
    """In the place of every child and check: answers what it is told."""

    def __init__(self, lowered: Numerics, lints: tuple[Lint, ...] = ()) -> None:
        super().__init__(0.0)
        self.lowered, self.lints = lowered, lints

    def check(self, *_) -> Numerics:
        return self.lowered

    def analyze(self, reply, launch, target):
        return {"matmul": 4}, [lint for lint in self.lints if lint.function == launch.function]


def numerics(outcome: str, reason: str = "") -> Numerics:
    return Numerics(outcome=outcome, where="here", error=0.001, budget=0.002, reason=reason)


def cell_of(monkeypatch, named: NamedProblem, standing: Standing, reply: Reply | None = None) -> Cell:
    monkeypatch.setattr(run, "compile_in", lambda *_: reply or Reply(outcome="ok", facts={"linalg": "text"}))
    workers = Workers(Options())
    monkeypatch.setattr(workers, "compiler", lambda _: None)
    monkeypatch.setattr(workers, "get", lambda _: None)
    (spec,) = select.specs([named], select.targets(["ascend910b2"], [], None))
    checkers = Checkers(Standing(numerics("not_run", "left out")), {"ascend": {"lowered": standing}})
    return make_cell(spec, Options(), workers, checkers)


def lint(name: str, message: str, function: str = "dense_forward") -> Lint:
    return Lint(name=name, function=function, value=2, message=message)


@pytest.mark.parametrize(
    ("outcome", "status", "level"),
    [
        ("pass", "PASS", "lowering-checked"), ("fail", "FAIL", "declared"), ("error", "FAIL", "declared"),
        ("crash", "CRASH", "declared"), ("hang", "TIMEOUT", "declared"), ("not_run", "NOTE", "declared"),
    ],
)  # fmt: skip
def test_the_level_is_what_the_execution_showed(monkeypatch, outcome, status, level):
    found = cell_of(monkeypatch, dense(dtype="fp16", head_dim=64), Standing(numerics(outcome, "why")))
    assert (found.status, found.level) == (status, level)
    assert found.reason == {"PASS": "", "NOTE": "lowers to linalg; not run here: why"}.get(
        status, "lowered numerics: why"
    )
    assert found.lowered.outcome == outcome


def test_a_red_lint_fails_the_cell_before_anything_is_executed(monkeypatch):
    standing = Standing(numerics("pass"), (lint("uninitialised-reduction", "the reduction starts from …"),))
    found = cell_of(monkeypatch, dense(dtype="fp16", head_dim=64), standing)
    assert (found.status, found.level, found.lowered) == ("FAIL", "declared", None)
    assert found.reason == "dense_forward: uninitialised-reduction: the reduction starts from …"


def test_other_lints_are_reported_and_fail_nothing(monkeypatch):
    loop = lint("row-loop", "a load of q is 16 copies of one row, one after another")
    found = cell_of(monkeypatch, dense(dtype="fp16", head_dim=64), Standing(numerics("pass"), (loop,)))
    assert (found.status, found.lints) == ("PASS", (loop,))
    assert found.kernels == (KernelFacts(function="dense_forward", facts={"matmul": 4}),)


def test_a_lint_that_a_quirk_explains_says_so(monkeypatch):
    whole = lint("whole-tile-load", "q is read whole and masked afterwards, once", "decode_split")
    found = cell_of(monkeypatch, decode(dtype="fp16", head_dim=64), Standing(numerics("pass"), (whole,)))
    assert [one.explained_by for one in found.lints] == ["ascend-0108-reads-before-mask"]
    assert ("ascend-0108-reads-before-mask", "explains") in {(note.id, note.role) for note in found.footnotes}
    # Of a kernel that the quirk does not concern it explains nothing.
    dense_cell = cell_of(
        monkeypatch, dense(dtype="fp16", head_dim=64),
        Standing(numerics("pass"), (lint("whole-tile-load", "q is read whole and masked afterwards, once"),)),
    )  # fmt: skip
    assert [one.explained_by for one in dense_cell.lints] == [""]


def test_a_refused_lowering_is_what_the_cell_says(monkeypatch):
    reply = Reply(outcome="crash", kind="SIGABRT", stage="ttadapter", message="Assertion `x' failed")
    found = cell_of(monkeypatch, dense(dtype="fp16", head_dim=64), Standing(numerics("pass")), reply)
    assert (found.status, found.level, found.lowered) == ("CRASH", "declared", None)
    assert found.reason == "dense_forward: SIGABRT at ttadapter: Assertion `x' failed"
