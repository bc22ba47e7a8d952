"""The table: every kind of failure, the most telling first. Of two that a text holds the first is its failure."""

from __future__ import annotations

from portattn.tools.quirks.lifecycle.formats import ascend, missing, mlir, processes, ptxas, python, resources
from portattn.tools.quirks.lifecycle.formats.row import Recogniser

TABLE: tuple[Recogniser, ...] = (
    *missing.ROWS,
    *resources.ROWS,
    *ptxas.ROWS,
    *ascend.SAID,
    *mlir.SAID,
    *ascend.TOOLS,
    *python.FRONT_END,
    *processes.HANGS,
    *python.EXCEPTIONS,
    *mlir.PLACED,
    *ascend.PASSED_ON,
    *mlir.PASSED_ON,
    *processes.DEATHS,
)
