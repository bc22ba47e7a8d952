"""Compiling a benchmark's kernels in child processes before anything is timed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from tiny import shrunk

from portattn.tools.bench import precompile
from portattn.tools.bench.cases import Case
from portattn.tools.bench.sets import SETS
from portattn.tools.pool import in_children

DECODE, PAGED = (shrunk(next(c for c in SETS["seed"] if name in c.name)) for name in ("seed decode", "seed paged"))


def tell(asked: precompile.PrecompileJob) -> str:
    return f"{asked.backend} {asked.core} {asked.device} {os.getpid()}"


def test_every_case_is_given_to_a_child():
    found: dict[Case, str] = {}
    cases = [DECODE, PAGED]
    assert precompile.prime_all(cases, "auto", True, torch.device("cpu"), 2, found.__setitem__, tell)
    assert set(found) == set(cases)
    for told in found.values():
        *fields, pid = told.split()
        assert fields == ["auto", "True", "cpu"]
        assert int(pid) != os.getpid()


def stop(asked: precompile.PrecompileJob) -> str:
    os._exit(1)


def test_a_child_that_dies_is_said():
    found: dict[Case, str] = {}
    assert not precompile.prime_all([DECODE], "auto", False, torch.device("cpu"), 1, found.__setitem__, stop)
    assert found == {}


@pytest.mark.interpreter
def test_what_a_child_does():
    assert precompile.prime(precompile.PrecompileJob(case=DECODE, backend="auto", core=False, device="cpu")) == ""
    failed = precompile.prime(precompile.PrecompileJob(case=DECODE, backend="gluon_forward", core=False, device="cpu"))
    assert failed.startswith("portattn prepared: ")
    assert "gluon_forward" in failed


def raises(item: int) -> int:
    raise ValueError(f"item {item}")


def test_what_a_child_raises_is_raised_here():
    with pytest.raises(ValueError, match="item 3"):
        in_children([3], raises, 1, lambda item, found: None)


def waits(item: Path) -> None:
    item.write_text(str(os.getpid()))
    threading.Event().wait(60)


def test_children_that_hang_are_killed(tmp_path):
    marks = [tmp_path / "1", tmp_path / "2"]
    assert not in_children(marks, waits, 2, lambda item, found: None, lambda: all(m.exists() for m in marks))
    for mark in marks:
        with pytest.raises(ProcessLookupError):  # no such process any more
            os.kill(int(mark.read_text() or 0), 0)


def test_time_ends_it():
    found: dict[Case, str] = {}
    assert not precompile.prime_all(
        [DECODE], "auto", False, torch.device("cpu"), 1, found.__setitem__, tell, seconds=0.0
    )
    assert found == {}
