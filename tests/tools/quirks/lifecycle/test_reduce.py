"""Reducing: to the smallest specialisation that fails in the same way, by few compiles, never to another failure."""

import subprocess
from typing import Any

import msgspec
import pytest
import quirk_files
from support import random_call

from portattn.compile import ensure_compiled
from portattn.config import Settings, current
from portattn.errors import ArgumentError, PortattnError
from portattn.launch import kernel_calls
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, find_backends
from portattn.schema.problem import Problem
from portattn.tools.matrix.problems import full
from portattn.tools.quirks import failure_facts, reduce
from portattn.tools.quirks.probe_plans import Specialisation
from portattn.tools.quirks.reduce import OFFERS, changing_steps
from portattn.worker.client import Reply

BIG = Problem(
    batch=2, heads_q=8, heads_k=2, seq_q=1024, seq_k=1024, head_dim=128, dtype="bf16", causal="bottom_right",
    bias=True, alibi_slopes=True, softcap=True, return_lse=True, window_left=63,
)  # fmt: skip
SAME = "error: 'tt.load' op planted"


class Compiler:
    """In the place of a worker: `fails` decides on the constants and options of dense_forward."""

    python = "python3"

    def __init__(self, fails):
        self.fails, self.seen = fails, list[dict[str, Any]]()

    def request(self, task, seconds, **fields):
        self.seen.append(fields["signature"])
        text = self.fails(fields["signature"]["constants"], fields["signature"]["options"])
        if not text:
            return Reply(outcome="ok", facts={"scratchpad_bytes": 1024})
        outcome = "hang" if text == "hang" else "error"
        return Reply(outcome=outcome, stage="ttgir", kind="RuntimeError", message="PassManager::run failed", log=text)


def subject(registry, problem=BIG, symptom="compile-error", **launch):
    target = registry.target("cuda:sm_90", "triton==3.6.0")
    lowering, chosen = plan(problem, target, registry, settings=Settings(backend="triton")).specialised
    what = Specialisation(problem=problem, lowering=lowering, launch=chosen.changed({"num_stages": 4} | launch))
    return reduce.Subject(id="it", what=what, target=target, symptom=symptom, signature=r"'tt\.load' op planted")


def test_only_what_the_failure_needs_is_left(registry):
    """Fails with softcap, three stages or more and key tiles over 16: all else goes."""

    def fails(constants, options):
        return SAME if constants["SOFTCAP"] and options["num_stages"] >= 3 and constants["BLOCK_N"] > 16 else ""

    compiler = Compiler(fails)
    made = reduce.reduce(subject(registry), registry, compiler)
    after, problem = made.after, made.after.problem
    assert problem.softcap
    assert (after.launch.num_stages, after.launch.block_n) == (3, 32)
    assert (after.launch.block_m, after.launch.num_warps, problem.head_dim) == (16, 1, 16)
    gone = ("bias", "alibi_slopes", "return_lse", "window")
    assert {name: getattr(problem, name) for name in gone} == dict.fromkeys(gone, False)
    assert problem.causal == "none"
    assert (problem.batch, problem.heads_q, problem.dtype) == (1, 1, "fp16")
    assert made.complete
    assert made.compiles == len(compiler.seen) <= 40
    assert "softcap" not in {change.partition(":")[0] for change in made.changed}
    assert "num_stages: 4 -> 3" in made.changed
    # The result is where every step was tried and none was possible.
    for offer in OFFERS:
        for step in changing_steps(offer, after):
            if step.result.cannot(made_target(registry)):
                continue
            call = step.result.launches(made_target(registry), registry)[0]
            same = call.constexprs == after.launches(made_target(registry), registry)[0].constexprs
            assert same or not fails(call.constexprs, call.options()), step.name


def made_target(registry):
    return registry.target("cuda:sm_90", "triton==3.6.0")


@pytest.mark.parametrize("tiles", [{"block_m": 16, "rows_m": 128}, {"block_m": 128, "rows_m": 16}], ids=str)
def test_of_two_tiles_the_one_that_fails_is_left(registry, tiles):
    gradients = Problem(op="attention_backward", batch=1, heads_q=8, heads_k=8, seq_q=512, seq_k=512, head_dim=64)

    def fails(constants, options):
        return SAME if constants["BLOCK_M"] >= 64 and options["num_stages"] >= 2 else ""

    before = subject(registry, gradients, block_n=32, rows_n=16, num_stages=3, rows_stages=2, **tiles)
    launch = reduce.reduce(before, registry, Compiler(fails)).after.launch
    assert launch.kernels() == (launch,)
    assert (launch.block_m, launch.block_n, launch.num_warps, launch.num_stages) == (64, 16, 1, 2)


