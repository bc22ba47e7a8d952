"""Run requests that fill a cache in place: they have no result, no gradient and no autocast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from portattn.api.execute import lookup, run_request
from portattn.api.request import Request, request_of
from portattn.api.torch_ops import WRITING, arguments_of
from portattn.api.transform_checks import are_dispatched, are_transformed, check_has_storage
from portattn.api.unknown_arguments import short_traceback
from portattn.schema.tensors import POINTER_ALIGNMENT


def write(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
    """Run a call: from the launch cache if its shape class is cached, otherwise by planning it.

    tensors, values  in the Request's order; `backend` and `validate` come last among values
    arguments        all of them by the caller's names
    """
    if torch.compiler.is_dynamo_compiling():
        by_operator(op, tensors, values)
        return
    if lookup(op, tensors, values, ()) is not None:
        return
    with short_traceback:
        carry_out(request_of(op, arguments))


def carry_out(request: Request) -> None:
    """Run a request by its plan, a recorded or transformed one by the torch operator."""
    tensors, values, _ = request.parts
    if are_transformed(tensors) or are_dispatched(tensors) or torch._C._are_functorch_transforms_active():
        by_operator(request.op, tensors, values)
        return
    check_has_storage(request.op, request.named_tensors)
    run_request(request)


def nowhere(request: Request) -> None:
    """Make a request write nothing with the same launches: its tokens get no slot."""
    for name in ("slots", "seqlens_k"):
        tensor = request.tensors.get(name)
        if isinstance(tensor, torch.Tensor):
            before = 0 if tensor.is_meta else tensor.data_ptr() % POINTER_ALIGNMENT // tensor.element_size()
            memory = torch.full((before + tensor.numel(),), -1, dtype=tensor.dtype, device=tensor.device)
            request.tensors[name] = memory[before:].view(tensor.shape)


def by_operator(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Call the torch operator. Traced by dynamo: plain Python alone."""
    getattr(torch.ops.portattn, op)(*arguments_of(op, tensors, values, (), WRITING))
