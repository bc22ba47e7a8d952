"""What runs in each rank: the cases, compared with one process in float64."""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import DTYPES, cases, tensors_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from whole import NAMES, definition

import portattn
from portattn.distributed import ContextParallel, context_parallel
from portattn.testing.tolerance import budget, count_misplaced, largest


@functools.lru_cache(maxsize=32)
def shared(key: tuple[tuple[str, Any], ...], device: str = "cpu") -> ContextParallel:
    how = dict(key)
    mesh = how.pop("mesh", None)
    return context_parallel(None if mesh is None else _mesh(mesh, device), **how)


def _mesh(sizes: tuple[int, ...], device: str) -> Any:
    return init_device_mesh(device, sizes, mesh_dim_names=("ring", "ulysses")[: len(sizes)])


def all_cases(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    found = {}
    for number, case in enumerate(cases(ranks)):
        with portattn.settings(fallback="silent"):
            ours = local_results(case, number)
        parts: list[Any] = [None] * ranks
        judge = number % ranks
        dist.gather_object(ours, parts if rank == judge else None, dst=judge)
        if rank == judge:
            found[case["name"]] = wrong(case, number, parts)
    return found


def local_results(case: dict[str, Any], seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """This rank's part of {out, lse, gradients}, (B, H, S, ·), by calls as a user makes them."""
    parallel = shared(tuple(case["how"].items()), device)
    whole, dtype = tensors_of(case, seed), DTYPES[case["dtype"]]
    packed = "cu" in case
    leaves = {}
    for name in NAMES:
        if name not in whole:
            continue
        tensor = whole[name]
        if name in "qkv":
            if case.get("poison"):
                tensor[:, :, case["cu"][-1] :] = float("nan")
            tensor = _laid_out(case, parallel.shard(tensor).to(device, dtype))
        else:
            tensor = tensor.float().to(device)
        wants = name != "alibi_slopes" or parallel.shards.ring == 1
        leaves[name] = tensor.requires_grad_(wants)
    options = {name: case[name] for name in ("window", "softcap", "scale", "backend") if name in case}
    options |= {name: leaves[name] for name in ("sinks", "alibi_slopes") if name in leaves}
    options["causal"] = case.get("causal_word", case.get("causal", False))
    qkv: list[Any] = [leaves[n] for n in "qkv"]
    if case.get("dtensor"):
        qkv = [DTensor.from_local(x, _mesh(case["how"]["mesh"], device), [Shard(2)]) for x in qkv]
    if packed:
        cu = torch.tensor(case["cu"], dtype=torch.int32)
        out, lse = parallel.varlen_attention(*qkv, cu, **options, return_lse=True)
        assert lse.dtype is torch.float32
    else:
        layout = "bshd" if case.get("bshd") else "bhsd"
        out, lse = parallel.attention(*qkv, **options, layout=layout, return_lse=True)
    out, lse = (x.to_local() if isinstance(x, DTensor) else x for x in (out, lse))
    assert out.dtype is dtype
    grads = [(out, _laid_out(case, parallel.shard(whole["grad_out"]).to(device, dtype)))]
    if "grad_lse" in whole:
        of_lse = parallel.shard(whole["grad_lse"]).float().to(device)
        grads.append((lse, of_lse[0] if packed else of_lse))
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad([o for o, _ in grads], list(wanted.values()), [g for _, g in grads])
    found = {"out": _bhsd(case, out.detach()), "lse": lse.detach()[None] if packed else lse.detach()}
    for (name, leaf), gradient in zip(wanted.items(), gradients, strict=True):
        assert gradient.shape == leaf.shape, name
        assert gradient.dtype == leaf.dtype, name
        found[f"grad_{name}"] = _bhsd(case, gradient) if name in "qkv" else gradient
    return {name: tensor.cpu() for name, tensor in found.items()}


def _laid_out(case: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) as the call takes it."""
    if "cu" in case:
        tensor = tensor[0].transpose(0, 1)
    elif case.get("bshd"):
        tensor = tensor.transpose(1, 2).contiguous()
    if case.get("strided"):  # every second element of rows that are longer, and nothing in between is to be read
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"))
        wide[..., ::2] = tensor
        tensor = wide[..., ::2]
    return tensor.detach()


def _bhsd(case: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    if "cu" in case:
        return tensor.transpose(0, 1)[None]
    return tensor.transpose(1, 2) if case.get("bshd") else tensor


def wrong(case: dict[str, Any], seed: int, parts: list[dict[str, torch.Tensor]], device: str = "cpu") -> list[str]:
    parallel = shared(tuple(case["how"].items()), device)
    whole, dtype = tensors_of(case, seed), DTYPES[case["dtype"]]
    expected, same = definition(case, whole, torch.float64), definition(case, whole, dtype)
    found = []
    for name in parts[0]:
        ours = joined(parallel, [part[name] for part in parts], name, case["length"])
        if case.get("poison") and name.startswith("grad"):
            pass  # the gradient of what nobody attends is 0, whatever it holds
        wide = torch.float32 if name in ("lse", "grad_sinks", "grad_alibi_slopes") else dtype
        error = largest(ours.double() - expected[name])
        least = 8.0 if name == "lse" else 0.0
        limit = budget(wide, expected[name], same[name], least)
        if count_misplaced(ours, expected[name]):
            found.append(f"{name}: {count_misplaced(ours, expected[name])} elements are finite in one of the two alone")
        if not error <= limit:
            found.append(f"{name}: {error:.3g} > {limit:.3g}")
    return found


def joined(parallel: ContextParallel, parts: list[torch.Tensor], name: str, length: int) -> torch.Tensor:
    """The whole tensor: rows where they belong; of sinks and slopes the sum."""
    if name in ("grad_sinks", "grad_alibi_slopes"):
        return torch.stack(parts).sum(0)
    shape = list(parts[0].shape)
    shape[2] = length
    whole, shards = parts[0].new_full(shape, float("nan")), parallel.shards
    for rank, part in enumerate(parts):
        at = 0
        for start, stop in shards.rows(length, rank // shards.inner, rank % shards.inner):
            whole[:, :, start:stop] = part[:, :, at : at + stop - start]
            at += stop - start
    return whole


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
