"""Arguments of one call over several ranks: checks, normalised values, and values that ranks compare."""

from __future__ import annotations

import itertools
import numbers
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from portattn.api.signatures import request_of
from portattn.distributed.collectives import Ranks
from portattn.distributed.sharding import Documents, Mask, Shards
from portattn.errors import ArgumentError
from portattn.validate.checks import shape_or_value

_AXES = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1)}  # of sequences, of heads, of rows
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WHOLE = "portattn.attention takes it where one device has the whole sequence"


def axes(op: str, layout: Any) -> tuple[int, int, int]:
    """Return a layout's axes of sequences, heads and rows."""
    if not isinstance(layout, str) or layout not in _AXES:
        raise ArgumentError(op, "layout", layout, "must be one of bhsd, bshd")
    return _AXES[layout]


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a call, with q, k and v as views (B, H, S, D); packed rows have B = 1."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    length: int
    mask: Mask
    documents: Documents | None
    scale: float | None
    causal: bool | str
    window: Any
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    backend: str | None


def check_rows(op: str, given: dict[str, Any], packed: bool) -> None:
    """Raise ArgumentError unless q, k and v are tensors of the same rows and the options work on one rank's rows."""
    for name in "qkv":
        tensor = given[name]
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(op, name, type(tensor).__name__, "must be a torch.Tensor")
        if tensor.ndim != (3 if packed else 4):
            limit = "must be (rows, heads, head_dim)" if packed else "must have four axes"
            raise ArgumentError(op, f"{name}.shape", tuple(tensor.shape), limit)
        if tensor.dtype != given["q"].dtype:
            limit = f"must be q's, {given['q'].dtype}: quantised operands are not taken over several ranks"
            raise ArgumentError(op, f"{name}.dtype", tensor.dtype, limit)
    if given["q"].dtype not in _DTYPES:
        limit = "must be float16, bfloat16 or float32 over several ranks"
        raise ArgumentError(op, "q.dtype", given["q"].dtype, limit)
    if not _is_nothing(given["dropout_p"]):
        limit = "must be 0: dropout is not computed over several ranks, whose masks would have to be parts of one"
        raise ArgumentError(op, "dropout_p", given["dropout_p"], limit)
    for name in ("chunk", "bias", "mask", "seqlens_q", "seqlens_k"):
        value = given.get(name)
        if value is not None:
            raise ArgumentError(op, name, shape_or_value(value), f"must be None over several ranks: {_WHOLE}")


def _is_nothing(dropout_p: Any) -> bool:
    return dropout_p is None or (isinstance(dropout_p, numbers.Real) and dropout_p == 0)


def check_arguments(
    op: str, shards: Shards, given: dict[str, Any], documents: Documents | None, by_heads: bool
) -> Arguments:
    """Return the checked arguments of a call; with `by_heads`, q, k and v have all rows of some heads."""
    packed = documents is not None
    q, k, v = given["q"], given["k"], given["v"]
    row_axis = 0 if packed else axes(op, given["layout"])[2]
    local = q.shape[row_axis]
    for name in "kv":
        if given[name].shape[row_axis] != local:
            limit = f"must be q's, {local}: queries and keys are of the same rows, cut alike"
            raise ArgumentError(op, f"{name}.shape[{row_axis}]", given[name].shape[row_axis], limit)
    if packed:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    elif given["layout"] == "bshd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    slopes = given["alibi_slopes"]
    sequences = q.shape[0] if documents is None else len(documents.cu) - 1
    if isinstance(slopes, torch.Tensor) and slopes.ndim == 2 and packed:
        if tuple(slopes.shape) != (sequences, q.shape[1]):
            limit = f"must be ({q.shape[1]},) or ({sequences}, {q.shape[1]}), of documents and heads"
            raise ArgumentError(op, "alibi_slopes.shape", tuple(slopes.shape), limit)
        slopes = slopes[:1] if sequences else None
    views = {"q": q, "k": k, "v": v, "layout": "bhsd", "alibi_slopes": slopes, "return_lse": given["return_lse"]}
    try:
        request_of("attention", **given | views).build()
    except ArgumentError as error:
        raise ArgumentError(op, error.argument, error.value, error.limit) from None
    length = local if by_heads else local * shards.ranks
    if length % shards.unit and not by_heads:
        each = shards.unit // shards.ranks
        limit = f"must be a multiple of {each}: {shards.layout} shards over {shards.ranks} ranks are of sequences that "
        limit += f"{shards.unit} divides"
        raise ArgumentError(op, f"q.shape[{row_axis}]", local, limit)
    if documents is not None and documents.cu[-1] > length:
        limit = f"must be at most {length}, the rows of all ranks together"
        raise ArgumentError(op, "cu_seqlens[-1]", documents.cu[-1], limit)
    if not by_heads:
        _check_heads(op, shards, q.shape[1], given["alibi_slopes"])
    return Arguments(
        q, k, v, length, mask_of(given["causal"], given["window"]), documents, given["scale"], given["causal"],
        given["window"], given["softcap"], given["alibi_slopes"], given["sinks"], given["backend"],
    )  # fmt: skip


def _check_heads(op: str, shards: Shards, heads: int, slopes: Any) -> None:
    if heads % shards.inner:
        limit = f"must be a multiple of {shards.inner}, the ranks that Ulysses shares them out to"
        raise ArgumentError(op, "q's heads", heads, limit)
    if shards.ring > 1 and isinstance(slopes, torch.Tensor) and slopes.requires_grad and torch.is_grad_enabled():
        limit = "must be False: a ring does not compute the slopes' gradient (hint: method='ulysses' does, or detach())"
        raise ArgumentError(op, "alibi_slopes.requires_grad", True, limit)


