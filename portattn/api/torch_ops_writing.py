"""What the torch operators do that fill a cache: write, check shapes, refuse gradients."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch._guards import TracingContext

from portattn.api.execute import lookup, run_request
from portattn.api.request import request_from
from portattn.api.torch_ops import OperatorSignature
from portattn.errors import ArgumentError, TracingWarning


def write(signature: OperatorSignature, *arguments: Any) -> None:
    """The operator: the call is carried out, and nothing returned."""
    parts = signature.split(arguments)
    with torch.no_grad():  # what requires gradients was refused before
        if lookup(signature.op, *parts) is None:
            run_request(request_from(signature.op, *parts))


def check(signature: OperatorSignature, *arguments: Any) -> None:
    """All that is known of arguments without data. Sizes may be symbolic, and then nothing is."""
    parts = signature.split(arguments)
    sizes = [size for tensor in parts[0] if tensor is not None for size in (*tensor.shape, *tensor.stride())]
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        request_from(signature.op, *parts).build()
    if TracingContext.try_get() is not None and not torch.compiler.is_exporting():
        _warn_of_views(signature, dict(zip(signature.tensors, arguments, strict=False)))


def _warn_of_views(signature: OperatorSignature, tensors: Mapping[str, Any]) -> None:
    """torch 2.13 writes to wrong places, without an error, where several arguments that a custom operator changes are
    views of one tensor that are made in the compiled function, or that begin elsewhere than when it was traced."""
    written = {name: tensors[name] for name in signature.written if tensors.get(name) is not None}
    storages = [tensor.untyped_storage()._cdata for tensor in written.values()]
    if len(set(storages)) < len(storages):
        warnings.warn(
            f"{signature.op} in a compiled function: {' and '.join(written)} are views of one tensor, which torch may "
            "fill wrongly (docs/graphs.md, what cannot be done): give it tensors of their own, or call it uncompiled",
            TracingWarning,
            stacklevel=2,
        )


def without_gradient(signature: OperatorSignature, *arguments: Any) -> None:
    """The operator where something may be differentiated, which none of its tensors can be."""
    if torch.is_grad_enabled():
        for name, tensor in zip(signature.tensors, arguments, strict=False):
            if tensor is not None and tensor.requires_grad:
                limit = f"{signature.op} writes in place and has no gradient: call it under torch.no_grad()"
                raise ArgumentError(signature.op, f"{name}.requires_grad", True, limit)
    with torch._C._AutoDispatchBelowAutograd():
        getattr(torch.ops.portattn, signature.op)(*arguments)
