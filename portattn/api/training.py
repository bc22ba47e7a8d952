"""Training calls whose gradients portattn's kernels compute: one node of autograd's graph each.
They go past torch's dispatcher; recorded and transformed calls are operators (torch_ops_impl.py)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import msgspec
import torch

from portattn.api import backward, dispatch
from portattn.api.execute import lookup, run_request
from portattn.api.request import Request, Result, request_from
from portattn.compile.variants import variant_of
from portattn.config import current, using
from portattn.errors import PathUnavailable
from portattn.launch.cache import identical
from portattn.planning.kernel_specs import CORES
from portattn.schema.call import Call
from portattn.schema.ops import BACKWARD, ROWS
from portattn.schema.problem import Problem
from portattn.schema.tensors import are_mapped

# The place of return_lse among a Request's fixed values, and of V among its tensors.
_LSE = {op: ROWS[op].fixed.index("return_lse") for op in BACKWARD}
_V = {op: tuple(ROWS[op].tensors).index("v") for op in BACKWARD}
_MOST_KNOWN = 1024


class TrainingNode:
    """Makes the results of training calls nodes of autograd's graph: calls alike in all but tensors and lengths."""

    __slots__ = ("_absent", "_places", "arguments", "asked", "natives", "op", "returns_lse", "settings", "values")
    apply: Any  # makes a node of autograd's graph: _Call's, below

    def __init__(self, op: str, tensors: Sequence[Any], values: tuple[Any, ...]) -> None:
        self.op, self.values, self.settings = op, values, current()
        self._places = tuple(place for place, tensor in enumerate(tensors) if tensor is not None)
        every, lse = tuple(ROWS[op].tensors), _LSE[op]
        # Names of a node's arguments: the first one is no tensor.
        self.arguments = ("", *(every[place] for place in self._places))
        self.returns_lse = bool(values[lse])
        # The values to run with: the backward pass takes the LSE, also of calls that do not request it.
        self.asked = values if values[lse] is True else (*values[:lse], True, *values[lse + 1 :])
        # If the first tensors alone are given, as Q, K and V are, nothing must be sorted.
        first = self._places == tuple(range(len(self._places)))
        self._absent = (None,) * (len(every) - len(self._places)) if first else None
        # native.c's functions of a backward pass, by whether torch's algorithms are to be deterministic.
        self.natives: list[Any] = [None, None]

    def __call__(self, tensors: tuple[Any, ...], lengths: tuple[Any, ...], results: Any) -> Result:
        """Return results as the call does, as outputs of a node. results: (out, LSE), without a graph."""
        # torch handles each argument of a node by itself: all values are one argument, and absent tensors are left out.
        found: Result = self.apply((self, lengths, results), *[tensors[place] for place in self._places])
        return found

    def tensors(self, given: Sequence[Any]) -> tuple[Any, ...]:
        if self._absent is not None:
            return (*given, *self._absent)
        found: list[Any] = [None] * len(ROWS[self.op].tensors)
        for place, tensor in zip(self._places, given, strict=True):
            found[place] = tensor
        return tuple(found)


# Keys of calls whose gradients kernels were planned for. Plans differ by sizes too, which costs time alone: if no
# kernel takes these sizes, another path computes the gradients.
_known: dict[Any, TrainingNode] = {}


def forget() -> None:
    _known.clear()


def is_planned(request: Request) -> bool:
    return plan_training(request)[0] is not None


def plan_training(request: Request) -> tuple[TrainingNode | None, Call | None]:
    """Return the key of a training call that kernels compute, and its Call if it had to be built.

    The key is None if torch differentiates the call; the Call then is the request's own. Otherwise the Call is the
    forward's, with the LSE and without autograd: its plan here is the plan that runs."""
    op, tensors = request.op, tuple(request.tensors.values())
    q, v = tensors[0], request.tensors["v"]
    if op not in _LSE or not isinstance(q, torch.Tensor) or not isinstance(v, torch.Tensor):
        return None, None
    if not any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        return None, None
    if not q.ndim or not v.ndim:  # validation names it
        return None, None
    if not backward.may_have_kernels(op, q, v, request.settings.backend):
        return None, None
    values = request.fixed_values
    key = _key(op, tensors, values)
    try:
        kind = _known.get(key)
    except TypeError:
        return None, None
    if kind is not None:
        return kind if identical(values, kind.values) else TrainingNode(op, tensors, values), None
    call = request.build()
    own = call.problem
    forward = msgspec.structs.replace(_without_captured(own), needs_grad=False, return_lse=True)
    # If no kernel adds the gradients of tensors that a score function reads, the reference computes all gradients.
    trained = bool(own.grad_captured) and backward.has_kernel(own, q.device, request.settings)
    trained = trained and _has_key(call, forward, request)
    trained = trained or _is_trained(call, _without_captured(own), forward, request)
    call.dry = False
    if not trained:
        return None, _with_problem(call, own)
    while len(_known) >= _MOST_KNOWN:
        _known.pop(next(iter(_known)))
    kind = _known[key] = TrainingNode(op, tensors, values)
    return kind, _with_problem(call, forward)


