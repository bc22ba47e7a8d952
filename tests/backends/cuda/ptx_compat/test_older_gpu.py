"""On a newer NVIDIA GPU: every kernel family as code of sm_80, sm_86 and sm_89, against the oracle."""

import re
from typing import Any

import msgspec
import pytest

from portattn.backends.cuda.ptx_compat import PtxExecutor
from portattn.planning.planner import plan
from portattn.planning.registry import devices, parse_target
from portattn.schema.toolchain import installed_toolchain
from portattn.testing import canary
from portattn.tools.matrix import problems
from portattn.worker.client import Reply, Worker

pytestmark = [pytest.mark.gpu, pytest.mark.compiles]
SECONDS = 50.0  # less than what a whole test is usually given, so that a child that hangs is named
ARCHES = ("sm_80", "sm_86", "sm_89")
CASES = {f"{op} {n}": problem for op, found in canary.CASES.items() for n, problem in enumerate(found)}
# Problems of a usual size (scaled to some thousand rows): several tiles, pipelined loops, split keys.
LARGE = {named.name: named.problem for named in problems.SETS["quick"]()}


class Keeping(Worker):
    """A worker that keeps its last answer, so that a failed test can print the child's log."""

    last: Reply | None = None

    def request(self, task, seconds, **fields):
        self.last = super().request(task, seconds, **fields)
        return self.last


Workers = tuple[Keeping, Keeping]


@pytest.fixture(scope="module")
def workers():
    """One child that compiles and one that runs, both of this Python; each has answered."""
    alone = {"OMP_NUM_THREADS": "1"}  # test processes run side by side
    with Keeping(environment=alone, runs="") as compiling, Keeping(environment=alone, runs="kernels") as running:
        for worker, what in ((compiling, "compiles"), (running, "runs")):
            reply = worker.request("hello", SECONDS)
            assert reply.outcome == "ok", f"the child that {what} does not start: {told(reply)}"
        yield compiling, running


def told(reply):
    """An answer with the end of the child's log."""
    if reply is None:
        return "was asked nothing"
    return f"{reply.outcome} at stage {reply.stage!r}: {reply.kind}: {reply.message}\n{reply.log[-3000:]}"


def why(seen, workers):
    """What a failed test says: the reason, and what both children said last."""
    children = [f"the child that {what}: {told(w.last)}" for what, w in zip(("compiles", "runs"), workers, strict=True)]
    return "\n".join([f"{seen.outcome}: {seen.reason}", *children])


@pytest.fixture(scope="module")
def older():
    found = PtxExecutor(SECONDS, devices())
    lacks = found.lacks(target("sm_80")) or without_assembler()
    if lacks:
        pytest.skip(lacks)
    return found


def without_assembler():
    """Why this Triton assembles no code of the older chips; empty where it does."""
    from triton.backends.nvidia import compiler

    find = getattr(compiler, "get_ptxas", None)
    try:
        return "" if find is None or find(80).path else "this Triton names no assembler of sm_80 code"
    except RuntimeError as missing:  # of 3.9 and newer, made small for one chip: scripts/pack_triton.py --arch
        if "Cannot find ptxas" not in str(missing):
            raise
        return f"this Triton assembles no sm_80 code: {missing}"


def target(arch):
    return parse_target(f"cuda:{arch}", str(installed_toolchain()))


def run(older, arch, problem, workers, scaled=False):
    where = target(arch)
    if older.lacks(where):
        pytest.skip(older.lacks(where))
    made = plan(problem, where)
    assert made.path == "triton", made.rejected
    return older.check(made, where, *workers, () if scaled else [problem])


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", CASES)
def test_canaries_are_right_as_an_older_chips_code(older, workers, arch, name):
    seen = run(older, arch, CASES[name], workers)
    assert seen.outcome == "pass", why(seen, workers)
    assert seen.where.startswith(f"{arch} code on sm_")
    assert seen.error is not None
    if CASES[name].writes:  # what is stored is compared bit by bit, and a cache holds something else before
        assert seen.error == 0.0
    else:
        assert seen.error > 0.0  # 16-bit results are never exact: something was computed and compared


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", LARGE)
def test_usual_sizes_are_right_as_an_older_chips_code(older, workers, arch, name):
    where = target(arch)
    if plan(LARGE[name], where).path != "triton":
        pytest.skip("another path is planned there")
    seen = run(older, arch, LARGE[name], workers, scaled=True)
    assert seen.outcome == "pass", why(seen, workers)


class Changed:
    """A compiler's child whose texts are changed: the first `old` becomes `new`."""

    def __init__(self, worker, old, new):
        self.worker, self.old, self.new = worker, old, new

    def request(self, task, seconds, **fields):
        reply = self.worker.request(task, seconds, **fields)
        assert reply.outcome == "ok", told(reply)
        assert self.old in str(reply.facts["ptx"]), f"the code has no {self.old!r}"
        text = str(reply.facts["ptx"]).replace(self.old, self.new, 1)
        return msgspec.structs.replace(reply, facts={**reply.facts, "ptx": text})


@pytest.mark.parametrize(
    ("old", "new", "outcome", "said"),
    [
        ("ex2.approx.ftz.f32", "lg2.approx.ftz.f32", "fail", "over its budget|NaN or infinite"),
        ("mma.sync", "mma.sunk", "error", "CUDA_ERROR_INVALID_PTX"),
        (".version ", ".version 1", "not_run", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
        (".target sm_80", ".target sm_90a", "error", "compiled for sm_90a, and sm_80 was asked for"),
        # An access far outside every tensor ends the device's context: the next run has a fresh one.
        ("\tret;", "\tmov.u64 \t%rd1, 64;\n\tst.global.u32 \t[%rd1], 0;\n\tret;", "error crash", ""),
    ],
)
def test_bugs_in_the_code_are_seen(older, workers, old, new, outcome, said):
    changed: Any = Changed(workers[0], old, new)
    seen = run(older, "sm_80", CASES["attention 0"], (changed, workers[1]))
    assert seen.outcome in outcome.split(), why(seen, workers)
    assert re.search(said, seen.reason), why(seen, workers)
    seen = run(older, "sm_80", CASES["attention 0"], workers)
    assert seen.outcome == "pass", why(seen, workers)  # the next one is not harmed


def test_nothing_is_run_on_an_equal_device(older):
    assert older.device is not None
    assert "a GPU newer than it" in older.lacks(older.device)
