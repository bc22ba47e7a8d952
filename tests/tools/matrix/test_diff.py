"""Two runs compared: what is lost is said, is red, and has its cause; what is only different is neither."""

from __future__ import annotations

import msgspec
import pytest

from portattn.schema.plan import Rejection
from portattn.schema.problem import Problem
from portattn.testing.findings import KernelFacts, Numerics
from portattn.tools.matrix.cells import Footnote, PlanSummary
from portattn.tools.matrix.diff import LOST, compare, part_of
from portattn.tools.matrix.problems import decode, dense
from portattn.tools.matrix.snapshot import evidence, problem_digest

TAKES = Footnote(id="rocm-0901-takes", role="rejected", sentence="x; the reference path is taken", upstream="none")
SETS = Footnote(id="rocm-0902-sets", role="applied", sentence="x; sets num_stages = 1", upstream="none")
REFERENCE = PlanSummary(
    path="reference", core_taken=False, rejected=(Rejection(path="triton", reason="planted", quirk=TAKES.id),)
)  # fmt: skip
PASSED = Numerics(outcome="pass", where="interpreter")


def only(diff):
    (change,) = diff.changes
    return change


def kernel(**facts):
    return (KernelFacts(function="dense_forward", facts=facts),)


@pytest.fixture
def rocm(cell):
    def make(**changes):
        return cell(**({"target": "rocm:gfx942", "level": "emulated", "interpreter": PASSED} | changes))

    return make


def test_the_same_run_has_no_changes(rocm, seen):
    cells = [rocm(), rocm(named=decode("GQA", dtype="bf16", head_dim=128))]
    diff = compare(seen(cells), seen(cells))
    assert (diff.compared, diff.changes) == (2, ())


def test_a_quirk_that_takes_the_core_is_the_cause(rocm, seen):
    """`toolchain = {triton = "<4"}, path = "reference"` for all of ROCm: every cell passes, at `declared`."""
    taken = rocm(level="declared", plan=REFERENCE, footnotes=(TAKES,), interpreter=None)
    change = only(compare(seen([rocm()]), seen([taken], digests={"quirks/rocm": "other"})))
    assert set(change.kinds) == {"level", "core", "quirks"}
    assert change.lost
    assert change.told["level"] == "emulated → declared"
    assert change.told["core"] == "path triton → reference"
    assert change.joined == (TAKES.id,)
    assert str(change.causes[0]) == f"quirk {TAKES.id} rules out the path triton"
    assert [cause.name for cause in change.causes[1:]] == ["quirks/rocm"]


def test_a_missing_toolchain_is_a_lost_level(rocm, seen):
    gone = rocm(status="NOT_RUN", level="declared", reason="not compiled here", kernels=())
    was, now = seen([rocm(kernels=kernel(spills=0))]), seen([gone], toolchains={"triton==3.6.0": ""})
    change = only(compare(was, now))
    assert change.kinds == ("level",)
    assert change.told["level"] == "emulated → NOT_RUN"
    assert [str(cause) for cause in change.causes] == ["triton==3.6.0 is compiled with by installed → nothing"]


def test_spills_of_a_new_compiler_are_a_lost_level_and_its_column_is_found(cell, seen):
    was = cell(kernels=kernel(spills=0))
    now = cell(toolchain="triton==3.9.0", status="NOTE", level="declared", reason="152 bytes spilled",
               kernels=kernel(spills=152))  # fmt: skip
    change = only(compare(seen([was]), seen([now])))
    assert set(change.kinds) == {"level", "facts"}
    assert change.told == {"level": "compiles → NOTE", "facts": "dense_forward spills 0 → 152"}
    assert (change.was, change.toolchain) == ("triton==3.6.0", "triton==3.9.0")
    assert str(change.causes[0]) == "toolchain triton==3.6.0 → triton==3.9.0"


def test_spills_within_a_level_are_told_and_not_lost(cell, seen):
    change = only(compare(seen([cell(kernels=kernel(spills=8))]), seen([cell(kernels=kernel(spills=24))])))
    assert change.kinds == ("facts",)
    assert not change.lost


def test_what_another_path_compiles_is_not_compared(cell, seen):
    variant = PlanSummary(path="gluon_forward", core_taken=False, schedule={"x": 1})
    change = only(compare(seen([cell(plan=variant, kernels=kernel(spills=8))]), seen([cell(kernels=kernel(spills=9))])))
    assert change.kinds == ("variant",)
    assert change.told["variant"] == "path gluon_forward → triton"


