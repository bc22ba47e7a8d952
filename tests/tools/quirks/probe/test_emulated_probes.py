"""Probes that execute AMD's machine code in the model of its chip: programs, and planned problems of wrong results."""

import os
import sys
from pathlib import Path

import msgspec
import pytest
from planted_probe import plant

from portattn.backends.rocm.emulator.executor import EmulatorExecutor
from portattn.planning.registry import Registry
from portattn.schema.toolchain import installed_toolchain
from portattn.testing.executor import execute_code
from portattn.testing.findings import Numerics
from portattn.tools.quirks import probe, probe_plans
from portattn.worker.probe_harness import Bench, Code, Missing

KNOWN = Registry.load()
HARNESS = Path(KNOWN.quirks["rocm-0018-tf32-refused"].file).parent.parent / "probes" / "harness.py"
SIZES = "--q 1,2,64,64 --kv 1,2,64,64 --dtype bf16"
PROBE = f"plan: attention --target rocm:gfx942 {SIZES} --start num_stages=4"
QUIET = {"symptom": "wrong-result", "signature": ""}
# A copy of a row; its arms store past the end, add one, leave the row as it is.
COPY = """\
import triton
import triton.language as tl
from harness import BugFound

@triton.jit
def copy(x, out, n, MORE: tl.constexpr, ADD: tl.constexpr):
    place = tl.arange(0, 64)
    tl.store(out + place, tl.load(x + place, mask=place < n) + ADD, mask=place < n + MORE)

def probe(arm, bench):
    more, add = {arms}[arm]
    code = bench.compile(copy, {{"x": "*fp32", "out": "*fp32", "n": "i32"}}, {{"MORE": more, "ADD": add}})
    x = [float(n) for n in range(48)]
    given = {{"x": ("fp32", x), "out": ("fp32", [-1.0] * 48), "n": 48}}
    out = bench.execute(code, given, ["out"], unchecked={unchecked})["out"]
    if out != x:
        raise BugFound(f"{{out[1]}} for {{x[1]}}")
"""
compiles = pytest.mark.skipif(installed_toolchain().distribution != "triton", reason="needs community Triton")


def planted(folder, off, unchecked=()):
    program = COPY.format(arms={"control": (0, 0), "off": off, "on": (0, 0)}, unchecked=unchecked)
    quirk = plant(folder, **QUIET, program=program)
    (folder / "probes" / "harness.py").write_text(HARNESS.read_text())
    return quirk


@compiles
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("off", "unchecked", "told"),
    [((8, 0), (), "BugFound: OutOfBounds: line"), ((8, 1), ("memory",), "BugFound: 2.0 for 1.0")],
)  # fmt: skip
def test_wrong_numbers_and_findings_are_seen(tmp_path, off, unchecked, told):
    result = probe.run(planted(tmp_path, off, unchecked), seconds=300)
    assert (result.verdict, result.off.word, result.level) == ("confirmed", "fail:signature", "emulated"), result
    assert told in result.reason
    assert (result.control.level, result.on.level) == ("emulated", "emulated")


@compiles
@pytest.mark.compiles
def test_fixed_compiler_turns_red(tmp_path):
    result = probe.run(planted(tmp_path, off=(0, 0)), seconds=300)
    assert (result.verdict, result.level, result.red) == ("stale", "emulated", True), result


@compiles
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("number", "arch"), [("rocm-0007", "gfx1100"), ("rocm-0024", "gfx942"), ("any-0004", "gfx942")]
)
def test_shipped_probes_see_what_their_ranges_say(number, arch):
    """On the installed compiler: confirmed where the entry's range has it, and red on the day that it is fixed."""
    (quirk,) = (quirk for id_, quirk in KNOWN.quirks.items() if id_.startswith(number))
    result = probe.run(quirk, target=f"rocm:{arch}", seconds=300)
    assert result.verdict == ("confirmed" if result.in_range else "absent"), result
    assert result.level == "emulated"


