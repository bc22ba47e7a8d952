"""The sets of a whole model (scripts/bench_sets/models.py), in small sizes on the CPU."""

import functools
import statistics
from typing import Any

import pytest
import torch
from places import ROOT

from portattn.api import ops
from portattn.tools.bench.workloads import Measure
from portattn.worker.own_kernels import load

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="the transformers package is not installed")


sets = load(str(ROOT / "scripts" / "bench_sets" / "models.py"))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def rows(*steps: str, rounds: int = 1, **how: Any) -> dict[str, dict[str, Any]]:
    """Return rows of the named steps as `case, contender`."""
    found = {}
    for step in steps:
        measure = Measure("cpu", only=step, tiny=True, rounds=rounds, **how)
        found |= {f"{row['case']}, {row['contender']}": row for row in sets.training_step(measure)}
    return found


def test_both_train_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "STEPS", ("plain", "checkpointed"))
    found = rows("", rounds=3)
    assert list(found) == [f"{step}, {who}" for step in sets.STEPS for who in sets.CONTENDERS]
    for step in sets.STEPS:
        theirs, ours = (found[f"{step}, {who}"] for who in sets.CONTENDERS)
        for row in (theirs, ours):
            assert len(row["rounds_ms"]) == 3
            assert row["ms"] == statistics.median(row["rounds_ms"]) > 0
        pairs = zip(theirs["rounds_ms"], ours["rounds_ms"], strict=True)
        assert ours["of_peer"] == statistics.median(a / b for a, b in pairs)
        assert ours["losses"]["sdpa"] == pytest.approx(ours["losses"]["portattn"], rel=1e-2)
        assert set(ours["gradients_apart"]) == set(sets.PROJECTIONS)
        assert ours["path"]
    from transformers import AttentionInterface

    assert "portattn" not in AttentionInterface._global_mapping


def test_a_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "STEPS", ("compiled",))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = rows("")
    assert found["compiled, portattn"]["ms"] > 0
    assert found["compiled, portattn"]["path"] == ""


def test_generation_and_prefill_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(sets.transformers(Measure("cpu", only="left-padded", tiny=True, rounds=1)))
    expected = [(what, who) for what in ("generate", "prefill") for who in sets.CONTENDERS]
    assert [(row["case"].split()[0], row["contender"]) for row in found] == expected
    assert all(row["least_ms"] == row["ms"] for row in found)


def test_checkpointing_recomputes_and_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention
    counted = lambda *args, **named: calls.append(1) or sdpa(*args, **named)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    trainer = sets.Trainer(sets.TINY, "cpu")
    for name, factor in (("plain", 1), ("checkpointed", 2), ("plain", 1)):
        calls.clear()
        with trainer.as_workload(name):
            trainer.backward()
        assert len(calls) == factor * sets.TINY.layers


def test_wrong_gradients_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.attention
    monkeypatch.setattr(ops, "attention", lambda q, k, v, **named: right(q, 0.5 * k + (0.5 * k).detach(), v, **named))
    (row,) = rows("plain").values()
    assert row["failed"].startswith("gradients differ: {'k_proj': 0.")
    assert "q_proj" not in row["failed"]
    assert "ms" not in row


def test_steps_without_time_are_named() -> None:
    measure = Measure("cpu", tiny=True, end=0.0)
    assert (list(sets.training_step(measure)), measure.left) == ([], list(sets.STEPS))
