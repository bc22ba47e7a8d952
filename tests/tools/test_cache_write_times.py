"""scripts/cache_write_times.py, in its small configuration on the CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("portattn_cache_write_times", ROOT / "scripts/cache_write_times.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return module


def test_every_case_is_a_row(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--tiny", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["case"], row["cache"]) for row in rows] == [(c, kind) for c in script.TINY for kind in script.KINDS]
    assert all(row["ms"] > 0 and row["path"] == "reference" for row in rows)
    step = {row["cache"]: row["bytes"] for row in rows if row["case"] == "decode"}
    assert step["bf16"] == 2 * 4 * 8 * 128 * 4 + 4 * 8  # four tokens of K and V, read and written, and their slots


def test_other_bits_are_an_error(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    real = script.portattn.write_pages

    def wrong(**given: Any) -> None:
        real(**given)
        if given.get("backend") is None:
            given["v_pages"].view(torch.uint8)[0, 0, 0, 0] ^= 1

    monkeypatch.setattr(script.portattn, "write_pages", wrong)
    assert script.main(["--tiny"]) == 1
    assert "decode, bf16: other bits than the reference's" in capsys.readouterr().err


def test_without_a_gpu_sizes_must_be_small(script: Any) -> None:
    with pytest.raises(SystemExit) as left:
        script.main([])
    assert left.value.code == 2
