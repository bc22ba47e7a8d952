"""PtxExecutor: which targets it takes, what it makes of answers; and how cells, `verify` and command lines show it."""

import contextlib
import json
import re
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from planted import planted as planted

from portattn.backends.cuda.ptx_compat import PtxExecutor
from portattn.cli import main, verify
from portattn.cli.matrix import _summary
from portattn.cli.matrix_compare import counts
from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.testing import canary, executor
from portattn.testing.findings import Numerics
from portattn.tools.matrix import provenance, select
from portattn.tools.matrix.cell_text import brief
from portattn.tools.matrix.cells import Cell
from portattn.tools.matrix.problems import dense
from portattn.tools.matrix.run import Options, execute
from portattn.tools.matrix.site import render
from portattn.worker.client import Reply

TOOLCHAIN = "triton==3.6.0"
PASSED = {"error": 1e-3, "budget": 2e-3, "wrong": 0.0}
LABEL = "sm_80 code on sm_90"


def target(name, toolchain=TOOLCHAIN):
    return parse_target(name, toolchain)


def older(*here):
    return PtxExecutor(5.0, [target(name) for name in here])


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
@pytest.mark.parametrize("device", ["sm_90", "sm_100", "sm_120"])
def test_older_targets_are_taken_and_labelled(arch, device):
    found = older("cpu:generic", f"cuda:{device}")
    assert found.lacks(target(f"cuda:{arch}")) == ""
    assert found.where(target(f"cuda:{arch}")) == f"{arch} code on {device}"
    assert found.where(target(f"cuda:{arch}", "triton==3.9.0")) == f"{arch} code on {device}"


@pytest.mark.parametrize(
    ("name", "toolchain", "here", "said"),
    [
        ("cuda:sm_80", TOOLCHAIN, (), "needs an NVIDIA GPU newer than sm_80; none is here"),
        ("cuda:sm_80", TOOLCHAIN, ("cpu:generic", "rocm:gfx942"), "none is here"),
        ("cuda:sm_80", TOOLCHAIN, ("cuda:sm_80",), "needs a GPU newer than it, and here is sm_80"),
        ("cuda:sm_89", TOOLCHAIN, ("cuda:sm_86",), "needs a GPU newer than it, and here is sm_86"),
        ("cuda:sm_90", TOOLCHAIN, ("cuda:sm_90",), "needs a GPU newer than it, and here is sm_90"),
        ("cuda:sm_90", TOOLCHAIN, ("cuda:sm_100",), r"for that chip only \(sm_90a\), and here is sm_100"),
        ("cuda:sm_80", "flagtree==0.3.0", ("cuda:sm_90",), "community Triton's, and this is flagtree==0.3.0"),
        ("rocm:gfx942", TOOLCHAIN, ("cuda:sm_90",), "rocm:gfx942 is no NVIDIA GPU"),
    ],
)
def test_other_targets_are_refused_with_what_is_needed(name, toolchain, here, said):
    found = older(*here)
    assert re.search(said, found.lacks(target(name, toolchain)))
    assert found.where(target(name, toolchain)) == name
    idle: Any = None
    made = plan(canary.CASES["attention"][0], target("cuda:sm_80"))
    seen = found.check(made, target(name, toolchain), idle, idle, [made.problem])
    assert seen.outcome == "not_run"
    assert re.search(said, seen.reason)


class Child:
    """A worker that answers from a list, and keeps what it was asked."""

    def __init__(self, *replies):
        self.replies, self.asked, self.closed = list(replies), [], 0

    def request(self, task, seconds, **fields):
        self.asked.append((task, fields))
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def close(self):
        self.closed += 1


def compiles(shared=8192):
    return Child(Reply(outcome="ok", facts={"ptx": "text", "scratchpad_bytes": shared, "num_warps": 4, "scratch": 0}))


def checked(compiler, runner, arch="sm_80", here="cuda:sm_90"):
    where = target(f"cuda:{arch}")
    made = plan(canary.CASES["decode_attention"][0], where)
    assert made.path == "triton"
    return older(here).check(made, where, compiler, runner, [made.problem])


def test_each_launch_is_sent_with_what_it_was_compiled_for():
    compiler, runner = compiles(), Child(Reply(outcome="ok", facts=PASSED))
    seen = checked(compiler, runner)
    assert (seen.outcome, seen.where, seen.error) == ("pass", LABEL, 1e-3)
    assert [fields["target"] for _, fields in compiler.asked] == [["cuda", 80, 32]] * 2
    ((task, fields),) = runner.asked
    assert task == "portattn.backends.cuda.ptx_compat:compare"
    assert [code["signature"]["function"] for code in fields["texts"]] == ["decode_split", "combine"]
    assert fields["texts"][0]["signature"] == compiler.asked[0][1]["signature"]
    assert {code["text"] for code in fields["texts"]} == {"text"}
    assert runner.closed == 0