def test_what_the_model_does_not_know_is_missing():
    """No verdict comes of an instruction that is not modelled, or of a compiler that the model was not tried with."""
    from portattn.backends.rocm.emulator.amdgpu import Program, UnknownInstruction

    request = {
        "target": "rocm:gfx942", "arguments": {}, "outputs": [], "grid": [1], "unchecked": [], "types": {},
        "facts": {"scratchpad_bytes": 0, "num_warps": 1}, "texts": {"amdgcn": "v_new"}, "triton": "3.6.0",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:

        def parse(text):
            raise UnknownInstruction("v_new is not modelled")

        patch.setattr(Program, "parse", parse)
        answer = execute_code(request)
    assert answer == {"missing": "the model does not know: v_new is not modelled"}
    old = execute_code(request | {"triton": "3.3.1"})
    assert old == {"missing": "the model was tried with the code of Triton 3.4 and newer"}
    none = execute_code(request | {"target": "cuda:sm_90", "texts": {"ptx": ""}})
    assert none == {"missing": "nothing here executes code for cuda:sm_90"}
    with pytest.raises(Missing, match="nothing here executes code for cuda:sm_90"):
        Bench("cuda:sm_90", ("cuda", 90, 32), executor=sys.executable, path=os.pathsep.join(sys.path)).execute(
            Code({"ptx": ""}), {}, []
        )
    with pytest.raises(Missing, match="needs --executor PYTHON"):
        Bench("cuda:sm_90", ("cuda", 90, 32)).execute(Code({"ptx": ""}), {}, [])


def wrong_result(symptom="wrong-result", signature=""):
    quirk = KNOWN.quirks["rocm-0001-four-stages"]
    when = msgspec.structs.replace(quirk.when, arch=("gfx942",))
    evidence = msgspec.structs.replace(quirk.evidence, probe=PROBE, signature=signature)
    return msgspec.structs.replace(quirk, symptom=symptom, when=when, evidence=evidence)


def off_arm(monkeypatch, seen, quirk):
    monkeypatch.setattr(EmulatorExecutor, "check", lambda self, plan, target, compiler, runner: seen)
    return probe.off(quirk, registry=msgspec.structs.replace(KNOWN, quirks={quirk.id: quirk}))


@compiles
@pytest.mark.compiles
def test_planned_wrong_results_are_executed(monkeypatch):
    arm = off_arm(
        monkeypatch, Numerics(outcome="fail", where="a model", reason="out's error 3 is over"), wrong_result()
    )
    assert (arm.word, arm.level, arm.kind) == ("fail:signature", "emulated", "BugFound")
    arm = off_arm(
        monkeypatch, Numerics(outcome="error", where="a model", reason="error: LdsRace: line 3: x"), wrong_result()
    )
    assert (arm.word, arm.kind) == ("fail:signature", "BugFound")
    arm = off_arm(monkeypatch, Numerics(outcome="error", where="a model", reason="error: KeyError: x"), wrong_result())
    assert arm.word == "fail:Execution"
    arm = off_arm(monkeypatch, Numerics(outcome="not_run", where="a model", reason="no model"), wrong_result())
    assert (arm.word, arm.text) == ("fail:Missing", "Missing: no model")
    other = wrong_result("compile-error", "boom")
    arm = off_arm(monkeypatch, Numerics(outcome="fail", where="a model", reason="never asked"), other)
    assert (arm.word, arm.level) == ("pass", "compiles"), "what is about compiling is not executed"


@compiles
@pytest.mark.compiles
def test_planned_probe_in_the_model():
    """Really executed: this plan is right, so that an entry that says otherwise is stale."""
    quirk = wrong_result()
    registry = msgspec.structs.replace(KNOWN, quirks={quirk.id: quirk})
    result = probe.run(quirk, registry=registry, seconds=300)
    assert probe_plans.executes(quirk, registry.target("rocm:gfx942"))
    assert (result.off.word, result.off.level) == ("pass", "emulated"), result
