"""Cases of scripts/context_parallel_times.py: results and gradients over several ranks against float64 on each of them.

Every rank makes the same whole tensors, gives its own part to portattn, and the parts are gathered and judged under the
project's error budget (portattn.testing.tolerance), in numbers that a GPU's fast kernels take. What no call may read is
NaN: rows behind the last document, rows of a cache past its lengths.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from portattn.distributed import CacheShard, context_parallel, decode_parallel
from portattn.testing.tolerance import LSE_LEAST, budget, count_misplaced, largest

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BASE: dict[str, Any] = {"batch": 1, "heads": (8, 2), "length": 1024, "width": 128, "dtype": "bf16", "causal": True}
CUTS = (0, 96, 100, 470, 471, 800, 960)  # of 1024 rows; 64 are padding
RING: dict[str, dict[str, Any]] = {
    "ring, zigzag": {},
    "ring, zigzag, without a mask": {"causal": False},
    "ring, zigzag, bshd, fp16, two sequences": {"bshd": True, "dtype": "fp16", "batch": 2, "width": 64},
    "ring, contiguous, gradient of the LSE": {"layout": "contiguous", "grad_lse": True},
    "ring, window": {"window": (100, 0), "causal": False},
    "ring, sinks and softcap": {"sinks": True, "softcap": 3.0},
    "ring, ALiBi": {"alibi": True},
    "ring, fp32, values of another width": {"dtype": "fp32", "width": 64, "width_v": 32},
    "ring, DTensors": {"dtensor": True},
    "ring, packed": {"cu": CUTS},
    "ring, packed, contiguous, window": {"cu": CUTS, "layout": "contiguous", "window": (150, 0), "causal": False},
}
ULYSSES: dict[str, dict[str, Any]] = {
    "ulysses": {"method": "ulysses"},
    "ulysses, one key head": {"method": "ulysses", "heads": (8, 1), "grad_lse": True},
    "ulysses, window, sinks": {"method": "ulysses", "window": (100, 0), "sinks": True},
    "ulysses, packed": {"method": "ulysses", "cu": CUTS},
}
DECODE: dict[str, dict[str, Any]] = {
    "decode, contiguous": {"kind": "contiguous"},
    "decode, contiguous, compiled": {"kind": "contiguous", "compiled": True},
    "decode, contiguous, own heads": {"kind": "contiguous", "split": "shard"},
    "decode, contiguous, window, four queries": {"kind": "contiguous", "queries": 4, "window": (300, 0)},
    "decode, paged": {"kind": "paged"},
    "decode, paged, four queries": {"kind": "paged", "queries": 4, "causal": True},
    "decode, latent": {"kind": "latent"},
}
LENGTHS = (1000, 17, 0, 640)  # keys of the sequences of a cache
CAPACITY, INTERLEAVE, PAGE = 1024, 16, 64


def groups() -> list[list[str]]:
    """Names of cases that one process a rank runs; groups run side by side, since most of their time is compiling."""
    return [[name] for name in RING] + [
        list(ULYSSES)[:2], list(ULYSSES)[2:], list(DECODE)[:2], list(DECODE)[2:4], list(DECODE)[4:],
    ]  # fmt: skip


def run(names: list[str], device: torch.device) -> dict[str, list[str]]:
    """By case, what is wrong with it; alike on every rank."""
    found = {}
    for seed, name in enumerate(names):
        case = BASE | {"name": name} | {**RING, **ULYSSES, **DECODE}[name]
        found[name] = decoded(case, seed, device) if "kind" in case else trained(case, seed, device)
    return found


def judged(name: str, ours: torch.Tensor, exact: torch.Tensor, same: torch.Tensor, dtype: torch.dtype) -> list[str]:
    error = largest(ours.double() - exact)
    limit = budget(dtype, exact, same, LSE_LEAST if name == "lse" else 0.0)
    found = [f"{name}: {error:.3g} > {limit:.3g}"] if not error <= limit else []
    if count_misplaced(ours, exact):
        found.append(f"{name}: {count_misplaced(ours, exact)} elements are finite in one of the two alone")
    return found


def random(generator: torch.Generator, dtype: torch.dtype, device: torch.device, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=generator).to(dtype).double().to(device)


def trained(case: dict[str, Any], seed: int, device: torch.device) -> list[str]:
    """Out, LSE and gradients of a call of context_parallel."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),)) if case.get("dtensor") else None
    shared = context_parallel(mesh, method=case.get("method", "ring"), layout=case.get("layout"))
    whole, dtype = tensors_of(case, seed, device), DTYPES[case["dtype"]]
    packed = "cu" in case
    leaves = {}
    for name in "qkv":
        tensor = shared.shard(whole[name]).to(dtype)
        if packed:
            tensor = tensor[0].transpose(0, 1).contiguous()
        elif case.get("bshd"):
            tensor = tensor.transpose(1, 2).contiguous()
        leaves[name] = tensor.requires_grad_()
    options = {name: case[name] for name in ("causal", "window", "softcap") if name in case}
    if "sinks" in whole:
        options["sinks"] = leaves["sinks"] = whole["sinks"].float().requires_grad_()
    if "alibi_slopes" in whole:
        options["alibi_slopes"] = whole["alibi_slopes"].float()
    qkv = [leaves[name] for name in "qkv"]
    if mesh is not None:
        qkv = [DTensor.from_local(tensor, mesh, [Shard(2)]) for tensor in qkv]
    if packed:
        cu = torch.tensor(case["cu"], dtype=torch.int32)
        out, lse = shared.varlen_attention(*qkv, cu, **options, return_lse=True)
    else:
        layout = "bshd" if case.get("bshd") else "bhsd"
        out, lse = shared.attention(*qkv, **options, layout=layout, return_lse=True)

    if mesh is not None:
        out, lse = out.to_local(), lse.to_local()

    def heads_first(tensor: torch.Tensor) -> torch.Tensor:
        if packed:
            return tensor.transpose(0, 1)[None]
        return tensor.transpose(1, 2) if case.get("bshd") else tensor

    of_out = shared.shard(whole["grad_out"]).to(dtype)
    given = [heads_first(out)], [of_out]
    if "grad_lse" in whole:
        given[0].append(lse[None] if packed else lse)
        given[1].append(shared.shard(whole["grad_lse"]).float())
    gradients = torch.autograd.grad(given[0], list(leaves.values()), given[1])
    ours = {"out": shared.unshard(heads_first(out).detach())}
    ours["lse"] = shared.unshard((lse[None] if packed else lse).detach(), 2)
    for name, gradient in zip(leaves, gradients, strict=True):
        if name == "sinks":
            dist.all_reduce(gradient)
            ours[f"grad_{name}"] = gradient
        else:
            ours[f"grad_{name}"] = shared.unshard(heads_first(gradient))
    exact, same = definition(case, whole, torch.float64), definition(case, whole, dtype)
    wrong = []
    for name, tensor in ours.items():
        wide = torch.float32 if name in ("lse", "grad_sinks") else dtype
        wrong += judged(name, tensor, exact[name], same[name], wide)
    return wrong


