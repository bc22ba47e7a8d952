"""scripts/flash_attn_suite.py: the cases that it draws, that they see portattn's modules, and what it says."""

import importlib
import json
import types
from pathlib import Path

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
    os.abort() if how == "crash" else time.sleep(300)
"""
FILES = {
    "tests/test_flash_attn.py": TWO, "hopper/test_flash_attn.py": THREE,
    "hopper/test_util.py": "attention_ref = None\n", "hopper/padding.py": "pad_input = None\n",
    "flash_attn/layers/rotary.py": "from flash_attn.ops.triton.rotary import apply_rotary as apply_rotary_emb\n",
    "flash_attn/ops/triton/rotary.py": "def apply_rotary():\n    return 'turned'\n",
}  # fmt: skip


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    machine = {"chip": "sm_90", "toolchain": "triton==3.8.0", "torch": "2.11.0", "gpus": ["NVIDIA H100"], "build": "b1"}
    machine |= {"variable": "CUDA_VISIBLE_DEVICES"}
    monkeypatch.setattr(importlib.import_module("chip_suite"), "machine_of", lambda environment: dict(machine))
    return importlib.import_module("flash_attn_suite")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / path).write_text(text)
    return tmp_path / "source"


def test_a_sample_run_in_processes(suite, source, tmp_path, capfd):
    """Failures of one kind are one group; a crash and a case that hangs cost their own case; a log is gone on with."""
    log, found = tmp_path / "log", tmp_path / "found.json"
    limits = ["--processes", "2", "--time-limit", "30"]
    words = ["--source", str(source), "--cases", "20", "--log", str(log), "--json", str(found), *limits]
    assert suite.main([*words, "--seed", "3"]) == 1
    told = json.loads(found.read_text())
    assert (told["counts"], told["ran"]) == ({"passed": 7, "skipped": 2, "failed": 4}, 11)
    assert told["tests"].keys() == {"fa2:test_right", "fa2:test_other", "fa2:test_left_out", "fa3:test_bad"}
    assert told["skips"] == {"has none": 1, "never": 1}
    reasons = {group["reason"]: len(group["cases"]) for group in told["failures"]}
    assert reasons["fa2:test_other: torch.OutOfMemoryError: of memory"] == 1
    assert reasons["fa2:test_other: assert # == #"] == 1
    assert sum(number for text, number in reasons.items() if text.startswith("fa3:test_bad: worker 'gw")) == 2
    assert "before 3" in next(g["first"]["said"] for g in told["failures"] if "assert # ==" in g["reason"])
    assert "11 ran, 63.64% of them passed; 2 skipped" in capfd.readouterr().out
    assert suite.main([*words, "--seed", "3", "--only", "test_right"]) == 0
    assert json.loads(found.read_text())["ran"] == 6
    assert suite.main([*words, "--seed", "4"]) == 2
    assert "is of another state (source " in capfd.readouterr().err


def test_no_files_and_broken_ones(suite, source, tmp_path, capfd):
    assert suite.main(["--source", str(tmp_path)]) == 2
    assert "has no tests/test_flash_attn.py" in capfd.readouterr().err
    (source / "hopper/padding.py").write_text("raise ValueError('broken')\n")
    assert suite.main(["--source", str(source), "--processes", "1"]) == 2
    assert "ValueError: broken" in capfd.readouterr().err


def test_a_sample_has_each_test_and_follows_its_seed(suite: types.ModuleType) -> None:
    tests = [
        suite.Test(name, ((("a",), tuple(range(size))), (("b", "c"), ((1, 2), (3, 4)))))
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
