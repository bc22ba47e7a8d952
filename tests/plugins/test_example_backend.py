"""A backend with a compiler of its own, installed as another package and driven by the command line as a user would, by
`portattn ci` and by the pytest plug-in."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
from places import ROOT

from portattn.schema.toolchain import installed_toolchain

COMPILER = "triton-example==1.1.0.post2"
PROBLEM = ("--q", "1,2,128,64", "--kv", "1,2,128,64", "--dtype", "fp16")


@pytest.fixture
def python(site: Path, tmp_path: Path) -> Callable[[str], str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (site, ROOT)))}

    def call(script: str) -> str:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


pytestmark = pytest.mark.compiles


def test_doctor_says_who_knows_which_compiler(run: Callable[..., Any]) -> None:
    sections = {section["title"]: section for section in run("doctor", "--json", exits=0).json["sections"]}
    compilers = {item["name"]: item["value"] for item in sections["compilers"]["items"]}
    told = compilers["triton-example"]
    assert told.startswith("installed 1.1.0.post2, added to Triton as triton_example; known to portattn-example 0.1")
    assert "also named pytorch-triton-example" in told
    assert "; known to portattn" in compilers["triton"]
    assert "example" in {item["name"] for item in sections["backends"]["items"]}
    assert not sections["backends"]["errors"]


def test_a_plan_has_the_compiler_and_its_quirk(run: Callable[..., Any]) -> None:
    line = ("plan", "attention", "--target", "example:one", *PROBLEM)
    made = run(*line, "--json").json
    assert (made["path"], made["toolchain"], made["launch"]["num_stages"]) == ("triton", COMPILER, 2)
    assert "example-0001-two-stages" in {quirk["id"] for quirk in made["quirks"]}
    newer = run(*line, "--toolchain", "pytorch_triton_example==1.2.0,triton==3.6.0", "--json").json
    assert (newer["toolchain"], newer["launch"]["num_stages"]) == ("triton-example==1.2.0", 3)
    assert dict(made["launch"]["options"]) == {"fuse": False}, "an option that portattn's own backends do not have"
    assert dict(newer["launch"]["options"]) == {"fuse": True}
    other = run(*line, "--toolchain", "triton==3.6.0", "--json").json
    assert other["path"] == "example_attention"
    assert other["rejected"][0]["reason"] == "triton==3.6.0 compiles nothing for example"
    assert other["rejected"][0]["hint"] == "needs triton-example"
    unknown = run(*line, "--toolchain", "triton-nonesuch==1.0", exits=2)
    for part in ("'triton-nonesuch' is no known compiler", "triton, triton-ascend", "triton-example", "may bring"):
        assert part in unknown.err


def test_the_public_function_plans_for_it(python: Callable[[str], str]) -> None:
    """And its vendor's path, asked directly, is right on tensors of the CPU."""
    script = """
import torch, portattn
from portattn.planning.registry import Registry
from portattn.schema.toolchain import installed_toolchain
from portattn.testing.tolerance import random_call
target = portattn.target("example:one")
problem = portattn.Problem(batch=1, heads_q=4, heads_k=2, seq_q=33, seq_k=33, head_dim=64)
made = portattn.plan(problem, target)
print(made.path, made.toolchain)
[vendor] = Registry.load().backends["example"].vendor
call = random_call(problem, 0, device="cpu")
out, _ = vendor.run(call)
from portattn.reference import blockwise
torch.testing.assert_close(out, blockwise.run(call)[0], rtol=2e-2, atol=2e-2)
print(vendor.rejects(portattn.Problem(batch=1, heads_q=2, heads_k=2, seq_q=9, seq_k=9, head_dim=512), target).reason)
print(target.toolchain.component("triton") == installed_toolchain().version, target.toolchain.within("triton", ">=3.2"))
"""
    planned, wide, beneath = python(script).splitlines()
    assert (planned, wide) == (f"triton {COMPILER}", "head_dim is 512, and example_attention takes up to 256")
    assert beneath == "True True", "ranges of Triton hold for the Triton that it is added to"


