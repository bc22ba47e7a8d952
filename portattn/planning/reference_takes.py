"""What the reference path can do: everything that a Problem can ask for today, gradients and dropout included."""

from __future__ import annotations

from portattn.planning.kernel_specs import CORES

TAKES = frozenset().union(*(kernel.takes for kernel in CORES.values())) | {"needs_grad", "dropout"}
