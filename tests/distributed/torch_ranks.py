"""What the ranks of the tests of torch's context_parallel run."""

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from places import ROOT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

from portattn.errors import ArgumentError
from portattn.testing import tolerance

sys.path.append(str(ROOT / "examples"))

import torch_context_parallel as inside
from torch_context_parallel import torch_context_parallel


def inputs(heads_k: int, length: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, length, 16), (2, heads_k, length, 16), (2, heads_k, length, 16), (2, 4, length, 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def expected(tensors: list[torch.Tensor], is_causal: bool, scale: float | None,
        dtype: torch.dtype) -> list[torch.Tensor]:  # fmt: skip
    q, k, v = (t.to(dtype).clone().requires_grad_() for t in tensors[:3])
    repeat = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeat, 1).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    out = scores.softmax(-1) @ v.repeat_interleave(repeat, 1)
    out.backward(tensors[3].to(dtype))
    return [out.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


def judged(found: list[torch.Tensor], tensors: list[torch.Tensor], is_causal: bool, scale: float | None) -> list[float]:
    exact = expected(tensors, is_causal, scale, torch.float64)
    same = expected(tensors, is_causal, scale, tensors[0].dtype)
    return [tolerance.largest(ours.double() - right) / tolerance.budget(ours.dtype, right, torchs)
        for ours, right, torchs in zip(found, exact, same, strict=True)]  # fmt: skip


def unmodified(heads_k: int, length: int, dtype: torch.dtype, is_causal: bool, scale: float | None,
        order: str) -> dict[str, Any]:  # fmt: skip
    """F.scaled_dot_product_attention inside of both context managers, forward and backward."""
    mesh, tensors = init_device_mesh("cpu", (dist.get_world_size(),)), inputs(heads_k, length, dtype)
    shards = [t.clone() for t in tensors]
    torchs = context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * 4, no_restore_buffers=set(shards))
    first, second = (torch_context_parallel(), torchs) if order == "around" else (torchs, torch_context_parallel())
    with first, second:
        q, k, v = (t.detach().requires_grad_() for t in shards[:3])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=heads_k != 4)
        out.backward(shards[3])
        whole = context_parallel_unshard(mesh, [out.detach(), q.grad, k.grad, v.grad], [2] * 4)
    return {"shares": judged(whole, tensors, is_causal, scale)}


def operators(name: str) -> dict[str, Any]:
    """An operator that is CUDA's, called with DTensors as SDPA calls it there, with its backward."""
    mesh, tensors = init_device_mesh("cpu", (dist.get_world_size(),)), inputs(4, 16, torch.float32)
    shards = [t.clone() for t in tensors]
    calls = []
    with (torch_context_parallel(), context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * 4,
            no_restore_buffers=set(shards)), counted(calls)):  # fmt: skip
        leaves = [t.detach().requires_grad_() for t in shards[:3]]
        q, k, v = (DTensor.from_local(t, mesh, [Shard(2)]) for t in leaves)
        extra = () if "flash" in name else (None, True)
        out = getattr(torch.ops.aten, name)(q, k, v, *extra, is_causal=True)[0].to_local()
        out.backward(shards[3])
        whole = context_parallel_unshard(mesh, [out.detach(), *(t.grad for t in leaves)], [2] * 4)  # type: ignore[misc]
    return {"shares": judged(whole, tensors, True, None), "calls": calls}


class counted:  # noqa: N801 - a context manager
    """Notes each forward and each part of a backward that portattn computes."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._before = inside.ops.attention, inside.differentiate
        inside.ops.attention = self._noting("forward", inside.ops.attention)
        inside.differentiate = self._noting("backward", inside.differentiate)

    def __exit__(self, *error: object) -> None:
        inside.ops.attention, inside.differentiate = self._before

    def _noting(self, what: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._calls.append(what)
            return function(*args, **kwargs)

        return noted


def refused(options: dict[str, Any]) -> str:
    """What F.scaled_dot_product_attention raises for what cannot be done."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v, _ = (t.clone() for t in inputs(4, 16, torch.float32))
    if "attn_mask" in options:
        options = {"attn_mask": torch.zeros(2, 4, 8, 8)}
    with torch_context_parallel(), context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
        except ArgumentError as error:
            return str(error)
    return "nothing"


def torch_alone() -> tuple[str, str]:
    """What torch says without the block, before and after one."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for _ in range(2):
        q, k, v, _ = (t.clone() for t in inputs(4, 16, torch.float32))
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
            try:
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
                found.append("nothing")
            except NotImplementedError as error:
                found.append(str(error))
        with torch_context_parallel():
            pass
    return found[0], found[1]