def test_its_quirks_are_listed_audited_and_probed(run: Callable[..., Any]) -> None:
    listed = run("quirks", "list", "--backend", "example", "--json").json
    assert "example-0001-two-stages" in {quirk["id"] for quirk in listed}
    audited = run("quirks", "audit", "--json")
    assert (audited.status, audited.json["findings"]) == (0, []), audited.out
    [result] = run("quirks", "probe", "example-0001", "--json", exits=0).json["results"]
    assert (result["verdict"], result["toolchain"], result["target"]) == ("confirmed", COMPILER, "example:one")
    assert "a loop has at most 2 stages, and 3 were asked for" in result["off"]["text"]


LOG = """
triton-example 1.1.0.post2
Traceback (most recent call last):
  File "/site/portattn_example/adapter.py", line 60, in compile_kernel
RuntimeError: PassManager::run failed
"""


def test_a_failure_of_its_compiler_is_drafted_for_it(run: Callable[..., Any], tmp_path: Path) -> None:
    """The log names the compiler, and that its backend; an entry for a compiler of another backend is none."""
    log, out = tmp_path / "log.txt", tmp_path / "drafts"
    log.write_text(LOG, encoding="utf-8")
    line = ("quirks", "new", "--from-log", str(log), "--out", str(out), "--no-replay")
    refused = run(*line, "--target", "example:one", "--toolchain", "triton==3.6.0", exits=2)
    assert "must be a version of triton-example" in refused.err
    run(*line, exits=0)
    [draft] = (out / "example").glob("*.toml")
    assert draft.name.startswith("example-0003-"), "its package has two"
    assert 'toolchain = { triton-example = "==1.1.0.post2" }' in draft.read_text(encoding="utf-8")


def test_a_program_of_its_own_is_compiled_and_executed_by_it(run: Callable[..., Any]) -> None:
    """Its adapter compiles the probe's kernel, with an option of its own, and its model runs the code."""
    [result] = run("quirks", "probe", "example-0002", "--json", exits=0).json["results"]
    assert (result["verdict"], result["off"]["level"]) == ("confirmed", "emulated"), result
    assert "the second value is 1.0, and not 2.0" in result["off"]["text"]
    assert (result["control"]["outcome"], result["on"]["outcome"]) == ("pass", "pass")


def test_the_lab_lists_its_releases(run: Callable[..., Any]) -> None:
    rows = {row["toolchain"]: row["state"] for row in run("lab", "list", "--json").json["toolchains"]}
    assert rows["triton-example==1.1.0"] == rows["triton-example==1.2.0"] == "missing"
    assert list(rows)[-1] == "triton-example==1.2.0", "portattn's own come first"
    refused = run("lab", "create", "flagtree==0.3.0", exits=2)
    assert "must be one of triton, triton-ascend, triton-example, which can be installed by name" in refused.err


def test_the_matrix_compiles_and_executes(run: Callable[..., Any], tmp_path: Path) -> None:
    if missing := support.no_interpreter():
        pytest.skip(missing)
    out = tmp_path / "matrix"
    line = ("matrix", "run", "--targets", "example:one", "--ops", "attention,decode*,mla*", "--out", str(out), "--json")
    assert run(*line, exits=0).json["levels"].keys() == {"emulated"}
    cells = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()[1:]]
    assert {cell["toolchain"] for cell in cells} == {COMPILER}
    for cell in cells:
        assert cell["emulated"]["where"] == f"a model of one, code of {COMPILER}"
        main = max((kernel["facts"] for kernel in cell["kernels"]), key=lambda facts: facts["mma"])
        assert main["mma"] > 0
        assert main["instructions"] > 50
        assert 0 < main["scratchpad_bytes"] <= 65536
    assert "emulated  example:one" not in run(*line, "--resume", exits=0).err, "nothing is made again"


def test_verify_asks_its_executor(run: Callable[..., Any]) -> None:
    if missing := support.no_interpreter():
        pytest.skip(missing)
    called = run("verify", "attention", "--target", "example:one", "--emulate", "--json", exits=0)
    assert (called.json["toolchain"], called.json["levels"]) == (COMPILER, {"emulated": len(called.json["rows"])})


