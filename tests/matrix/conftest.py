"""Cells made by hand, and a compiler that fails as it is told, for the matrix's tests."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from portattn.matrix import numerics, provenance, select
from portattn.matrix.cells import Cell, PlanSummary, Run, cell_id
from portattn.matrix.problems import Named, decode, dense

# Speaks the worker's protocol, with no compiler behind it: each arch ends in its own way.
PLANTED = """\
#!{python}
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("serve", sys.argv[2])
serve = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serve)
FITS = {{"local_memory": 1024, "registers": 64, "spills": 0}}
def answer(request, say):
    arch = str(request["target"][1])
    say({{"stage": "ttgir"}})
    if arch == "80":
        print("Assertion `planted' failed.", file=sys.stderr, flush=True)
        os.abort()
    if arch == "86":
        time.sleep(600)
    if arch == "89":
        return {{"ok": False, "stage": "ttgir", "kind": "RuntimeError", "message": "planted refusal\\nmore", "log": "trace"}}
    if arch == "120":
        return {{"ok": True, "facts": FITS | {{"mma": 4, "spills": 96}}}}
    if arch == "gfx90a":
        return {{"ok": True, "facts": FITS}}
    return {{"ok": True, "facts": FITS | {{"mma": 4, "wgmma": 8, "tcgen05": 8, "mfma": 8, "wmma": 8}}}}
serve.answer = answer
serve.main()
"""


@pytest.fixture
def planted(tmp_path: Path) -> str:
    """A program that takes the place of a Python with Triton: sm_80 aborts, sm_86 hangs, sm_89 refuses, sm_120 spills,
    gfx90a has no matrix instruction, every other arch compiles."""
    path = tmp_path / "planted-compiler"
    path.write_text(PLANTED.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


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
