"""What the ranks of the tests of sharded caches run: each makes the whole call by the same seed, keeps its own part of
the cache, and judges the merged result against the float64 oracle of the whole."""

from typing import Any

import opcalls
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import portattn
from portattn.distributed import CacheShard, decode_parallel
from portattn.errors import ArgumentError
from portattn.testing import tolerance

GARBAGE_PAGE = 5  # the page size of a rank's pages is its own: other than that of the whole cache


def attend(name: str, fields: dict[str, Any], seed: int, interleave: int, heads: str, lengths: list[int] | None = None,
        poison: str = "apart", device: str = "cpu", compiled: bool = False) -> dict[str, Any]:  # fmt: skip
    """A random call of opcalls.CALLS over a shard: {error, budget, …, bits}, bits of the whole result."""
    call = tolerance.random_call(opcalls.problem(name, **fields), seed, poison=poison)  # type: ignore[arg-type]
    if lengths is not None:
        call.seqlens_k.copy_(torch.tensor(lengths, dtype=torch.int32))
    arguments = opcalls.given(call)
    parallel = decode_parallel(interleave=interleave, heads=heads)  # type: ignore[arg-type]
    local = {
        n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in sharded(arguments, parallel.shard).items()
    }
    before = {key: value.clone() for key, value in local.items() if isinstance(value, torch.Tensor)}
    function = getattr(parallel, call.problem.op)
    out, lse = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(**local)
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
    return facts | {"bits": bits(out).cpu().numpy().tobytes() + bits(lse).cpu().numpy().tobytes()}


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
        if name in found and found[name].ndim > 2 - (name == "kv_scale"):
            rows, pages = repaged(found[name], table, inside, shard)
            found[name], found["page_table"] = rows, pages
    return found


def part(rows: torch.Tensor, axis: int, shard: CacheShard) -> torch.Tensor:
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


