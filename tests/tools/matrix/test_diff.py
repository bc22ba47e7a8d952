"""Two runs compared: what is lost is said, is red, and has its cause; what is only different is neither."""

import msgspec
import pytest

from portattn.schema.problem import Problem
from portattn.testing.findings import KernelFacts, Numerics
from portattn.testing.kernel_cases import KernelCase, TargetChanges
from portattn.tools.compare.changes import LOST, compare, part_of
from portattn.tools.matrix.cells import Footnote, PlanSummary, evidence, problem_digest
from portattn.tools.matrix.problems import decode, dense

SETS = Footnote(
    id="rocm-0902-sets", role="applied", sentence="x; sets num_stages = 1", upstream="none", sets={"num_stages": 1}
)
NOTES = msgspec.structs.replace(SETS, id="rocm-0903-notes", sentence="x; nothing is changed: y", sets={})
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


def tile(rows):
    return PlanSummary(path="triton", kernel="dense_forward", launch={"block_m": rows})


VARIANT = PlanSummary(path="gluon_forward", core_taken=False, schedule={"x": 1})
LACKING = Numerics(outcome="not_run", where="interpreter", reason="numpy is too new")
INSTALLED = "triton==3.6.0 is compiled with by installed → nothing"
NOTHING = "nothing that is recorded differs: the same code, data and compilers gave another result"
CASE = KernelCase(function="m:f", outputs=("o",), options={"num_warps": 4})


def cycles(number, case=CASE):
    seen = Numerics(outcome="pass", where="a model", cycles=number)
    return {"target": "rocm:gfx942", "problem": None, "plan": None, "case": case, "kernels": kernel(), "emulated": seen}


