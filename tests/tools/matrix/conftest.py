"""Cells and runs made by hand, for the matrix's tests."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from planted import planted as planted

from portattn.testing import numerics
from portattn.tools.matrix import provenance, select
from portattn.tools.matrix.cells import Cell, PlanSummary, Run, cell_id
from portattn.tools.matrix.identity import Host, Identity, identified
from portattn.tools.matrix.problems import Named, decode, dense
from portattn.tools.matrix.snapshot import Snapshot, snapshot


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
def seen() -> Callable[..., Snapshot]:
    """A factory of snapshots: seen(cells, commit=…, digests={…}, …); changes are the identity's."""

    def make(cells: Sequence[Cell], shown: str = "run", missing: int = 0, **changes: Any) -> Snapshot:
        made = whole(cells, **changes)
        cells = [msgspec.structs.replace(cell, origin=cell.origin or made.identity.id) for cell in cells]
        return msgspec.structs.replace(snapshot(made, cells, shown), missing=missing)

    return make


def whole(cells: Sequence[Cell], **changes: Any) -> Run:
    """A Run with an identity made by hand."""
    day = datetime.datetime(2026, 11, changes.pop("day", 21), tzinfo=datetime.timezone.utc)
    fields: dict[str, Any] = {
        "portattn": "0.1.0",
        "commit": "1" * 40,
        "digests": {"kernels": "k", "code": "c", "quirks/any": "a", "quirks/cuda": "q", "quirks/rocm": "r"},
        "compiler": "triton==3.6.0",
        "toolchains": {"triton==3.6.0": "installed"},
        "host": Host(system="Linux x86_64", name=changes.pop("host", "")),
        "versions": {"torch": "2.13.0"},
        "date": day,
    }
    fields["digests"] = fields["digests"] | changes.pop("digests", {})
    identity = identified(Identity(**(fields | changes)))
    return Run(
        portattn="0.1.0",
        kernels=identity.digests["kernels"],
        toolchains=tuple(dict.fromkeys(c.toolchain for c in cells)),
        compiler="triton==3.6.0",
        machine="Linux x86_64",
        devices=(),
        versions={},
        command="portattn matrix run",
        problems="quick",
        targets=tuple(dict.fromkeys(c.target for c in cells)),
        cells=tuple(c.id for c in cells),
        identities=(identity,),
        date=day,
    )


@pytest.fixture
def run_of() -> Callable[..., tuple[Run, list[Cell]]]:
    """A factory of a run of cells, made under an identity of its own: run_of(cells, host=…, digests={…}, …)."""

    def make(cells: Sequence[Cell], **changes: Any) -> tuple[Run, list[Cell]]:
        made = whole(cells, **changes)
        origin = made.identity.id
        return made, [msgspec.structs.replace(c, index=i, origin=origin) for i, c in enumerate(cells)]

    return make


@pytest.fixture
def run() -> Callable[[Sequence[Cell]], Run]:
    """A factory of the Run that some cells belong to."""

    def make(cells: Sequence[Cell]) -> Run:
        empty = provenance.this_run(select.specs([], []), "quick", "portattn matrix run", [])
        from msgspec.structs import replace

        return replace(empty, cells=tuple(c.id for c in cells), targets=tuple(dict.fromkeys(c.target for c in cells)))

    return make
