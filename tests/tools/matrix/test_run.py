"""A run: real compiles, and compilers that fail in every way, which end in their cells and nowhere else."""

import time

import pytest

from portattn.errors import QuirkConflict
from portattn.planning.registry import devices
from portattn.schema.toolchain import Toolchain, installed_toolchain
from portattn.testing import executor
from portattn.tools.matrix import run, select
from portattn.tools.matrix.cells import Cell
from portattn.tools.matrix.problems import dense
from portattn.tools.matrix.run import Options, execute
from portattn.worker.client import Reply

pytestmark = pytest.mark.compiles  # plans need an installed Triton, also where the compiler is planted


HERE = str(installed_toolchain())  # what cells are compiled with where a test says nothing else
ASCEND = "triton-ascend==3.2.0"


def cells_of(specs, **options) -> dict[tuple[str, str], Cell]:
    found: list[Cell] = []
    execute(specs, Options(**options), found.append)
    assert sorted(c.index for c in found) == [s.index for s in specs]
    return {(c.target.partition(":")[2], c.name): c for c in found}


@pytest.mark.usefixtures("core_only")
def test_two_targets_for_real(small):
    found = cells_of(select.specs(small, select.targets(["sm_90", "gfx942"], [], None)), seconds=120)
    for (arch, name), cell in found.items():
        main = cell.kernels[0]
        assert main.function == cell.plan.kernel
        assert any(main.facts.get(key, 0) > 0 for key in (("mfma",) if arch == "gfx942" else ("wgmma", "mma")))
        assert 0 < main.facts["registers"] <= 512
        level = "emulated" if arch == "gfx942" else "compiles"
        assert (cell.status, cell.level) == ("PASS", level), (arch, name, cell.reason)
        assert (cell.emulated is not None) is (arch == "gfx942")
        assert {gate.name for gate in cell.gates} >= {"registers", "bytes spilled", "matrix instructions"}
        assert all(gate.passed for gate in cell.gates)
        assert cell.interpreter.outcome in ("pass", "not_run"), cell.interpreter
        if cell.interpreter.outcome == "pass":
            assert cell.interpreter.error <= cell.interpreter.budget
        assert cell.native is None
        assert cell.seconds > 0
    # decode splits its keys here: both of its kernels are compiled
    assert len(found["gfx942", small[1].name].kernels) == 2


SM_90 = Toolchain.parse("triton==3.6.0")


def variant_cell(python: str | None, small, **options) -> Cell:
    specs = select.specs(small[:1], select.targets(["sm_90"], [SM_90], None))
    pythons = {str(SM_90): python} if python else {}
    (cell,) = cells_of(specs, pythons=pythons, **options).values()
    return cell


def test_a_variant_is_compiled_for_real_and_the_core_beside_it(small):
    if str(SM_90) != HERE:
        pytest.skip(f"the variants are for {SM_90}, and this is {HERE}")
    cell = variant_cell(None, small, seconds=120)
    assert (cell.status, cell.level) == ("PASS", "compiles"), cell.reason
    assert (cell.plan.path, cell.plan.core_taken) == ("gluon_forward", False)
    assert cell.plan.schedule["width"] == 64
    functions = [kernel.function for kernel in cell.kernels]
    assert (functions[0], functions[-1]) == ("scheduled_forward", "dense_forward")
    assert cell.kernels[0].facts["wgmma"] > 0
    gates = {(gate.function, gate.name) for gate in cell.gates}
    assert {("scheduled_forward", "products made to wait by ptxas"), ("scheduled_forward", "bytes spilled")} <= gates
    assert ("dense_forward", "bytes spilled") in gates
    assert cell.interpreter.outcome in ("pass", "not_run")  # the core's


@pytest.mark.usefixtures("no_interpreter")
@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ("scheduled_forward", "scheduled_forward: RuntimeError at ttgir: planted"),
        ("dense_forward", "the core kernel beside it: dense_forward: RuntimeError at ttgir: planted"),
        ("", ""),
    ],
)
def test_a_variant_s_cell_is_red_by_either_kernel(monkeypatch, planted, small, refused, reason):
    pytest.importorskip("triton.experimental.gluon")

    def compile_in(worker, launch, *_):
        if launch.function == refused:
            return Reply(outcome="error", stage="ttgir", kind="RuntimeError", message="planted")
        facts = {"scratchpad_bytes": 1024, "registers": 64, "spills": 0, "wgmma": 8, "mma": 4}
        return Reply(outcome="ok", facts=facts)

    monkeypatch.setattr(run, "compile_in", compile_in)
    monkeypatch.setattr("portattn.testing.findings.compile_in", compile_in)
    cell = variant_cell(planted, small)
    assert (cell.status, cell.level) == (("ERROR", "declared") if refused else ("PASS", "compiles"))
    assert (cell.reason, cell.plan.path) == (reason, "gluon_forward")


