"""Calls of the gradients of attention, varlen_attention and block_sparse_attention.

api/backward.py makes them of arguments that the forward has validated, its results, and their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from portattn.errors import ArgumentError
from portattn.schema.call import Call
from portattn.schema.ops import BACKWARD, CAPTURED_GRADIENTS
from portattn.schema.problem import Problem
from portattn.validate.checks import is_large, reachable, rows_aligned, starts_aligned
from portattn.validate.dense import dense_call, packed, varlen_call
from portattn.validate.sparse import block_call


def dense_backward_call(**given: Any) -> Call:
    lists = given.pop("block_queries")
    call = _call(dense_call, given, _view(given), lambda lse: lse)
    if call.block_mask is not None:
        down, places = call.block_mask.shape[2:]
        shape = places - 2, down + 2
        if lists is None or lists.ndim != 4 or lists.shape[2:] != shape or lists.stride(3) != 1:
            limit = f"must be contiguous, (B, Hq, {shape[0]}, {shape[1]}), beside block_mask"
            given_shape = None if lists is None else tuple(lists.shape)
            raise ArgumentError(call.problem.op, "block_queries.shape", given_shape, limit)
        call.block_queries = lists.expand(*call.block_mask.shape[:2], *shape)
    return call


def block_backward_call(**given: Any) -> Call:
    listed = ("block_rows", "block_starts", "block_chunks")
    call = _call(block_call, {name: given[name] for name in given if name not in listed}, _view(given), lambda lse: lse)
    for name in listed:
        setattr(call, name, given[name])
    return call


def _view(given: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    swapped = given["layout"] == "bshd"
    return lambda tensor: tensor.transpose(1, 2) if swapped else tensor


def varlen_backward_call(**given: Any) -> Call:
    return _call(varlen_call, given, packed, lambda lse: lse[None])


_RESULTS = ("forward_out", "grad_out", "grad_q", "grad_k", "grad_v")  # laid out as q, k and v are
_BY_ROW = ("forward_lse", "grad_lse", "grad_slopes")


def _call(
    forward: Callable[..., Call],
    given: Mapping[str, Any],
    view: Callable[[torch.Tensor], torch.Tensor],
    by_row: Callable[[torch.Tensor], torch.Tensor],
) -> Call:
    """Build the forward's Call and add the backward's tensors, like q by `view` and with a number a row by `by_row`."""
    own = (*_RESULTS, *_BY_ROW, "grad_bias", *CAPTURED_GRADIENTS, "deterministic")
    call = forward(**{name: value for name, value in given.items() if name not in own})
    op = BACKWARD[call.problem.op]
    tensors: dict[str, Any] = {name: view(given[name]) for name in _RESULTS}
    tensors |= {name: None if given.get(name) is None else by_row(given[name]) for name in _BY_ROW}
    tensors |= {name: given.get(name) for name in ("grad_bias", *CAPTURED_GRADIENTS)}
    out, rows = (*call.q.shape[:3], call.v.shape[3]), tuple(call.q.shape[:3])
    shapes = {
        "forward_out": out, "grad_out": out, "grad_q": tuple(call.q.shape),
        "grad_k": tuple(call.k.shape), "grad_v": tuple(call.v.shape),
        "forward_lse": rows, "grad_lse": rows, "grad_slopes": rows,
    }  # fmt: skip
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ArgumentError(op, f"{name}.shape", tuple(tensor.shape), f"must be {shape}")
        dtype = torch.float32 if name in _BY_ROW else call.q.dtype
        if tensor.dtype != dtype:
            raise ArgumentError(op, f"{name}.dtype", tensor.dtype, f"must be {dtype}")
        if name in _BY_ROW and not tensor.is_contiguous():
            raise ArgumentError(op, f"{name}.stride()", tensor.stride(), "must be contiguous")
    for name in ("grad_q", "grad_k", "grad_v"):
        if tensors[name].shape[3] > 1 and tensors[name].stride(3) != 1:
            raise ArgumentError(op, f"{name}.stride(-1)", tensors[name].stride(3), "must be 1")
    read = {name: reachable(tensors[name].resolve_neg()) for name in ("forward_out", "grad_out")}
    copied = call.copied or any(read[name] is not tensors[name] for name in read)
    tensors |= read
    laid_out = [tensors[name] for name in _RESULTS]
    made: Problem = msgspec.structs.replace(
        call.problem,
        op=op,
        return_lse=False,
        needs_grad=False,
        aligned=call.problem.aligned
        and all(rows_aligned(tensor) for tensor in laid_out)
        and starts_aligned(tensors["forward_lse"]),
        large=call.problem.large or is_large(*laid_out),
        grad_lse=tensors["grad_lse"] is not None,
        grad_bias=tensors["grad_bias"] is not None,
        grad_slopes=tensors["grad_slopes"] is not None,
        grad_captured=sum(1 << n for n, name in enumerate(CAPTURED_GRADIENTS) if tensors[name] is not None),
        deterministic=given["deterministic"],
    )
    for name, tensor in tensors.items():
        setattr(call, name, tensor)
    call.problem, call.copied = made, copied
    return call
