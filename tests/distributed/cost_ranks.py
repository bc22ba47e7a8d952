"""What the ranks of the tests of costs run: calls whose messages are counted."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from portattn.distributed import context_parallel, decode_parallel


def sent(q: tuple[int, ...], kv: tuple[int, ...], inner: int, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    """{forward, backward}: (bytes to other ranks, messages)."""
    world = dist.get_world_size()
    method = "ulysses" if inner == world else None
    mesh: Any = None
    if 1 < inner < world:
        mesh = init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("ring", "heads"))
    shared, length = context_parallel(mesh, method=method, layout=layout), q[2] // world
    tensors = [torch.randn(*sizes[:2], length, sizes[3], dtype=torch.bfloat16).requires_grad_()
        for sizes in (q, kv, kv)]  # fmt: skip
    found: dict[str, Any] = {}
    counted = [0, 0]
    batch, exchange = dist.batch_isend_irecv, dist.all_to_all_single

    def of_batch(operations: Any) -> Any:
        for operation in operations:
            if operation.op is dist.isend:
                counted[0] += operation.tensor.nbytes
                counted[1] += 1
        return batch(operations)

    def of_exchange(into: Any, given: Any, received: Any, sizes: Any, group: Any) -> Any:
        own = dist.get_rank(group)
        counted[0] += sum(size for place, size in enumerate(sizes) if place != own) * given.element_size()
        counted[1] += 1
        return exchange(into, given, received, sizes, group=group)

    dist.batch_isend_irecv, dist.all_to_all_single = of_batch, of_exchange
    try:
        out = shared.attention(*tensors, **options)
        found["forward"] = (counted[0], counted[1])
        counted[:] = [0, 0]
        out.float().sum().backward()  # type: ignore[union-attr]
        found["backward"] = (counted[0], counted[1])
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single = batch, exchange
    return found


def decoded(q: tuple[int, ...], kv: tuple[int, ...], heads: str) -> int:
    """Bytes that a rank gives to the collective of one call, its own part among them."""
    shared = decode_parallel(heads=heads, validate=False)  # type: ignore[arg-type]
    cache = torch.randn(kv[0], kv[1], -(-kv[2] // dist.get_world_size()), kv[3], dtype=torch.bfloat16)
    found = []
    gather, exchange = dist.all_gather_into_tensor, dist.all_to_all_single

    def noting(function: Any) -> Any:
        def noted(into: Any, given: Any, group: Any) -> Any:
            found.append(given.nbytes)
            return function(into, given, group=group)

        return noted

    dist.all_gather_into_tensor, dist.all_to_all_single = noting(gather), noting(exchange)
    try:
        lengths = torch.full((q[0],), kv[2], dtype=torch.int32)
        shared.decode_attention(torch.randn(q, dtype=torch.bfloat16), cache, cache, lengths)
    finally:
        dist.all_gather_into_tensor, dist.all_to_all_single = gather, exchange
    return found[0]
