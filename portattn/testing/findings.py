"""What was found out about compiled kernels: facts, gates, lints, and numbers compared with the oracle."""

from __future__ import annotations

from typing import Literal

import msgspec

from portattn.schema.problem import Problem

Facts = dict[str, int | str | float]
LintName = Literal[
    "scalar-loop", "row-loop", "whole-tile-load", "masked-store", "leftover", "uninitialised-reduction",
    "programs", "unified-buffer",
]  # fmt: skip
# Of these nothing but a quirk that explains it makes a kernel acceptable.
LIMITS: frozenset[str] = frozenset({"masked-store", "leftover", "uninitialised-reduction", "programs"})


class KernelFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One compiled kernel: registers, spills (bytes), scratchpad_bytes (bytes), matrix instructions by name …"""

    function: str
    facts: Facts


class Gate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure against its limit. A gate that does not hold is red unless a quirk explains it.

    noted  it does not hold and is no fault: the tile was chosen with another compiler, and with this one costs time
    """

    name: str
    function: str
    value: int
    limit: str
    passed: bool
    explained_by: str = ""
    noted: bool = False

    def __str__(self) -> str:
        return f"{self.function}: {self.value} {self.name}, {self.limit}"


class Numerics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run on a small problem, compared with the float64 oracle.

    outcome  pass; fail (over the budget, or NaN); error, crash and hang: the run raised, died or did not end in its
             time; not_run: there is nothing here to run it with. The reason says more of any but pass
    error, budget          largest absolute error of out, and what it may be
    lse_error, lse_budget  the same for the log-sum-exp, where one was computed
    """

    outcome: Literal["pass", "fail", "error", "crash", "hang", "not_run"]
    where: str
    problem: Problem | None = None
    error: float | None = None
    budget: float | None = None
    lse_error: float | None = None
    lse_budget: float | None = None
    reason: str = ""


class Lint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lint that fired on one kernel.

    value         how much of it there is: copies, loads, operations, programs, bytes
    limit         of "programs" and "unified-buffer": what the chip has; 0 elsewhere
    explained_by  id of the quirk that says why it is so; empty without one
    """

    name: LintName
    function: str
    value: int
    message: str
    limit: int = 0
    explained_by: str = ""

    def __str__(self) -> str:
        return f"{self.function}: {self.name}: {self.message}"

    @property
    def red(self) -> bool:
        """Whether it rejects the kernel."""
        return self.name in LIMITS and not self.explained_by