def _without_captured(problem: Problem) -> Problem:
    return msgspec.structs.replace(problem, grad_captured=0)


def _is_trained(call: Call, problem: Problem, forward: Problem, request: Request) -> bool:
    """Return whether kernels are planned for the forward of a training call, and for its gradients."""
    if backward.has_kernel(problem, call.q.device, request.settings) and _has_key(call, forward, request):
        return True
    # A call with other sizes may have kernels: planning it takes time, not planning it loses its graph.
    return bool(dispatch.plan_call(_with_problem(call, problem), request.settings).key)


def _has_key(call: Call, forward: Problem, request: Request) -> bool:
    """Return whether a kernel that autograd may ask gradients of is planned for the forward of a training call."""
    try:
        made = dispatch.plan_call(_with_problem(call, forward), request.settings)
    except PathUnavailable:
        return False
    if not made.key:
        return False
    variant = variant_of(made)
    return "needs_grad" in (CORES[made.problem.op].takes if variant is None else variant.takes)


def _with_problem(call: Call, problem: Problem) -> Call:
    call.problem = problem
    return call


def _key(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
    q, width = tensors[0], tensors[_V[op]].size(-1)
    # Types say which tensors are given.
    types = tuple(map(type, values)), tuple(map(type, tensors))
    return op, values, types, q.dtype, q.device, q.size(-1), width, current()


def run(node: TrainingNode, request: Request, call: Call | None) -> Result:
    """Run a training call that plan_training planned, as a node of autograd's graph."""
    op, (tensors, values, lengths) = request.op, request.parts
    if call is None:  # its key was known: a seed was drawn, or no launches are cached for its sizes
        found = lookup(op, tensors, values, lengths)
        if found is not None:
            return found
    request = request_from(op, tensors, node.asked, lengths)
    request.record = node
    if call is None:
        with torch.no_grad():
            call = request.build()
    return run_request(request, call)


class _Call(torch.autograd.Function):
    """A node: (TrainingNode, lengths, (out, lse)) and the given tensors -> out, or (out, lse)."""

    @staticmethod
    def forward(ctx: Any, about: tuple[TrainingNode, tuple[Any, ...], Any], *given: Any) -> Any:
        node, lengths, results = about
        ctx.save_for_backward(*given, *results)
        ctx.about = node, lengths
        ctx.set_materialize_grads(False)
        return results if node.returns_lse else results[0]

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any = None) -> Any:
        node, lengths = ctx.about
        saved, wanted, names = ctx.saved_tensors, ctx.needs_input_grad, node.arguments
        deterministic = torch.are_deterministic_algorithms_enabled()
        native = node.natives[deterministic]
        if native is not None and grad_lse is None and not torch.is_grad_enabled():
            found = native(saved, lengths, wanted, grad_out)
            if found is not NotImplemented:
                return found
        if grad_out is None and grad_lse is None:
            return (None,) * len(names)
        *given, out, lse = saved
        asked = tuple(compress(names, wanted))
        # create_graph=True: second derivatives are refused when they are computed. is_grads_batched=True: torch
        # calls an operator for each gradient, which no kernel could tell apart.
        record = torch.is_grad_enabled() or are_mapped(grad_out, grad_lse)
        compute = backward.record_gradients if record else backward.compute_gradients
        parts = node.op, node.tensors(given), node.values, lengths, out, lse, grad_out, grad_lse, asked
        if current() is node.settings:
            made = compute(*parts)
        else:  # torch runs a backward pass in threads of its own, where no block of settings is open
            with using(node.settings):
                made = compute(*parts)
        if native is None:
            node.natives[deterministic] = backward.native(node.op, names, node.values, out.device.type, node.settings)
        return tuple(map(made.get, names))


# `_Call.apply` without 2 µs of Python, which unwraps tensors of ended transforms: no call with one comes here.
TrainingNode.apply = super(torch.autograd.Function, _Call).apply
_node_type: Any = getattr(_Call, "_backward_cls", None)
if _node_type is not None:  # torch's engine calls its `apply`: two frames of Python less
    _node_type.apply = _Call.backward
