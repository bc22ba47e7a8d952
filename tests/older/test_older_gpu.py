"""On a newer NVIDIA GPU: every kernel family as code of sm_80, sm_86 and sm_89, against the oracle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from portattn import Problem, Target, canary
from portattn.machine import devices
from portattn.matrix import problems
from portattn.matrix.cells import Numerics
from portattn.matrix.numerics import on_device
from portattn.older.check import Older
from portattn.planner import plan
from portattn.toolchain import installed
from portattn.worker.client import Reply, Worker

pytestmark = [pytest.mark.gpu, pytest.mark.compiles]
SECONDS = 120.0
ARCHES = ("sm_80", "sm_86", "sm_89")
CASES = {f"{op} {n}": problem for op, found in canary.CASES.items() for n, problem in enumerate(found)}
# Problems of a usual size (scaled to some thousand rows): several tiles, pipelined loops, split keys.
LARGE = {named.name: named.problem for named in problems.SETS["quick"]()}


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Worker, Worker]]:
    with Worker(runs="") as compiling, Worker(runs="kernels") as running:
        yield compiling, running


@pytest.fixture(scope="module")
def older() -> Older:
    found = Older(SECONDS, devices())
    lacks = found.lacks(target("sm_80"))
    if lacks:
        pytest.skip(lacks)
    return found


def target(arch: str) -> Target:
    return Target.parse(f"cuda:{arch}", str(installed()))


def run(older: Older, arch: str, problem: Problem, workers: tuple[Worker, Worker], scaled: bool = False) -> Numerics:
    where = target(arch)
    if older.lacks(where):
        pytest.skip(older.lacks(where))
    made = plan(problem, where)
    assert made.path == "triton", made.rejected
    return older.check(made, on_device(problem, "cuda") if scaled else problem, where, *workers)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", CASES)
def test_canaries_are_right_as_an_older_chips_code(
    older: Older, workers: tuple[Worker, Worker], arch: str, name: str
) -> None:
    seen = run(older, arch, CASES[name], workers)
    assert seen.outcome == "pass", seen.reason
    assert seen.where.startswith(f"{arch} code on sm_")
    assert seen.error is not None
    assert seen.error > 0.0  # 16-bit results are never exact: something was computed and compared


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", LARGE)
def test_usual_sizes_are_right_as_an_older_chips_code(
    older: Older, workers: tuple[Worker, Worker], arch: str, name: str
) -> None:
    where = target(arch)
    if plan(LARGE[name], where).path != "triton":
        pytest.skip("another path is planned there")
    seen = run(older, arch, LARGE[name], workers, scaled=True)
    assert seen.outcome == "pass", seen.reason


class Changed:
    """A compiler's child whose texts are changed: the first `old` becomes `new`."""

    def __init__(self, worker: Worker, old: str, new: str) -> None:
        self.worker, self.old, self.new = worker, old, new

    def request(self, task: str, seconds: float, **fields: Any) -> Reply:
        reply = self.worker.request(task, seconds, **fields)
        assert self.old in str(reply.facts["ptx"])
        text = str(reply.facts["ptx"]).replace(self.old, self.new, 1)
        return msgspec.structs.replace(reply, facts={**reply.facts, "ptx": text})


@pytest.mark.parametrize(
    ("old", "new", "outcome", "said"),
    [
        ("ex2.approx.ftz.f32", "lg2.approx.ftz.f32", "fail", "over its budget|NaN or infinite"),
        ("mma.sync", "mma.sunk", "error", "CUDA_ERROR_INVALID_PTX"),
        (".version ", ".version 1", "not_run", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
        (".target sm_80", ".target sm_90a", "error", "compiled for sm_90a, and sm_80 was asked for"),
    ],
)
def test_bugs_in_the_code_are_seen(
    older: Older, workers: tuple[Worker, Worker], old: str, new: str, outcome: str, said: str
) -> None:
    changed: Any = Changed(workers[0], old, new)
    seen = run(older, "sm_80", CASES["attention 0"], (changed, workers[1]))
    assert seen.outcome == outcome, seen.reason
    assert re.search(said, seen.reason), seen.reason
    assert run(older, "sm_80", CASES["attention 0"], workers).outcome == "pass"  # the next one is not harmed


def test_a_fault_ends_in_its_own_run(older: Older, workers: tuple[Worker, Worker]) -> None:
    """An access far outside every tensor ends the device's context: the next run has a fresh one."""
    changed: Any = Changed(workers[0], "\tret;", "\tmov.u64 \t%rd1, 64;\n\tst.global.u32 \t[%rd1], 0;\n\tret;")
    seen = run(older, "sm_80", CASES["attention 0"], (changed, workers[1]))
    assert seen.outcome in ("error", "crash"), seen
    assert run(older, "sm_80", CASES["attention 0"], workers).outcome == "pass"


def test_nothing_is_run_on_an_equal_device(older: Older) -> None:
    assert older.device is not None
    assert "a GPU newer than it" in older.lacks(older.device)
