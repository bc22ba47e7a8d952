"""Plain calls that gradients are asked of, where kernels of portattn's compute them: one node of autograd's graph each.

What torch records or transforms goes through the operators (gradients.py); these calls go past torch's dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch

from portattn.api import backward, dispatch
from portattn.api.perform import Trained, carried_out, found_cached
from portattn.api.request import Request, request_from
from portattn.api.tracing import transformed_or_traced
from portattn.config import current, using
from portattn.launch.guards import in_mode
from portattn.schema.ops import BACKWARD, ROWS
from portattn.schema.tensors import are_mapped

# The place of return_lse among a Request's fixed values, and of V among its tensors.
_LSE = {op: ROWS[op].fixed.index("return_lse") for op in BACKWARD}
_V = {op: tuple(ROWS[op].tensors).index("v") for op in BACKWARD}
_SEED = {op: tuple(ROWS[op].tensors).index("dropout_seed") for op in BACKWARD}
_DROPPED = {op: ROWS[op].fixed.index("dropout_p") for op in BACKWARD}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_KNOWN = 1024
# Calls whose gradients kernels were planned for, by everything that plans differ by but sizes. A plan that differs by
# other sizes costs time alone: what no kernel computes is computed by other means.
_known: dict[Any, bool] = {}


def forget() -> None:
    """Forget what was planned: records or data have changed."""
    _known.clear()


def known(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...]) -> Trained:
    """(out, lse) of a call like one that was planned before; None where it is none, or nothing can be told of it."""
    if not _known or op not in _LSE or in_mode() or transformed_or_traced():
        return None
    present = [t for t in tensors if t is not None]
    if not all(type(t) in _PLAIN for t in present) or not any(t.requires_grad for t in present):
        return None
    try:
        if not _known.get(_key(op, tensors, values)) or (values[_DROPPED[op]] and tensors[_SEED[op]] is None):
            return None
    except (TypeError, RuntimeError):  # an unhashable argument, or a tensor without sizes: validation names it
        return None
    return call(op, tensors, values, lengths)


def planned(request: Request) -> bool:
    """Whether gradients are asked of a call, and the plan is that kernels of portattn's compute them."""
    op, tensors = request.op, tuple(request.tensors.values())
    q, v = tensors[0], request.tensors["v"]
    if op not in _LSE or not isinstance(q, torch.Tensor) or not isinstance(v, torch.Tensor):
        return False
    if not any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        return False
    if not backward.may_have_kernels(op, q, v, request.settings.backend):
        return False
    key = _key(op, tensors, request.fixed_values)
    try:
        found = _known.get(key)
    except TypeError:
        return False
    if found is None:
        found = bool(dispatch.plan_call(request.build(), request.settings).key)
        if not found:  # a call with other sizes may have kernels: to find out costs time, not to would lose its graph
            return False
        while len(_known) >= _MOST_KNOWN:
            _known.pop(next(iter(_known)))
        _known[key] = found
    return found


def _key(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
    q = tensors[0]
    given = tuple([t is not None for t in tensors])
    return (
        op,
        values,
        tuple(map(type, values)),
        given,
        q.dtype,
        q.device,
        q.shape[-1],
        tensors[_V[op]].shape[-1],
        current(),
    )


def call(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...]) -> Trained:
    """(out, lse), with the LSE whether or not it is asked for: the backward pass takes it."""
    found: Trained = _Call.apply(op, values, lengths, *tensors)
    return found


class _Call(torch.autograd.Function):
    """Operation, values and sizes, and tensors, as a Request has them -> (out, lse)."""

    @staticmethod
    def forward(ctx: Any, op: str, values: tuple[Any, ...], lengths: tuple[Any, ...], *tensors: Any) -> Any:
        place = _LSE[op]
        asked = values if values[place] is True else (*values[:place], True, *values[place + 1 :])
        found = found_cached(op, tensors, asked, lengths)
        if found is None:
            found = carried_out(request_from(op, tensors, asked, lengths))
        ctx.save_for_backward(*tensors, *found)
        ctx.op, ctx.values, ctx.lengths, ctx.settings = op, values, lengths, current()
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        *given, out, lse = ctx.saved_tensors
        op, values, tensors = ctx.op, ctx.values, tuple(given)
        found: list[Any] = [None] * (3 + len(tensors))
        if not values[_LSE[op]]:
            grad_lse = None
        if grad_out is None and grad_lse is None:
            return tuple(found)
        names = ROWS[op].tensors
        asked = [name for name, needed in zip(names, ctx.needs_input_grad[3:], strict=True) if needed]
        with using(ctx.settings):  # torch runs a backward pass in threads of its own
            # create_graph=True: second derivatives are refused where they are asked for. is_grads_batched=True: torch
            # calls an operator for each gradient, which no kernel could tell apart.
            if torch.is_grad_enabled() or are_mapped(grad_out, grad_lse):
                made = backward.recorded(op, tensors, values, ctx.lengths, out, lse, grad_out, grad_lse, asked)
            else:
                made = backward.computed(op, tensors, values, ctx.lengths, out, lse, grad_out, grad_lse, asked)
        for place, name in enumerate(names):
            found[3 + place] = made.get(name)
        return tuple(found)
