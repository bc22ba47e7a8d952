"""What the ranks of the tests of gradients run: losses that are not the same on each rank."""

from typing import Any

import torch
import torch.distributed as dist

import portattn
from portattn.distributed import context_parallel


def losses_that_differ(method: str) -> dict[str, float]:
    """By leaf: the largest error. The first rank takes out and LSE, the second out alone, a third the LSE alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shared, generator = context_parallel(method=method), torch.Generator().manual_seed(5)
    whole = {name: torch.randn(1, 6, 12, 8, generator=generator).requires_grad_() for name in "qkv"}
    mine = {name: shared.shard(tensor.detach()).requires_grad_() for name, tensor in whole.items()}

    def loss(at: int, out: Any, lse: Any) -> Any:
        return (out.square().sum() if at < 2 else 0.0) + (lse.sum() if at != 1 else 0.0)

    loss(rank, *shared.attention(*mine.values(), causal=True, return_lse=True)).backward()
    out, lse = portattn.attention(whole["q"], whole["k"], whole["v"], causal=True, return_lse=True)
    total = torch.zeros(())
    for at in range(world):
        place = (at, 0) if method == "ring" else (0, at)
        rows = torch.cat([torch.arange(*span) for span in shared.shards.rows(12, *place)])
        total = total + loss(at, out[:, :, rows], lse[:, :, rows])
    total.backward()
    return {name: float((mine[name].grad - shared.shard(whole[name].grad)).abs().max()) for name in "qkv"}  # type: ignore
