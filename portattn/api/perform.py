"""Carrying a request out: a call of a known class by what was kept of it, any other by its plan."""

from __future__ import annotations

from typing import Any

import torch

from portattn.api import dispatch, monitor, repeated
from portattn.api.request import Caching, Request, Result
from portattn.api.tracing import refuse_what_no_kernel_sees, shapes_alone
from portattn.config import current
from portattn.launch import cache
from portattn.schema.call import Call
from portattn.schema.plan import Plan


def try_cached(
    op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...] = ()
) -> Result | None:
    """Perform a call of a kind that is known, with sizes of a class that is known; None where it is none.

    tensors, values, lengths  as the Request has them, in its order; `backend` and `validate` come last among values.
                              Nothing is known of them
    """
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
    """Carry a request out: out in the caller's layout, with the LSE where it is asked for."""
    shapes = admitted(request)
    if shapes is not None:
        return shapes
    call = request.build()
    caching = Caching(request) if request.cacheable() else None
    with monitor.watching(request):
        out, lse = dispatch.run(call, request.settings, caching)
    if caching is None:
        repeated.keep(request, call, dispatch.last_plan())
    return finished(call, out, lse)


def admitted(request: Request) -> Result | None:
    """What a call gives that computes shapes alone; None where it is to be carried out.

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
    return dispatch.plan_call(request.build(), request.settings)
