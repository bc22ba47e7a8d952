"""Run a request from the launch cache if its shape class is cached, otherwise by planning it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from portattn.api import dispatch, monitor
from portattn.api.request import CacheWriter, Request, Result, inputs_of, settings_for
from portattn.config import Settings, current
from portattn.launch import cache
from portattn.planning.registry import Registry
from portattn.schema.call import Call
from portattn.schema.plan import Plan

if TYPE_CHECKING:
    from portattn.launch.cached_launch import CachedLaunch


Results = tuple[torch.Tensor, torch.Tensor | None]


class RepeatedCall:
    """A CPU path's CachedLaunch: calls with one call key and the first call's sizes, training calls too."""

    __slots__ = ("inputs", "plan", "run", "settings")

    def __init__(self, plan: Plan, settings: Settings, inputs: Sequence[int], run: Callable[..., Results]) -> None:
        self.plan, self.settings, self.inputs, self.run = plan, settings, list(inputs), run

    def program(self, inputs: Sequence[int]) -> Sequence[int] | None:
        return self.inputs if inputs == self.inputs else None

    def note(self, inputs: Sequence[int]) -> Plan:
        return self.plan

    def native(self) -> None:
        return

    def __call__(
        self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], sizes: Sequence[int],
        place: torch.Tensor | None = None,
    ) -> Results:  # fmt: skip
        out, lse = self.run(*tensors)
        return (out if place is None else place.copy_(out)), lse


def keep(request: Request, call: Call, plan: Any) -> None:
    """Cache a call that ran on a CPU by this plan, if its path can repeat calls.

    Calls under autocast, by another path than the request's, and calls that are not `Request.repeatable` are not
    cached."""
    if call.q.device.type != "cpu" or not isinstance(plan, Plan) or plan.key or call.copied:
        return
    if torch.is_autocast_enabled("cpu") or not request.repeatable():
        return
    run = _repeated_training(request, call, plan) if call.problem.needs_grad else _repeated(call, plan)
    if run is None or request.settings != settings_for(request.op, *request.asked):
        return
    kind, inputs = request.kind(), inputs_of(request)
    if kind.find(inputs) is None:
        kind.add(cast("CachedLaunch", RepeatedCall(plan, request.settings, inputs, run)))
        cache.remember(kind)


def _repeated(call: Call, plan: Plan) -> Callable[..., Results] | None:
    backend = Registry.load().backends[plan.target.partition(":")[0]]
    vendor = next((v for v in backend.vendor if v.name == plan.path), None)
    return None if vendor is None else vendor.repeated(call)


def _repeated_training(request: Request, call: Call, plan: Plan) -> Callable[..., Results] | None:
    """Return a function that runs training calls of these sizes and holds none of the call's tensors, or None.

    The path itself runs each call, so torch records its graph. Only Q, K and V may be given: their views need no more
    than a transposition."""
    if request.given != ("q", "k", "v"):
        return None
    problem, scale, softcap, run = call.problem, call.scale, call.softcap, dispatch.runner(plan)
    swapped = problem.layout == "bshd"

    def repeat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Results:
        if swapped:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = run(Call(problem=problem, q=q, k=k, v=v, scale=scale, softcap=softcap))
        return out.transpose(1, 2) if swapped else out, lse if problem.return_lse else None

    return repeat


def lookup(
    op: str,
    tensors: tuple[Any, ...],
    values: tuple[Any, ...],
    lengths: tuple[Any, ...],
    place: torch.Tensor | None = None,
) -> Result | None:
    """Like `call.try_cached`, for a call that is not traced. place: memory for `out`, as the call would allocate it."""
    find = cache.finder
    if find is not None:
        found: Any = find(op, tensors, values, lengths, place)
        if found is not NotImplemented:
            return found
    known = cache.kinds(op, values)
    if not known:
        return None
    settings = current()
    for kind in known:
        if place is not None and kind.record is not None:  # results in given memory have no gradient
            continue
        hit = kind.hit
        if hit is not None:
            found = hit(tensors, values, lengths, settings, place, None, None)
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
            dispatch.set_last_plan(cached.note(inputs))
            out, lse = cached(given, addresses, sizes) if place is None else cached(given, addresses, sizes, place)
            if kind.record is not None:
                return cast("Result", kind.record(tensors, lengths, (out, lse)))
            return out if lse is None else (out, lse)
    return None


def run_request(request: Request, call: Call | None = None) -> Result:
    """Plan and run a request whose tensors have storage, and cache its launches. call: the request's, if built.

    A request with `record` runs without autograd, and is a node of autograd's graph afterwards."""
    call = request.build() if call is None else call
    caching = CacheWriter(request) if request.cacheable() else None
    record = request.record
    # The key distinguishes calls that autograd records: it is made before.
    with monitor.watching(request), contextlib.nullcontext() if record is None else torch.no_grad():
        out, lse = dispatch.run(call, request.settings, caching)
        if caching is None:
            keep(request, call, dispatch.last_plan())
        results = to_caller_layout(call, out, lse)
    if record is None:
        return results
    tensors, _, lengths = request.parts
    return cast("Result", record(tensors, lengths, results))


def to_caller_layout(call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> Result:
    """Return the results, given as (B, Hq, Sq, Dv) and (B, Hq, Sq), in the caller's layout."""
    problem = call.problem
    if problem.writes:  # which has no result
        return out
    if problem.backward:  # a number of each row
        return out[0] if problem.packed else out
    if problem.packed:
        out = out[0].transpose(0, 1)
        lse = None if lse is None else lse[0]
    elif problem.layout == "bshd":
        out = out.transpose(1, 2)
    out = out.contiguous()  # as fake results are; a vendor's may have other strides
    return (out, lse.contiguous()) if lse is not None and problem.return_lse else out
