"""What the system failed at is no record on a kernel, wherever the compiler was then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import problem
from workerfaults import planted

from portattn.compile import compile_check
from portattn.compile.store import CompileStore, store
from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.testing import canary
from portattn.worker.client import Reply, Worker
from portattn.worker.stages import RUNS


def failing(monkeypatch: pytest.MonkeyPatch, worker: Worker) -> None:
    """The streams of the worker's child fail once it has announced a stage."""
    started = worker._started

    def starts() -> Any:
        child = started()
        move = child.pipes.move

        def fails(seconds: float) -> bool:
            move(seconds)
            if b"ttgir" in child.pipes._got:
                monkeypatch.setattr(child.pipes, "move", breaks)
            return True

        def breaks(seconds: float) -> bool:
            raise OSError(5, os.strerror(5))

        monkeypatch.setattr(child.pipes, "move", fails)
        return child

    monkeypatch.setattr(worker, "_started", starts)


def test_a_failure_of_the_system_is_not_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call falls back, with the reason; the next process asks again."""
    settings = Settings(cache_dir=str(tmp_path / "records"), backend="triton")
    target, p = parse_target("cuda:sm_90", "triton==3.6.0"), problem(dtype="fp16", head_dim=64)
    made = plan(p, target, settings=settings)
    launches, _, _ = kernel_calls(made, meta_call(p), 1)
    with Worker(python=planted(tmp_path, "say(stage='ttgir')\ntime.sleep(600)")) as worker:
        failing(monkeypatch, worker)
        monkeypatch.setattr(compile_check, "_worker", worker)
        failed = compile_check.ensure(made, launches, torch.empty(1), target, settings)
    assert failed is not None
    assert not failed.passed
    assert "Input/output error" in failed.reason
    key = compile_check.code_key(made, launches)
    assert store(settings).get(key) == failed
    assert CompileStore(Path(settings.cache_dir)).get(key) is None


def test_a_failure_of_the_system_says_nothing_about_a_canary() -> None:
    where, p = parse_target("cuda:sm_90", "triton==3.6.0"), problem(dtype="fp16")
    seen = {"outcome": "crash", "stage": RUNS, "kind": "SIGSEGV", "message": "Segmentation fault"}
    assert canary.judge_reply(Reply(**seen), where, p)[0] == "compiler-crash"
    assert canary.judge_reply(Reply(**seen, unavailable=True), where, p) == ("", "crash: SIGSEGV: Segmentation fault")
