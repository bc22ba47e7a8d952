"""What a call would do, asked before it runs: `plan`, `explain`, `prepare`."""

from __future__ import annotations

from typing import Any

import torch

from portattn.api.binding import named_arguments
from portattn.api.jagged import are_jagged, packed
from portattn.api.perform import plan_request
from portattn.api.prepare import Prepared
from portattn.api.request import Request, request_of
from portattn.api.tracing import are_transformed
from portattn.api.unknown_arguments import short_traceback
from portattn.config import current
from portattn.errors import ArgumentError, TracingError
from portattn.planning.planner import plan as plan_problem
from portattn.planning.registry import parse_target
from portattn.schema.ops import PUBLIC
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target

_PLANNERS = ("plan", "explain")  # they take a Problem too


def plan(op: str | Problem, *args: Any, **kwargs: Any) -> Plan:
    """How a call would run, without running it.

    op          the operation's name, "attention" say; or a Problem
    args, kwargs  the operation's own arguments: plans for the tensors' device. Of a Problem: the Target alone, also of
                a machine that is not here; compile records of this machine's cache are not consulted then

    Returns the Plan: path, kernel, quirks applied, and a reason for each path that is not taken. Nothing is launched.

    Raises what the call would raise before launching: ArgumentError, UnknownArgument, PathUnavailable, QuirkConflict.

    >>> import torch, portattn
    >>> q = torch.randn(1, 8, 16, 64)
    >>> portattn.plan("attention", q, q, q, causal=True).path
    'sdpa'
    >>> problem = portattn.Problem(batch=1, heads_q=8, heads_k=8, seq_q=16, seq_k=16, head_dim=64)
    >>> portattn.plan(problem, portattn.target("rocm:gfx942", "triton==3.6.0")).kernel
    'dense_forward'
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
        target = args[0] if args else kwargs.pop("target", None)
        taken = f"{asker}(problem, target) takes a Problem and a Target, as portattn.target('BACKEND:ARCH') makes one"
        if len(args) > 1 or kwargs:
            others = *args[1:], *kwargs
            raise ArgumentError(asker, "arguments", tuple(_briefly(one) for one in others), f"{taken}, and no more")
        if not isinstance(target, Target):
            raise ArgumentError(asker, "target", _briefly(target), f"{taken}{_unknown(target)}")
        return plan_problem(op, target, settings=current())
    if "target" in kwargs:
        target = kwargs["target"]
        limit = f"goes with a Problem, {asker}(problem, target): a call is planned for its tensors' device"
        raise ArgumentError(asker, "target", _briefly(target), f"{limit}{_unknown(target)}")
    return plan_request(make_request(asker, op, args, kwargs))


def _briefly(value: object) -> object:
    """A value as an error shows it: a target by its name, and of what has a page of fields or numbers the type."""
    if isinstance(value, Target):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float)) else type(value).__name__


def _unknown(target: object) -> str:
    """What an error adds where a target is a text that names none: the nearest names."""
    if isinstance(target, str):
        try:
            parse_target(target, "none")
        except ArgumentError as error:
            return f"; {target!r} names none: {error.limit}"
    return ""


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
