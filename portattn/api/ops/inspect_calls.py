"""What a call would do, asked before it runs: `plan`, `explain`, `prepare`."""

from __future__ import annotations

from typing import Any

import torch

from portattn.api.call import plan_request
from portattn.api.jagged import are_jagged, packed
from portattn.api.prepare import Prepared
from portattn.api.request import Request, request_of
from portattn.api.signatures import named_arguments
from portattn.api.transform_checks import are_transformed
from portattn.api.unknown_arguments import short_traceback
from portattn.config import current
from portattn.errors import ArgumentError, TracingError
from portattn.planning.planner import plan as plan_problem
from portattn.planning.registry import parse_target
from portattn.schema.ops import PUBLIC
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain

_PLANNERS = ("plan", "explain")  # they take a Problem too


def plan(op: str | Problem, *args: Any, **kwargs: Any) -> Plan:
    """How a call would run, without running it.

    op          the operation's name, "attention" say; or a Problem
    args, kwargs  the operation's own arguments, planned for the tensors' device; or for another machine, which need not
                be here, with two keywords more: target="h100", a name that `portattn.target` takes or a Target, and
                toolchain="triton==3.6.0" (None: this machine's). Of a Problem these two alone. Compile records of this
                machine's cache are not consulted where a target is given

    Returns the Plan: path, kernel, quirks applied, and a reason for each path that is not taken. Nothing is launched.

    Raises what the call would raise before launching: ArgumentError, UnknownArgument, PathUnavailable, QuirkConflict.

    >>> import torch, portattn
    >>> q = torch.randn(1, 8, 16, 64)
    >>> portattn.plan("attention", q, q, q, causal=True).path
    'sdpa'
    >>> problem = portattn.Problem(batch=1, heads_q=8, heads_k=8, seq_q=16, seq_k=16, head_dim=64)
    >>> portattn.plan(problem, portattn.target("rocm:gfx942", "triton==3.6.0")).kernel
    'dense_forward'
    >>> half = q.half()
    >>> portattn.plan("attention", half, half, half, target="h100", toolchain="triton==3.6.0").target
    'cuda:sm_90'
    """
    with short_traceback:
        return _planned("plan", op, args, kwargs)


def explain(op: str | Problem, *args: Any, **kwargs: Any) -> str:
    """`plan(...)` as text for people: path, kernel, the quirks applied, and why each other path is not taken.

    op          as of `plan`
    args, kwargs  as of `plan`

    Returns the text, several lines: `Plan.explain` of the plan.

    Raises what `plan` raises.

    >>> import torch, portattn
    >>> q = torch.randn(1, 8, 16, 64)
    >>> print(portattn.explain("attention", q, q, q).splitlines()[0])
    attention q (1,8,16,64) kv (1,8,16,64) fp32
    """
    with short_traceback:
        return _planned("explain", op, args, kwargs).explain()


def prepare(op: str, *args: Any, **kwargs: Any) -> Prepared:
    """Plan a call, compile what it needs and allocate its partial results: a handle whose `run` does the rest.

    op          the operation's name, "paged_attention" say
    args, kwargs  the operation's own arguments; later runs may differ in data only, not in shapes, strides or types

    Returns a Prepared: `handle.run(...)` takes the same arguments, and `out=` and `lse=`.

    Memory: the handle holds the partial results of a split (`decode_attention` says how many), and no tensor of the
    call.

    Raises what the call would raise before launching: ArgumentError, UnknownArgument, PathUnavailable, QuirkConflict.

    >>> import torch, portattn
    >>> q, k, v = torch.randn(3, 2, 8, 16, 64).unbind()
    >>> handle = portattn.prepare("attention", q, k, v, causal=True)
    >>> out = torch.empty_like(q)
    >>> handle.run(q, k, v, causal=True, out=out) is out
    True
    >>> torch.equal(out, portattn.attention(q, k, v, causal=True))
    True
    """
    with short_traceback:
        return Prepared(make_request("prepare", op, args, kwargs))


def _planned(asker: str, op: str | Problem, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    if isinstance(op, Problem):
        return plan_problem(op, _target_of_problem(asker, args, kwargs), settings=current())
    elsewhere = {name: kwargs.pop(name) for name in ("target", "toolchain") if name in kwargs}
    request = make_request(asker, op, args, kwargs)
    return plan_request(request, _target(asker, **elsewhere) if elsewhere else None)


def _target_of_problem(asker: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Target:
    given = dict(zip(("target", "toolchain"), args, strict=False))
    for name in filter(kwargs.__contains__, given):
        raise ArgumentError(asker, name, _briefly(kwargs[name]), "must be given once, and is given by position too")
    given |= kwargs
    if len(args) > 2 or "target" not in given or not given.keys() <= {"target", "toolchain"}:
        limit = f"must be a target and a toolchain: {asker}(problem, target, 'triton==3.6.0')"
        raise ArgumentError(asker, "arguments", (*(_briefly(value) for value in args), *kwargs), limit)
    return _target(asker, **given)


def _target(asker: str, target: Any = None, toolchain: Any = None) -> Target:
    """Return the Target of a target's name and a toolchain, or the one that is given."""
    if toolchain is not None and not isinstance(toolchain, (str, Toolchain)):
        limit = "must be a text, as 'triton==3.6.0', a Toolchain, or None for this machine's"
        raise ArgumentError(asker, "toolchain", _briefly(toolchain), limit)
    if isinstance(target, Target):
        if toolchain is not None:
            limit = f"goes with a target's name: {target} has its own"
            raise ArgumentError(asker, "toolchain", str(toolchain), limit)
        return target
    if not isinstance(target, str):
        limit = "must be a target's name, as `portattn doctor` lists them, or a Target of portattn.target(name)"
        raise ArgumentError(asker, "target", _briefly(target), limit)
    try:
        return parse_target(target, toolchain)
    except ArgumentError as error:
        if error.argument == "toolchain":
            raise ArgumentError(asker, "toolchain", toolchain, error.limit) from None
        raise ArgumentError(asker, "target", target, error.limit) from None


def _briefly(value: object) -> object:
    """Return a value as an error shows it: a target by its name, a large object by its type."""
    if isinstance(value, Target):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float)) else type(value).__name__


def make_request(asker: str, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
    """The request that a call with these arguments makes."""
    if not isinstance(op, str) or op not in PUBLIC:
        problem = "a Problem or " if asker in _PLANNERS else ""
        given = type(op).__name__ if isinstance(op, torch.Tensor) else op  # not a page of numbers
        raise ArgumentError(asker, "op", given, f"must be {problem}one of {', '.join(PUBLIC)}")
    given = named_arguments(op)(*args, **kwargs)
    if asker in _PLANNERS and op == "attention" and are_jagged(given["q"], given["k"], given["v"]):
        op, given = "varlen_attention", packed(given)
    request = request_of(op, given)
    if are_transformed(request.tensors.values()):
        raise TracingError(f"{asker}: torch.func has the tensors of this call. Ask outside of the transform")
    return request
