"""scripts/training_step_times.py, in its small configuration on the CPU."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

from portattn.api import ops
from portattn.worker.import_file import load

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="the transformers package is not installed")


times = load(str(ROOT / "scripts" / "training_step_times.py"))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "times.json"
    status = times.main(["--tiny", "--out", str(out), *words])
    return status, json.loads(out.read_text(encoding="utf-8"))


def test_both_train_in_turns(tmp_path: Path) -> None:
    words = [word for name in ("plain", "checkpointed") for word in ("--workload", name)]
    status, found = run(tmp_path, "--seconds", "600", "--rounds", "3", *words)
    assert status == 0, found
    assert list(found["workloads"]) == ["plain", "checkpointed"]
    assert found["left out"] == []
    for workload in found["workloads"].values():
        assert set(workload["seconds"]) == set(times.CONTENDERS)
        for name, rounds in workload["rounds"].items():
            assert len(rounds) == 3
            assert workload["seconds"][name] == statistics.median(rounds) > 0
        pairs = zip(workload["rounds"]["sdpa"], workload["rounds"]["portattn"], strict=True)
        assert workload["sdpa / portattn"] == statistics.median(a / b for a, b in pairs)
        assert workload["losses"]["sdpa"] == pytest.approx(workload["losses"]["portattn"], rel=1e-2)
        assert set(workload["gradients apart"]) == set(times.PROJECTIONS)
        assert workload["path"]
    from transformers import AttentionInterface

    assert "portattn" not in AttentionInterface._global_mapping


def test_a_compiled_step(tmp_path: Path) -> None:
    status, found = run(tmp_path, "--seconds", "600", "--rounds", "1", "--workload", "compiled")
    assert status == 0, found
    assert found["workloads"]["compiled"]["seconds"]["portattn"] > 0
    assert found["workloads"]["compiled"]["path"] == ""


def test_checkpointing_recomputes_and_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    counted = lambda *args, **named: calls.append(1) or sdpa(*args, **named)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    trainer = times.Trainer(times.TINY, "cpu")
    for name, factor in (("plain", 1), ("checkpointed", 2), ("plain", 1)):
        calls.clear()
        with trainer.as_workload(name):
            trainer.backward()
        assert len(calls) == factor * times.TINY.layers


def test_a_step_changes_weights() -> None:
    trainer = times.Trainer(times.TINY, "cpu")
    trainer.optimizer.param_groups[0]["lr"] = 1e-2
    before = trainer.backward()
    for _ in range(3):
        trainer.step()
    assert trainer.backward() < before


def test_wrong_gradients_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same result, and half of k's gradient."""
    right = ops.attention

    def halved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> Any:
        return right(q, 0.5 * k + (0.5 * k).detach(), v, **named)

    monkeypatch.setattr(ops, "attention", halved)
    status, found = run(tmp_path, "--seconds", "600", "--rounds", "1", "--workload", "plain")
    assert status == 1
    (workload,) = found["workloads"].values()
    assert workload["failed"].startswith("gradients differ: {'k_proj': 0.")
    assert "q_proj" not in workload["failed"]
    assert "seconds" not in workload


def test_a_failure_is_told_and_the_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = times.compared

    def failing(trainer: Any) -> Any:
        if any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules()):
            raise RuntimeError("no memory left")
        return compared(trainer)

    monkeypatch.setattr(times, "compared", failing)
    words = [word for name in ("checkpointed", "plain") for word in ("--workload", name)]
    status, found = run(tmp_path, "--seconds", "600", "--rounds", "1", *words)
    assert status == 1
    assert found["workloads"]["checkpointed"] == {"failed": "RuntimeError: no memory left"}
    assert "failed" not in found["workloads"]["plain"]


def test_what_has_no_time_is_named(tmp_path: Path) -> None:
    status, found = run(tmp_path, "--seconds", "0")
    assert (status, found["workloads"]) == (0, {})
    assert found["left out"] == list(times.WORKLOADS)


def test_time_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(times.time, "monotonic", lambda: now[0])
    given = times.shares(["a", "b", "c"], 100.0, 30.0)
    assert next(given) == ("a", 110.0)
    now[0] = 104.0
    assert next(given) == ("b", 117.0)
    now[0] = 131.0
    assert list(given) == []