def tensors_of(case: dict[str, Any], seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """In float64, rounded to the case's dtype: (B, H, S, D), alike on every rank."""
    generator, dtype = torch.Generator().manual_seed(seed), DTYPES[case["dtype"]]
    batch, (heads, heads_k), length, width = case["batch"], case["heads"], case["length"], case["width"]
    width_v = case.get("width_v", width)
    found = {
        "q": random(generator, dtype, device, batch, heads, length, width),
        "k": random(generator, dtype, device, batch, heads_k, length, width),
        "v": random(generator, dtype, device, batch, heads_k, length, width_v),
        "grad_out": random(generator, dtype, device, batch, heads, length, width_v),
    }
    if "cu" in case:
        for name in "qkv":
            found[name][:, :, case["cu"][-1] :] = math.nan
    if case.get("grad_lse"):
        found["grad_lse"] = random(generator, torch.float32, device, batch, heads, length)
    if case.get("sinks"):
        found["sinks"] = random(generator, torch.float32, device, heads)
    if case.get("alibi"):
        found["alibi_slopes"] = random(generator, torch.float32, device, heads).abs() * 0.1
    return found


def definition(case: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """{out, lse, and the gradients} by the definition. Products are in the dtype; what comes on top of them is in
    float32 at least, as kernels compute."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    names = [name for name in ("q", "k", "v", "sinks") if name in tensors]
    leaves = {n: tensors[n].clone().to(dtype if n in "qkv" else wide).requires_grad_() for n in names}
    q, k, v = (leaves[name] for name in "qkv")
    length, group, device = q.shape[2], q.shape[1] // k.shape[1], q.device
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    keep = torch.ones(length, length, dtype=torch.bool, device=device)
    padding = torch.zeros(length, dtype=torch.bool, device=device)
    if case["causal"]:
        keep &= distance >= 0
    for side, sign in zip(case.get("window") or (None, None), (1, -1), strict=True):
        if side is not None:
            keep &= sign * distance <= side
    if "cu" in case:
        of = torch.bucketize(place, torch.tensor(case["cu"], device=device), right=True)
        padding = place >= case["cu"][-1]
        keep &= (of[:, None] == of) & ~padding & ~padding[:, None]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k, v = (tensor.masked_fill(padding[:, None], 0.0) for tensor in (q, k, v))
    scores = (q @ k.transpose(2, 3)).to(wide) / math.sqrt(q.shape[3])
    if case.get("softcap"):
        scores = case["softcap"] * torch.tanh(scores / case["softcap"])
    if "alibi_slopes" in tensors:
        scores = scores - tensors["alibi_slopes"].to(wide)[:, None, None] * distance.abs()
    scores = scores.masked_fill(~keep, -math.inf)
    if "sinks" in leaves:
        scores = torch.cat([scores, leaves["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    nothing = torch.isneginf(scores).all(3)
    lse = torch.logsumexp(scores, 3)
    weights = torch.softmax(scores.masked_fill(nothing[..., None], 0.0), 3).masked_fill(nothing[..., None], 0.0)
    out = weights[..., :length].to(dtype) @ v
    loss = (out.to(wide) * tensors["grad_out"].to(wide)).sum()
    if "grad_lse" in tensors:
        loss = loss + (lse.masked_fill(nothing, 0.0) * tensors["grad_lse"].to(wide)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found = {"out": out.detach(), "lse": lse.detach()}
    return found | {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def decoded(case: dict[str, Any], seed: int, device: torch.device) -> list[str]:
    """Out and LSE of a call of decode_parallel over caches of bf16."""
    generator, dtype, batch = torch.Generator().manual_seed(seed), torch.bfloat16, len(LENGTHS)
    split = case.get("split", "all")
    shared = decode_parallel(interleave=INTERLEAVE, heads=split)
    count, lengths = case.get("queries", 1), torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    heads, heads_k = (8, 2) if case["kind"] != "latent" else (16, 1)
    rank_dim, rope = 512, 64
    width = rank_dim + rope if case["kind"] == "latent" else 128
    q = random(generator, dtype, device, batch, heads, count, width)
    k = random(generator, dtype, device, batch, heads_k, CAPACITY, width)
    v = k[..., :rank_dim] if case["kind"] == "latent" else random(generator, dtype, device, *k.shape)
    options = {name: case[name] for name in ("window", "causal") if name in case and count > 1}
    scale = 1 / math.sqrt(width)
    k_part, v_part = (part_of(tensor.to(dtype), shared.shard, lengths) for tensor in (k, v))
    if case["kind"] == "contiguous":
        call = (
            torch.compile(shared.decode_attention, fullgraph=True) if case.get("compiled") else shared.decode_attention
        )
        out, lse = call(q.to(dtype), k_part, v_part, lengths, return_lse=True, **options)
    else:
        table = torch.randperm(batch * k_part.shape[2] // PAGE, generator=generator).to(device, torch.int32)
        table = table.reshape(batch, -1)
        pages = [paged(part, table) for part in (k_part, v_part)]
        if case["kind"] == "paged":
            out, lse = shared.paged_attention(q.to(dtype), *pages, table, lengths, return_lse=True, **options)
        else:
            q_nope, q_rope = q.to(dtype).split([rank_dim, rope], 3)
            latent = pages[0][:, :, 0]
            out, lse = shared.mla_attention(
                q_nope, q_rope, latent, table, lengths, scale=scale, return_lse=True, **options
            )
    if split == "shard":
        out, lse = gathered(out, 1), gathered(lse, 1)
    wrong = []
    found = {dtype_: attended(q, k, v, lengths, case, options, dtype_, scale) for dtype_ in (torch.float64, dtype)}
    for place, (name, ours, wide) in enumerate((("out", out, dtype), ("lse", lse, torch.float32))):
        wrong += judged(name, ours, found[torch.float64][place], found[dtype][place], wide)
    return wrong


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, case: dict[str, Any],
    options: dict[str, Any], dtype: torch.dtype, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """By the definition, in a dtype; queries are the last of each sequence."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    group, count = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (t.to(dtype).repeat_interleave(group, 1) for t in (k, v))
    place = torch.arange(k.shape[2], device=q.device)
    mine = lengths[:, None].long() - count + torch.arange(count, device=q.device)
    distance = mine[:, :, None] - place
    keep = (place < lengths[:, None])[:, None].expand_as(distance)
    if options.get("causal"):
        keep = keep & (distance >= 0)
    if options.get("window"):
        keep = keep & (distance <= options["window"][0]) & (distance >= -options["window"][1])
    scores = ((q.to(dtype) @ k.transpose(2, 3)).to(wide) * scale).masked_fill(~keep[:, None], -math.inf)
    nothing = torch.isneginf(scores).all(3)
    weights = torch.softmax(scores.masked_fill(nothing[..., None], 0.0), 3).masked_fill(nothing[..., None], 0.0)
    return weights.to(dtype) @ v, torch.logsumexp(scores, 3)


def part_of(rows: torch.Tensor, shard: CacheShard, lengths: torch.Tensor) -> torch.Tensor:
    """This rank's rows of (B, H, rows, D) and a page more; NaN past a sequence's length."""
    size = rows.shape[2] // shard.world_size + PAGE
    places = shard.positions(size, rows.device)
    found = rows.index_select(2, places.clamp(max=rows.shape[2] - 1))
    return found.masked_fill((places >= lengths[:, None])[:, None, :, None], math.nan)


def paged(part: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """(B, H, rows, D) as pages (P, page, H, D), in the table's order."""
    pages = part.unflatten(2, (-1, PAGE)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    found = torch.empty_like(pages)
    found[table.flatten().long()] = pages
    return found


def gathered(local: torch.Tensor, axis: int) -> torch.Tensor:
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts, axis)
