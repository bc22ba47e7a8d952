"""portattn's own kernels, as planned and compiled for AMD chips, run in the model: right numbers, and bugs are seen."""

import re
from collections.abc import Iterator
from typing import Any

import coverage_data
import msgspec
import pytest
import support
from asmkit import ARCH_NAMES
from emulated_slice import SLICE

from portattn import Problem, Target
from portattn.backends.rocm.emulator.amdgpu import ARCHES
from portattn.backends.rocm.emulator.executor import EmulatorExecutor
from portattn.cli.verify import verification_rows
from portattn.config import Settings
from portattn.launch import KernelCall
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.ops import ROWS
from portattn.schema.toolchain import installed_toolchain
from portattn.testing import canary
from portattn.testing.findings import Numerics
from portattn.tools.matrix.problems import full
from portattn.worker.client import Reply, Worker

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(support.TRITON is None, reason="Triton is not installed")]
SECONDS = 120.0
CASES = [(arch, name) for arch in ARCH_NAMES for name in SLICE]


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Worker, Worker]]:
    lacks = EmulatorExecutor(SECONDS).lacks(target("gfx942"))
    if lacks:
        pytest.skip(lacks)
    with Worker(runs="") as compiling, Worker(runs="kernels") as running:
        yield compiling, running


def target(arch: str) -> Target:
    return parse_target(f"rocm:{arch}", str(installed_toolchain()))


def emulated(
    arch: str, problem: Problem, workers: tuple[Worker, Worker], model: EmulatorExecutor | None = None
) -> Numerics:
    where = target(arch)
    return (model or EmulatorExecutor(SECONDS)).check(plan(problem, where), where, *workers)


class Recording(EmulatorExecutor):
    """Keeps the mnemonics of what it runs."""

    def __init__(self) -> None:
        super().__init__(SECONDS)
        self.mnemonics: set[str] = set()

    def piece(self, launch: KernelCall, reply: Reply) -> Any:
        found = super().piece(launch, reply)
        self.mnemonics |= set().union(*coverage_data.used_mnemonics([found["text"]]).values())
        return found


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_the_machine_code_is_right(workers: tuple[Worker, Worker], arch: str, name: str) -> None:
    model = Recording()
    seen = emulated(arch, SLICE[name], workers, model)
    assert seen.outcome == "pass", seen.reason
    assert seen.error is not None
    if ROWS[SLICE[name].op].writes and SLICE[name].op != "indexer_logits":  # what is stored is compared bit by bit
        assert seen.error == 0.0
    else:
        assert seen.error > 0.0  # rounded results are never exact: something was computed and compared
    coverage_data.check_used(arch, model.mnemonics)


@pytest.mark.parametrize("arch", [name for name, arch in ARCHES.items() if arch.same_as])
def test_a_chip_with_the_instructions_of_another(workers: tuple[Worker, Worker], arch: str) -> None:
    seen = emulated(arch, SLICE["sparse_attention 0"], workers)
    assert seen.outcome == "pass", seen.reason
    assert f"a model of {arch}" in seen.where


