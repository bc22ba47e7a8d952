"""Numbers beside a cell: what is kept when a problem is scaled down, what is right and what is not."""

import os
import subprocess
import sys
import threading

import fakedriver
import msgspec
import pytest
import support
import torch

from portattn.config import Settings
from portattn.launch import run_core
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, parse_target
from portattn.schema.lowering import Launch
from portattn.schema.problem import Problem
from portattn.schema.toolchain import Toolchain
from portattn.testing import executor as triton_interpreter
from portattn.testing import findings, tolerance, verdict
from portattn.testing.executor import Interpreter, on_device, request_of, scale_down
from portattn.tools.matrix.problems import PADDED, dense, full
from portattn.tools.matrix.run import core_of
from portattn.worker.client import Reply

KEPT = ("op", "group", "head_dim", "head_dim_v", "dtype", "causal", "layout", "aligned", "return_lse",
        "seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k", "packed", "page_size", "page_layout", "pages_in_line",
        "log_weights", "magicpig", "softcap", "alibi_slopes", "sinks", "bias", "mask", "window",
        "num_splits")  # fmt: skip
GOOD = {"error": 0.1, "budget": 0.2, "wrong": 0}
SM_80, SM_90 = "cuda:sm_80", "cuda:sm_90"


@pytest.mark.parametrize("shrink", [lambda p, launch: scale_down(p, launch), lambda p, launch: on_device(p, "cuda")])
def test_scaling_down_keeps_what_decides_the_code(shrink):
    target = parse_target(SM_90, "triton==3.6.0")
    for named in full():
        made = core_of(plan(named.problem, target), target, Registry.load())
        if made is None:
            continue
        small = shrink(named.problem, made.launch)
        assert [getattr(small, name) for name in KEPT] == [getattr(named.problem, name) for name in KEPT], named.name
        constexprs = CORES[small.op].constexprs
        assert constexprs(small, *made.specialised) == constexprs(named.problem, *made.specialised)
        for name in ("batch", "heads_q", "heads_k", "seq_q", "seq_k", "total_q", "total_k", "tokens"):
            if getattr(named.problem, name) is not None:
                assert getattr(small, name) <= getattr(named.problem, name), (named.name, name)
        assert not small.page_size or small.has_lists or small.seq_k % small.page_size == 0
        if small.window:  # it still hides something
            assert 0 <= small.window_left < small.seq_k - 1
            assert small.window_right < small.seq_k
        launch = request_of(made, small, "interpreter", "cpu:generic", "cpu")["launch"]
        assert (launch["splits"] > 1) == (made.launch.splits > 1), named.name


ENDED = {"kind": "NotImplementedError", "message": "\nno such thing\nmore"}


@pytest.mark.parametrize(
    ("reply", "outcome", "reason"),
    [
        ({"facts": GOOD}, "pass", ""), ({"facts": GOOD | {"lse_error": 0.1, "lse_budget": 0.2}}, "pass", ""),
        ({"facts": GOOD | {"error": 0.21}}, "fail", "out's error 0.21 is over its budget 0.2"),
        ({"facts": GOOD | {"wrong": 3}}, "fail", "3 elements are NaN"),
        ({"facts": GOOD | {"lse_error": 0.3, "lse_budget": 0.2}}, "fail", "LSE's error 0.3"),
        *((ENDED | {"outcome": how}, how, f"{how}: NotImplementedError: no such thing")
          for how in ("error", "crash", "hang")),
    ],
)  # fmt: skip
def test_a_verdict_needs_every_figure_in_its_budget_and_a_run_that_ends_well(reply, outcome, reason):
    seen = findings.numerics(Reply(**{"outcome": "ok"} | reply), "here", dense(dtype="fp16", head_dim=64).problem)
    assert (seen.outcome, reason in seen.reason) == (outcome, True)
    assert outcome in ("pass", "fail") or (seen.reason, findings.figure(seen)) == (reason, f"FAIL: {reason}")


def test_both_tiles_of_gradients_are_filled():
    made = plan(
        Problem(op="attention_backward", batch=4, heads_q=8, heads_k=8, seq_q=4096, seq_k=4096, head_dim=64),
        parse_target(SM_90, "triton==3.6.0"), settings=Settings(backend="triton"),
    )  # fmt: skip
    for tiles in ({"block_m": 64, "block_n": 16, "rows_m": 128, "rows_n": 32}, {"block_m": 128, "rows_m": 16}):
        launch = Launch().changed(tiles)
        small = scale_down(made.problem, launch)
        assert small.seq_q > max(one.block_m for one in launch.kernels())
        assert small.seq_k > 2 * max(one.block_n for one in launch.kernels())
        # What only a compiler reads does not tell one specialisation from another.
        interpreter, worker = ready()
        for compiled in ({}, {"num_warps": 8}, {"rows_warps": 8, "rows_stages": 3}):
            interpreter.check(msgspec.structs.replace(made, launch=launch.changed(compiled)), worker)
        assert len(worker.requests) == 1
        (asked,) = worker.requests
        assert verdict.plan_of(asked, parse_target("cpu:generic", "none")).launch.of_rows().block_m == tiles["rows_m"]


