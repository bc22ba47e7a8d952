"""The scripts that time several GPUs: what they judge, draw and print, and a run over processes of a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import DOCS, ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")
SCRIPTS = ROOT / "scripts"
REPORT = DOCS / "performance" / "context-parallel.json"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def ran(*arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]), OMP_NUM_THREADS="1")
    command = [sys.executable, str(SCRIPTS / "context_parallel_times.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def test_parts_run_over_processes_of_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    parts = ("--part", "gone", "--part", "decode")
    done = ran("--small", "--device", "cpu", *parts, "--out", str(out), "--budget", "150")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["wrong"] == {}
    assert report["left out"] == []
    assert report["parts"]["gone"]["raised"] == "RuntimeError"
    assert report["parts"]["gone"]["seconds"] < 30
    decode = report["parts"]["decode"]
    assert decode["eager"].keys() == {"one", "several, all", "several, shard"}
    assert all(one["ms"] > 0 for one in decode["eager"].values())
    assert "a killed rank: RuntimeError" in done.stdout
    assert "decode, eager" in done.stdout


@pytest.mark.gpu
def test_cases_over_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    done = ran("--part", "correctness", "--out", str(tmp_path / "report.json"), "--budget", "500", timeout=520)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cases_are_judged(scripts: None) -> None:
    """A result that is off by more than the budget, or finite where the right one is not, is wrong."""
    import context_parallel_cases as cases

    right = torch.linspace(-1, 1, 64, dtype=torch.float64)
    same = right.bfloat16()
    assert cases.judged("out", same, right, same, torch.bfloat16) == []
    assert "out: " in cases.judged("out", (right + 0.1).bfloat16(), right, same, torch.bfloat16)[0]
    bad = same.clone()
    bad[3] = float("nan")
    assert "1 elements are finite in one of the two alone" in cases.judged("out", bad, right, same, torch.bfloat16)[0]
    names = [name for group in cases.groups() for name in group]
    assert sorted(names) == sorted([*cases.RING, *cases.ULYSSES, *cases.DECODE])


def test_what_makes_the_exit_status_1(scripts: None) -> None:
    import context_parallel_times as script

    assert script.wrong_in("correctness", {"cases": {"ring": [], "window": ["out: 3 > 1"]}}) == ["window: out: 3 > 1"]
    assert script.wrong_in("attention", {"failed": {"1": "Traceback"}}) == ["1: Traceback"]
    shapes = {"a": {"apart": {"ring": 0.003, "ring, grad_q": 0.015, "ulysses": float("nan")}}}
    assert script.wrong_in("attention", {"shapes": shapes}) == ["a: ulysses is nan apart"]
    decode = {"apart": {"several": 0.5}, "graph has the same bits": {"one": True, "several": False}}
    assert script.wrong_in("decode", decode) == ["several is 0.5 apart", "several: the graph gives other bits"]
    assert script.wrong_in("llama", {"loss": {"one": 10.0, "several": 10.001}}) == []
    assert len(script.wrong_in("llama", {"loss": {"one": 10.0, "several": 10.1}})) == 1
    assert script.wrong_in("gone", {}) == ["a rank that was gone was not noticed"]


def step(begin: float) -> list[list[Any]]:
    return [
        ["ncclDevKernel_SendRecv", 20, begin, 900.0], ["scheduled_forward", 7, begin + 100, 3000.0],
        ["merge_rows", 7, begin + 3100, 50.0], ["scheduled_backward", 7, begin + 3200, 7000.0],
        ["ncclDevKernel_SendRecv", 20, begin + 10000, 500.0], ["CatArrayBatchedCopy", 7, begin + 10600, 50.0],
    ]  # fmt: skip


def test_a_timeline_is_drawn(scripts: None, tmp_path: Path) -> None:
    import timeline_picture as script

    source, picture = tmp_path / "timeline.json", tmp_path / "timeline.svg"
    source.write_text(
        json.dumps({"tokens": 65536, "heads": [32, 8], "ranks": [step(0.0) + step(20000.0)] * 2}), encoding="utf-8"
    )
    assert script.main([str(source), str(picture)]) == 0
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.count("<rect") == 1 + 2 * 6 + len(script.KINDS)  # the paper, the second step's events, the legend
    assert "rank 1 sends" in drawn
    events = script.second_half(step(0.0) + step(20000.0))
    assert [kind for kind, _, _ in events].count("sends and receives") == 2
    # 0.8 of 0.9 ms while the forward runs; 0.2 of 0.5 ms while the backward does.
    assert script.hidden(events) == (pytest.approx(1.4), pytest.approx(1.0))
    source.write_text("{}", encoding="utf-8")
    assert script.main([str(source), str(picture)]) == 2


def test_the_page_has_the_tables_of_its_report(scripts: None) -> None:
    import context_parallel_page as script

    page = (DOCS / "performance" / "context-parallel.md").read_text(encoding="utf-8")
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    for table in script.TABLES:
        assert table(report) in page, table.__name__