@pytest.mark.parametrize(
    ("reply", "outcome", "said", "closed"),
    [
        (Reply(outcome="ok", facts=PASSED | {"error": 1.0}), "fail", "over its budget", 0),
        (Reply(outcome="ok", facts=PASSED | {"wrong": 3.0}), "fail", "3 elements are NaN", 0),
        (Reply(outcome="error", kind="CudaError", message="CUDA error 700"), "error", "CudaError: CUDA error 700", 1),
        (Reply(outcome="error", kind="PtxTooNew", message="CUDA error 222"), "not_run", "CUDA error 222", 0),
        (Reply(outcome="error", kind="BadPtx", message="planted"), "error", "BadPtx: planted", 0),
        (
            Reply(outcome="crash", kind="SIGSEGV", stage="import", message="died"), "crash",
            "SIGSEGV: died, at stage 'import'", 0,
        ),
        (
            Reply(outcome="hang", kind="timeout", stage="run combine", message="no answer in 5 s"), "hang",
            "no answer in 5 s, at stage 'run combine'", 0,
        ),
    ],
)  # fmt: skip
def test_what_a_run_ends_in(reply, outcome, said, closed):
    runner = Child(reply)
    seen = checked(compiles(), runner)
    assert seen.outcome == outcome
    assert said in seen.reason
    assert runner.closed == closed  # after an error that may be a fault, the next run has a new process


def test_a_compile_that_fails_is_the_outcome():
    refused = Child(Reply(outcome="error", kind="RuntimeError", stage="ttgir", message="planted\nmore"))
    seen = checked(refused, None)
    assert (seen.outcome, seen.reason) == ("error", "error: RuntimeError: decode_split: RuntimeError at ttgir: planted")


def test_shared_memory_is_limited_by_the_older_chip_and_by_the_device():
    """sm_86 has 99 KiB, whatever sm_90 has; and 163 KiB of sm_80 do not fit on sm_120."""
    seen = checked(compiles(110_000), None, "sm_86")
    assert seen.outcome == "error"
    assert "out of resource: shared memory, required 110000 bytes, sm_86 has 101376" in seen.reason
    assert checked(compiles(110_000), Child(Reply(outcome="ok", facts=PASSED)), "sm_80").outcome == "pass"
    seen = checked(compiles(110_000), None, "sm_80", "cuda:sm_120")
    assert (seen.outcome, seen.reason) == ("not_run", "needs 110000 bytes of shared memory, sm_120 has 101376")


# ---- cells


def made_cell(monkeypatch, planted, seen, **options):
    """A cell whose compiler is planted and whose run as an older chip's code is `seen`; None: there must be no run. The
    planted compiler gets sm_100 right and lets sm_120 spill."""

    def check(self, *_):
        assert seen is not None, "was not to be run"
        return seen

    monkeypatch.setattr(PtxExecutor, "check", check)
    monkeypatch.setattr(PtxExecutor, "lacks", lambda self, where: "" if self.device else "none is here")
    monkeypatch.setattr(executor, "interpreter_missing", lambda: "left out by this test")
    found: list[Cell] = []
    specs = select.specs([dense(dtype="fp16", head_dim=64)], [target(f"cuda:{options.pop('arch', 'sm_100')}")])
    options = {"here": (target("cuda:sm_90"),)} | options
    execute(specs, Options(pythons={TOOLCHAIN: planted}, seconds=5, **options), found.append)
    return found[0]


def numbers(outcome, reason=""):
    return Numerics(outcome=outcome, where=LABEL, error=1e-3, budget=2e-3, reason=reason)


def test_right_numbers_are_level_runs_with_the_label(monkeypatch, planted):
    cell = made_cell(monkeypatch, planted, numbers("pass"))
    assert (cell.status, cell.level, cell.label, cell.native) == ("PASS", "runs", LABEL, None)
    assert cell.older == numbers("pass")
    assert brief(cell) == LABEL
    assert counts([cell]) == f"1 runs ({LABEL})"
    made = provenance.this_run([], "quick", "portattn matrix run", [])
    assert _summary(made, [cell])["levels"] == {"runs": 1}
    assert _summary(made, [cell])["labels"] == {LABEL: 1}
    page = render(msgspec.structs.replace(made, cells=(cell.id,)), [cell])
    assert f'<span class="brief">{LABEL}</span>' in page
    assert f"{LABEL}: max error 1.00e-03 of 2.00e-03 allowed" in page
    assert msgspec.json.decode(msgspec.json.encode(cell), type=Cell) == cell


@pytest.mark.parametrize(("outcome", "status"), [("fail", "FAIL"), ("error", "FAIL"), ("hang", "TIMEOUT")])
def test_wrong_numbers_are_red_and_named(monkeypatch, planted, outcome, status):
    cell = made_cell(monkeypatch, planted, numbers(outcome, "planted"))
    assert (cell.status, cell.level, cell.label) == (status, "declared", "")
    assert cell.reason == f"{LABEL} numerics: planted"


