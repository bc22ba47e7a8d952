"""What the torch operators do: run, tell shapes, be mapped over one more axis. Their gradients are in gradients.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from portattn.api import dispatch, vmapping
from portattn.api.kernel_backward import Gradients, gradients
from portattn.api.perform import lookup, run_request
from portattn.api.request import Request, request_from
from portattn.api.torch_ops import Signature
from portattn.errors import PathUnavailable
from portattn.planning.gradients import own_names
from portattn.validate.quantised import result_dtype
from portattn.validate.stored import format_of, numbers_of

Results = tuple[torch.Tensor, torch.Tensor]


def forward(signature: Signature, *arguments: Any) -> Results:
    """The operator: (out, lse), or (out, a float32 tensor without elements) where no LSE is asked for."""
    parts = signature.split(arguments)
    if torch.is_grad_enabled():  # gradients are the operator's own
        with torch.no_grad():
            found = _found(signature.op, parts)
    else:
        found = _found(signature.op, parts)
    if isinstance(found, tuple):
        return found
    return found, found.new_empty(0, dtype=torch.float32)


def _found(op: str, parts: tuple[Any, ...]) -> Any:
    found = lookup(op, *parts)
    return run_request(request_from(op, *parts)) if found is None else found


def forward_shapes(signature: Signature, *arguments: Any) -> Results:
    """Tensors without data of the results' sizes, which may be symbolic. Checks all that is known of the arguments."""
    parts = signature.split(arguments)
    tensors, q = parts[0], arguments[0]
    sizes = [size for tensor in tensors if tensor is not None for size in (*tensor.shape, *tensor.stride())]
    if not any(isinstance(size, torch.SymInt) for size in (*sizes, *parts[2])):
        request_from(signature.op, *parts).build()
    latent = signature.row.latent
    v = tensors[tuple(signature.row.tensors).index("v")]
    dtype = result_dtype(q, v, signature.value(arguments, "out_dtype")) if "out_dtype" in signature.values else q.dtype
    out = q.new_empty((*q.shape[:-1], q.shape[-1] if latent else numbers_of(v, format_of(v))), dtype=dtype)
    if not signature.value(arguments, "return_lse"):
        return out, q.new_empty(0, dtype=torch.float32)
    axes: tuple[Any, ...]
    if q.ndim == 3:
        axes = (q.shape[1], q.shape[0])
    elif "layout" in signature.values and signature.value(arguments, "layout") == "bshd":
        axes = (q.shape[0], q.shape[2], q.shape[1])
    else:
        axes = tuple(q.shape[:-1])
    return out, q.new_empty(axes, dtype=torch.float32)


def backward(
    signature: Signature, grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Sequence[bool], *arguments: Any
) -> Any:
    """The gradients of the tensors that are wanted: by kernels of what the forward gave, or by a path that torch
    differentiates, which computes the forward once more."""
    made = by_kernels(signature, grad_out, grad_lse, out, lse, wanted, arguments)
    names = [signature.tensors[place] for place in signature.gradients]
    if made is None:
        return differentiated(signature, grad_out, grad_lse, wanted, arguments)
    places = zip(signature.gradients, names, wanted, strict=True)
    return tuple(
        _laid_out(arguments[place], made[name]) if needed else _none(arguments) for place, name, needed in places
    )


def by_kernels(
    signature: Signature, grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Sequence[bool],
    arguments: Sequence[Any],
) -> Gradients | None:  # fmt: skip
    """Gradients by parameter, by kernels; None where the forward kept nothing for them, or none runs here."""
    if out is None or lse is None:
        return None
    asked = [signature.tensors[place] for place, needed in zip(signature.gradients, wanted, strict=True) if needed]
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        return gradients(signature.op, *signature.split(arguments), out, lse, grad_out, grad_lse, asked)


def differentiated(
    signature: Signature, grad_out: Any, grad_lse: Any, wanted: Sequence[bool], arguments: Sequence[Any]
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
        _gradient(arguments[place], next(found_gradients)) if needed else _none(arguments) for place, needed in places
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


def _none(arguments: Sequence[Any]) -> torch.Tensor:
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


def _gradient(tensor: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """A gradient in memory of its own, with the strides that backward_shapes tells."""
    if gradient is None:
        return torch.zeros_like(tensor, requires_grad=False)
    return torch.empty_like(tensor, requires_grad=False).copy_(gradient)


def _laid_out(tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that is nobody else's, with the strides that backward_shapes tells: nearly always it has them."""
    same = gradient.stride() == tensor.stride() or gradient.stride() == torch.empty_like(tensor, device="meta").stride()
    return gradient if same else _gradient(tensor, gradient)


def backward_shapes(
    signature: Signature, grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Sequence[bool], *arguments: Any
) -> Any:
    places = zip(signature.gradients, wanted, strict=True)
    return tuple(torch.empty_like(arguments[place]) if needed else _none(arguments) for place, needed in places)


def forward_vmapped(signature: Signature, info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    """The operator for each index of the axis that vmap maps over, and the results stacked.

    Where the operation has a batch axis in all tensors that are mapped, the axis becomes part of that.
    """
    operator = getattr(torch.ops.portattn, signature.op)
    return vmapping.forward(signature, operator, info.batch_size, in_dims, arguments)


def backward_vmapped(signature: Signature, info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    operator = getattr(torch.ops.portattn, f"{signature.op}_backward")
    return vmapping.backward(operator, info.batch_size, in_dims, arguments)
