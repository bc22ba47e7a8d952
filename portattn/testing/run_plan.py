"""Running one plan's path on a small random problem and comparing it with the float64 oracle. Child process only.

Under TRITON_INTERPRET=1 the core kernels run as numpy (path "interpreter"); otherwise on this machine's device. Needs
portattn itself in the child's Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from portattn.launch import run_core
from portattn.launch.variant import run_variant
from portattn.planning.registry import Registry
from portattn.reference import blockwise, gradients, writing
from portattn.schema.call import Call
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.testing.tolerance import nan_filled_memory, random_call
from portattn.testing.verdict import judge
from portattn.worker.stages import RUNS


def compare(request: dict[str, Any], enter: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
    """Run `path` of `target` on random tensors: {"facts": …} as testing/verdict.judge says.

    The request holds problem, path, target and device, for a core path also kernel, lowering and launch, and a seed.
    Outputs and partial results start as NaN, and so does all padding, which no result may depend on. Raises what
    the kernels raise.
    """
    call, target = call_of(request), Registry.load().target(request["target"])
    enter(RUNS)
    probabilities = "as_q"
    with nan_filled_memory(), torch.no_grad():
        if request["path"] == "reference":
            reference = writing if call.problem.writes else gradients if call.problem.backward else blockwise
            out, lse = reference.run(call)
        elif "lowering" in request:
            out, lse = run_core(plan_of(request, target), call, target.arch.cores)
        else:
            backend = Registry.load().backends[target.backend]
            variant = next((v for v in backend.variants if v.name == request["path"]), None)
            if variant is not None:
                _, out, lse = run_variant(variant.for_toolchain(target.toolchain), call)
                probabilities = variant.probabilities
            else:
                out, lse = next(v for v in backend.vendor if v.name == request["path"]).run(call)
    precision = request.get("lowering", {}).get("dot_precision", "ieee") if request["path"] == "triton" else "ieee"
    return {"facts": judge(call, out, lse, precision, probabilities)}


def call_of(request: dict[str, Any]) -> Call:
    """The random call of a request: the same one wherever it is made."""
    problem = msgspec.convert(request["problem"], Problem)
    strides = "plain" if problem.aligned else "spare"
    return random_call(problem, request.get("seed", 0), device=request["device"], strides=strides, extremes=True)


def plan_of(request: dict[str, Any], target: Target) -> Plan:
    """The core plan of a request."""
    return Plan(
        problem=msgspec.convert(request["problem"], Problem),
        target=target.name,
        toolchain=str(target.toolchain),
        requested=request["path"],
        path=request["path"],
        kernel=request["kernel"],
        lowering=msgspec.convert(request["lowering"], Lowering),
        launch=msgspec.convert(request["launch"], Launch),
        choices=tuple(request["lowering"]),
        env=request.get("env", {}),
    )