@pytest.mark.usefixtures("no_interpreter")
def test_every_way_to_fail_ends_in_its_cell(planted):
    named = [dense(dtype="fp16", head_dim=64)]
    planted_for = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942"]  # tests/planted.py
    specs = select.specs(named, select.targets(planted_for, [], None))
    begun = time.monotonic()
    found = {
        arch: cell
        for (arch, _), cell in cells_of(specs, pythons={HERE: planted}, seconds=3, left_out=("emulated",)).items()
    }
    assert time.monotonic() - begun < 60
    assert {arch: cell.status for arch, cell in found.items()} == {
        "sm_80": "CRASH", "sm_86": "TIMEOUT", "sm_89": "ERROR", "sm_90": "PASS", "sm_100": "PASS", "sm_120": "FAIL",
        "gfx90a": "FAIL", "gfx942": "PASS",
    }  # fmt: skip
    assert "SIGABRT" in found["sm_80"].reason
    assert "Assertion `planted' failed." in found["sm_80"].log
    assert "no answer in 3 s" in found["sm_86"].reason
    assert found["sm_89"].reason == "dense_forward: RuntimeError at ttgir: planted refusal"
    assert "trace" in found["sm_89"].log
    assert "96 bytes spilled, none allowed" in found["sm_120"].reason
    assert "0 matrix instructions" in found["gfx90a"].reason
    assert {cell.level for cell in found.values() if cell.red} == {"declared"}
    assert {cell.stage for arch, cell in found.items() if arch in ("sm_80", "sm_86", "sm_89")} == {"ttgir"}


@pytest.mark.usefixtures("no_interpreter")
def test_an_interrupt_ends_the_run_and_its_children(planted, small):
    specs = select.specs(small, select.targets(["sm_90", "sm_86"], [], None))
    found: list[Cell] = []

    def done(cell: Cell) -> None:
        found.append(cell)
        raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        execute(specs, Options(pythons={HERE: planted}, seconds=100, jobs=3, left_out=("emulated",)), done)
    assert time.monotonic() - begun < 30  # sm_86 was still under way, and would have taken its 100 s
    assert len(found) == 1


@pytest.mark.usefixtures("no_interpreter")
def test_a_toolchain_that_is_not_here_is_planned_only(planted, small):
    named = select.toolchains(["triton==3.3.0", "flagtree==0.3.0"])
    found = cells_of(select.specs(small[:1], select.targets(["sm_90"], named[:1], None)), pythons={HERE: planted})
    (cell,) = found.values()
    assert (cell.status, cell.level, cell.toolchain) == ("NOT_RUN", "declared", "triton==3.3.0")
    hint = "its lab environment is not there; `portattn lab create triton==3.3.0` makes it"
    assert (cell.reason, cell.plan.kernel) == (f"not compiled here: triton==3.3.0: {hint}", "dense_forward")
    found = cells_of(select.specs(small[:1], select.targets(["sm_90"], named[1:], None)), pythons={HERE: planted})
    (cell,) = found.values()
    if cell.plan.kernel:  # the lab cannot make this one
        assert cell.reason == f"not compiled here: this Python has {HERE}"


@pytest.mark.usefixtures("no_interpreter")
def test_several_toolchains_in_one_run_each_have_their_own_compiler(planted, small, tmp_path):
    """One after the other, and each thread has one compiler in memory."""
    names = ["triton==3.4.0", "triton==3.9.0"]
    pythons, log = {}, tmp_path / "log"
    for name in names:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho begin {name} >> {log}\n{planted} "$@"\necho end {name} >> {log}\n')
        path.chmod(0o755)
        pythons[name] = str(path)
    specs = select.specs(small[:1], select.targets(["sm_90", "gfx942"], select.toolchains(names), None))
    assert [(str(s.target.toolchain)) for s in specs] == names * 2  # the page's order: target by target
    found: list[Cell] = []
    execute(specs, Options(pythons=pythons, jobs=1, left_out=("emulated",)), found.append)
    assert [cell.toolchain for cell in found] == [names[0]] * 2 + [names[1]] * 2
    assert {(c.index, c.target, c.toolchain, c.status) for c in found} == {
        (0, "cuda:sm_90", names[0], "PASS"), (1, "cuda:sm_90", names[1], "PASS"),
        (2, "rocm:gfx942", names[0], "PASS"), (3, "rocm:gfx942", names[1], "PASS"),
    }  # fmt: skip
    assert log.read_text().splitlines()[:2] == [f"begin {names[0]}", f"begin {names[1]}"]


