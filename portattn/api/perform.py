"""Carrying a request out: a call of a known class by what was kept of it, any other by its plan."""

from __future__ import annotations

from typing import Any

import torch

from portattn.api import autocast, dispatch, monitor, repeated
from portattn.api.in_graph import in_graph
from portattn.api.jagged import are_jagged
from portattn.api.request import Caching, Request, Result, request_from
from portattn.api.tracing import (
    are_dispatched,
    are_recorded,
    are_transformed,
    refuse_what_lies_nowhere,
    refuse_what_no_kernel_sees,
    shapes_alone,
)
from portattn.config import current
from portattn.launch import cache
from portattn.launch.guards import in_mode
from portattn.schema.call import Call
from portattn.schema.plan import Plan


def try_cached(
    op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...] = ()
) -> Result | None:
    """Perform a call of a kind that is known, with sizes of a class that is known; None where it is none. A call that
    dynamo traces is its operator's.

    tensors, values, lengths  as the Request has them, in its order; `backend` and `validate` come last among values.
                              Nothing is known of them
    """
    if torch.compiler.is_dynamo_compiling():
        return None if op == "attention" and are_jagged(*tensors[:3]) else in_graph(op, tensors, values, lengths)
    found = found_cached(op, tensors, values, lengths)
    if found is not None or not torch._C._is_any_autocast_enabled():
        return found
    if autocast.is_on(tensors[0]) and cache.kinds(op, values) and not in_mode():
        with autocast.off(tensors[0].device.type):  # what is kept of calls under autocast is of the cast tensors
            return found_cached(op, tuple(autocast.cast_now(op, tensors)), values, lengths)
    return found


def found_cached(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...]) -> Result | None:
    """As try_cached, of a call that is not traced."""
    known = cache.kinds(op, values)
    if not known:
        return None
    settings = current()
    for kind in known:
        hit = kind.hit
        if hit is not None:
            found = hit(tensors, values, lengths, settings, None, None, None)
            if found is not NotImplemented:
                if found is not None:
                    return found
                continue
        matched = kind.match(tensors, values, lengths, settings)
        if matched is None:
            continue
        given, addresses, inputs = matched
        its_class = kind.find(inputs)
        if its_class is not None:
            cached, sizes = its_class
            dispatch.note(cached.note(inputs))
            out, lse = cached(given, addresses, sizes)
            return out if lse is None else (out, lse)
    return None


def perform(request: Request) -> Result:
    """Carry a request out: out in the caller's layout, with the LSE where it is asked for.

    What something records or transforms, and tensors that are more than memory, go through torch's dispatcher.
    """
    tensors, values, lengths = request.parts
    # Dropout is no operator: where a mode only looks on, it sees what dropout is made of.
    dropout = request.values.get("dropout_p")  # nothing is known of it yet
    seen = are_recorded if isinstance(dropout, float) and dropout else are_dispatched
    if are_transformed(tensors) or seen(tensors):
        return in_graph(request.op, tensors, values, lengths)
    refuse_what_lies_nowhere(request.op, request.named_tensors)
    if autocast.is_on(request.tensors["q"]):
        return _as_autocast(request)
    return carried_out(request)


def _as_autocast(request: Request) -> Result:
    """Carry a request out in the dtype of autocast, which no kernel sees."""
    tensors, values, lengths = request.parts
    tensors = tuple(autocast.cast(request.op, tensors))
    with autocast.off(tensors[0].device.type):
        return carried_out(request_from(request.op, tensors, values, lengths))


def carried_out(request: Request) -> Result:
    """Carry a request out whose tensors lie in memory."""
    call = request.build()
    caching = Caching(request) if request.cacheable() else None
    with monitor.watching(request):
        out, lse = dispatch.run(call, request.settings, caching)
    if caching is None:
        repeated.keep(request, call, dispatch.last_plan())
    return finished(call, out, lse)


def admitted(request: Request) -> Result | None:
    """What the run of a handle gives that computes shapes alone; None where it is to be carried out.

    Raises where no kernel could see its tensors (tracing.py).
    """
    refuse_what_no_kernel_sees(request.op, request.named_tensors)
    if not shapes_alone(request.tensors.values()):
        return None
    call = request.build()
    return finished(call, call.new_out(), call.new_lse() if call.problem.return_lse else None)


def finished(call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> Result:
    """Results as (B, Hq, Sq, Dv) and (B, Hq, Sq) in the layout that the caller uses."""
    problem = call.problem
    if problem.packed:
        out = out[0].transpose(0, 1)
        lse = None if lse is None else lse[0]
    elif problem.layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if lse is not None and problem.return_lse else out


def plan_request(request: Request) -> Plan:
    """How a request would run, without running it."""
    tensors, values, lengths = request.parts
    cast = autocast.cast(request.op, tensors)
    if cast is not tensors:
        request = request_from(request.op, cast, values, lengths)
    return dispatch.plan_call(request.build(), request.settings)
