"""First calls, in processes of their own; on the CPU they time the reference."""

import os
import subprocess
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch

import portattn
from portattn.tools.bench import firstcall


@pytest.fixture
def small(monkeypatch):
    case = msgspec.structs.replace(firstcall.CASES[1], batch=1, seq_k=64)
    monkeypatch.setattr(firstcall, "CASES", (case,))
    return case


@pytest.mark.parametrize("warm", [False, True])
def test_what_a_child_times(small, warm):
    found = firstcall.time_calls(small, "cpu", warm)
    assert (found["warmup_s"] is not None) == warm
    assert 0 < found["second_s"] < 60
    assert found["first_s"] > 0
    assert found["path"] == "sdpa"


def test_three_processes_share_new_caches(small, monkeypatch):
    seen = []

    def child(case, environment, seconds, warm, folder):
        assert Path(portattn.__file__).parent.parent in map(Path, environment["PYTHONPATH"].split(os.pathsep))
        assert not list(Path(folder).iterdir())  # `python -m` imports from its working folder first
        seen.append({name: environment[name] for name in firstcall._CACHES})
        assert warm == (len(seen) == 3)
        return {"first_s": 3.0 - len(seen), "second_s": 0.01, "path": "triton", "warmup_s": 0.5 if warm else None}

    monkeypatch.setattr(firstcall, "_child", child)
    found = firstcall.measure(small, 2)
    assert (found.empty_s, found.kept_s, found.second_s, found.path, found.run) == (2.0, 1.0, 0.01, "triton", 2)
    assert (found.warmup_s, found.warmed_s) == (0.5, 0.0)
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0].values())) == 2
    assert not found.failed


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (subprocess.TimeoutExpired("python", 9.0), "no result after 9 s"),
        (subprocess.CalledProcessError(1, "", stderr="Trace\nRuntimeError: no device\n"), "RuntimeError: no device"),
    ],
)
def test_why_there_are_no_figures(small, monkeypatch, failure, text):
    monkeypatch.setattr(firstcall, "_child", Mock(side_effect=failure))
    found = firstcall.measure(small, 0)
    assert (found.failed, found.empty_s) == (text, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device would be timed, which takes long")
def test_a_process_that_does_not_know_the_case_says_so():
    unknown = msgspec.structs.replace(firstcall.CASES[0], name="no such case")
    assert "StopIteration" in firstcall.measure(unknown, 0).failed
