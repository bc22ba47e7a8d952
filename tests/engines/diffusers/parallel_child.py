"""One of the processes of test_diffusers_parallel.py. Arguments: its rank, how many there are, a file where they meet,
the path that calls take ("auto": by the setting), and cases by name. Prints each case's result."""

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2]))

from calls import assert_right, definition, dispatch
from diffusers import ContextParallelConfig, ParallelConfig
from quick_interpreter import quick_interpreter
from tiny_diffusers import flux, flux_inputs

from portattn.errors import ArgumentError
from portattn.integrations.diffusers import DiffusersRegistration, register

Case = Callable[[DiffusersRegistration, int, int], None]


def parallel(world: int, device: str = "cpu", **degrees: Any) -> ParallelConfig:
    rank = dist.get_rank()
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(**degrees))
    shape = config.context_parallel_config.mesh_shape
    mesh = dist.device_mesh.init_device_mesh(device, shape, mesh_dim_names=("ring", "ulysses"))
    config.setup(rank, world, torch.device(device), mesh=mesh)
    return config


def whole(rows: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, rows, 4, 16, dtype=torch.float64).to(dtype) for _ in range(3)]


def part(tensor: torch.Tensor, rank: int, world: int, uneven: int = 0) -> torch.Tensor:
    sizes = [tensor.shape[1] // world] * world
    sizes[0] += uneven
    sizes[-1] -= uneven
    return tensor.split(sizes, dim=1)[rank]


def attention(
    handle: DiffusersRegistration, rank: int, world: int, config: ParallelConfig, *, uneven: int = 0, lse: bool = False,
    mask: bool = False, gradients: bool = True, dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Out, LSE and gradients of this process' rows, against those of all rows in one process."""
    tensors = whole(24, dtype)
    hidden = torch.rand(2, 24, generator=torch.Generator().manual_seed(5)) > 0.3 if mask else None
    weights = torch.randn(2, 24, 4, 16, generator=torch.Generator().manual_seed(7))
    found: dict[str, Any] = {}
    for name, kind in (("right", torch.float64), ("same", dtype)):
        leaves = [tensor.to(kind).requires_grad_() for tensor in tensors]
        out, out_lse = definition(*leaves, None if hidden is None else hidden[:, None, None])
        found[name] = [out, out_lse.float() if name == "same" else out_lse]
        found[name] += torch.autograd.grad((out * weights).sum(), leaves)
    mine = [part(tensor, rank, world, uneven).detach().requires_grad_(gradients) for tensor in tensors]
    given = None if hidden is None else part(hidden, rank, world, uneven)
    ours = dispatch(handle, *mine, attn_mask=given, return_lse=lse, parallel_config=config)
    ours = list(ours) if lse else [ours, None]
    if gradients:
        ours += torch.autograd.grad((ours[0] * part(weights, rank, world, uneven)).sum(), mine)
    assert ours[0].dtype == dtype
    for mine_, same, right in zip(ours, found["same"], found["right"], strict=False):
        if mine_ is not None:
            assert_right(mine_, part(same, rank, world, uneven), part(right, rank, world, uneven))


def autocast(handle: DiffusersRegistration, rank: int, world: int, config: ParallelConfig, *, masked: bool) -> None:
    """The result is that of tensors in autocast's dtype, and so are the gradients, in their leaves' dtype. masked: by
    an added mask in another half precision than autocast's, which the backward sees without autocast."""
    mine = [part(tensor, rank, world).detach().requires_grad_() for tensor in whole(24)]
    mask = part(torch.randn(2, 24, generator=torch.Generator().manual_seed(5)), rank, world).half() if masked else None
    with torch.autocast("cpu", torch.bfloat16):
        out = dispatch(handle, *mine, attn_mask=mask, parallel_config=config)
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in mine]
    mask = None if mask is None else mask.bfloat16()
    expected = dispatch(handle, *half, attn_mask=mask, parallel_config=config)
    assert torch.equal(out, expected)
    pairs = zip(torch.autograd.grad(out.sum(), mine), torch.autograd.grad(expected.sum(), half), strict=True)
    assert all(torch.equal(ours, right.float()) for ours, right in pairs)


def dropout(handle: DiffusersRegistration, rank: int, world: int) -> None:
    """Gradients are those of the elements that the forward dropped: out is linear in value, and so known by them."""
    config = parallel(world, ulysses_degree=world)
    mine = [part(tensor, rank, world).detach().requires_grad_() for tensor in whole(24)]
    out = dispatch(handle, *mine, dropout_p=0.4, parallel_config=config)
    (slope,) = torch.autograd.grad(out.square().sum(), mine[2])
    both = torch.stack([(slope * mine[2]).sum(), out.detach().square().sum()])
    dist.all_reduce(both)
    assert torch.isclose(both[0], 2 * both[1], rtol=1e-4)
    plain = dispatch(handle, *mine, parallel_config=config)
    assert not torch.allclose(plain, out, atol=1e-3)


def refused(
    handle: DiffusersRegistration, rank: int, world: int, argument: str, degrees: dict[str, int], **named: Any
) -> None:
    mine = [part(tensor, rank, world) for tensor in whole(24)]
    if named.pop("grad", False):
        mine = [tensor.detach().requires_grad_() for tensor in mine]
    heads = named.pop("heads_k", 4)
    config = parallel(world, **degrees)
    with pytest.raises(ArgumentError) as raised:
        dispatch(handle, mine[0], *(m[:, :, :heads] for m in mine[1:]), parallel_config=config, **named)
    assert raised.value.argument == argument
    print(f"refused {rank} {argument}: {raised.value}")


def refusals(handle: DiffusersRegistration, rank: int, world: int) -> None:
    by_ring, by_heads = {"ring_degree": world}, {"ulysses_degree": world}
    for degrees in (by_ring, by_heads):
        refused(handle, rank, world, "is_causal", degrees, is_causal=True)
        refused(handle, rank, world, "key.shape[2]", degrees, enable_gqa=True, heads_k=2)
        refused(handle, rank, world, "enable_gqa", degrees, enable_gqa=True)
        refused(handle, rank, world, "return_lse", degrees, return_lse=True, grad=True)
    refused(handle, rank, world, "attn_mask.shape", by_ring, attn_mask=torch.ones(2, 12, dtype=torch.bool))
    refused(handle, rank, world, "dropout_p", by_ring, dropout_p=0.5)
    mask = torch.zeros(2, 12, requires_grad=True)
    refused(handle, rank, world, "attn_mask.requires_grad", by_heads, attn_mask=mask)


def model(handle: DiffusersRegistration, **degrees: int) -> None:
    """A transformer whose hooks split and gather what comes and goes, against itself in one process in float64."""
    plain, ours = flux(), flux()
    plain.set_attention_backend("native")
    with torch.no_grad():
        same = plain(**flux_inputs(text=6))[0]
        right = plain.double()(**flux_inputs(torch.float64, text=6))[0]
    ours.set_attention_backend(handle.name)
    # diffusers divides by the number of accelerators, of which a machine without any has none.
    torch.accelerator.device_count = lambda: 1
    ours.enable_parallelism(config=ContextParallelConfig(**degrees))
    with torch.no_grad():
        out = ours(**flux_inputs(text=6))[0]
    assert_right(out, same, right)


def ring(world: int, **named: bool) -> ParallelConfig:
    return parallel(world, ring_degree=world, **named)


def heads(world: int, **named: bool) -> ParallelConfig:
    return parallel(world, ulysses_degree=world, **named)


def of(work: Callable[..., None], degrees: Callable[[int], ParallelConfig], **named: Any) -> Case:
    return lambda handle, rank, world: work(handle, rank, world, degrees(world), **named)


CASES: dict[str, Case] = {
    "ring": of(attention, ring),
    "ring_in_half": of(attention, ring, dtype=torch.bfloat16),
    "ring_lse": of(attention, ring, lse=True, gradients=False),
    "ring_of_any_length": of(attention, partial(ring, ring_anything=True), uneven=3, gradients=False),
    "ulysses": of(attention, heads),
    "ulysses_masked": of(attention, heads, mask=True),
    "ulysses_lse": of(attention, heads, lse=True, gradients=False),
    "ulysses_of_any_length": of(attention, partial(heads, ulysses_anything=True), uneven=3, gradients=False),
    "unified": of(attention, lambda world: parallel(world, ring_degree=2, ulysses_degree=world // 2)),
    "autocast": of(autocast, ring, masked=False),
    "autocast_masked": of(autocast, heads, masked=True),
    "dropout": dropout,
    "refusals": refusals,
    "flux_by_ring": lambda handle, rank, world: model(handle, ring_degree=world),
    "flux_by_heads": lambda handle, rank, world: model(handle, ulysses_degree=world),
}


def main() -> None:
    rank, world, store, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if backend == "interpreter":
        quick_interpreter()
    handle = register("portattn_parallel", backend=None if backend == "auto" else backend)
    for name in sys.argv[5:]:
        CASES[name](handle, rank, world)
        print(f"right {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
