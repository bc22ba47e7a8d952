"""DTensors in a call over several ranks: their local tensors, and results that are DTensors again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from portattn.distributed.groups import Ranks
from portattn.errors import ArgumentError

_HINT = "redistribute it, or give local tensors"


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """How q, k and v lie.

    by_heads  each rank has all rows of some heads, so that nothing is left to exchange
    out, lse  make DTensors of the local results
    """

    by_heads: bool
    out: Callable[[torch.Tensor], torch.Tensor]
    lse: Callable[[torch.Tensor], torch.Tensor]


def are_placed(tensors: Sequence[Any]) -> bool:
    """Whether one of them is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def dtensor_layout(
    op: str, dims: Sequence[Ranks], tensors: dict[str, Any], axes: tuple[int, int, int]
) -> DTensorLayout:
    """How DTensors lie, all of which must lie alike: along each dimension of the ranks by rows, or along each by heads.

    axes  of sequences of the batch, of heads and of rows

    Raises ArgumentError for other placements.
    """
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
