"""Gradients by a path that torch differentiates: the forward pass is computed once more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from portattn.api import dispatch
from portattn.api.execute import run_request
from portattn.api.request import Request, request_from
from portattn.api.torch_ops import OperatorSignature
from portattn.errors import PathUnavailable
from portattn.planning.gradients import own_names


def gradient_builds(
    signature: OperatorSignature, grad_out: Any, grad_lse: Any, wanted: Sequence[bool], arguments: Sequence[Any]
) -> Any:
    """The gradients that are wanted, by a path that torch differentiates, which computes the forward once more."""
    given = list(arguments)
    inputs = []
    for place, needed in zip(signature.gradients, wanted, strict=True):
        if needed:
            given[place] = given[place].detach().requires_grad_()
            inputs.append(given[place])
    before = dispatch.last_plan_state()
    with _recording():
        found = by_torch(request_from(signature.op, *signature.split(given)))
        dispatch.note_backward(before)
        results = found if isinstance(found, tuple) else (found,)
        pairs = [(r, g) for r, g in zip(results, (grad_out, grad_lse), strict=False) if g is not None]
        pairs = [(r, g) for r, g in pairs if r.requires_grad]  # of calls without keys, nothing depends on anything
        made: Any = [None] * len(inputs)
        if pairs:
            made = torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
    found_gradients = iter(made)
    places = zip(signature.gradients, wanted, strict=True)
    return tuple(
        laid_out_like(arguments[place], next(found_gradients)) if needed else no_gradient(arguments)
        for place, needed in places
    )


def by_torch(request: Request) -> Any:
    """Carry a request out by a path that torch differentiates: the one that it names, a vendor's, the reference."""
    if request.settings.backend not in ("auto", *own_names()):
        return run_request(request)
    for backend in ("vendor", "reference"):
        request.settings = msgspec.structs.replace(request.settings, backend=backend)
        try:
            return run_request(request)
        except PathUnavailable:
            if backend == "reference":
                raise
    raise AssertionError


def no_gradient(arguments: Sequence[Any]) -> torch.Tensor:
    return arguments[0].new_empty(0)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Inside the block torch's operators are differentiated, which they are not inside of an operator."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def laid_out_like(tensor: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """A gradient in memory of its own, with the strides that backward_shapes tells."""
    if gradient is None:
        return torch.zeros_like(tensor, requires_grad=False)
    return torch.empty_like(tensor, requires_grad=False).copy_(gradient)