def test_what_could_not_be_run_is_no_evidence(monkeypatch, planted):
    cell = made_cell(monkeypatch, planted, numbers("not_run", "CUDA error 222"))
    assert (cell.status, cell.level, cell.label) == ("PASS", "compiles", "")
    assert cell.older.reason == "CUDA error 222"


def test_a_tile_that_spills_stays_without_a_level(monkeypatch, planted):
    """Right numbers do not take back what a gate said."""
    cell = made_cell(monkeypatch, planted, None, arch="sm_120")
    assert cell.status == "FAIL"
    assert cell.older is None


def test_without_a_newer_gpu_or_switched_off_nothing_is_run(monkeypatch, planted):
    for options in ({"left_out": ("older",)}, {"here": ()}, {"here": (target("cpu:generic"),)}):
        cell = made_cell(monkeypatch, planted, None, **options)
        assert (cell.status, cell.level, cell.older) == ("PASS", "compiles", None)


# ---- verify, and the command lines


def rows(monkeypatch, seen, *here, **options):
    monkeypatch.setattr(PtxExecutor, "check", lambda *_: seen)
    monkeypatch.setattr(verify, "devices", lambda: [target(name) for name in here])
    monkeypatch.setattr(verify.Interpreter, "check", lambda *_: numbers("pass"))
    monkeypatch.setattr(verify.lab, "worker", lambda _: contextlib.nullcontext())
    said: list[str] = []
    return list(
        verify.verification_rows(["mla_attention"], target("cuda:sm_80"), Settings(), 5.0, said.append, **options)
    )


def test_a_verified_row_says_level_and_label(monkeypatch):
    row, _ = rows(monkeypatch, numbers("pass"), "cuda:sm_90")
    assert (row.verdict, row.level, row.label) == ("agree", "runs", LABEL)
    row, _ = rows(monkeypatch, numbers("fail", "planted"), "cuda:sm_90")
    assert (row.verdict, row.level, row.label) == ("device", "declared", "")
    row, _ = rows(monkeypatch, numbers("not_run", "none is here"))
    assert (row.verdict, row.level, row.label) == ("agree", "declared", "")
    row, _ = rows(monkeypatch, numbers("pass"), "cuda:sm_90", run_ptx_compat=False)
    assert (list(row.seen), row.level) == (["interpreter"], "declared")
    with pytest.raises(ArgumentError, match="needs an NVIDIA GPU newer than sm_80; none is here"):
        rows(monkeypatch, numbers("pass"), run_ptx_compat=True)


def called(*arguments):
    result = CliRunner().invoke(main, list(arguments), prog_name="portattn")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr("portattn.planning.registry.devices", lambda: [])
    monkeypatch.setattr(verify, "devices", lambda: [])
    monkeypatch.setattr(verify.Interpreter, "check", lambda *_: numbers("pass"))


@pytest.mark.usefixtures("no_device")
def test_asked_for_without_a_gpu_is_one_clear_error(tmp_path):
    needs = "running sm_80 code needs an NVIDIA GPU newer than sm_80; none is here"
    status, out, err = called("verify", "mla_attention", "--target", "cuda:sm_80", "--run-older")
    assert (status, out) == (2, "")
    assert needs in err
    line = ("matrix", "run", "--out", str(tmp_path / "m"), "--targets", "sm_80,gfx942", "--run-older")
    status, out, err = called(*line)
    assert (status, out) == (2, "")
    assert needs in err
    assert not (tmp_path / "m").exists()


@pytest.mark.usefixtures("no_device")
def test_not_asked_for_without_a_gpu_it_is_said():
    status, out, _ = called("verify", "mla_attention", "--target", "cuda:sm_80", "--toolchain", TOOLCHAIN)
    assert status == 0
    assert "not run as sm_80 code: running sm_80 code needs an NVIDIA GPU newer than sm_80; none is here" in out
    status, out, _ = called("verify", "mla_attention", "--target", "cuda:sm_80", "--toolchain", TOOLCHAIN, "--json")
    found = json.loads(out)
    assert found["rows"][0]["seen"]["older"]["outcome"] == "not_run"
    assert (found["levels"], found["labels"]) == ({"declared": 2}, {})


@pytest.mark.usefixtures("no_device")
def test_the_label_is_in_text_and_json(monkeypatch):
    monkeypatch.setattr(PtxExecutor, "check", lambda *_: numbers("pass"))
    line = ("verify", "mla_attention", "--target", "cuda:sm_80", "--toolchain", TOOLCHAIN)
    status, out, _ = called(*line)
    assert status == 0
    assert f"2 problems, 2 verified, 0 red, 2 runs ({LABEL})" in out
    found = json.loads(called(*line, "--json")[1])
    assert (found["levels"], found["labels"]) == ({"runs": 2}, {LABEL: 2})
    assert (found["rows"][0]["level"], found["rows"][0]["label"]) == ("runs", LABEL)