def test_code_of_another_kernel_is_seen(python: Callable[[str], str]) -> None:
    """What the compiler wrote takes part in the evidence: a damaged text, or another kernel's, is no pass."""
    script = """
import triton_example
from portattn_example import execute
code = triton_example.emit("tt.func public @f() tt.dot", "tt.func public @f()\\n  tt.dot a\\n", 1, 64)
for kernel, text in (("g", code), ("f", code[1:]), ("f", "")):
    try:
        execute.compare({"texts": [{"kernel": kernel, "code": text}]}, lambda stage: None)
    except triton_example.Refused as error:
        print(error)
"""
    first, second, third = python(script).splitlines()
    assert first == "the code is of f, and g is launched"
    assert second == third == "this is no code of Example One"


def test_without_the_compiler_the_plan_says_what_it_needs(run: Callable[..., Any], site: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    for name in ("portattn_example", "portattn_example-0.1.dist-info"):
        shutil.copytree(site / name, alone / name)
    path = os.pathsep.join(map(str, (alone, ROOT)))
    line = ("plan", "attention", "--target", "example:one", *PROBLEM, "--json")
    made = run(*line, PYTHONPATH=path).json
    assert (made["path"], made["rejected"][0]["hint"]) == ("example_attention", "needs triton-example")
    probed = run("quirks", "probe", "example-0001", "--toolchain", "triton-example==1.1.0", PYTHONPATH=path, exits=2)
    assert "portattn lab create triton-example==1.1.0" in probed.err


ONE = ("--targets", "example:one", "--problems", "decode*")
PLUGIN = "portattn.integrations.pytest_plugin"
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(x + places, places < n, 0.0) * 2, places < n)
"""
TEST = """
from doubling import double


def test_it_compiles(portattn_target):
    made = portattn_target.compile(double, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 64})
    assert made.facts["instructions"] > 5
"""


def test_the_side_that_is_not_named_is_of_the_same_compiler(run: Callable[..., Any]) -> None:
    newer = run("ci", "--from", "triton-example==1.1.0", *ONE, "--json")
    assert (newer.json["before"], newer.json["after"]) == ("triton-example==1.1.0", COMPILER), newer.err
    older = run("ci", "--to", "triton-example==1.2.0", *ONE, "--json")
    assert (older.json["before"], older.json["after"]) == (COMPILER, "triton-example==1.2.0"), older.err
    own = run("ci", "--from", "triton==3.4.0", "--targets", "sm_90", "--problems", "decode*", "--json")
    assert own.json["after"] == str(installed_toolchain()), "Triton is asked for by its name, whatever is beside it"


def test_ci_compiles_with_it(run: Callable[..., Any], tmp_path: Path) -> None:
    if missing := support.no_interpreter():
        pytest.skip(missing)
    out = tmp_path / "ci"
    both = run("ci", "--from", COMPILER, "--to", COMPILER, *ONE, "--compile", "--out", str(out), "--json", exits=0)
    assert (both.json["compiled"], both.json["compared"]) == (True, 1)
    baseline = tmp_path / "baseline.toml"
    assert run("matrix", "baseline", str(out / "after"), str(baseline)).status == 0
    kept = run("ci", "--baseline", str(baseline), *ONE, "--json")
    assert (kept.json["before"], kept.json["after"]) == (COMPILER, COMPILER), kept.err
    lacks = run("ci", "--from", COMPILER, "--to", "triton-example==1.2.0", *ONE, "--compile", exits=2)
    assert "--to is 'triton-example==1.2.0', but is neither installed nor in the lab" in lacks.err


def test_a_teams_kernel_is_compiled_with_it(site: Path, tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text(KERNEL, encoding="utf-8")
    (tmp_path / "test_doubling.py").write_text(TEST, encoding="utf-8")
    # The plug-in is named, and no other is looked for: this portattn may be a checkout on the path.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, site, ROOT))),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PORTATTN_CACHE_DIR": str(tmp_path / "cache")}  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", PLUGIN, "--portattn-target=example:one", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