# Tiles with rows that are not real, and values of NaN that are hidden from those that are.
_HIDDEN = {"batch": 2, "heads_q": 2, "heads_k": 2, "head_dim": 64, "dtype": "fp16", "return_lse": True}
HIDDEN = {
    "filler rows": Problem(op="decode_attention", **_HIDDEN, seq_q=1, seq_k=83, bias=True),
    "left padding": Problem(
        op="attention", **_HIDDEN, seq_q=45, seq_k=150, window_left=3, causal="bottom_right", leftpad_q=True,
        seqlens_q=True,
    ),
    "rows beyond the end": Problem(op="attention", **_HIDDEN, seq_q=1, seq_k=83, bias=True),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_rows_that_are_not_real_do_not_let_hidden_values_in(workers: tuple[Worker, Worker], name: str) -> None:
    seen = emulated("gfx942", HIDDEN[name], workers)
    assert seen.outcome == "pass", seen.reason


@pytest.mark.parametrize("toolchain", ["triton==3.4.0", "triton==3.6.0", "triton==3.9.0"])
@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_every_lowering_that_a_plan_chooses_is_in_the_slice(arch: str, toolchain: str) -> None:
    """Kernels and lowerings of the matrix's full set, which has every operation, dtype, head size and feature."""
    where = parse_target(f"rocm:{arch}", toolchain)

    def chosen(problem: Problem) -> tuple[str, str, object]:
        made = plan(problem, where)
        return made.path, made.kernel, made.lowering

    wanted = {chosen(named.problem) for named in full()}
    assert {path for path, _, _ in wanted} <= {"triton", "reference"}  # dense gradients by tensors without strides
    wanted = {one for one in wanted if one[0] == "triton"}
    assert len({kernel for _, kernel, _ in wanted}) == 14
    assert wanted <= {chosen(problem) for problem in SLICE.values()}


class Planted(EmulatorExecutor):
    """Machine code with a bug: the first line that matches becomes another."""

    def __init__(self, pattern: str, replacement: str) -> None:
        super().__init__(SECONDS)
        self.pattern, self.replacement = re.compile(pattern, re.MULTILINE), replacement

    def piece(self, launch: KernelCall, reply: Reply) -> Any:
        found = super().piece(launch, reply)
        text, count = self.pattern.subn(self.replacement, found["text"], count=1)
        assert count == 1
        return found | {"text": text}


BUGS = {
    "a barrier is missing": (r"^\ts_barrier$", "\ts_nop 0", "LdsRace"),
    "a wait is missing": (r"^\ts_waitcnt (vm|lgkm)cnt\(0\)$", "\ts_nop 0", "MissingWait"),
    "an exponential is a logarithm": (r"^\tv_exp_f32_e32", "\tv_log_f32_e32", "over its budget|NaN or infinite"),
    "an instruction is not known": (r"^\tv_exp_f32_e32", "\tv_expire_f32_e32", "UnknownInstruction"),
}


@pytest.mark.parametrize("name", BUGS)
def test_bugs_in_the_machine_code_are_seen(workers: tuple[Worker, Worker], name: str) -> None:
    pattern, replacement, said = BUGS[name]
    seen = emulated("gfx942", canary.CASES["attention"][0], workers, Planted(pattern, replacement))
    assert seen.outcome in ("fail", "error")
    assert re.search(said, seen.reason), seen.reason


def test_what_has_no_model_is_said() -> None:
    model = EmulatorExecutor(SECONDS)
    assert "Triton 3.4 and newer" in model.lacks(parse_target("rocm:gfx942", "triton==3.2.0"))
    assert "sm_90 has no model" in model.lacks(parse_target("cuda:sm_90", "triton==3.6.0"))
    assert not model.lacks(parse_target("rocm:gfx1201", "triton==3.9.0"))
    made = plan(canary.CASES["attention"][0], parse_target("rocm:gfx942", "triton==3.2.0"))
    idle: Any = None
    assert model.check(made, parse_target("rocm:gfx942", "triton==3.2.0"), idle, idle).outcome == "not_run"


def test_a_hang_ends_at_the_time_limit(workers: tuple[Worker, Worker]) -> None:
    """A branch back to itself: the model's own step limit would come later."""
    model = Planted(r"^\ts_endpgm$", ".Lforever:\n\ts_branch .Lforever\n\ts_endpgm")
    model.seconds = 5.0
    problem = msgspec.structs.replace(canary.CASES["decode_attention"][1], batch=1)
    seen = emulated("gfx942", problem, (workers[0], Worker(runs="kernels")), model)
    assert seen.outcome in ("hang", "error")
    assert re.search("no answer in 5 s|StepLimit", seen.reason)


# What `portattn verify --target rocm:… --emulate` does, on chips of 64 and of 32 lanes.


@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])  # of 64 lanes and of 32
def test_a_canary_by_both_means(arch: str) -> None:
    target = parse_target(f"rocm:{arch}", str(installed_toolchain()))
    if lacks := EmulatorExecutor(60.0).lacks(target):
        pytest.skip(lacks)
    said: list[str] = []
    rows = list(verification_rows(["sparse_attention"], target, Settings(), 120.0, said.append, emulate=True))
    assert len(rows) == len(said) == 2
    for row in rows:
        assert row.seen["emulated"].outcome == "pass", row.seen["emulated"].reason
        assert f"a model of {arch}" in row.seen["emulated"].where
        assert row.verdict == "agree", row.sentence
