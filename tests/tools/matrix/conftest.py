"""Cells and runs made by hand, for the matrix's tests."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from planted import planted as planted

from portattn.testing import numerics
from portattn.tools.matrix import provenance, select
from portattn.tools.matrix.cells import Cell, PlanSummary, Run, cell_id
from portattn.tools.matrix.problems import Named, decode, dense


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave interpreted numerics out: they start a child that imports torch."""
    monkeypatch.setattr(numerics, "interpreter_missing", lambda: "left out by this test")


@pytest.fixture
def small() -> list[Named]:
    """Two problems that compile quickly."""
    return [dense(dtype="fp16", head_dim=64), decode("GQA", dtype="fp16", head_dim=64)]


@pytest.fixture
def cell() -> Callable[..., Cell]:
    """A factory of hand-made cells: cell(target=…, status=…, …)."""

    def make(**changes: Any) -> Cell:
        named = changes.pop("named", dense(dtype="fp16", head_dim=64))
        target, toolchain = changes.pop("target", "cuda:sm_90"), changes.pop("toolchain", "triton==3.6.0")
        fields = {
            "id": cell_id(named.problem, target, toolchain),
            "index": 0,
            "name": named.name,
            "problem": named.problem,
            "target": target,
            "toolchain": toolchain,
            "status": "PASS",
            "level": "compiles",
            "plan": PlanSummary(path="triton", kernel="dense_forward"),
            "date": datetime.datetime(2026, 11, 21, tzinfo=datetime.timezone.utc),
        }
        return Cell(**(fields | changes))

    return make


@pytest.fixture
def run() -> Callable[[Sequence[Cell]], Run]:
    """A factory of the Run that some cells belong to."""

    def make(cells: Sequence[Cell]) -> Run:
        empty = provenance.this_run(select.specs([], []), "quick", "portattn matrix run", [])
        from msgspec.structs import replace

        return replace(empty, cells=tuple(c.id for c in cells), targets=tuple(dict.fromkeys(c.target for c in cells)))

    return make
