"""scripts/engine_times.py, in its small sizes on the CPU: what is right, what is wrong, and what is not there."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
CASES = ["--tiny", "--part", "flash_attn", "--case", "16 x 512"], ["--tiny", "--part", "masks", "--case", "tree"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module("engine_times")
    for name in [name for name in sys.modules if name.split(".")[0] in ("engine_times", "engine_parts")]:
        del sys.modules[name]


@pytest.mark.parametrize("arguments", CASES, ids=["flash_attn", "masks"])
def test_results_are_checked(script: Any, tmp_path: Path, arguments: list[str]) -> None:
    assert script.main([*arguments, "--out", str(tmp_path / "times.json")]) == 0
    found = json.loads((tmp_path / "times.json").read_text())
    assert found["device"] == "cpu"
    ours = [row for row in found["rows"] if row["contender"] == "portattn"]
    assert [row["right"] for row in ours] == [True]
    assert 0 < ours[0]["error"] <= ours[0]["budget"]
    assert "ms" not in ours[0], "without a GPU nothing is timed"


@pytest.mark.parametrize(
    ("device", "done"), [("cpu", "called again, without a graph, with"), ("cuda", "replayed with")]
)
def test_what_is_said_of_graphs(script: Any, device: str, done: str) -> None:
    measure = importlib.import_module("engine_parts.measure").Measure("", True, 0.0, True, device)
    assert measure.replay_note(True) == f"{done} other lengths: right"
    assert measure.replay_note(False) == f"{done} other lengths: WRONG"


def test_a_cache_is_called_again_on_a_cpu(script: Any, capsys: Any) -> None:
    arguments = ["--tiny", "--part", "flash_attn", "--case", "flash_attn_with_kvcache 64 x 8k, append"]
    assert script.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "called again, without a graph, with other lengths: right" in printed
    assert "replayed" not in printed


def test_a_wrong_result_is_an_error(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    part = importlib.import_module("engine_parts.flash_attn_part")
    real = part.flash_attn_func
    monkeypatch.setattr(part, "flash_attn_func", lambda *given, **named: real(*given, **named) * 1.5)
    assert script.main(CASES[0]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_contender_that_fails_is_an_error(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    part = importlib.import_module("engine_parts.flash_attn_part")

    def fails(*given: Any, **named: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(part, "flash_attn_func", fails)
    assert script.main(CASES[0]) == 1
    assert "FAILED RuntimeError: out of luck" in capsys.readouterr().out


def test_an_engine_that_is_not_there_is_named(script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in [name for name in sys.modules if name.startswith("portattn.integrations.vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    assert script.main(["--tiny", "--part", "vllm"]) == 2
    assert "vllm: absent: Absent: vLLM's Python files:" in capsys.readouterr().out


def test_without_a_gpu_sizes_must_be_small(script: Any, capsys: Any) -> None:
    assert script.main([]) == 2
    assert "--tiny" in capsys.readouterr().err
