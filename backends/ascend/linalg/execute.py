"""A plan's launches, as triton-ascend lowers them, on a small random problem. Child process only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from portattn.backends.ascend.linalg.program import OUTPUTS, Launched, Programs
from portattn.backends.ascend.linalg.tools import missing
from portattn.launch import KernelCall, has_rows, kernel_calls, signature
from portattn.planning.registry import Registry
from portattn.schema.call import Call
from portattn.testing.run_plan import call_of, plan_of
from portattn.testing.tolerance import nan_filled_memory
from portattn.testing.verdict import judge

_programs: Programs | None = None


def compare(request: dict[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Execute lowered launches: {"facts": …} as testing/verdict.judge says, and `strays`, stray accesses as a text.

    The request is that of testing/run_plan.py with `texts`, the lowered text of each launch in order. Outputs, partial
    results, scratch memory and all padding start as NaN. Raises LinalgError when a text cannot be executed.
    """
    global _programs
    _programs = _programs or Programs()
    target = Registry.load().target(request["target"])
    with nan_filled_memory(), torch.no_grad():
        plan, call = plan_of(request, target), call_of(request)
        launches, out, lse = kernel_calls(plan, call, target.arch.cores)
        found: list[str] = []
        if has_rows(plan):
            for launch, text in zip(launches, request["texts"], strict=True):
                enter(f"execute {launch.function}")
                seen = _programs.launch(text, launch.grid, arguments_of(launch), outputs_of(call))
                found += complaints(launch.function, seen)
    enter("judge")
    return {"facts": judge(call, out, lse) | {"strays": "; ".join(found)}}


def arguments_of(launch: KernelCall) -> dict[str, Any]:
    """The run-time arguments that the compiled kernel still takes."""
    taken = signature(launch).types
    return {name: value for name, value in launch.arguments.items() if name in taken}


def outputs_of(call: Call) -> tuple[str, ...]:
    """The arguments that kernels may write to: of what fills a cache the cache, and scales that are computed."""
    if not call.problem.writes:
        return OUTPUTS
    return ("k", "v", "k_scale", "v_scale") if call.problem.kv_scales == "token" else ("k", "v")


def complaints(function: str, seen: Launched) -> list[str]:
    """What a launch did to memory that is not its own, a sentence each."""
    inputs = [f"{function} writes its input {name}" for name in seen.wrote_inputs]
    return [*(f"{function} {stray}" for stray in seen.strays), *inputs]


def run_code(request: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Execute a probe's kernel; see tools/quirks/probe/executing.py. Raises LinalgError on a text that cannot be."""
    lacking = missing()
    if lacking:
        return {"missing": lacking}
    seen = Programs().launch(request["texts"]["linalg"], tuple(request["grid"]), arguments, tuple(request["outputs"]))
    return {"strays": [*map(str, seen.strays), *(f"writes its input {name}" for name in seen.wrote_inputs)]}
