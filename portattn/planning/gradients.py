"""Planning of training calls: which path computes the gradients of a problem, and that one is needed.

A kernel of portattn's runs a call that gradients are asked of only where another one can compute them.
"""

from __future__ import annotations

import functools

import msgspec

from portattn.planning.registry import Registry
from portattn.schema.ops import BACKWARD
from portattn.schema.problem import Problem

CORE = "triton"
INTERPRETER = "interpreter"  # the CPU's core path: planned only when it is asked for by name


def backward_problem(problem: Problem) -> Problem:
    """The problem of a problem's gradients, with whatever of them may be asked for."""
    return msgspec.structs.replace(
        problem,
        op=BACKWARD[problem.op],
        needs_grad=False,
        return_lse=False,
        grad_lse=problem.return_lse,
        grad_bias=problem.bias,
        grad_slopes=problem.alibi_slopes,
    )


def own_path(backend: str, device_type: str) -> str | None:
    """What to ask of planning for the gradients of a call with this `backend`; None where it names no kernel."""
    if device_type == "cpu":
        return backend if backend == INTERPRETER else None
    if backend in ("auto", CORE):
        return backend
    return "auto" if backend in own_names() else None


@functools.lru_cache(maxsize=1)
def own_names() -> frozenset[str]:
    """The paths that are kernels of portattn's own."""
    return frozenset((CORE, INTERPRETER, *Registry.load().variant_names()))