def test_another_failure_is_not_the_same(registry):
    def fails(constants, options):
        return SAME if constants["BIAS_BY_KEY"] is False and options["num_warps"] >= 4 else "error: something else"

    made = reduce.reduce(subject(registry), registry, Compiler(fails))
    assert made.after.launch.num_warps == 4
    assert any(step.ended.startswith("fails otherwise") and not step.kept for step in made.tried)
    assert made.log.endswith(SAME)


def test_a_hang_is_reduced_without_a_signature(registry):
    asked = msgspec.structs.replace(subject(registry, symptom="hang"), signature="")
    made = reduce.reduce(asked, registry, Compiler(lambda c, o: "hang" if o["num_stages"] > 1 else ""))
    assert made.after.launch.num_stages == 2


def test_what_does_not_fail_is_refused(registry):
    with pytest.raises(PortattnError, match=r"does not fail on cuda:sm_90 with triton==3\.6\.0: compiles"):
        reduce.reduce(subject(registry), registry, Compiler(lambda c, o: ""))
    with pytest.raises(PortattnError, match="without a signature"):
        reduce.reduce(msgspec.structs.replace(subject(registry), signature=""), registry, Compiler(lambda c, o: SAME))


def test_a_limit_of_compiles_ends_it(registry):
    compiler = Compiler(lambda c, o: SAME)
    made = reduce.reduce(subject(registry), registry, compiler, most=5)
    assert not made.complete
    assert len(compiler.seen) == 5
    assert not made.after.problem.softcap


def test_over_the_chips_memory_is_a_failure_too(registry):
    class Large(Compiler):
        def request(self, task, seconds, **fields):
            used = 300_000 if fields["signature"]["constants"]["BLOCK_M"] >= 64 else 1024
            return Reply(outcome="ok", facts={"scratchpad_bytes": used})

    asked = msgspec.structs.replace(
        subject(registry, block_m=128), symptom="resource-limit", signature="out of resource: shared memory"
    )
    assert reduce.reduce(asked, registry, Large(lambda c, o: "")).after.launch.block_m == 64


@pytest.mark.parametrize("named", full()[::9], ids=lambda named: named.name)
def test_every_step_is_a_call_that_can_be_made(named, registry):
    """Steps of every kind of problem: each one that planning allows has launches, and changes something."""
    target = made_target(registry)
    made = plan(named.problem, target, registry, settings=Settings(backend="triton"))
    what = Specialisation(problem=named.problem, lowering=made.lowering, launch=made.launch)
    for offer in OFFERS:
        for step in changing_steps(offer, what):
            assert step.result != what
            if not step.result.cannot(target):
                assert step.result.launches(target, registry)


def incident_of(registry, buggy, monkeypatch):
    target = registry.target("cuda:sm_86", "triton==3.6.0")
    made = plan(BIG, target, registry)
    made = msgspec.structs.replace(made, launch=made.launch.changed({"num_stages": 4}))
    launches, q, _ = kernel_calls(made, random_call(BIG), target.arch.cores)
    with buggy.worker() as worker:
        monkeypatch.setattr(ensure_compiled, "_worker", worker)
        return ensure_compiled.ensure(made, launches, q, target, current()).incident


def test_an_incident_on_the_command_line(portattn, buggy, registry, incidents, monkeypatch, tmp_path):
    name = incident_of(registry, buggy, monkeypatch)
    monkeypatch.setattr("portattn.tools.lab.worker", lambda toolchain, **options: buggy.worker())
    called = portattn("quirks", "reduce", name, "--write", "--json", exits=0)
    reduced = called.json["reduced"]
    assert reduced["after"]["launch"]["num_stages"] == 3
    assert reduced["probe"].startswith("plan: attention --target cuda:sm_86")
    assert "compiles: num_warps" in called.err or "num_warps" in called.err
    smaller = incidents.incident(f"{name}-reduced")
    assert (called.json["written"], smaller.problem.head_dim) == (f"incident {smaller.id}", 16)
    # The command sends the request to a compiler, and what is kept of the log is the smaller one's.
    assert '"ok": false' in subprocess.run(smaller.command, shell=True, capture_output=True, text=True).stdout
    found = [failure_facts.from_incident(one, [], registry) for one in (smaller, incidents.incident(name))]
    assert found[0].failure.signature == found[1].failure.signature


