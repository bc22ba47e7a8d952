"""A candidate's numbers, before it is timed: the gate of the benchmarks, with the mean error beside the largest."""

from __future__ import annotations

import torch

from portattn.schema.call import Call
from portattn.testing.tolerance import nan_filled_memory
from portattn.tools.bench.cases import Case
from portattn.tools.bench.gate import OracleGate
from portattn.tools.bench.tensors import Tensors, rows_of
from portattn.tools.tune.gradients import WRITTEN, Shares
from portattn.tools.tune.tunable import BuiltCandidate, RunnableCandidate


class Errors:
    """Of one run: largest and mean absolute error in the gate's sample, and what the largest may be."""

    __slots__ = ("budget", "largest", "mean")

    def __init__(self, largest: float, mean: float, budget: float) -> None:
        self.largest, self.mean, self.budget = largest, mean, budget

    @property
    def wrong(self) -> bool:
        """NaN is infinite here, and wrong."""
        return not self.largest <= self.budget


class Checker(OracleGate):
    """Compares what a candidate fills with the float64 oracle."""

    def errors(self, out: torch.Tensor) -> Errors:
        """out: (B, Hq, Sq, Dv) as a Call has it; of packed queries (1, Hq, Tq, Dv)."""
        shown = out[0].transpose(0, 1) if self.case.packed else out
        worst, total, count = 0.0, 0.0, 0
        for sequence, head, rows, expected in self._parts:
            got = rows_of(self.case, shown, sequence, head, rows)
            off = (got.double() - expected).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
            worst, total, count = max(worst, float(off.max())), total + float(off.sum()), count + off.numel()
        return Errors(worst, total / max(count, 1), self.budget)


class GradientChecker:
    """Compares the gradients that a candidate fills with float64. Errors are parts of their budgets, which are 1."""

    def __init__(self, case: Case, t: Tensors, call: Call) -> None:
        self._shares = Shares(case, t, call)

    def errors(self, out: torch.Tensor) -> Errors:
        """out: delta, which is not judged: the gradients are made of it."""
        largest, mean = self._shares.of()
        return Errors(largest, mean, self._shares.gate.budget)


def checker(case: Case, t: Tensors, call: Call) -> Checker | GradientChecker:
    """What judges the candidates of a case."""
    return GradientChecker(case, t, call) if case.backward else Checker(case, t)


def start(built: BuiltCandidate, call: Call) -> RunnableCandidate:
    """The candidate with outputs that hold NaN: what it does not write shows."""
    for name in WRITTEN:
        memory = getattr(call, name)
        if memory is not None:
            memory.fill_(float("nan"))
    with nan_filled_memory():
        return built.start(call)