def test_the_reason_of_a_variant_that_is_not_taken_is_the_cause(cell, seen):
    variant = PlanSummary(path="gluon_forward", core_taken=False, schedule={"x": 1})
    core = PlanSummary(path="triton", kernel="dense_forward", notes=("not gluon_forward: it needs Triton 3.6.0",))
    change = only(compare(seen([cell(plan=variant)]), seen([cell(plan=core)])))
    assert str(change.causes[0]) == "the path gluon_forward is not taken: it needs Triton 3.6.0"
    note = f"not gluon_forward: Gluon has lost functions [{SETS.id}]"
    core = msgspec.structs.replace(core, notes=(note,))
    change = only(compare(seen([cell(plan=variant)]), seen([cell(plan=core, footnotes=(SETS,))])))
    assert str(change.causes[0]) == f"quirk {SETS.id} rules out the path gluon_forward"


def test_a_cell_that_is_gone_is_lost_and_says_what_it_was(rocm, cell, seen):
    change = only(compare(seen([rocm(), cell()]), seen([cell()])))
    assert change.kinds == ("gone",)
    assert change.told["gone"] == "the cell is gone; it was emulated, path triton"
    assert str(change.causes[0]) == "the new run has no target rocm:gfx942"
    change = only(compare(seen([rocm(), cell()]), seen([cell()], missing=1)))
    assert "interrupted" in str(change.causes[0])
    other = decode("GQA", dtype="bf16", head_dim=128)
    change = next(c for c in compare(seen([cell()]), seen([cell(named=other)])).changes if "gone" in c.kinds)
    assert "has no problem of the name" in str(change.causes[0])


def test_winning_is_shown_and_a_new_cell_is_new(rocm, cell, seen):
    was, now = rocm(level="compiles", kernels=kernel(spills=8)), rocm(kernels=kernel(spills=0))
    changes = compare(seen([was]), seen([now, cell()])).changes
    assert [change.kinds for change in changes] == [("won",), ("new",)]
    assert changes[0].told["won"] == "compiles → emulated; dense_forward spills 8 → 0"
    assert not any(change.lost for change in changes)


def test_a_work_around_that_left_is_a_cause(rocm, seen):
    red = rocm(status="FAIL", level="declared", reason="wrong")
    change = only(compare(seen([rocm(footnotes=(SETS,))]), seen([red], digests={"quirks/rocm": "new"})))
    assert change.left == (SETS.id,)
    assert str(change.causes[0]) == f"quirk {SETS.id} is no more in the plan"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"digests": {"kernels": "new"}, "commit": "2" * 40}, "digest of the kernels (k → new)"),
        ({"digests": {"quirks/any": "new"}}, "quirks of every backend (a → new)"),
        ({"versions": {"torch": "2.14.0"}}, "torch 2.13.0 → 2.14.0"),
        ({"variables": {"TRITON_PTXAS_PATH": "p"}}, "variable TRITON_PTXAS_PATH 'unset' → 'p'"),
        ({"executors": {"rocm:gfx942 emulated": "left out"}}, "emulated: not there → left out"),
        ({"toolchains": {"triton==3.6.0": "lab"}}, "triton==3.6.0 is compiled with by installed → lab"),
        ({"portattn": "0.2.0"}, "portattn 0.1.0 → 0.2.0"),
        ({"digests": {"quirks/cuda": "new"}}, "nothing that is recorded differs"),
        ({"host": "another"}, "nothing that is recorded differs"),
    ],
)  # fmt: skip
def test_without_a_quirk_the_cause_is_what_differs(rocm, seen, changes, cause):
    red = rocm(status="FAIL", level="declared", reason="wrong")
    change = only(compare(seen([rocm()]), seen([red], **changes)))
    assert str(change.causes[0]).startswith(cause)
    assert ("commit 1111111111 → 2222222222" in map(str, change.causes)) == ("commit" in changes)


def test_a_problem_that_is_another_one_is_said(rocm, seen):
    other = msgspec.structs.replace(rocm().problem, seq_q=64)
    red = rocm(problem=other, status="FAIL", level="declared")
    change = only(compare(seen([rocm()]), seen([red])))
    assert str(change.causes[0]) == "the problem of this name is another one"