@pytest.mark.parametrize(("op", "read"), [("write_pages", "bytes"), ("paged_attention", "words")])
def test_ptx_is_interpreted_as_the_form_without_it(op, read):
    problem = Problem(
        op=op, batch=4, heads_q=8, heads_k=8, seq_q=1, seq_k=8192, head_dim=128, page_size=16, kv_format="e4m3",
        kv_scales="token",
    )  # fmt: skip
    made = plan(problem, parse_target(SM_90, "triton==3.6.0"), settings=Settings(backend="triton"))
    assert made.lowering.unpack == "ptx"
    interpreter, worker = ready()
    interpreter.check(made, worker)
    assert [asked["lowering"]["unpack"] for asked in worker.requests] == [read]


@pytest.mark.parametrize(
    ("here", "load", "interpreted", "said"),
    [
        ("triton==3.9.0", "block_ptr", "pointer", "which has no block pointers: tiles are loaded by pointers instead"),
        ("triton==3.8.0", "block_ptr", "block_ptr", ""),
        ("triton==3.3.1", "descriptor", "pointer", "which has no tensor descriptors: tiles are loaded by pointers"),
        ("triton==3.9.0", "descriptor", "descriptor", ""),
        ("triton==3.9.0", "pointer", "pointer", ""),
    ],
)
def test_loads_that_this_triton_has_not_are_interpreted_by_pointers_and_that_is_said(
    monkeypatch, here, load, interpreted, said
):
    """The plan is another compiler's, whose quirks say nothing of the Triton that interprets."""
    monkeypatch.setattr(triton_interpreter, "installed_toolchain", lambda: Toolchain.parse(here))
    interpreter, worker = ready()
    made = plan(dense(dtype="fp16", head_dim=64).problem, parse_target("ascend:ascend910b2", "triton-ascend==3.2.0"))
    assert made.lowering.load == "block_ptr"
    seen = interpreter.check(loading(made, load), worker)
    assert [asked["lowering"]["load"] for asked in worker.requests] == [interpreted]
    assert seen.where.startswith(f"interpreter, {here}")
    assert (said in seen.where) if said else (seen.where == f"interpreter, {here}")
    # What a plan that loads by pointers is told is its own, though the same code is interpreted once for both.
    assert interpreter.check(loading(made, "pointer"), worker).where == f"interpreter, {here}"
    assert len(worker.requests) == (1 if interpreted == "pointer" else 2)


def loading(made, load):
    return msgspec.structs.replace(made, lowering=msgspec.structs.replace(made.lowering, load=load))


def test_what_loads_need_of_triton_is_what_the_quirks_say():
    quirks = Registry.load().quirks
    for load, lost in (("block_ptr", "any-0001-no-block-pointers"), ("descriptor", "any-0002-no-descriptors")):
        for version in ("3.3.1", "3.4.0", "3.8.0", "3.9.0"):
            toolchain = Toolchain.parse(f"triton=={version}")
            without = toolchain.within("triton", quirks[lost].when.toolchain["triton"])
            assert bool(triton_interpreter.lacking(load, toolchain)) is without, (load, version)