@pytest.mark.usefixtures("no_interpreter")
def test_ascend_says_what_it_needs_and_lowering_to_linalg_is_a_note_and_no_level(planted, small, monkeypatch):
    for cell in cells_of(select.specs(small, select.targets(["ascend910b2"], [], None))).values():
        assert (cell.status, cell.level) == ("NOT_RUN", "declared")
        assert "`portattn lab create triton-ascend==3.2.0` makes it" in cell.reason
        assert cell.footnotes
    monkeypatch.setattr("portattn.backends.ascend.linalg.executor.missing_reason", lambda: "no mlir-opt here")
    found = cells_of(select.specs(small, select.targets(["ascend910b2"], [], None)), pythons={ASCEND: planted})
    for cell in found.values():
        assert (cell.status, cell.level) == ("NOTE", "declared")
        assert cell.reason.endswith("lowers to linalg; not run here: no mlir-opt here")


@pytest.mark.usefixtures("no_interpreter")
def test_a_core_kernel_passed_over_for_being_slow_is_looked_at_and_claims_nothing(planted, small):
    slow = Toolchain.parse("triton-ascend==3.1.0")
    found = cells_of(
        select.specs(small[:1], select.targets(["ascend910b2"], [slow], None)), pythons={str(slow): planted}
    )
    (cell,) = found.values()
    if cell.plan.core_taken:
        pytest.skip("no quirk rules the core kernel out there any more")
    assert (cell.status, cell.level) == ("NOTE", "declared")
    assert cell.plan.path != "triton"
    assert cell.plan.kernel == "dense_forward"
    assert "the core kernel, not taken" in cell.reason
    assert {note.role for note in cell.footnotes} >= {"rejected"}


def test_a_device_that_is_here_runs(small):
    here = tuple(t for t in devices() if t.backend == "cpu")
    found = cells_of(select.specs(small, select.targets(["cpu"], [], None)), here=here)
    for cell in found.values():
        assert (cell.status, cell.level) == ("PASS", "runs")
        assert cell.plan.path in ("sdpa", "reference")
        assert cell.native.error <= cell.native.budget
    assert any(cell.plan.path == "sdpa" for cell in found.values())


@pytest.mark.usefixtures("no_interpreter")
def test_a_compiler_that_is_taken_away_and_a_registry_that_contradicts_itself_are_cells(monkeypatch, small, tmp_path):
    specs = select.specs(small[:1], select.targets(["sm_90"], [], None))
    (cell,) = cells_of(specs, pythons={HERE: str(tmp_path / "gone")}).values()
    assert (cell.status, cell.stage) == ("CRASH", "start")
    assert "cannot be started: No such file" in cell.reason

    def conflict(*_):
        raise QuirkConflict("launch num_warps", ("cuda-0001-a", 4), ("cuda-0002-b", 8))

    monkeypatch.setattr(run, "plan", conflict)
    (cell,) = cells_of(specs).values()
    assert (cell.status, cell.stage) == ("ERROR", "plan")
    assert "cuda-0001-a and cuda-0002-b" in cell.reason


@pytest.mark.parametrize(("outcome", "status"), [("error", "FAIL"), ("crash", "CRASH"), ("hang", "TIMEOUT")])
def test_kernels_that_raise_crash_or_hang_under_the_interpreter_are_red(monkeypatch, planted, small, outcome, status):
    class Broken:
        def request(self, task, seconds, **fields):
            return Reply(outcome=outcome, kind="IndexError", message="planted")

        def close(self):
            pass

    get = run.Workers.get
    monkeypatch.setattr(executor, "interpreter_missing", lambda: "")
    monkeypatch.setattr(run.Workers, "get", lambda self, kind: Broken() if kind == "interpreter" else get(self, kind))
    (cell,) = cells_of(select.specs(small[:1], select.targets(["sm_100"], [], None)), pythons={HERE: planted}).values()
    assert (cell.status, cell.red) == (status, True)
    assert cell.reason == f"interpreted numerics: {outcome}: IndexError: planted"
    assert cell.interpreter.outcome == outcome
