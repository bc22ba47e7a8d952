"""Training calls whose gradients portattn's kernels compute: one node of autograd's graph each.
They go past torch's dispatcher; recorded and transformed calls are operators (torch_ops_impl.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from portattn.api import backward, dispatch
from portattn.api.execute import lookup, run_request
from portattn.api.request import Request, request_from
from portattn.api.transform_checks import transformed_or_traced
from portattn.compile.variants import variant_of
from portattn.config import current, using
from portattn.errors import PathUnavailable
from portattn.launch.cache import identical
from portattn.launch.torch_compat import in_mode
from portattn.planning.kernel_specs import CORES
from portattn.schema.call import Call
from portattn.schema.ops import BACKWARD, ROWS
from portattn.schema.problem import Problem
from portattn.schema.tensors import are_mapped

# The place of return_lse among a Request's fixed values, and of V among its tensors.
_LSE = {op: ROWS[op].fixed.index("return_lse") for op in BACKWARD}
_V = {op: tuple(ROWS[op].tensors).index("v") for op in BACKWARD}
# (place of dropout_p among the values, of its seed among the tensors) of operations that have it.
_DROPOUT = {
    op: (ROWS[op].fixed.index("dropout_p"), tuple(ROWS[op].tensors).index("dropout_seed"))
    for op in BACKWARD
    if "dropout_p" in ROWS[op].fixed
}
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_MOST_KNOWN = 1024


Trained = tuple[torch.Tensor, torch.Tensor]


class _TrainingKey:
    """The call key of training calls: everything but their tensors and lengths."""

    __slots__ = ("_absent", "asked", "names", "op", "places", "returns_lse", "settings", "values")

    def __init__(self, op: str, tensors: Sequence[Any], values: tuple[Any, ...]) -> None:
        self.op, self.values, self.settings = op, values, current()
        self.places = tuple(place for place, tensor in enumerate(tensors) if tensor is not None)
        every, lse = tuple(ROWS[op].tensors), _LSE[op]
        self.names = tuple(every[place] for place in self.places)
        self.returns_lse = bool(values[lse])
        # The values to run with: the backward pass takes the LSE, also of calls that do not request it.
        self.asked = values if values[lse] is True else (*values[:lse], True, *values[lse + 1 :])
        # If the first tensors alone are given, as Q, K and V are, nothing must be sorted.
        first = self.places == tuple(range(len(self.places)))
        self._absent = (None,) * (len(every) - len(self.places)) if first else None

    def tensors(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._absent is not None:
            return given + self._absent
        found: list[Any] = [None] * len(ROWS[self.op].tensors)
        for place, tensor in zip(self.places, given, strict=True):
            found[place] = tensor
        return tuple(found)


# Keys of calls whose gradients kernels were planned for. Plans differ by sizes too, which costs time alone: if no
# kernel takes these sizes, another path computes the gradients.
_known: dict[Any, _TrainingKey] = {}


def has_cached() -> bool:
    return bool(_known)


def forget() -> None:
    _known.clear()


def lookup_trained(
    op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...]
) -> Trained | None:
    """Return (out, lse) of a call whose training key is cached; None for any other call."""
    if not _known or op not in _LSE or in_mode() or transformed_or_traced():
        return None
    if not _PLAIN.issuperset(map(type, tensors)) or True not in [t.requires_grad for t in tensors if t is not None]:
        return None
    try:
        kind = _known.get(_key(op, tensors, values))
        if kind is None or not identical(values, kind.values):  # (1, 0) == (True, 0), and validation tells them apart
            return None
        if op in _DROPOUT and values[_DROPOUT[op][0]] and tensors[_DROPOUT[op][1]] is None:
            return None
    except (TypeError, RuntimeError, IndexError):  # an unhashable argument, no sizes, no axes: validation names it
        return None
    return _applied(kind, tensors, lengths)


def is_planned(request: Request) -> bool:
    return plan_training(request)[0] is not None


def plan_training(request: Request) -> tuple[_TrainingKey | None, Call | None]:
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
        return kind if identical(values, kind.values) else _TrainingKey(op, tensors, values), None
    call = request.build()
    # Gradients of tensors that a score function reads are the reference's, which recomputes the scores.
    own, problem = call.problem, msgspec.structs.replace(call.problem, grad_captured=False)
    forward = msgspec.structs.replace(problem, needs_grad=False, return_lse=True)
    trained = backward.has_kernel(problem, q.device, request.settings) and _has_key(call, forward, request)
    if not trained:  # a call with other sizes may have kernels: planning it takes time, not planning it loses its graph
        trained = bool(dispatch.plan_call(_with_problem(call, problem), request.settings).key)
    call.dry = False
    if not trained:
        return None, _with_problem(call, own)
    while len(_known) >= _MOST_KNOWN:
        _known.pop(next(iter(_known)))
    kind = _known[key] = _TrainingKey(op, tensors, values)
    return kind, _with_problem(call, forward)


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


def run(kind: _TrainingKey, request: Request, call: Call | None) -> Trained:
    """Return (out, lse) of a call that plan_training planned: the backward pass takes the LSE, requested or not."""
    tensors, _, lengths = request.parts
    return _applied(kind, tensors, lengths, call)


def _applied(kind: _TrainingKey, tensors: Sequence[Any], lengths: tuple[Any, ...], call: Call | None = None) -> Trained:
    # torch handles each argument of a node by itself: all others are one argument, and absent tensors are no arguments.
    found: Trained = _Call.apply((kind, lengths, call), *[tensors[place] for place in kind.places])
    return found


class _Call(torch.autograd.Function):
    """A node: (kind, lengths, the forward's Call or None) and the given tensors -> (out, lse)."""

    @staticmethod
    def forward(ctx: Any, about: tuple[_TrainingKey, tuple[Any, ...], Call | None], *given: Any) -> Any:
        kind, lengths, call = about
        tensors = kind.tensors(given)
        found = lookup(kind.op, tensors, kind.asked, lengths)
        if found is None:
            found = run_request(request_from(kind.op, tensors, kind.asked, lengths), call)
        ctx.save_for_backward(*given, *found)
        ctx.about = kind, lengths
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        kind, lengths = ctx.about
        saved, names = ctx.saved_tensors, kind.names
        if not kind.returns_lse:
            grad_lse = None
        if grad_out is None and grad_lse is None:
            return (None,) * (1 + len(names))
        given, out, lse = saved[:-2], saved[-2], saved[-1]
        asked = [name for name, needed in zip(names, ctx.needs_input_grad[1:], strict=True) if needed]
        # create_graph=True: second derivatives are refused when they are computed. is_grads_batched=True: torch
        # calls an operator for each gradient, which no kernel could tell apart.
        record = torch.is_grad_enabled() or are_mapped(grad_out, grad_lse)
        compute = backward.record_gradients if record else backward.compute_gradients
        parts = kind.op, kind.tensors(given), kind.values, lengths, out, lse, grad_out, grad_lse, asked
        if current() is kind.settings:
            made = compute(*parts)
        else:  # torch runs a backward pass in threads of its own, where no block of settings is open
            with using(kind.settings):
                made = compute(*parts)
        return (None, *map(made.get, names))
