"""What the ranks of the tests of sharded caches run: each makes the whole call by the same seed, keeps its own part of
the cache, and judges the merged result against the float64 oracle of the whole."""

from __future__ import annotations

from typing import Any

import opcalls
import torch
import torch.distributed as dist

from portattn.distributed import CacheShard, decode_parallel
from portattn.testing import tolerance

GARBAGE_PAGE = 5  # the page size of a rank's pages is its own: other than that of the whole cache


def attend(
    name: str, fields: dict[str, Any], seed: int, interleave: int, heads: str, lengths: list[int] | None = None
) -> dict[str, Any]:
    """A random call of opcalls.CALLS over a shard: {error, budget, …, bits}, bits of the whole result."""
    call = tolerance.random_call(opcalls.problem(name, **fields), seed)
    if lengths is not None:
        assert call.seqlens_k is not None
        call.seqlens_k.copy_(torch.tensor(lengths, dtype=torch.int32))
    arguments = opcalls.given(call)
    parallel = decode_parallel(interleave=interleave, heads=heads)  # type: ignore[arg-type]
    local = sharded(arguments, parallel.shard)
    before = {key: value.clone() for key, value in local.items() if isinstance(value, torch.Tensor)}
    out, lse = getattr(parallel, call.problem.op)(**local)
    for key, value in before.items():
        assert torch.equal(bits(local[key]), bits(value)), f"{key} was changed"
    packed = call.problem.packed
    axis = {True: 1, False: 1 if call.problem.layout == "bhsd" else 2}[bool(packed)]
    if heads == "shard":
        out, lse = gathered(out, axis), gathered(lse, 0 if packed else 1)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    shown = out.transpose(0, 1)[None] if packed else out.transpose(1, 2) if call.problem.layout == "bshd" else out
    facts = tolerance.judge(call, shown, lse[None] if packed else lse)
    return facts | {"bits": bits(out).numpy().tobytes() + bits(lse).numpy().tobytes()}


def sharded(arguments: dict[str, Any], shard: CacheShard) -> dict[str, Any]:
    """The arguments with this rank's part of the caches: NaN in every row that it does not own."""
    found = dict(arguments)
    if "k_cache" in found:
        axis = 2 if found["layout"] == "bhsd" else 1
        for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            if name in found and found[name].ndim > 2:
                found[name] = part(found[name], axis, shard)
        return found
    table = found["page_table"]
    latent = "kv_pages" in found
    inside = 1 if latent or found["page_layout"] == "phd" else 2
    for name in ("k_pages", "v_pages", "kv_pages", "k_scale", "v_scale", "kv_scale"):
        if name in found and found[name].ndim > 1:
            rows, pages = repaged(found[name], table, inside, shard)
            found[name], found["page_table"] = rows, pages
    return found


def part(rows: torch.Tensor, axis: int, shard: CacheShard) -> torch.Tensor:
    """Rows of a sequence that the rank holds, and two more."""
    total = rows.shape[axis]
    capacity = -(-total // (shard.world_size * shard.interleave)) * shard.interleave + 2
    places = shard.positions(capacity)
    found = rows.index_select(axis, places.clamp(max=max(total - 1, 0)))
    beyond = (places >= total).reshape([-1 if at == axis else 1 for at in range(rows.ndim)])
    nothing = float("nan") if rows.is_floating_point() and rows.dtype.itemsize > 1 else 0
    return torch.where(beyond, torch.tensor(nothing, dtype=rows.dtype), found)


def repaged(
    pages: torch.Tensor, table: torch.Tensor, inside: int, shard: CacheShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's pages of another size, in another order, among pages of NaN; and their table."""
    page, batch = pages.shape[inside], table.shape[0]
    known = table.clamp(0, pages.shape[0] - 1).long()
    rows = pages.movedim(inside, 1)[known].flatten(1, 2)  # (B, rows, …)
    mine = part(rows, 1, shard)
    short = -mine.shape[1] % GARBAGE_PAGE
    pad = torch.full((batch, short, *mine.shape[2:]), 0).to(mine.dtype)
    if pad.is_floating_point() and pad.dtype.itemsize > 1:
        pad.fill_(float("nan"))
    mine = torch.cat([mine, pad], 1).unflatten(1, (-1, GARBAGE_PAGE))  # (B, pages, page, …)
    count = mine.shape[1]
    order = torch.randperm(batch * count + 3, generator=torch.Generator().manual_seed(shard.rank + page))[
        : batch * count
    ]
    found = torch.full((batch * count + 3, *mine.shape[2:]), 0).to(mine.dtype)
    if found.is_floating_point() and found.dtype.itemsize > 1:
        found.fill_(float("nan"))
    found[order] = mine.flatten(0, 1)
    return found.movedim(1, inside), order.reshape(batch, count).to(torch.int32)


def gathered(local: torch.Tensor, axis: int) -> torch.Tensor:
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts, axis)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
