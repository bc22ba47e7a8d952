"""An operation's result in the caller's memory, as engines need it, written by the kernel itself if possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portattn.api import ops
from portattn.api.execute import lookup
from portattn.api.signatures import arguments_as_parts
from portattn.api.torch_ops import RETURNS_LSE
from portattn.api.transform_checks import transformed_or_traced
from portattn.config import current
from portattn.errors import ArgumentError
from portattn.launch.cache import kinds
from portattn.launch.native import reader
from portattn.schema.ops import ROWS
from portattn.schema.tensors import POINTER_ALIGNMENT
from portattn.validate.checks import check_dense

# A byte holds two numbers: v's width is not the result's.
_PACKED = torch.uint8


def into(place: torch.Tensor, op: str, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call an operation for inference, with its result written into `place`, which is returned.

    Kernels write into it if the call is cached and `place` is as such a call would allocate it: contiguous, from a
    multiple of 16 bytes on, and apart from q, k and v. Otherwise the result is copied. Raises as the operation does,
    and ArgumentError if `place` is not as the result or requires a gradient, or return_lse is requested; nothing is
    written then.

    Args:
        place: of the result's shape and dtype, on q's device, any strides
        op: the operation's name, "paged_attention" say; not with return_lse
        args, kwargs: the operation's own arguments
    """
    if torch.compiler.is_dynamo_compiling():
        return place.copy_(getattr(ops, op)(*args, **kwargs))
    if not isinstance(place, torch.Tensor):
        raise ArgumentError(op, "place", type(place).__name__, "must be a torch.Tensor")
    if op not in RETURNS_LSE:
        raise ArgumentError(op, "op", op, f"must be one of {', '.join(sorted(RETURNS_LSE))}")
    check_dense(op, "place", place)
    tensors, values, lengths = arguments_as_parts(op)(*args, **kwargs)
    if values[RETURNS_LSE[op]]:
        given = values[RETURNS_LSE[op]]
        raise ArgumentError(op, "return_lse", given, "must be False: there is a place for out alone")
    if place.requires_grad:
        raise ArgumentError(op, "place.requires_grad", True, "must be False: results in given memory have no gradient")
    # Tensors of torch.func have no memory to look at, and nested ones no sizes.
    plain = not (transformed_or_traced() or any(isinstance(t, torch.Tensor) and t.is_nested for t in tensors[:3]))
    if plain and _launched(op, tensors, values, lengths, place):
        return place
    if plain and _as_allocated(place, tensors, ROWS[op].latent):
        found = lookup(op, tensors, values, lengths, place)
        if found is not None:
            return place
    result = getattr(ops, op)(*args, **kwargs)
    if result.requires_grad:
        limit = "must be False of all arguments: results in given memory have no gradient (torch.no_grad())"
        raise ArgumentError(op, "requires_grad", True, limit)
    if place.shape != result.shape or place.dtype != result.dtype or place.device != result.device:
        is_, must = (f"{tuple(t.shape)}, {t.dtype}, {t.device}" for t in (place, result))
        raise ArgumentError(op, "place", is_, f"must be as the result: {must}")
    return place.copy_(result)


def _launched(op: str, tensors: Any, values: Any, lengths: Any, place: torch.Tensor) -> bool:
    """Return whether native.c knew the call, found `place` as it would allocate it, and launched the kernels.
    It reads the shape, strides, dtype, device and address in less time than Python takes for one of them."""
    if reader() is None or torch._C._is_any_autocast_enabled() or place.is_neg():
        return False
    known, settings = kinds(op, values), current()
    if not known or not _apart(place, tensors):
        return False
    for kind in known:
        if kind.hit is not None:
            found = kind.hit(tensors, values, lengths, settings, place, None, None)
            if found is not None and found is not NotImplemented:
                return True
    return False


def _apart(place: torch.Tensor, tensors: Sequence[Any]) -> bool:
    """Return whether q, k and v lie in other memory; False for sparse tensors, which the operation refuses."""
    memory = place.untyped_storage().data_ptr()
    return all(
        isinstance(t, torch.Tensor) and t.layout is torch.strided and t.untyped_storage().data_ptr() != memory
        for t in tensors[:3]
    )


def _as_allocated(place: torch.Tensor, tensors: Sequence[Any], latent: bool) -> bool:
    """Return whether a call of these tensors would allocate such memory. latent: v is a whole row, wider than out."""
    q, k, v = tensors[:3]
    if not all(isinstance(t, torch.Tensor) for t in (q, k, v)) or torch._C._is_any_autocast_enabled():
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    if (
        (v.dtype is _PACKED and not latent)
        or place.dtype != q.dtype
        or place.device != q.device
        or not place.is_contiguous()
    ):
        return False
    width = (q if latent else v).shape[-1]
    if place.shape[:-1] != q.shape[:-1] or place.shape[-1] != width or place.is_neg():
        return False
    if not place.numel() or place.data_ptr() % POINTER_ALIGNMENT:
        return False
    return _apart(place, tensors)
