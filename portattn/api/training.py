"""Plain calls that gradients are asked of, where kernels of portattn's compute them: one node of autograd's graph each.

What torch records or transforms goes through the operators (operator_autograd.py); these calls go past torch's
dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portattn.api import dispatch, kernel_backward
from portattn.api.execute import lookup, run_request
from portattn.api.request import Request, request_from
from portattn.api.transform_checks import transformed_or_traced
from portattn.config import current, using
from portattn.launch.cache import identical
from portattn.launch.guards import in_mode
from portattn.schema.ops import BACKWARD, ROWS
from portattn.schema.tensors import are_mapped

# The place of return_lse among a Request's fixed values, and of V among its tensors.
_LSE = {op: ROWS[op].fixed.index("return_lse") for op in BACKWARD}
_V = {op: tuple(ROWS[op].tensors).index("v") for op in BACKWARD}
_SEED = {op: tuple(ROWS[op].tensors).index("dropout_seed") for op in BACKWARD}
_DROPPED = {op: ROWS[op].fixed.index("dropout_p") for op in BACKWARD}
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_MOST_KNOWN = 1024


Trained = tuple[torch.Tensor, torch.Tensor]


class _TrainingKey:
    """What calls of one kind have in common: everything but their tensors and lengths.

    values    of the call; `asked` are those by which it is computed, with the LSE whether or not the call asks for it:
              the backward pass takes it
    settings  in force as it was made
    places    of the tensors that are given, among the operation's; `names` are theirs
    """

    __slots__ = ("_absent", "asked", "names", "op", "places", "returns_lse", "settings", "values")

    def __init__(self, op: str, tensors: Sequence[Any], values: tuple[Any, ...]) -> None:
        self.op, self.values, self.settings = op, values, current()
        self.places = tuple(place for place, tensor in enumerate(tensors) if tensor is not None)
        every, lse = tuple(ROWS[op].tensors), _LSE[op]
        self.names = tuple(every[place] for place in self.places)
        self.returns_lse = bool(values[lse])
        self.asked = values if values[lse] is True else (*values[:lse], True, *values[lse + 1 :])
        # Where the first ones alone are given, as Q, K and V are, there is nothing to sort.
        first = self.places == tuple(range(len(self.places)))
        self._absent = (None,) * (len(every) - len(self.places)) if first else None

    def tensors(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """As a Request has them, None for those that are not given."""
        if self._absent is not None:
            return given + self._absent
        found: list[Any] = [None] * len(ROWS[self.op].tensors)
        for place, tensor in zip(self.places, given, strict=True):
            found[place] = tensor
        return tuple(found)


# Calls whose gradients kernels were planned for, by everything that plans differ by but sizes. A plan that differs by
# other sizes costs time alone: what no kernel computes is computed by other means.
_known: dict[Any, _TrainingKey] = {}


def has_cached() -> bool:
    """Return whether any call was planned to be trained by kernels."""
    return bool(_known)


def forget() -> None:
    """Forget what was planned: records or data have changed."""
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
        if values[_DROPPED[op]] and tensors[_SEED[op]] is None:
            return None
    except (TypeError, RuntimeError, IndexError):  # an unhashable argument, no sizes, no axes: validation names it
        return None
    return _applied(kind, tensors, lengths)


def is_planned(request: Request) -> bool:
    """Whether gradients are asked of a call, and the plan is that kernels of portattn's compute them."""
    op, tensors = request.op, tuple(request.tensors.values())
    q, v = tensors[0], request.tensors["v"]
    if op not in _LSE or not isinstance(q, torch.Tensor) or not isinstance(v, torch.Tensor):
        return False
    if not any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        return False
    if not q.ndim or not v.ndim:  # validation names it
        return False
    if not kernel_backward.may_have_kernels(op, q, v, request.settings.backend):
        return False
    key = _key(op, tensors, request.fixed_values)
    try:
        if key in _known:
            return True
    except TypeError:
        return False
    if not dispatch.plan_call(request.build(), request.settings).key:
        return False  # a call with other sizes may have kernels: to find out costs time, not to would lose its graph
    while len(_known) >= _MOST_KNOWN:
        _known.pop(next(iter(_known)))
    _known[key] = _TrainingKey(op, tensors, request.fixed_values)
    return True


def _key(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
    q, width = tensors[0], tensors[_V[op]].size(-1)
    # Types say which tensors are given.
    types = tuple(map(type, values)), tuple(map(type, tensors))
    return op, values, types, q.dtype, q.device, q.size(-1), width, current()


def call(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...]) -> Trained:
    """(out, lse), with the LSE whether or not it is asked for: the backward pass takes it."""
    return _applied(_TrainingKey(op, tensors, values), tensors, lengths)


def _applied(kind: _TrainingKey, tensors: Sequence[Any], lengths: tuple[Any, ...]) -> Trained:
    # torch handles each argument of a node by itself: what is no tensor is one argument, and tensors that are not given
    # are none.
    found: Trained = _Call.apply((kind, lengths), *[tensors[place] for place in kind.places])
    return found


class _Call(torch.autograd.Function):
    """(kind, lengths) of a call, and the tensors that are given -> (out, lse)."""

    @staticmethod
    def forward(ctx: Any, about: tuple[_TrainingKey, tuple[Any, ...]], *given: Any) -> Any:
        kind, lengths = about
        tensors = kind.tensors(given)
        found = lookup(kind.op, tensors, kind.asked, lengths)
        if found is None:
            found = run_request(request_from(kind.op, tensors, kind.asked, lengths))
        ctx.save_for_backward(*given, *found)
        ctx.about = about
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
        # create_graph=True: second derivatives are refused where they are asked for. is_grads_batched=True: torch
        # calls an operator for each gradient, which no kernel could tell apart.
        record = torch.is_grad_enabled() or are_mapped(grad_out, grad_lse)
        compute = kernel_backward.record_gradients if record else kernel_backward.compute_gradients
        parts = kind.op, kind.tensors(given), kind.values, lengths, out, lse, grad_out, grad_lse, asked
        if current() is kind.settings:
            made = compute(*parts)
        else:  # torch runs a backward pass in threads of its own, where no block of settings is open
            with using(kind.settings):
                made = compute(*parts)
        return (None, *map(made.get, names))