def test_a_quirks_probe_is_reduced_in_its_file(portattn, buggy, monkeypatch, tmp_path):
    shape = "--q 2,8,1024,128 --kv 2,8,1024,128 --dtype bf16 --softcap"
    probe = f"plan: attention --target cuda:sm_89 {shape} --start num_stages=4"
    when = 'arch = ["sm_89"]\ntoolchain = { triton = "==3.6.0" }\nlaunch = { num_stages = ">=3" }'
    effect = "launch = { num_stages = 2 }"
    path = quirk_files.plant(tmp_path, "cuda-0901-planted", effect, when=when, symptom="compile-error", evidence="")
    text = path.read_text().replace('"none: planted by a test"', f'"{probe}"  # as it was seen')
    path.write_text(text.replace("boom", "ttg.async_copy"))
    known = Registry.read(find_backends(), tmp_path)
    monkeypatch.setattr(Registry, "load", lambda: known)
    monkeypatch.setattr("portattn.tools.lab.worker", lambda toolchain, **options: buggy.worker())
    called = portattn("quirks", "reduce", "cuda-0901-planted", "--toolchain", "triton==3.6.0", "--write", exits=0)
    written = path.read_text()
    assert "# as it was seen" in written
    assert "--softcap" not in written
    assert "num_stages=3" in written
    assert Registry.read(find_backends(), tmp_path).quirks["cuda-0901-planted"].evidence.probe in called.out


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        (("nobody",), "ID"), (("ascend-0014-sparse-reshape-crash", "--seconds", "0"), "--seconds"),
        (("ascend-0014-sparse-reshape-crash", "--most", "-1"), "--most"),
    ],
)  # fmt: skip
def test_bad_input(portattn, arguments, argument):
    called = portattn("quirks", "reduce", *arguments, "--json", exits=2)
    error = called.json["error"]
    assert error.get("argument", argument) == argument  # a range that the option itself has is told in a sentence
    assert argument in called.err


def test_a_quirk_without_a_planned_probe_is_refused(registry):
    quirk = next(q for q in registry.quirks.values() if not q.evidence.probe.startswith("plan:"))
    with pytest.raises(ArgumentError, match="must have a probe of the form 'plan:'"):
        reduce.of_quirk(quirk, registry, None)


@pytest.mark.compiles
def test_a_real_failure_is_reduced(registry):
    """Triton 3.6.0 fails on gfx950 at four stages with four loads in a loop: the bias is the fourth, and stays."""
    from portattn.schema.toolchain import installed_toolchain
    from portattn.tools import lab

    if str(installed_toolchain()) != "triton==3.6.0":
        pytest.skip(f"the bug is in triton==3.6.0, and this is {installed_toolchain()}")
    target = registry.target("rocm:gfx950", "triton==3.6.0")
    small = Problem(batch=1, heads_q=1, heads_k=1, seq_q=16, seq_k=32, head_dim=16, bias=True, return_lse=True)
    lowering, launch = plan(small, target, registry, settings=Settings(backend="triton")).specialised
    what = Specialisation(
        problem=small, lowering=lowering,
        launch=launch.changed({"num_stages": 4, "block_m": 16, "block_n": 16, "num_warps": 1}),
    )  # fmt: skip
    asked = reduce.Subject(
        id="it", what=what, target=target, symptom="compiler-crash", off=("rocm-0001-four-stages",),
        signature=registry.quirks["rocm-0001-four-stages"].evidence.signature,
    )  # fmt: skip
    with lab.worker(None, environment={"TRITON_ALWAYS_COMPILE": "1"}) as worker:
        made = reduce.reduce(asked, registry, worker)
    assert made.after.problem.bias
    assert made.after.launch.num_stages == 4
    assert not made.after.problem.return_lse
    assert made.probe.startswith("plan: attention --target rocm:gfx950")
