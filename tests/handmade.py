"""Cells and runs made by hand, for the matrix's tests."""

import datetime
from collections.abc import Sequence
from typing import Any

import msgspec

from portattn.tools.matrix.cells import Cell, Host, Identity, PlanSummary, Run, cell_id, with_id
from portattn.tools.matrix.problems import dense


def make_cell(**changes: Any) -> Cell:
    """A hand-made cell: make_cell(target=…, status=…, …)."""
    named = changes.pop("named", dense(dtype="fp16", head_dim=64))
    target, toolchain = changes.pop("target", "cuda:sm_90"), changes.pop("toolchain", "triton==3.6.0")
    fields = {
        "id": cell_id(named.problem, target, toolchain), "index": 0, "name": named.name, "problem": named.problem,
        "target": target, "toolchain": toolchain, "status": "PASS", "level": "compiles",
        "plan": PlanSummary(path="triton", kernel="dense_forward"),
        "date": datetime.datetime(2026, 11, 21, tzinfo=datetime.timezone.utc),
    }  # fmt: skip
    return Cell(**(fields | changes))


def whole(cells: Sequence[Cell], **changes: Any) -> Run:
    day = datetime.datetime(2026, 11, changes.pop("day", 21), tzinfo=datetime.timezone.utc)
    fields: dict[str, Any] = {
        "portattn": "0.1.0", "commit": "1" * 40,
        "digests": {"kernels": "k", "code": "c", "quirks/any": "a", "quirks/cuda": "q", "quirks/rocm": "r"},
        "compiler": "triton==3.6.0", "toolchains": {"triton==3.6.0": "installed"},
        "host": Host(system="Linux x86_64", name=changes.pop("host", "")), "versions": {"torch": "2.13.0"}, "date": day,
    }  # fmt: skip
    fields["digests"] = fields["digests"] | changes.pop("digests", {})
    identity = with_id(Identity(**(fields | changes)))
    return Run(
        portattn="0.1.0", kernels=identity.digests["kernels"],
        toolchains=tuple(dict.fromkeys(c.toolchain for c in cells)), compiler="triton==3.6.0", machine="Linux x86_64",
        devices=(), versions={}, command="portattn matrix run", problems="quick",
        targets=tuple(dict.fromkeys(c.target for c in cells)), cells=tuple(c.id for c in cells), identities=(identity,),
        date=day,
    )  # fmt: skip


def make_run(cells: Sequence[Cell], **changes: Any) -> tuple[Run, list[Cell]]:
    """A run of cells, made under an identity of its own: make_run(cells, host=…, digests={…}, …)."""
    made = whole(cells, **changes)
    origin = made.identity.id
    return made, [msgspec.structs.replace(c, index=i, origin=origin) for i, c in enumerate(cells)]
