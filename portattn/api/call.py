"""The entry of every eager call: cached launches, torch's dispatcher, autocast, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from portattn.api import autocast, dispatch, training
from portattn.api.execute import lookup, run_request, to_caller_layout
from portattn.api.graph_call import in_graph, new_seed
from portattn.api.jagged import are_jagged
from portattn.api.request import Request, Result, request_from
from portattn.api.torch_ops import RETURNS_LSE
from portattn.api.transform_checks import (
    are_dispatched,
    are_transformed,
    check_has_storage,
    refuse_what_no_kernel_sees,
    shapes_alone,
)
from portattn.launch import cache
from portattn.launch.guards import in_mode
from portattn.planning.planner import plan
from portattn.schema.plan import Plan
from portattn.schema.target import Target


def try_cached(
    op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...] = ()
) -> Result | None:
    """Return the result of a call whose call key and shape class are cached, else None. Dynamo traces the operator.

    tensors, values, lengths  in the order of the Request, with `backend` and `validate` last among values; nothing is
                              validated
    """
    if torch.compiler.is_dynamo_compiling():
        return None if op == "attention" and are_jagged(*tensors[:3]) else in_graph(op, tensors, values, lengths)
    found = lookup(op, tensors, values, lengths)
    if found is not None:
        return found
    if not torch._C._is_any_autocast_enabled():
        return _trained(op, tensors, values, lengths) if torch.is_grad_enabled() else None
    trains = training.has_cached() and torch.is_grad_enabled()
    if autocast.is_on(tensors[0]) and (trains or cache.kinds(op, values)) and not in_mode():
        cast = tuple(autocast.cast_now(op, tensors))
        with autocast.off(tensors[0].device.type):  # entries cached under autocast are keyed by the cast tensors
            found = lookup(op, cast, values, lengths)
            if found is None and trains:
                found = _trained(op, cast, values, lengths)
    return found


def _trained(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...]) -> Result | None:
    """Like `execute.lookup`, for a call that requires gradients."""
    found = training.lookup_trained(op, tensors, values, lengths)
    if found is None:
        return None
    return found if values[RETURNS_LSE[op]] else found[0]


def perform(request: Request) -> Result:
    """Run a request and return `out` in the caller's layout, with the LSE if it is requested.

    Calls that torch records or transforms, and tensor subclasses, go through torch's dispatcher.
    """
    tensors, values, lengths = request.parts
    # Plain tensors too, inside a transform of others: their results are wrapped there, without storage.
    if are_transformed(tensors) or are_dispatched(tensors) or torch._C._are_functorch_transforms_active():
        return in_graph(request.op, tensors, values, lengths)
    check_has_storage(request.op, request.named_tensors)
    if "dropout_seed" in request.tensors:
        draw_seed(request)
    if autocast.is_on(request.tensors["q"]):
        return _as_autocast(request)
    return run_with_autograd(request)


def _as_autocast(request: Request) -> Result:
    """Run a request in the dtype of autocast, with autocast off."""
    tensors, values, lengths = request.parts
    tensors = tuple(autocast.cast(request.op, tensors))
    with autocast.off(tensors[0].device.type):
        return run_with_autograd(request_from(request.op, tensors, values, lengths))


def draw_seed(request: Request, draw: Callable[[torch.Tensor], torch.Tensor] = new_seed) -> None:
    """Where something is dropped and no seed is given, give one, from torch's generator. Nothing is validated yet."""
    share, q = request.values["dropout_p"], request.tensors["q"]
    if request.tensors["dropout_seed"] is None and isinstance(share, float) and share and isinstance(q, torch.Tensor):
        request.tensors["dropout_seed"] = draw(q)


def run_with_autograd(request: Request) -> Result:
    """Run a request, as a node of autograd's graph if kernels compute its gradients."""
    if not torch.is_grad_enabled() or not training.is_planned(request):
        return run_request(request)
    out, lse = training.call(request.op, *request.parts)
    return (out, lse) if request.return_lse else out


def fake_result(request: Request) -> Result | None:
    """Return a handle's result for fake tensors, or None for tensors with data.

    Raise for tensors that no kernel can read (transform_checks.py).
    """
    refuse_what_no_kernel_sees(request.op, request.named_tensors)
    if not shapes_alone(request.tensors.values()):
        return None
    call = request.build()
    return to_caller_layout(call, call.new_out(), call.new_lse() if call.problem.return_lse else None)


def plan_request(request: Request, target: Target | None = None) -> Plan:
    """Return how a request would run here, or on another target, without running it."""
    if "dropout_seed" in request.tensors:  # the plan is the same for any seed, and torch's generator stays as it is
        draw_seed(request, lambda q: torch.zeros(1, dtype=torch.int64, device=q.device))
    tensors, values, lengths = request.parts
    cast = autocast.cast(request.op, tensors)
    if cast is not tensors:
        request = request_from(request.op, cast, values, lengths)
    call = request.build()
    if target is not None:
        return plan(call.problem, target, settings=request.settings)
    return dispatch.plan_call(call, request.settings)