@pytest.mark.interpreter
def test_block_pointers_of_a_plan_are_no_fault_under_a_triton_without_them(tmp_path):
    """Triton 3.9.0 of the lab, whose interpreter runs Ascend's plan in a child."""
    tritons = fakedriver.triton_folders()
    if "3.9.0" not in tritons:
        pytest.skip("the lab has no Triton 3.9.0 for this Python")
    program = """
import sys
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.testing.executor import Interpreter
from portattn.tools.matrix.problems import dense
from portattn.worker.client import Worker
made = plan(dense(dtype="fp16", head_dim=64).problem, parse_target("ascend:ascend910b2", "triton-ascend==3.2.0"))
with Worker(runs="interpreter") as worker:
    seen = Interpreter(120.0).check(made, worker)
print(made.lowering.load, seen.outcome, seen.where, seen.reason, sep="|")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tritons["3.9.0"].parent), *filter(None, sys.path)])},
    )  # fmt: skip
    load, outcome, where, reason = done.stdout.strip().split("|")
    assert (load, outcome, reason) == ("block_ptr", "pass", "")
    assert where == "interpreter, triton==3.9.0, which has no block pointers: tiles are loaded by pointers instead"


class CountingWorker:
    def __init__(self):
        self.requests = []
        self.go = threading.Event()

    def request(self, task, seconds, **fields):
        self.requests.append(fields)
        self.go.wait(10)
        return Reply(outcome="ok", facts=GOOD)


def ready():
    """An interpreter that is there, and a worker that answers at once."""
    interpreter, worker = Interpreter(1.0), CountingWorker()
    interpreter.missing = ""
    worker.go.set()
    return interpreter, worker


def test_a_specialisation_is_interpreted_once_whoever_asks():
    interpreter, worker = ready()
    worker.go.clear()
    made = plan(dense(dtype="fp16", head_dim=64).problem, parse_target(SM_80, "triton==3.6.0"))
    found = []
    threads = [threading.Thread(target=lambda: found.append(interpreter.check(made, worker))) for _ in range(3)]
    for thread in threads:
        thread.start()
    worker.go.set()
    for thread in threads:
        thread.join()
    assert (len(worker.requests), [seen.outcome for seen in found]) == (1, ["pass"] * 3)
    other = plan(dense(dtype="fp16", head_dim=80).problem, parse_target(SM_80, "triton==3.6.0"))
    interpreter.check(other, worker)
    assert len(worker.requests) == 2


def small_request(**changes):
    problem = support.problem(dtype="fp16", seq_q=21, **changes)
    made = support.core_plan(support.Device("cpu", "interpreter"), problem)
    return request_of(made, problem, "interpreter", "cpu:generic", "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "changes", [{}, PADDED | {"leftpad_q": True, "leftpad_k": True}, {"layout": "bshd", "aligned": False}]
)
def test_the_kernels_are_right(changes):
    facts = verdict.compare(small_request(**changes))["facts"]
    assert 0 < facts["error"] <= facts["budget"] < 0.1
    assert facts["lse_error"] <= facts["lse_budget"] < 0.1
    assert facts["wrong"] == 0


@pytest.mark.interpreter
@pytest.mark.parametrize("damage", ["off", "unwritten", "lse", "lse is inf", "out is inf"])
def test_damage_is_seen(monkeypatch, damage):
    def damaged(plan, call, cores):
        out, lse = run_core(plan, call, cores)
        if damage == "off":
            out[0, 0, 3] += 0.1
        elif damage == "unwritten":
            out = torch.where(torch.arange(out.shape[2])[:, None] == 3, call.new_out(), out)
        elif damage == "out is inf":
            out[0, 0, 3] = float("inf")
        else:
            lse = torch.zeros_like(lse) if damage == "lse" else torch.full_like(lse, float("inf"))
        return out, lse

    monkeypatch.setattr(verdict, "run_core", damaged)
    facts = verdict.compare(small_request())["facts"]
    assert findings.numerics(Reply(outcome="ok", facts=facts), "here", support.problem()).outcome == "fail"


def test_the_reference_path_is_compared_too():
    request = {"path": "reference", "target": "cpu:generic", "device": "cpu"}
    facts = verdict.compare(request | {"problem": msgspec.to_builtins(support.problem(seqlens_k=True))})["facts"]
    assert (facts["wrong"], facts["error"] <= facts["budget"]) == (0, True)


def test_fewer_bits_in_a_product_widen_the_budget_by_what_they_cost():
    call = support.random_call(support.problem(), seed=3)
    out, lse = tolerance.same_dtype(call)
    budgets = [tolerance.judge(call, out, lse, precision)["budget"] for precision in ("ieee", "tf32x3", "tf32")]
    assert budgets[0] <= budgets[1] < 10 * budgets[0] < budgets[2] / 10
    assert tolerance.round_fraction(torch.tensor([1.0, 1.0 + 2**-12, 1.0 + 3 * 2**-11, -2.0]), 10).tolist() == [
        1, 1, 1 + 2**-9, -2,
    ]  # fmt: skip


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["out", "lse"])
def test_what_is_not_finite_is_wrong_here_and_in_the_tests(where, value):
    call = support.random_call(support.problem(), seed=3)
    out, lse = tolerance.same_dtype(call)
    support.assert_right(call, out, lse)
    {"out": out, "lse": lse}[where][0, 0, 3] = value
    assert tolerance.judge(call, out, lse)["wrong"] == (16 if where == "out" else 1)
    with pytest.raises(AssertionError, match="NaN or infinite"):
        support.assert_right(call, out, lse)


def test_a_row_with_nothing_to_attend_must_be_zero_and_minus_infinity():
    call = support.random_call(support.problem(seq_q=24, seq_k=5, causal="bottom_right"))
    out, lse = tolerance.same_dtype(call)
    assert tolerance.judge(call, out, lse)["wrong"] == 0
    out[0, 0, 0, 0] = 1e-30
    lse[0, 0, 1] = float("inf")
    assert tolerance.judge(call, out, lse)["wrong"] == 2


def test_a_missing_interpreter_alone_is_not_run(monkeypatch):
    monkeypatch.setattr(triton_interpreter, "interpreter_missing", lambda: "no NumPy")
    made = plan(dense(dtype="fp16", head_dim=64).problem, parse_target(SM_80, "triton==3.6.0"))
    seen = Interpreter(1.0).check(made, CountingWorker())
    assert (seen.outcome, seen.reason) == ("not_run", "no NumPy")
