"""What the torch operators do that fill a cache: write, check shapes, refuse gradients."""

from __future__ import annotations

from typing import Any

import torch

from portattn.api.operators import Signature
from portattn.api.perform import carried_out, found_cached
from portattn.api.request import request_from
from portattn.errors import ArgumentError


def write(signature: Signature, *arguments: Any) -> None:
    """The operator: the call is carried out, and nothing returned."""
    parts = signature.split(arguments)
    with torch.no_grad():  # what requires gradients was refused before
        if found_cached(signature.op, *parts) is None:
            carried_out(request_from(signature.op, *parts))


def check(signature: Signature, *arguments: Any) -> None:
    """All that is known of arguments without data. Sizes may be symbolic, and then nothing is."""
    parts = signature.split(arguments)
    sizes = [size for tensor in parts[0] if tensor is not None for size in (*tensor.shape, *tensor.stride())]
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        request_from(signature.op, *parts).build()


def without_gradient(signature: Signature, *arguments: Any) -> None:
    """The operator where something may be differentiated, which none of its tensors can be."""
    if torch.is_grad_enabled():
        for name, tensor in zip(signature.tensors, arguments, strict=False):
            if tensor is not None and tensor.requires_grad:
                limit = f"{signature.op} writes in place and has no gradient: call it under torch.no_grad()"
                raise ArgumentError(signature.op, f"{name}.requires_grad", True, limit)
    with torch._C._AutoDispatchBelowAutograd():
        getattr(torch.ops.portattn, signature.op)(*arguments)
