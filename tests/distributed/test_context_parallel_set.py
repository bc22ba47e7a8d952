"""The set context-parallel: what it judges, draws and prints, and a run over processes of a CPU."""

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
REPORT = DOCS / "performance" / "context-parallel.json"


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
    rows = {}
    for part in ("gone", "decode"):
        done = ran("--tiny", "--only", part, "--out", str(tmp_path), "--budget", "150", exits=0)
        report = json.loads((tmp_path / "context-parallel.json").read_text(encoding="utf-8"))
        assert report["left"] == []
        (rows[part],) = report["rows"]
    assert (rows["gone"]["raised"], rows["gone"]["right"]) == ("RuntimeError", True)
    assert rows["gone"]["seconds"] < 30
    decode = rows["decode"]
    assert decode["eager"].keys() == {"one", "several, all", "several, shard"}
    assert all(one["ms"] > 0 for one in decode["eager"].values())
    assert "a killed rank: RuntimeError" in rows["gone"]["note"]
    assert "decode, eager" in done.stdout


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
    assert script.wrong_in("llama", {"loss": {"one": 10.0, "several": 10.001}}) == []
    assert len(script.wrong_in("llama", {"loss": {"one": 10.0, "several": 10.1}})) == 1
    assert script.wrong_in("gone", {}) == ["a rank that was gone was not noticed"]


def step(begin):
    return [
        ["ncclDevKernel_SendRecv", 20, begin, 900.0], ["scheduled_forward", 7, begin + 100, 3000.0],
        ["merge_rows", 7, begin + 3100, 50.0], ["scheduled_backward", 7, begin + 3200, 7000.0],
        ["ncclDevKernel_SendRecv", 20, begin + 10000, 500.0], ["CatArrayBatchedCopy", 7, begin + 10600, 50.0],
    ]  # fmt: skip


def test_a_timeline_is_drawn(scripts, tmp_path):
    import context_parallel
    import timeline as script

    found = {"tokens": 65536, "heads": [32, 8], "ranks": [step(0.0) + step(20000.0)] * 2}
    told = context_parallel.draw(found, tmp_path)
    assert told["messages"][0] == "rank 0: 1.40 ms of messages, 1.00 ms of them while it computes"
    assert json.loads((tmp_path / "timeline.json").read_text(encoding="utf-8")) == found
    drawn = (tmp_path / "timeline.svg").read_text(encoding="utf-8")
    assert drawn.count("<rect") == 1 + 2 * 6 + len(script.KINDS)  # the paper, the second step's events, the legend
    assert "rank 1 sends" in drawn
    events = script.second_half(step(0.0) + step(20000.0))
    assert [kind for kind, _, _ in events].count("sends and receives") == 2
    # 0.8 of 0.9 ms while the forward runs; 0.2 of 0.5 ms while the backward does.
    assert script.hidden(events) == (pytest.approx(1.4), pytest.approx(1.0))


def test_the_page_has_the_tables_of_its_report():
    page = (DOCS / "performance" / "context-parallel.md").read_text(encoding="utf-8")
    report = workloads.read(REPORT)
    assert report.wrong == []
    tables = workloads.as_markdown(report).strip().split("\n\n")
    assert len(tables) == 5
    assert all(table in page for table in tables)
