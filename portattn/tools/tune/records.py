"""What a run writes down, a line of JSON each: how it was made, what compiled to what, and each candidate's verdict."""

from __future__ import annotations

import datetime
from typing import Literal

import msgspec

from portattn.tools.tune.choice import Choice
from portattn.tools.tune.race import Times

SCHEMA = 1  # raised when a reader of the version before would misread it

# refused       the planner, or the variant, does not take it
# twin          the same launches as an earlier candidate
# ruled out     it does not compile, does not fit, spills, or over-subscribes a core
# compiles      compile-only: it fits and does not spill
# wrong         its numbers are over the error budget; never timed
# broke         it raised, or ended the process, when it was first run
# abandoned     clearly slower after one short timing
# slower        timed to the end of its turn, and not the best
# within noise  the best of the challengers, and no faster than the incumbent by more than the noise
# chosen        the best; what is written into the tuning file
# kept          the incumbent, which nothing replaces
# not reached   the budget was spent before
CandidateState = Literal[
    "refused", "twin", "ruled out", "compiles", "wrong", "broke", "abandoned", "slower", "within noise",
    "chosen", "kept", "not reached",
]  # fmt: skip
RED: frozenset[str] = frozenset({"wrong", "broke"})
# Of these nothing is worth a row of a table by default: they cost no device time and say only why.
QUIET: frozenset[str] = frozenset({"refused", "twin", "ruled out", "not reached"})


class Origin(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """The first line: the origin of the figures.

    chip       the device's name, or the chip's title if it is not here
    measured   whether anything was timed
    classes    the requested classes by name; workloads by class
    only       the settings that candidates were restricted to
    """

    schema: int = SCHEMA
    target: str
    chip: str
    measured: bool
    toolchain: str
    ptxas: str
    torch: str
    portattn: str
    kernels: str
    commit: str
    command: str
    date: datetime.date
    classes: dict[str, tuple[str, ...]]
    spills: int = 0
    only: dict[str, tuple[str, ...]] = {}


class CodeRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="code"):
    """What compiling one code gave: see tunable.CompileResult."""

    code: str
    failure: str = ""
    facts: dict[str, int | str | float] | None = None


class Trying(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trying"):
    """A candidate is about to run for the first time. One that nothing follows ended the process."""

    name: str
    problem: str
    choice: str


class Interruption(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stopped"):
    """The run was interrupted, and knew of it: what was being tried is not to blame."""


class CandidateRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="candidate"):
    """What became of one candidate on one problem of a class.

    error, mean_error, budget  against float64: largest, mean, and what the largest may be
    """

    name: str
    problem: str
    choice: Choice
    verdict: CandidateState
    reason: str = ""
    error: float | None = None
    mean_error: float | None = None
    budget: float | None = None
    times: Times | None = None
    registers: int | None = None
    spills: int | None = None
    scratchpad_bytes: int | None = None


class ProblemResult(msgspec.Struct, frozen=True, kw_only=True):
    """One problem's figures in the final round, microseconds (medians), by the role that a candidate has there."""

    problem: str
    times: Times | None = None
    incumbent: float | None = None
    runner_up: float | None = None
    error: float | None = None
    budget: float | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="class"):
    """What became of a class. A class that has one is not searched again.

    choice     what the class gets; None where nothing could be chosen
    replaces   whether that is another choice than the tuning file's
    ratio      its mean time over the incumbent's; noise: what it had to beat 1 by
    complete   False: the budget was spent, and not every candidate was looked at
    timed_with  the compiler that the incumbent was timed with, where that is another one; else empty
    """

    name: str
    choice: Choice | None
    replaces: bool
    measured: bool
    incumbent: Choice | None = None
    runner_up: Choice | None = None
    ratio: float | None = None
    noise: float | None = None
    results: tuple[ProblemResult, ...] = ()
    registers: int | None = None
    spills: int | None = None
    scratchpad_bytes: int | None = None
    counts: dict[str, int] = {}
    reason: str = ""
    complete: bool = True
    seconds: float = 0.0
    timed_with: str = ""


Record = Origin | CodeRecord | Trying | Interruption | CandidateRecord | Outcome