def test_the_digest_of_a_problem_is_of_what_it_asks_for(cell):
    problem = cell().problem

    class Later(Problem, frozen=True, kw_only=True):
        later: int = 0

    same = Later(**msgspec.structs.asdict(problem))
    assert problem_digest(same) == problem_digest(problem)
    assert problem_digest(Later(**msgspec.structs.asdict(problem), later=1)) != problem_digest(problem)
    assert problem_digest(msgspec.structs.replace(problem, seq_q=64)) != problem_digest(problem)


def test_interpreted_numbers_that_are_not_there_any_more_are_lost(cell, seen):
    missing = Numerics(outcome="not_run", where="interpreter", reason="numpy is too new")
    change = only(compare(seen([cell(interpreter=PASSED)]), seen([cell(interpreter=missing)])))
    assert change.kinds == ("interpreter",)
    assert change.lost


def test_interpreted_numbers_of_a_variant_are_lost_too(cell, seen):
    variant = PlanSummary(path="gluon_forward", core_taken=False, schedule={"x": 1})
    change = only(compare(seen([cell(plan=variant, interpreter=PASSED)]), seen([cell(plan=variant)])))
    assert change.kinds == ("interpreter",)


def test_the_least_loss_of_evidence_is_a_lost_level(cell, seen):
    """A level that rests on another chip is one step less than one on the chip itself."""
    older = cell(level="runs", label="sm_80 code on sm_90")
    change = only(compare(seen([cell(level="runs")]), seen([older])))
    assert change.kinds == ("level",)
    assert change.told["level"] == "runs → runs (sm_80 code on sm_90)"


def test_levels_in_order(cell):
    def known(**changes):
        return evidence(cell(**changes))

    order = [
        known(status="CRASH", level="declared"),
        known(status="NOT_RUN", level="declared"),
        known(status="NOTE", level="declared"),
        known(level="compiles"),
        known(level="lowering-checked"),
        known(level="emulated"),
        known(level="runs", label="sm_80 code on sm_90"),
        known(level="runs"),
        known(level="measured"),
    ]
    assert order == sorted(order)
    assert len(set(order)) == len(order)
    assert known(level="declared") == known(status="NOTE", level="declared")


def test_two_compilers_that_left_are_gone_and_not_one_that_changed(cell, seen):
    was = [cell(toolchain=f"triton=={v}") for v in ("3.4.0", "3.6.0")]
    now = [cell(toolchain="triton==3.9.0")]
    assert sorted(change.kinds for change in compare(seen(was), seen(now)).changes) == [("gone",), ("gone",), ("new",)]
    both = [cell(toolchain=f"triton=={v}") for v in ("3.4.0", "3.9.0")]
    assert compare(seen(was), seen(both)).changes == (), "3.6.0 became 3.9.0"
    ascend = [cell(toolchain="triton-ascend==3.2.0")]
    assert {c.kinds for c in compare(seen(now), seen(ascend)).changes} == {("gone",), ("new",)}


def test_a_run_of_a_part_has_not_lost_the_rest(rocm, cell, seen):
    other = decode("GQA", dtype="bf16", head_dim=128)
    old = seen([rocm(), rocm(named=other), cell(), cell(toolchain="triton==3.4.0")])
    new = seen([cell()])
    assert {c.kinds for c in compare(old, new).changes} == {("gone",)}
    diff = compare(old, new, part_of(old, new))
    assert (diff.compared, diff.apart, diff.changes) == (1, 3, ())
    # Asked for by name, a target that is not there any more is gone all the same.
    diff = compare(old, new, part_of(old, new, target=lambda name: name.startswith("rocm"), problem=lambda _: True))
    assert [c.kinds for c in diff.changes if c.target == "rocm:gfx942"] == [("gone",), ("gone",)]
    # A new compiler in place of the old ones is compared with none of them.
    bumped = seen([cell(toolchain="triton==3.9.0")])
    one = seen([cell()])
    assert compare(one, bumped, part_of(one, bumped)).compared == 1
    assert dense(dtype="fp16", head_dim=64).name == cell().name


def test_what_is_lost_is_what_the_help_says():
    assert {"gone", "level", "core", "variant", "interpreter"} == LOST
