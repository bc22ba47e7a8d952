"""A kernel that is tuned without a device: its candidates are torch on the CPU, and a clock that is told the times."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from portattn.reference import blockwise
from portattn.schema.call import Call
from portattn.testing.bound import Costs, LowerBound
from portattn.tools.tune.tunable import BuiltCandidate, Choice, CompileResult, NotBuilt, RunnableCandidate

SMALL = "attention q=1,2,20,16 kv=1,1,37,16 dtype=fp16 causal"
OTHER = "attention q=2,2,20,16 kv=2,1,37,16 dtype=fp16 causal"


@dataclasses.dataclass
class Made:
    """One candidate of the fake kernel: how it behaves, and how long it takes (µs, by round if a list)."""

    us: float = 100.0
    behaviour: str = "right"
    facts: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"registers": 128, "spills": 0, "scratchpad_bytes": 1}
    )
    failure: str = ""
    bound: float | None = None  # µs that its code takes at least


class FakeTunable:
    """dense_forward in name: what a file says of that is its incumbent. Candidates by block_n."""

    name, ops = "dense_forward", ("attention",)

    def __init__(self, made: dict[int, Made]) -> None:
        self.made = made
        self.started: list[int] = []
        self.compiled: list[int] = []

    def space(self, problem, target, base) -> Iterator[Choice]:
        return (choice(block_n) for block_n in self.made)

    def today(self, problem, target) -> Choice | None:
        return None

    def build(self, problem, choice, target) -> BuiltCandidate:
        block_n = int(choice.launch["block_n"])
        if block_n not in self.made:
            raise NotBuilt(f"no tile of {block_n}")
        one = self.made[block_n]
        if one.behaviour == "refused":
            raise NotBuilt("the planner says no")
        identity = f"{block_n} {problem.batch}" if one.behaviour != "twin" else f"twin {problem.batch}"

        def start(call: Call) -> RunnableCandidate:
            self.started.append(block_n)
            return begun(call, one)

        def compile_it(worker, seconds: float) -> CompileResult:
            self.compiled.append(block_n)
            return CompileResult(one.failure, one.facts)

        def bound_of(facts) -> LowerBound | None:
            costs = Costs(counts={}, cycles={}, alone=0.0, programs=1, scratchpad_bytes=0)
            about = dict.fromkeys(("steps", "programs", "bytes", "clock_mhz"), 1) | {"binding": "matrix", "times": {}}
            return None if one.bound is None else LowerBound(us=one.bound, costs=costs, **about)

        return BuiltCandidate(identity, start, compile=compile_it, bound=bound_of)


def choice(block_n: int) -> Choice:
    return Choice(launch={"block_m": 64, "block_n": block_n})


class Timed:
    """What a clock is given: runs, and knows how long it is to have taken."""

    def __init__(self, one: Made, run: Callable[[], object]) -> None:
        self.one, self.run = one, run

    def __call__(self) -> object:
        return self.run()


def begun(call: Call, one: Made) -> RunnableCandidate:
    if one.behaviour == "raises":
        raise RuntimeError("no kernel image\nmore")
    if one.behaviour == "too large":
        raise type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})("shared memory")
    if one.behaviour == "interrupt":
        raise KeyboardInterrupt
    if one.behaviour == "out of memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    out, runs = call.new_out(), []

    def run() -> None:
        runs.append(1)
        right, _ = blockwise.run(call)
        out.copy_(right)
        if one.behaviour == "wrong":
            out[..., -1, -1] += 0.5
        if one.behaviour == "nan":
            out[0, 0, 0, 0] = float("nan")
        if one.behaviour.startswith("wrong after") and len(runs) > int(one.behaviour.split()[-1]):
            out.add_(1.0)

    return RunnableCandidate(Timed(one, run), out)


class FakeClock:
    """Says what a candidate is told to take, a little more each time that it is asked for the same one."""

    def __init__(self, jitter: float = 0.0) -> None:
        self.jitter, self.asked = jitter, 0
        self.thorough: list[bool] = []

    def samples(self, run: Any, timing: str, thorough: bool) -> list[float]:
        run()
        self.asked += 1
        self.thorough.append(thorough)
        factor = 1.0 + self.jitter * (self.asked % 3)
        return [run.one.us * factor, run.one.us * factor * 1.01]


TIMED = """\
[provenance]
chip = "NVIDIA H200"
toolchain = "triton==3.6.0"
date = 2026-11-01
measured = true

"""
FILE = f"""\
# What the chip likes.
{TIMED}# Narrow heads.
[[entry]]
kernel = "*_forward"
when = ["widest<=64"]
launch = {{ block_m = 64, block_n = 64 }}  # as timed
note = "of old"

# The rest.
[[entry]]
kernel = "*_forward"
launch = {{ block_m = 32, block_n = 32 }}
timed = false
"""


class NoWorker:
    """The fake kernel compiles nothing."""

    def close(self) -> None:
        pass