def raised(change: str) -> str:
    """What a rank raises where the last rank, or every one, makes the call of `change`."""
    shard = CacheShard(dist.get_rank(), dist.get_world_size())
    last = shard.rank == shard.world_size - 1
    q, cache = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 10, 16)
    call: dict[str, Any] = {"q": q, "k_cache": cache, "v_cache": cache}
    call["seqlens_k"] = torch.tensor([7, 20], dtype=torch.int32)
    heads = "all"
    try:
        if change == "interleave":
            decode_parallel(interleave=2 if last else 1)
        elif change == "no interleave":
            decode_parallel(interleave=0 if last else 1)
        elif change == "mesh":
            decode_parallel(init_device_mesh("cpu", (2, shard.world_size // 2), mesh_dim_names=("dp", "cp")))
        elif change == "lengths":
            call["seqlens_k"] = call["seqlens_k"] - int(last)
        elif change == "queries" and last:
            call["q"] = q[:, :, [0, 0]]
        elif change == "scale" and last:
            call["scale"] = 0.5
        elif change == "one bad cache" and last:
            call["v_cache"] = cache[..., :3, :]
        elif change == "no lengths":
            call["seqlens_k"] = None
        elif change in ("bias", "mask", "tree_mask", "leftpad_k"):
            call[change] = torch.zeros(2, 4, 1, 10)
        elif change == "chunk":
            call["chunk"] = 4
        elif change == "gradient":
            call["q"] = q.clone().requires_grad_()
        elif change == "unknown":
            call["foo"] = 1
        elif change == "heads":
            heads, call["q"] = "shard", q[:, :2]
            call["k_cache"] = call["v_cache"] = cache[:, :1]
        decode_parallel(heads=heads).decode_attention(**call)  # type: ignore[arg-type]
    except ArgumentError as error:
        return str(error)
    return "nothing"


def collectives(heads: str) -> list[tuple[str, int]]:
    """(function, bytes) of each collective of one call without validation."""
    found: list[tuple[str, int]] = []
    parallel = decode_parallel(heads=heads, validate=False)  # type: ignore[arg-type]
    functions = {
        n: getattr(dist, n) for n in ("all_gather_into_tensor", "all_to_all_single", "all_gather", "all_reduce")
    }
    shard = parallel.shard
    q, cache = torch.randn(3, 4, 1, 16), torch.randn(3, 2, 10, 16)
    lengths = torch.tensor([7, 20, 0], dtype=torch.int32)
    try:
        for name, function in functions.items():
            setattr(dist, name, _noting(found, name, function))
        parallel.decode_attention(q, cache, cache, lengths, backend="reference", validate=False)
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)
    assert shard.world_size == dist.get_world_size()
    return found


def _noting(found: list[tuple[str, int]], name: str, function: Any) -> Any:
    def noted(output: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
        found.append((name, given.nbytes))
        return function(output, given, **options)

    return noted


def without_memory() -> dict[str, Any]:
    """Ranks but the first have no row of any sequence, and NaN in the pages that their tables name."""
    shard = CacheShard(dist.get_rank(), dist.get_world_size(), interleave=16)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((2, 4, 1, 8), (2, 2, 16, 8), (2, 2, 16, 8)))
    lengths = torch.tensor([16, 3], dtype=torch.int32)
    whole = portattn.decode_attention(q, k, v, lengths)
    mine = (k, v) if shard.rank == 0 else (k[:, :, :0], v[:, :, :0])
    found = decode_parallel(interleave=16).decode_attention(q, *mine, lengths)
    pages = [t.transpose(1, 2) if shard.rank == 0 else torch.full((2, 16, 2, 8), float("nan")) for t in (k, v)]
    table = torch.arange(2, dtype=torch.int32)[:, None]
    paged = decode_parallel(interleave=16).paged_attention(q, *pages, table, lengths)
    return {"contiguous": float((found - whole).abs().max()), "paged": float((paged - whole).abs().max())}


def appended(layout: str, interleave: int, quantised: bool) -> None:
    """Prefill, then tokens one and several at a time: parts are the rows of the whole cache, rotated as they are."""
    parallel, generator = decode_parallel(interleave=interleave), torch.Generator().manual_seed(1)
    batch, heads, rows, dim = 3, 2, 30, 8
    angles = torch.rand(rows, 2, generator=generator)
    rotary = {"cos": angles.cos(), "sin": angles.sin()}
    stored = torch.int8 if quantised else torch.float32
    size = (batch, heads, rows, dim) if layout == "bhsd" else (batch, rows, heads, dim)
    axis = 2 if layout == "bhsd" else 1
    whole = [torch.zeros(size, dtype=stored) for _ in "kv"]
    mine = [
        part(t, axis, parallel.shard).nan_to_num() if not quantised else part(t, axis, parallel.shard) for t in whole
    ]
    scales = [{}, {}]
    if quantised:
        scales = [{n: torch.zeros(c.shape[:-1]) for n in ("k_scale", "v_scale")} for c in (whole[0], mine[0])]
    lengths = torch.tensor([0, 4, -1], dtype=torch.int32)
    for count in (7, 1, 1, 5, 1):
        shape = (batch, heads, count, dim) if layout == "bhsd" else (batch, count, heads, dim)
        k, v = (torch.randn(shape, generator=generator) for _ in "kv")
        portattn.append_kv(k, v, *whole, lengths, layout=layout, **rotary, **scales[0])
        parallel.append_kv(k, v, *mine, lengths, layout=layout, **rotary, **scales[1])
        lengths = torch.where(lengths < 0, lengths, lengths + count)
    tensors = [*zip(whole, mine, strict=True)]
    if quantised:
        tensors += [(scales[0][name][..., None], scales[1][name][..., None]) for name in scales[0]]
    for all_rows, own in tensors:
        places = parallel.shard.positions(own.shape[axis])
        known = places < rows
        assert torch.equal(own.movedim(axis, 0)[known], all_rows.movedim(axis, 0)[places[known]])
        assert not own.movedim(axis, 0)[~known].any()
        assert all_rows.any()


def written_pages(interleave: int) -> float:
    """vLLM's way: slots from positions and this rank's page table; then paged attention over what was written."""
    parallel, generator = decode_parallel(interleave=interleave), torch.Generator().manual_seed(2)
    page, lengths = 4, [23, 0, 9]
    k, v = (torch.randn(sum(lengths), 2, 8, generator=generator) for _ in "kv")
    q = torch.randn(3, 4, 1, 8, generator=generator)
    sequences = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    seqlens_k = torch.tensor(lengths, dtype=torch.int32)
    pages = -(-int(parallel.shard.lengths(seqlens_k).max()) // page)
    order = torch.randperm(3 * pages + 2, generator=torch.Generator().manual_seed(parallel.shard.rank))[: 3 * pages]
    table = order.reshape(3, pages).to(torch.int32)
    caches = [torch.full((3 * pages + 2, page, 2, 8), float("nan")) for _ in "kv"]
    portattn.write_pages(k, v, *caches, parallel.shard.slots(positions, page, table, sequences))
    found = parallel.paged_attention(q, *caches, table, seqlens_k)
    cu_k = torch.tensor([0, 23, 23, 32], dtype=torch.int32)
    right = portattn.varlen_attention(q[:, :, 0], k, v, torch.arange(4, dtype=torch.int32), cu_k, 1, 23)
    return float((found[:, :, 0] - right).abs().max())


def compiled(heads: str) -> float:
    parallel = decode_parallel(heads=heads)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((2, 4, 1, 8), (2, 2, 16, 8), (2, 2, 16, 8)))
    k, v = (part(t, 2, parallel.shard) for t in (k, v))
    lengths = torch.tensor([16, 3], dtype=torch.int32)
    function = torch.compile(parallel.decode_attention, fullgraph=True, backend="eager")
    found = function(q, k, v, lengths, window=(9, 0))
    return float((found - parallel.decode_attention(q, k, v, lengths, window=(9, 0))).abs().max())