def mask_of(causal: Any, window: Any) -> Mask:
    """Return the joint window of a causal mask and a window, for as many queries as keys."""
    left, right = (None if side is None or side < 0 else side for side in window or (None, None))
    return Mask(left, 0 if causal else right)


def documents_of(op: str, cu_seqlens: Any) -> Documents:
    """Return the documents of cu_seqlens, which a device's tensor reads back."""
    if isinstance(cu_seqlens, Documents):
        return cu_seqlens
    if not isinstance(cu_seqlens, (torch.Tensor, list, tuple)):
        raise ArgumentError(op, "cu_seqlens", type(cu_seqlens).__name__, "must be a torch.Tensor (documents + 1,)")
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            what = f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
            raise ArgumentError(op, "cu_seqlens", what, "must be (documents + 1,) of int32 or int64")
        cu_seqlens = cu_seqlens.tolist()
    cu = tuple(cu_seqlens)
    if not all(isinstance(place, int) for place in cu):
        raise ArgumentError(op, "cu_seqlens", cu, "must be integers")
    if not cu or cu[0] != 0 or any(stop < start for start, stop in itertools.pairwise(cu)):
        raise ArgumentError(op, "cu_seqlens", cu, "must begin with 0 and never fall")
    return Documents(cu)


def description(given: dict[str, Any], documents: Documents | None, fixed: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values that must be the same on every rank, by argument."""
    grad = torch.is_grad_enabled()
    said: dict[str, Any] = {}
    for name in "qkv":
        said[f"{name}.shape"] = tuple(given[name].shape)
    said["dtype"], said["device"] = given["q"].dtype, given["q"].device.type
    for name in ("alibi_slopes", "sinks"):
        tensor = given[name]
        said[f"{name}.shape"] = None if tensor is None else tuple(tensor.shape)
    for name in ("scale", "causal", "window", "softcap", "backend", "layout"):
        said[name] = given.get(name)
    for name in ("q", "k", "v", "sinks", "alibi_slopes"):
        # Of each: a backward pass sends what its own tensors' gradients need, and ranks would wait for one another.
        tensor = given[name]
        said[f"whether gradients of {name} are asked for"] = grad and tensor is not None and tensor.requires_grad
    if documents is not None:
        cu, more = documents.cu, len(documents.cu) - _SHOWN
        said["cu_seqlens"] = cu if more <= 0 else (*cu[:_SHOWN], f"{more} more, which hash to {hash(documents):x}")
    return said | dict(fixed)


_SHOWN = 16  # beginnings of documents that an error shows


_HINT = "redistribute it, or give local tensors"


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """Layout of q, k and v, and makers of DTensors; `by_heads`: each rank has all rows of some heads."""

    by_heads: bool
    out: Callable[[torch.Tensor], torch.Tensor]
    lse: Callable[[torch.Tensor], torch.Tensor]


def are_placed(tensors: Sequence[Any]) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def dtensor_layout(
    op: str, dims: Sequence[Ranks], tensors: dict[str, Any], axes: tuple[int, int, int]
) -> DTensorLayout:
    """Return the layout of DTensors, which must be sharded alike by rows or by heads; axes: batch, heads, rows."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    q = tensors["q"]
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            raise ArgumentError(op, name, type(tensor).__name__, "q, k and v must all be DTensors, or none of them")
        if tensor.device_mesh != q.device_mesh:
            raise ArgumentError(op, f"{name}.device_mesh", tensor.device_mesh, "must be q's")
        if tuple(tensor.placements) != tuple(q.placements):
            raise ArgumentError(op, f"{name}.placements", tensor.placements, f"must be q's, {q.placements}")
    mesh, placements = q.device_mesh, tuple(q.placements)
    members = [tuple(dist.get_process_group_ranks(mesh.get_group(place))) for place in range(mesh.ndim)]
    ours = [members.index(ranks.members) for ranks in dims if ranks.members in members]
    if len(ours) < len(dims):
        raise ArgumentError(op, "q.device_mesh", mesh, "must have the dimensions that context_parallel was given")
    batch, heads, rows = axes
    by = {placements[place] for place in ours}
    if by not in ({Shard(rows)}, {Shard(heads)}):
        limit = f"must be Shard({rows}), of the rows, or Shard({heads}), of the heads, over these ranks ({_HINT})"
        raise ArgumentError(op, "q.placements", placements, limit)
    for place, placement in enumerate(placements):
        if place not in ours and placement not in (Replicate(), Shard(batch), Shard(heads)):
            limit = f"must be whole or sharded by sequences or heads over other ranks ({_HINT})"
            raise ArgumentError(op, "q.placements", placements, limit)
    of_lse = {batch: 0, heads: 1, rows: 2}
    for name, tensor in tensors.items():
        for place in range(mesh.ndim):
            placement = placements[place]
            if isinstance(placement, Shard) and tensor.shape[placement.dim] % mesh.size(place):
                limit = f"must be a multiple of {mesh.size(place)}, the ranks over which it is sharded"
                raise ArgumentError(op, f"{name}.shape[{placement.dim}]", tensor.shape[placement.dim], limit)
    lse = tuple(Shard(of_lse[p.dim]) if isinstance(p, Shard) else p for p in placements)
    return DTensorLayout(
        by == {Shard(heads)},
        lambda tensor: DTensor.from_local(tensor, mesh, placements, run_check=False),
        lambda tensor: DTensor.from_local(tensor, mesh, lse, run_check=False),
    )
