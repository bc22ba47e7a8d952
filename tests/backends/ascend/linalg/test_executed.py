"""LinalgExecutor: lowered code that is wrong, refused, crashes or does not end. Without triton-ascend."""

import re

import lowered_texts as texts
import msgspec
import pytest

from portattn.backends.ascend.linalg import executor
from portattn.backends.ascend.linalg.executor import LinalgExecutor
from portattn.launch import signature
from portattn.launch.kernelcall import KernelCall
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.testing.executor import small_problems
from portattn.worker.client import Reply, Worker

TARGET = parse_target("ascend:ascend910b2", toolchain="triton-ascend==3.2.0")
DENSE = Problem(op="attention", dtype="fp32", batch=1, heads_q=1, heads_k=1, seq_q=16, seq_k=16, head_dim=16)
MLIR_OF = {"*fp32": "memref<?xf32>", "i32": "i32", "fp32": "f32"}


class Planted:
    """In a lowering child's place: every kernel becomes this body."""

    def __init__(self, body: str) -> None:
        self.body, self.asked = body, 0

    def request(self, task: str, seconds: float, **fields) -> Reply:
        self.asked += 1
        types = [MLIR_OF[kind] for kind in fields["signature"]["types"].values()]
        text = texts.kernel(self.body, *types, name=fields["signature"]["function"])
        return Reply(outcome="ok", facts={"linalg": text})


class Answering(Planted):
    def request(self, task: str, seconds: float, **fields) -> Reply:
        return Reply(outcome="crash", kind="SIGABRT", stage="ttadapter", message="Assertion `planted'\nmore")


@pytest.fixture
def made() -> Plan:
    return plan(DENSE, TARGET)


@pytest.mark.usefixtures("mlir")
@pytest.mark.parametrize(
    ("body", "outcome", "said"),
    [
        ("", "fail", "are NaN or infinite where they must not be"),
        ("    %9 = hivm.hir.vexp %arg2", "error", "LinalgError: the lowered text has hivm.hir.vexp"),
        ("    %9 = arith.addi %arg2, %arg2 : i32", "error", "LinalgError: mlir-opt: exit status 1"),
        (f"    {texts.HISTOGRAM}", "not_run", "only the vendor's compiler has hfusion.histogram"),
        (
            "    %9 = func.call @triton_cumsum_0(%5, %0, %1) : (tensor<8xi32>, i32, i1) -> tensor<8xi32>",
            "not_run",
            "only the vendor's compiler has triton_cumsum",
        ),
        (texts.FOREVER, "hang", "no answer in 8 s"),
        (texts.FAR_AWAY, "crash", "SIGSEGV"),
    ],
)
def test_code_that_is_not_right_is_a_result(made, runner: Worker, body, outcome, said):
    seconds = 8.0 if outcome == "hang" else 60.0  # for a child that is there already
    seen = LinalgExecutor(seconds).check(made, TARGET, Planted(body), runner)
    assert seen.outcome == outcome
    assert said in seen.reason
    assert seen.where == "x86, as triton-ascend==3.2.0 lowers it for ascend910b2"


@pytest.mark.usefixtures("mlir")
def test_an_access_outside_the_arguments_fails_and_is_named(made, runner: Worker):
    body = """\
    %at = arith.constant 100000 : index
    %c0 = arith.constant 0 : index
    %v = memref.load %arg3[%at] : memref<?xf32>
    memref.store %v, %arg5[%c0] : memref<?xf32>"""
    seen = LinalgExecutor(60.0).check(made, TARGET, Planted(body), runner)
    assert seen.outcome == "fail"
    assert re.search(r"outside its memory: dense_forward reads k \d+ bytes after its end", seen.reason)


@pytest.fixture
def nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if MLIR's programs were here: stand-ins for the children need none of them."""
    monkeypatch.setattr(executor, "missing_reason", lambda: "")


@pytest.mark.usefixtures("nothing_missing")
def test_a_lowering_that_fails_on_the_small_problem_says_so(made):
    seen = LinalgExecutor(60.0)
    found = seen.check(made, TARGET, Answering(""), Planted(""))
    assert (found.outcome, found.reason) == (
        "crash", "on a small problem, dense_forward: SIGABRT at ttadapter: Assertion `planted'",
    )  # fmt: skip


def test_without_mlir_nothing_is_asked(made, monkeypatch):
    monkeypatch.setattr(executor, "missing_reason", lambda: "no mlir-opt here: install it")
    compiler = Planted("")
    seen = LinalgExecutor(60.0).check(made, TARGET, compiler, compiler)
    assert (seen.outcome, seen.reason, compiler.asked) == ("not_run", "no mlir-opt here: install it", 0)


class Judging:
    """In the running child's place."""

    def __init__(self, **facts) -> None:
        self.facts, self.asked = {"error": 0.5, "budget": 1.0, "wrong": 0, "strays": ""} | facts, 0

    def request(self, task: str, seconds: float, **fields) -> Reply:
        self.asked += 1
        return Reply(outcome="ok", facts=self.facts)


@pytest.mark.usefixtures("nothing_missing")
def test_one_lowering_is_executed_once_for_all_chips_of_as_many_cores(made):
    seen, runner = LinalgExecutor(60.0), Judging()
    for arch in ("ascend910b2", "ascend910b1", "ascend910b2"):
        target = parse_target(f"ascend:{arch}", toolchain="triton-ascend==3.2.0")
        found = seen.check(plan(DENSE, target), target, Planted(""), runner)
        assert found.where.endswith(arch)
        assert found.outcome == "pass"
    assert runner.asked == 1
    fewer = parse_target("ascend:ascend910b3", toolchain="triton-ascend==3.2.0")
    seen.check(plan(DENSE, fewer), fewer, Planted(""), runner)
    assert runner.asked == 2


@pytest.mark.usefixtures("nothing_missing")
def test_an_lse_over_its_budget_fails(made):
    seen = LinalgExecutor(60.0)
    found = seen.check(made, TARGET, Planted(""), Judging(lse_error=2.0, lse_budget=1.0))
    assert (found.outcome, found.reason) == ("fail", "LSE's error 2 is over its budget 1")


def test_a_batch_is_checked_with_its_last_sequence_full_too():
    padded = msgspec.structs.replace(DENSE, batch=4, seqlens_q=True, seqlens_k=True, seq_q=512, seq_k=512)
    first, alone = small_problems(plan(padded, TARGET))
    assert (first.batch, alone.batch) == (3, 1)
    packed = msgspec.structs.replace(DENSE, op="varlen_attention", batch=4, total_q=512, total_k=512)
    _, alone = small_problems(plan(packed, TARGET))
    assert (alone.total_q, alone.total_k) == (alone.seq_q, alone.seq_k)
    assert len(small_problems(plan(DENSE, TARGET))) == 1


def test_lints_and_facts_name_the_arguments():
    arguments, launch = {"n": 3, "one": 1}, plan(DENSE, TARGET).launch
    call = KernelCall("portattn.kernels.dense", "dense_forward", (70000,), arguments, {}, launch)
    assert list(signature(call).types) == ["n"]
    text = texts.kernel("", "i32")
    facts, lints = LinalgExecutor(60.0).analyze(Reply(outcome="ok", facts={"linalg": text, "matmul": 2}), call, TARGET)
    assert facts == {"matmul": 2, "tile_bytes": 0, "programs": 70000}
    assert [lint.red for lint in lints] == [True]
