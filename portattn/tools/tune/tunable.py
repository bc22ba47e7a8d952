"""What a kernel must say to be tuned: Tunable, and BuiltCandidate, one candidate ready to be compiled and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from portattn.errors import PortattnError
from portattn.schema.call import TENSORS, Call
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.tools.tune.choice import Choice
from portattn.worker.client import Worker

Facts = dict[str, int | str | float]


class NotBuilt(PortattnError):
    """A candidate that the planner or a variant does not take for the problem; the text says why."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """How compiling a candidate ended.

    failure  why there is no code for it, or why the code does not fit the chip; empty otherwise
    facts    registers, spills, scratchpad_bytes … of the kernel that does the work
    """

    failure: str = ""
    facts: Facts | None = None


@dataclass(frozen=True, slots=True)
class RunnableCandidate:
    """A candidate on a device: `run()` enqueues it on the current stream and fills `out` (B, Hq, Sq, Dv)."""

    run: Callable[[], object]
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class BuiltCandidate:
    """One candidate for one problem.

    identity  candidates of equal identity are the same launches: one of them is enough
    start     brings it onto the device of a Call's tensors; raises what compiler and device raise
    code      candidates of equal code are compiled once; empty for the identity
    compile   compiles it in a child process, on a machine without the chip too, in so many seconds at most; None where
              that cannot be done, and then nothing is known of it before it runs
    """

    identity: str
    start: Callable[[Call], RunnableCandidate]
    code: str = ""
    compile: Callable[[Worker, float], CompileResult] | None = None


class Tunable(Protocol):
    """A kernel whose choices can be searched. `name` is its name in tuning files, `ops` the ops that it serves.

    A kernel that sweeps its parts one by one also has `joined(base, ranked)`: further choices from the timed ones, the
    fastest first.
    """

    @property
    def name(self) -> str: ...

    @property
    def ops(self) -> tuple[str, ...]: ...

    def space(self, problem: Problem, target: Target, base: Choice) -> Iterable[Choice]:
        """Return the choices to try, most promising first. base: today's choice, or a choice without settings."""
        ...

    def today(self, problem: Problem, target: Target) -> Choice | None:
        """Return the choice that runs without an entry in the tuning file; None if it is all defaults."""
        ...

    def build(self, problem: Problem, choice: Choice, target: Target) -> BuiltCandidate:
        """The candidate for the problem. Raises NotBuilt where it cannot be."""
        ...


def bind_launcher(launch: Callable[[Mapping[str, torch.Tensor | None]], object], call: Call) -> RunnableCandidate:
    """What a variant's launcher makes of a call: outputs are allocated once, and filled by every run."""
    out = call.new_out()
    lse = call.new_lse() if call.problem.return_lse else None
    tensors = {name: getattr(call, name) for name in TENSORS} | {"out": out, "lse": lse}
    return RunnableCandidate(lambda: launch(tensors), out)
