"""The set context-parallel: what it judges and prints, and a run over processes of a CPU."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from places import DOCS, ROOT

from portattn.tools.bench import workloads

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")
SETS = ROOT / "scripts" / "bench_sets"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SETS))


def ran(*arguments, exits, timeout=200):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]), OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "portattn", "bench", "--set", "context-parallel", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == exits, done.stdout + done.stderr
    return done


def test_parts_run_over_processes_of_a_cpu(tmp_path):
    done = ran("--tiny", "--only", "decode", "--out", str(tmp_path), "--budget", "150", exits=0)
    report = json.loads((tmp_path / "context-parallel.json").read_text(encoding="utf-8"))
    assert report["left"] == []
    (decode,) = report["rows"]
    assert decode["eager"].keys() == {"one", "several, all", "several, shard"}
    assert all(one["ms"] > 0 for one in decode["eager"].values())
    assert "decode, eager: one " in done.stdout


@pytest.mark.gpu
def test_cases_over_two_gpus(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ran("--only", "correctness", "--out", str(tmp_path), "--budget", "500", timeout=520, exits=0)


def test_cases_are_judged(scripts):
    """A result that is off by more than the budget, or finite where the right one is not, is wrong."""
    import context_parallel_cases as cases

    right = {"error": 0.5, "budget": 1.0, "lse_error": 1e-6, "lse_budget": 1e-5, "wrong": 0}
    assert cases.over(right) == []
    assert cases.over(right | {"error": 2.0, "lse_error": math.nan}) == ["out: 2 > 1", "lse: nan > 1e-05"]
    assert cases.over(right | {"wrong": 1}) == ["places that are finite: 1 > 0"]
    assert sorted(name for group in cases.groups() for name in group) == sorted([*cases.TRAINED, *cases.DECODED])


def test_what_makes_the_exit_status_1(scripts):
    import context_parallel as script

    assert script.wrong_in("correctness", {"cases": {"ring": [], "window": ["out: 3 > 1"]}}) == ["window: out: 3 > 1"]
    assert script.wrong_in("attention", {"failed ranks": {"1": "Traceback"}}) == ["1: Traceback"]
    shapes = {"a": {"apart": {"ring": 0.003, "ring, grad_q": 0.015, "ulysses": float("nan")}}}
    assert script.wrong_in("attention", {"shapes": shapes}) == ["a: ulysses is nan apart"]
    decode = {"apart": {"several": 0.5}, "graph has the same bits": {"one": True, "several": False}}
    assert script.wrong_in("decode", decode) == ["several is 0.5 apart", "several: the graph gives other bits"]
    shapes["a"]["times"] = {"forward": {"one": {"ms": 4.0}, "ring": {"ms": 2.0}}}
    assert script.summary({"shapes": shapes}) == ["a, forward: one 4 ms, ring 2 ms"]
    assert script.summary({"cases": {"ring": [], "window": ["wrong"]}}) == ["1 of 2 cases in their budget"]


def test_the_record_in_the_documentation_is_read():
    report = workloads.read(DOCS / "performance" / "context-parallel.json")
    assert report.wrong == []
    assert {row["case"] for row in report.rows} >= {"correctness", "attention", "decode"}
    assert workloads.as_markdown(report).count("\n") == 2 + len(report.rows)
