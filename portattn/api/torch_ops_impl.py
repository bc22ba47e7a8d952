"""Implementations of the torch operators: eager, fake (shapes) and vmap. Gradients are in operator_autograd.py."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from portattn.api import recompute, vmapping
from portattn.api.execute import lookup, run_request
from portattn.api.kernel_backward import Gradients, gradients
from portattn.api.recompute import laid_out_like, no_gradient
from portattn.api.request import request_from
from portattn.api.torch_ops import OperatorSignature
from portattn.validate.quantised import result_dtype
from portattn.validate.stored import format_of, numbers_of

Results = tuple[torch.Tensor, torch.Tensor]


def forward(signature: OperatorSignature, *arguments: Any) -> Results:
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


def forward_shapes(signature: OperatorSignature, *arguments: Any) -> Results:
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
    signature: OperatorSignature,
    grad_out: Any,
    grad_lse: Any,
    out: Any,
    lse: Any,
    wanted: Sequence[bool],
    *arguments: Any,
) -> Any:
    """Return the wanted gradients: by kernels from the forward's results, or by a path that torch differentiates, which
    recomputes the forward."""
    made = by_kernels(signature, grad_out, grad_lse, out, lse, wanted, arguments)
    names = [signature.tensors[place] for place in signature.gradients]
    if made is None:
        return recompute.gradient_builds(signature, grad_out, grad_lse, wanted, arguments)
    places = zip(signature.gradients, names, wanted, strict=True)
    return tuple(
        _own_memory(arguments[place], made[name]) if needed else no_gradient(arguments)
        for place, name, needed in places
    )


def by_kernels(
    signature: OperatorSignature, grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Sequence[bool],
    arguments: Sequence[Any],
) -> Gradients | None:  # fmt: skip
    """Gradients by parameter, by kernels; None where the forward kept nothing for them, or none runs here."""
    if out is None or lse is None:
        return None
    asked = [signature.tensors[place] for place, needed in zip(signature.gradients, wanted, strict=True) if needed]
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        return gradients(signature.op, *signature.split(arguments), out, lse, grad_out, grad_lse, asked)


def _own_memory(tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that is nobody else's, with the strides that backward_shapes tells: nearly always it has them."""
    same = gradient.stride() == tensor.stride() or gradient.stride() == torch.empty_like(tensor, device="meta").stride()
    return gradient if same else laid_out_like(tensor, gradient)


def backward_shapes(
    signature: OperatorSignature,
    grad_out: Any,
    grad_lse: Any,
    out: Any,
    lse: Any,
    wanted: Sequence[bool],
    *arguments: Any,
) -> Any:
    places = zip(signature.gradients, wanted, strict=True)
    return tuple(torch.empty_like(arguments[place]) if needed else no_gradient(arguments) for place, needed in places)


def forward_vmapped(signature: OperatorSignature, info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    """The operator for each index of the axis that vmap maps over, and the results stacked.

    Where the operation has a batch axis in all tensors that are mapped, the axis becomes part of that.
    """
    operator = getattr(torch.ops.portattn, signature.op)
    return vmapping.forward(signature, operator, info.batch_size, in_dims, arguments)


def backward_vmapped(signature: OperatorSignature, info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    operator = getattr(torch.ops.portattn, f"{signature.op}_backward")
    return vmapping.backward(operator, info.batch_size, in_dims, arguments)
