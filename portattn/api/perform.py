"""Carrying a request out: a call of a known class by what was kept of it, any other by its plan."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from portattn.api import autocast, dispatch, monitor
from portattn.api.graph_call import in_graph, new_seed
from portattn.api.jagged import are_jagged
from portattn.api.request import CacheWriter, Request, Result, inputs_of, request_from
from portattn.api.torch_ops import RETURNS_LSE
from portattn.api.transform_checks import (
    are_dispatched,
    are_transformed,
    check_has_storage,
    refuse_what_no_kernel_sees,
    shapes_alone,
)
from portattn.config import Settings, current
from portattn.launch import cache
from portattn.launch.guards import in_mode
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.call import Call
from portattn.schema.plan import Plan
from portattn.schema.target import Target

if TYPE_CHECKING:
    from portattn.launch.cached_launch import CachedLaunch


Results = tuple[torch.Tensor, torch.Tensor | None]


class RepeatedCall:
    """Calls of one kind with the sizes of their first: what a Kind asks of a class of sizes (CachedLaunch)."""

    __slots__ = ("inputs", "plan", "run", "settings")

    def __init__(self, plan: Plan, settings: Settings, inputs: Sequence[int], run: Callable[..., Results]) -> None:
        self.plan, self.settings, self.inputs, self.run = plan, settings, list(inputs), run

    def program(self, inputs: Sequence[int]) -> Sequence[int] | None:
        """The sizes themselves where they are these ones."""
        return self.inputs if inputs == self.inputs else None

    def note(self, inputs: Sequence[int]) -> Plan:
        return self.plan

    def native(self) -> None:
        """native.c launches kernels; this calls torch."""
        return

    def __call__(
        self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], sizes: Sequence[int],
        place: torch.Tensor | None = None,
    ) -> Results:  # fmt: skip
        """Run with these tensors: (out, LSE or None). place: where out goes."""
        out, lse = self.run(*tensors)
        return (out if place is None else place.copy_(out)), lse


def keep(request: Request, call: Call, plan: Any) -> None:
    """Keep a call that has run on a CPU by this plan, where its path can run others like it.

    Not where gradients are asked for, autocast is on, or Request.cacheable forbids it on any device.
    """
    if call.q.device.type != "cpu" or not isinstance(plan, Plan) or plan.key or call.problem.needs_grad:
        return
    backend = Registry.load().backends[plan.target.partition(":")[0]]
    vendor = next((v for v in backend.vendor if v.name == plan.path), None)
    run = None if vendor is None else vendor.repeated(call)
    if run is None or call.copied or torch.is_autocast_enabled("cpu") or not request.repeatable():
        return
    kind = request.kind()
    kind.add(cast("CachedLaunch", RepeatedCall(plan, request.settings, inputs_of(request), run)))
    cache.remember(kind)


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
    found = lookup(op, tensors, values, lengths)
    if found is not None:
        return found
    if not torch._C._is_any_autocast_enabled():
        return _known_training(op, tensors, values, lengths) if _training and torch.is_grad_enabled() else None
    trains = bool(_training) and torch.is_grad_enabled()
    if autocast.is_on(tensors[0]) and (trains or cache.kinds(op, values)) and not in_mode():
        cast = tuple(autocast.cast_now(op, tensors))
        with autocast.off(tensors[0].device.type):  # what is kept of calls under autocast is of the cast tensors
            found = lookup(op, cast, values, lengths)
            if found is None and trains:
                found = _known_training(op, cast, values, lengths)
    return found


Trained = tuple[torch.Tensor, torch.Tensor] | None
_training: list[Callable[..., Trained]] = []  # training.known, once a call was trained


def _known_training(
    op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...]
) -> Result | None:
    """As found_cached, of a call that gradients are asked of and that is like an earlier one."""
    found = _training[0](op, tensors, values, lengths)
    if found is None:
        return None
    return found if values[RETURNS_LSE[op]] else found[0]


def lookup(
    op: str,
    tensors: tuple[Any, ...],
    values: tuple[Any, ...],
    lengths: tuple[Any, ...],
    place: torch.Tensor | None = None,
) -> Result | None:
    """As try_cached, of a call that is not traced.

    place  where out goes, as the call would allocate it; None: it is allocated
    """
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
            return out if lse is None else (out, lse)
    return None


def perform(request: Request) -> Result:
    """Carry a request out: out in the caller's layout, with the LSE where it is asked for.

    What something records or transforms, and tensors that are more than memory, go through torch's dispatcher.
    """
    tensors, values, lengths = request.parts
    # Plain tensors inside a transform of others, too: whatever is made of them there is wrapped, without memory.
    if are_transformed(tensors) or are_dispatched(tensors) or torch._C._are_functorch_transforms_active():
        return in_graph(request.op, tensors, values, lengths)
    check_has_storage(request.op, request.named_tensors)
    if "dropout_seed" in request.tensors:
        draw_seed(request)
    if autocast.is_on(request.tensors["q"]):
        return _as_autocast(request)
    return run_with_autograd(request)


def _as_autocast(request: Request) -> Result:
    """Carry a request out in the dtype of autocast, which no kernel sees."""
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
    """Carry a request out: where gradients are asked for and kernels compute them, as a node of autograd's graph."""
    if not torch.is_grad_enabled():
        return run_request(request)
    training = importlib.import_module("portattn.api.training")
    if not _training:
        _training.append(training.known)
    if not training.planned(request):
        return run_request(request)
    out, lse = training.call(request.op, *request.parts)
    return (out, lse) if request.return_lse else out


def run_request(request: Request) -> Result:
    """Carry a request out whose tensors lie in memory."""
    call = request.build()
    caching = CacheWriter(request) if request.cacheable() else None
    with monitor.watching(request):
        out, lse = dispatch.run(call, request.settings, caching)
    if caching is None:
        keep(request, call, dispatch.last_plan())
    return finished(call, out, lse)


def fake_result(request: Request) -> Result | None:
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
    if problem.writes:  # which has no result
        return out
    if problem.backward:  # a number of each row
        return out[0] if problem.packed else out
    if problem.packed:
        out = out[0].transpose(0, 1)
        lse = None if lse is None else lse[0]
    elif problem.layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if lse is not None and problem.return_lse else out


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
