"""scripts/fp8_forward_times.py: small sizes on a CPU, its rows and its exit status."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("portattn_fp8_forward_times", ROOT / "scripts/fp8_forward_times.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return module


def test_rows_say_path_time_and_error(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--tiny", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["contender"], row["causal"]) for row in rows} >= {
        (name, causal) for name in ("e4m3", "bf16") for causal in (False, True)
    }
    for row in rows:
        assert row["path"]
        assert row["ms"] > 0
        assert math.isclose(row["tflops"] * row["ms"] * 1e9, 4 * 2 * 64**3 * 2 * (0.5 if row["causal"] else 1.0))
        assert row["rms"] < (0.1 if row["contender"].startswith("e4m3") else 0.01)


def test_a_result_that_is_further_off_is_red(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--tiny", "--most", "0.01"]) == 1
    assert "e4m3 D=64 S=64: rms" in capsys.readouterr().err
