"""One real call per device for `portattn doctor`, in child processes: what crashes or hangs does so there."""

from __future__ import annotations

import msgspec

from portattn.cli.checked import Check
from portattn.compile.store import store
from portattn.config import current
from portattn.planning.detect_target import devices
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, parse_target
from portattn.schema.problem import Problem
from portattn.testing.executor import arches, executors
from portattn.testing.numerics import COMPARE, Interpreter, figure, numerics, request_of
from portattn.tools import lab
from portattn.worker.client import Worker

# Small enough for an interpreter, with a ragged last tile, grouped heads, a mask and lengths.
PROBLEM = Problem(
    op="attention", batch=2, heads_q=4, heads_k=2, seq_q=77, seq_k=77, head_dim=64, dtype="fp16",
    causal="bottom_right", seqlens_k=True, return_lse=True,
)  # fmt: skip


def device_checks(seconds: float) -> list[Check]:
    """The planned path on each device of this machine."""
    found = []
    for target in devices():
        made = plan(PROBLEM, target, records=store(current()), settings=current())
        kind = Registry.load().backends[target.backend].device_type
        with Worker(runs="kernels") as worker:
            reply = worker.request(COMPARE, seconds, **request_of(made, PROBLEM, made.path, target.name, kind))
        seen = numerics(reply, str(target), PROBLEM)
        outcome = "PASS" if seen.outcome == "pass" else "FAIL"
        found.append(
            Check(
                name=f"{target.name}, {made.path} path",
                outcome=outcome,  # type: ignore[arg-type]
                detail=figure(seen),
                error=seen.error,
                budget=seen.budget,
            )
        )
    return found


def interpreter_check(seconds: float) -> list[Check]:
    """The core kernel under Triton's interpreter, where Triton and NumPy allow it."""
    name = "interpreter, dense_forward"
    interpreter = Interpreter(seconds)
    if interpreter.missing:
        return [Check(name=name, outcome="SKIP", detail=interpreter.missing)]
    target = parse_target("cpu:generic")
    made = plan(PROBLEM, target, settings=msgspec.structs.replace(current(), backend="interpreter", quirks=""))
    with Worker(runs="interpreter") as worker:
        seen = interpreter.check(made, worker)
    outcome = "PASS" if seen.outcome == "pass" else "FAIL"
    return [Check(name=name, outcome=outcome, detail=figure(seen), error=seen.error, budget=seen.budget)]  # type: ignore[arg-type]


def emulated_check(arch: str, seconds: float) -> list[Check]:
    """The machine code of the core kernel, made here, in the functional model of a chip."""
    target = parse_target(f"{arches('emulated')[arch]}:{arch}")
    emulated = executors(target.backend, seconds)["emulated"]
    name = f"{target}, machine code in a model"
    if lacks := emulated.lacks(target):
        return [Check(name=name, outcome="SKIP", detail=lacks)]
    made = plan(PROBLEM, target, settings=msgspec.structs.replace(current(), backend="auto", quirks=""))
    with lab.worker(str(target.toolchain)) as compiling, Worker(runs="kernels") as running:
        seen = emulated.check(made, target, compiling, running)
    outcome = "PASS" if seen.outcome == "pass" else "FAIL"
    return [Check(name=name, outcome=outcome, detail=figure(seen), error=seen.error, budget=seen.budget)]  # type: ignore[arg-type]
