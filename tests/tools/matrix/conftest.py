"""Fixtures of the matrix's tests."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from handmade import make_cell, make_run, whole
from planted import planted as planted

from portattn.testing import executor
from portattn.tools.matrix import provenance, select
from portattn.tools.matrix.cells import Cell, Run, Snapshot, snapshot
from portattn.tools.matrix.problems import NamedProblem, decode, dense


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave interpreted numerics out: they start a child that imports torch."""
    monkeypatch.setattr(executor, "interpreter_missing", lambda: "left out by this test")


@pytest.fixture
def small() -> list[NamedProblem]:
    return [dense(dtype="fp16", head_dim=64), decode("GQA", dtype="fp16", head_dim=64)]


@pytest.fixture
def cell() -> Callable[..., Cell]:
    return make_cell


@pytest.fixture
def seen() -> Callable[..., Snapshot]:
    """A factory of snapshots: seen(cells, commit=…, digests={…}, …); changes are the identity's."""

    def make(cells: Sequence[Cell], shown: str = "run", missing: int = 0, **changes: Any) -> Snapshot:
        made = whole(cells, **changes)
        cells = [msgspec.structs.replace(cell, origin=cell.origin or made.identity.id) for cell in cells]
        return msgspec.structs.replace(snapshot(made, cells, shown), missing=missing)

    return make


@pytest.fixture
def run_of() -> Callable[..., tuple[Run, list[Cell]]]:
    return make_run


@pytest.fixture
def run() -> Callable[[Sequence[Cell]], Run]:
    def make(cells: Sequence[Cell]) -> Run:
        empty = provenance.this_run(select.specs([], []), "quick", "portattn matrix run", [])
        from msgspec.structs import replace

        return replace(empty, cells=tuple(c.id for c in cells), targets=tuple(dict.fromkeys(c.target for c in cells)))

    return make