WIDER = msgspec.structs.replace(CASE, on={"gfx9*": TargetChanges(options={"num_warps": 8})})
CHANGES = {
    "some more cycles of another package's kernel are told": (
        cycles(1000), cycles(1230), {}, {"facts": "f cycles 1000 → 1230, +23 %"}, NOTHING,
    ),
    "twice the cycles are lost": (
        cycles(1000), cycles(2000), {}, {"facts": "f cycles 1000 → 2000, +100 %", "speed": "f cycles 1000 → 2000"},
        NOTHING,
    ),
    "a missing toolchain is a lost level": (
        {"level": "emulated", "kernels": kernel(spills=0)}, {"status": "NOT_RUN", "level": "declared", "kernels": ()},
        {"toolchains": {"triton==3.6.0": ""}}, {"level": "emulated → NOT_RUN"}, INSTALLED,
    ),
    "spills within a level are told and not lost": (
        {"kernels": kernel(spills=8)}, {"kernels": kernel(spills=24)}, {}, {"facts": "dense_forward spills 8 → 24"},
        NOTHING,
    ),
    "what another path compiles is not compared": (
        {"plan": VARIANT, "kernels": kernel(spills=8)}, {"kernels": kernel(spills=9)}, {},
        {"variant": "path gluon_forward → triton"}, NOTHING,
    ),
    "a key loop of twice the instructions for its products is lost": (
        {"kernels": kernel(instructions_a_megaflop=400)}, {"kernels": kernel(instructions_a_megaflop=800)}, {},
        {"speed": "dense_forward instructions_a_megaflop 400 → 800"}, NOTHING,
    ),
    "scratch where there was none, and half the occupancy, are lost": (
        {"kernels": kernel(occupancy=4)}, {"kernels": kernel(occupancy=2, spills=96)}, {},
        {"facts": "dense_forward spills 0 → 96", "speed": "dense_forward occupancy 4 → 2; dense_forward spills 0 → 96"},
        NOTHING,
    ),
    "another tile's loop is not compared": (
        {"plan": tile(64), "kernels": kernel(spills=8, instructions_a_megaflop=400)},
        {"plan": tile(128), "kernels": kernel(spills=9, instructions_a_megaflop=800)}, {},
        {"facts": "dense_forward spills 8 → 9"}, NOTHING,
    ),
    "interpreted numbers that are not there any more are lost": (
        {"interpreter": PASSED}, {"interpreter": LACKING}, {}, {"interpreter": "interpreted numbers: pass → not_run"},
        NOTHING,
    ),
    "interpreted numbers of a variant are lost too": (
        {"plan": VARIANT, "interpreter": PASSED}, {"plan": VARIANT}, {},
        {"interpreter": "interpreted numbers: pass → none"}, NOTHING,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("was", "now", "made", "told", "cause"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_cell(cell, seen, was, now, made, told, cause):
    change = only(compare(seen([cell(**was)]), seen([cell(**now)], **made)))
    assert (change.told, change.lost) == (told, set(told) != {"facts"})
    assert [str(one) for one in change.causes] == [cause]


def test_cycles_within_the_share_and_those_of_other_options_are_not_compared(cell, seen):
    for now in (cycles(1040), cycles(960), cycles(2000, WIDER)):
        assert compare(seen([cell(**cycles(1000))]), seen([cell(**now)])).changes == ()
    assert only(compare(seen([cell(**cycles(1000))]), seen([cell(**cycles(900))]))).kinds == ("won",)


def test_the_reason_of_a_variant_that_is_not_taken_is_the_cause(cell, seen):
    core = PlanSummary(path="triton", kernel="dense_forward", notes=("not gluon_forward: it needs Triton 3.6.0",))
    change = only(compare(seen([cell(plan=VARIANT)]), seen([cell(plan=core)])))
    assert str(change.causes[0]) == "the path gluon_forward is not taken: it needs Triton 3.6.0"
    core = msgspec.structs.replace(core, notes=(f"not gluon_forward: Gluon has lost functions [{SETS.id}]",))
    change = only(compare(seen([cell(plan=VARIANT)]), seen([cell(plan=core, footnotes=(SETS,))])))
    assert str(change.causes[0]) == f"quirk {SETS.id} rules out the path gluon_forward"


def test_a_cell_that_is_gone_is_lost_and_says_what_it_was(rocm, cell, seen):
    change = only(compare(seen([rocm(), cell()]), seen([cell()])))
    assert (change.kinds, change.told["gone"]) == (("gone",), "the cell is gone; it was emulated, path triton")
    assert str(change.causes[0]) == "the new run has no target rocm:gfx942"
    change = only(compare(seen([rocm(), cell()]), seen([cell()], missing=1)))
    assert "interrupted" in str(change.causes[0])
    other = decode("GQA", dtype="bf16", head_dim=128)
    change = next(c for c in compare(seen([cell()]), seen([cell(named=other)])).changes if "gone" in c.kinds)
    assert "has no problem of the name" in str(change.causes[0])


def test_a_quirk_that_changes_nothing_is_no_cause(rocm, seen):
    red = {"status": "FAIL", "level": "declared", "reason": "wrong", "toolchain": "triton==3.9.0"}
    toolchain = "toolchain triton==3.6.0 → triton==3.9.0"
    noted, plain = (seen([rocm(**red, footnotes=notes)]) for notes in ((NOTES,), ()))
    joined, left = only(compare(seen([rocm()]), noted)), only(compare(seen([rocm(footnotes=(NOTES,))]), plain))
    for change in (joined, left):
        assert (str(change.causes[0]), change.kinds, change.joined, change.left) == (toolchain, ("level",), (), ())
    listed = seen([rocm(footnotes=(SETS, NOTES))])
    kept = msgspec.structs.replace(listed.entries[0], quirks=(SETS.id, NOTES.id), noted=())  # as earlier baselines
    assert compare(msgspec.structs.replace(listed, entries=(kept,)), listed).changes == ()


@pytest.mark.parametrize(("changes", "cause"), [
    ({"digests": {"kernels": "new"}, "commit": "2" * 40}, "digest of the kernels (k → new)"),
    ({"digests": {"quirks/any": "new"}}, "quirks of every backend (a → new)"),
    ({"versions": {"torch": "2.14.0"}}, "torch 2.13.0 → 2.14.0"),
    ({"variables": {"TRITON_PTXAS_PATH": "p"}}, "variable TRITON_PTXAS_PATH 'unset' → 'p'"),
    ({"executors": {"rocm:gfx942 emulated": "left out"}}, "emulated: not there → left out"),
    ({"toolchains": {"triton==3.6.0": "lab"}}, "triton==3.6.0 is compiled with by installed → lab"),
    ({"portattn": "0.2.0"}, "portattn 0.1.0 → 0.2.0"),
    ({"digests": {"quirks/cuda": "new"}}, "nothing that is recorded differs"),
    ({"host": "another"}, "nothing that is recorded differs"),
])  # fmt: skip
def test_without_a_quirk_the_cause_is_what_differs(rocm, seen, changes, cause):
    red = rocm(status="FAIL", level="declared", reason="wrong")
    change = only(compare(seen([rocm()]), seen([red], **changes)))
    assert str(change.causes[0]).startswith(cause)
    assert ("commit 1111111111 → 2222222222" in map(str, change.causes)) == ("commit" in changes)


def test_a_problem_that_is_another_one_by_what_it_asks_for_is_said(rocm, cell, seen):
    red = rocm(problem=msgspec.structs.replace(rocm().problem, seq_q=64), status="FAIL", level="declared")
    change = only(compare(seen([rocm()]), seen([red])))
    assert str(change.causes[0]) == "the problem of this name is another one"
    problem = cell().problem

    class Later(Problem, frozen=True, kw_only=True):
        later: int = 0

    assert problem_digest(Later(**msgspec.structs.asdict(problem))) == problem_digest(problem)
    assert problem_digest(Later(**msgspec.structs.asdict(problem), later=1)) != problem_digest(problem)
    assert problem_digest(msgspec.structs.replace(problem, seq_q=64)) != problem_digest(problem)


def test_levels_in_order(cell):
    red = [evidence(cell(status=status, level="declared")) for status in ("CRASH", "NOT_RUN", "NOTE")]
    fair = [evidence(cell(level=level)) for level in ("compiles", "lowering-checked", "emulated")]
    runs = [evidence(cell(level="runs", label=label)) for label in ("sm_80 code on sm_90", "")]
    order = [*red, *fair, *runs, evidence(cell(level="measured"))]
    assert (order, len(set(order))) == (sorted(order), len(order))
    assert {"gone", "level", "core", "variant", "interpreter", "speed"} == LOST, "as the help says"
    assert evidence(cell(level="declared")) == red[-1]


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
    same = compare(old, old)
    assert (same.compared, same.changes) == (4, ())
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
