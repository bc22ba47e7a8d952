"""A compiler that a package adds beside Triton counts as installed: for `portattn ci`, and for the pytest plug-in."""

from __future__ import annotations

import os
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

pytestmark = pytest.mark.compiles


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
    both = run("ci", "--from", COMPILER, "--to", COMPILER, *ONE, "--compile", "--out", str(out), "--json")
    assert both.status == 0, both.err
    assert (both.json["compiled"], both.json["compared"]) == (True, 1)
    baseline = tmp_path / "baseline.toml"
    assert run("matrix", "baseline", str(out / "after"), str(baseline)).status == 0
    kept = run("ci", "--baseline", str(baseline), *ONE, "--json")
    assert (kept.json["before"], kept.json["after"]) == (COMPILER, COMPILER), kept.err
    lacks = run("ci", "--from", COMPILER, "--to", "triton-example==1.2.0", *ONE, "--compile")
    assert lacks.status == 2
    assert "--to is 'triton-example==1.2.0', but is neither installed nor in the lab" in lacks.err


def test_a_teams_kernel_is_compiled_with_it(site: Path, tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text(KERNEL, encoding="utf-8")
    (tmp_path / "test_doubling.py").write_text(TEST, encoding="utf-8")
    # The plug-in is named, and no other is looked for: this portattn may be a checkout on the path.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, site, ROOT))), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PORTATTN_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", PLUGIN, "--portattn-target=example:one", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
