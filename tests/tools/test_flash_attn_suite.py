"""scripts/flash_attn_suite.py: which cases it draws, that it runs them with portattn's modules, and what it says."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TWO = """
import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.bert_padding import unpad_input
from flash_attn.flash_attn_interface import _get_block_size_n
from flash_attn.layers.rotary import apply_rotary_emb

@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows, keys", [(1, 2), (3, 4), (5, 5)])
def test_right(rows, keys, causal):
    assert flash_attn_func.__module__.startswith("portattn.")
    q, k = torch.randn(1, rows, 2, 8), torch.randn(1, keys, 2, 8)
    print(flash_attn_func(q, k, k, causal=causal).shape, apply_rotary_emb())

@pytest.mark.parametrize("number", range(4))
def test_other(number):
    if number == 0:
        pytest.skip("has none")
    if number == 1:
        raise torch.OutOfMemoryError("of memory")
    print("before", number)
    assert number == 2

@pytest.mark.skipif(True, reason="never")
def test_left_out():
    raise AssertionError
"""
THREE = """
import os
import time
import pytest
from padding import pad_input
from test_util import attention_ref
from flash_attn_interface import get_scheduler_metadata

@pytest.mark.parametrize("how", ["crash", "hang"])
def test_bad(how):
    assert get_scheduler_metadata.__module__ == "portattn.integrations.flash_attn_interface"
    os.abort() if how == "crash" else time.sleep(60)
"""
FILES = {
    "tests/test_flash_attn.py": TWO,
    "hopper/test_flash_attn.py": THREE,
    "hopper/test_util.py": "attention_ref = None\n",
    "hopper/padding.py": "pad_input = None\n",
    "flash_attn/layers/rotary.py": "from flash_attn.ops.triton.rotary import apply_rotary as apply_rotary_emb\n",
    "flash_attn/ops/triton/rotary.py": "def apply_rotary():\n    return 'turned'\n",
}


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("flash_attn_suite")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / path).write_text(text)
    return tmp_path / "source"


def run(*words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "flash_attn_suite.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_sample_run_in_processes(source: Path, tmp_path: Path) -> None:
    """Failures of one kind are one group; a crash and a case that hangs cost their own case; a log is gone on with."""
    log, found = tmp_path / "log", tmp_path / "found.json"
    words = ("--source", source, "--seed", 3, "--processes", 2, "--time-limit", 8, "--log", log, "--json", found)
    ended = run(*words)
    assert ended.returncode == 1, ended.stderr
    told = json.loads(found.read_text())
    assert told["counts"] == {"passed": 7, "skipped": 2, "failed": 4}
    assert (told["cases"], told["of"], told["ran"]) == (13, 13, 11)
    assert told["skips"] == {"has none": 1, "never": 1}
    assert {group["reason"]: len(group["cases"]) for group in told["failures"]} == {
        "fa2:test_other: OutOfMemoryError: of memory": 1,
        "fa2:test_other: AssertionError: assert number == 2": 1,
        "fa3:test_bad: the process ended": 1,
        "fa3:test_bad: took longer than 8 s": 1,
    }
    outputs = [group["first"].get("output") for group in told["failures"]]
    assert "before 3\n" in outputs
    assert "11 ran, 63.64% of them passed; 2 skipped; 0 did not run" in ended.stdout
    again = run(*words, "--only", "test_right")
    assert again.returncode == 0
    assert json.loads(found.read_text())["ran"] == 6
    assert len(log.read_text().splitlines()) == 1 + 13
    other = run("--source", source, "--seed", 4, "--log", log)
    assert (other.returncode, "another sample" in other.stderr) == (2, True)


def test_no_time_and_no_files(source: Path, tmp_path: Path) -> None:
    ended = run("--source", source, "--processes", 1, "--seconds", 0)
    assert ended.returncode == 2
    assert "0 ran; 0 skipped; 13 did not run" in ended.stdout
    missing = run("--source", tmp_path)
    assert (missing.returncode, "has no tests/test_flash_attn.py" in missing.stderr) == (2, True)
    (source / "hopper/padding.py").write_text("raise ValueError('broken')\n")
    broken = run("--source", source, "--processes", 1)
    assert broken.returncode == 2
    assert "ValueError: broken" in broken.stderr


def test_a_sample_has_each_test_and_follows_its_seed(suite: types.ModuleType) -> None:
    tests = [
        suite.Test(name, lambda: None, ((("a",), tuple(range(size))), (("b", "c"), ((1, 2), (3, 4)))), None)
        for name, size in (("few", 1), ("some", 50), ("many", 5000))
    ]
    drawn = suite.sampled(tests, 100, 1)
    assert len(drawn) == len({(test.name, index) for test, index in drawn}) == 100
    assert [test.name for test, _ in drawn[:3]] == ["few", "some", "many"]
    counts = [sum(test.name == name for test, _ in drawn) for name in ("few", "some", "many")]
    assert counts[0] <= 2 < counts[1] < counts[2] / 5
    assert drawn == suite.sampled(tests, 100, 1) != suite.sampled(tests, 100, 2)
    assert len({json.dumps(tests[1].arguments(i)) for i in range(tests[1].count)}) == tests[1].count == 100
    assert len(suite.sampled(tests, 10**6, 1)) == sum(test.count for test in tests)


@pytest.mark.parametrize(("passed", "failed", "expected"), [(99, 1, 0), (98, 1, 1), (0, 0, 2), (5, 0, 0)])
def test_the_exit_status(suite: types.ModuleType, passed: int, failed: int, expected: int) -> None:
    ran = passed + failed
    assert suite.status({"ran": ran, "passed_of_those_that_ran": passed / ran if ran else None}) == expected
