"""What runs in each rank: calls as users make them, with DTensors, autocast and torch.compile."""

import weakref
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from whole import definition

import portattn
from portattn.distributed import context_parallel, execution
from portattn.errors import ArgumentError


def _whole(heads_k: int = 4, length: int = 32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = {"q": 4, "k": heads_k, "v": heads_k, "grad_out": 4}
    return {n: torch.randn(2, h, length, 8, generator=generator).double() for n, h in sizes.items()}


def _furthest(found: dict[str, torch.Tensor], case: dict[str, Any], whole: dict[str, torch.Tensor]) -> float:
    expected = definition(case, whole, torch.float64)
    return max(float((tensor.double() - expected[name]).abs().max()) for name, tensor in found.items())


def dtensors(rank: int, ranks: int, folder: Path) -> dict[str, float]:
    line = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    nested = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    flat = {"layout": "contiguous"}
    ways = {
        "rows, ring": (context_parallel(line, **flat), line, [Shard(2)]),
        "rows, ulysses": (context_parallel(line, method="ulysses", **flat), line, [Shard(2)]),
        "heads": (context_parallel(line, **flat), line, [Shard(1)]),
        "batch and rows": (context_parallel(grid["cp"], **flat), grid, [Shard(0), Shard(2)]),
        "heads and rows": (context_parallel(grid["cp"], **flat), grid, [Shard(1), Shard(2)]),
        "copies and rows": (context_parallel(grid["cp"], **flat), grid, [Replicate(), Shard(2)]),
        "rows of two dimensions": (context_parallel(nested, **flat), nested, [Shard(2), Shard(2)]),
    }
    whole, found = _whole(), {}
    for name, (parallel, mesh, placements) in ways.items():
        leaves = {n: distribute_tensor(whole[n].float(), mesh, placements).requires_grad_() for n in "qkv"}
        out, lse = parallel.attention(*leaves.values(), causal=True, return_lse=True)
        assert isinstance(out, DTensor)
        assert tuple(out.placements) == tuple(placements)
        grad = distribute_tensor(whole["grad_out"].float(), mesh, placements)
        gradients = torch.autograd.grad(out, list(leaves.values()), grad)
        made = {"out": out.full_tensor(), "lse": lse.full_tensor()}
        made |= {f"grad_{n}": g.full_tensor() for n, g in zip(leaves, gradients, strict=True)}
        found[name] = _furthest({n: t.detach() for n, t in made.items()}, {"causal": True}, whole)
    return found


def refused_dtensors(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    line = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    parallel, tensor = context_parallel(line), torch.ones(2, 4, 32, 8)
    rows, batch, copies, other = (distribute_tensor(tensor, mesh, placements)
        for mesh, placements in ((line, [Shard(2)]), (line, [Shard(3)]), (line, [Replicate()]),
        (grid, [Shard(0), Shard(2)])))  # fmt: skip
    odd = distribute_tensor(tensor[:, :, :30], line, [Shard(2)])
    calls = {
        "head_dim": (batch, batch, batch), "copies": (copies, copies, copies), "mixed": (rows, rows.to_local(), rows),
        "differ": (rows, copies, copies), "mesh": (other, other, other), "uneven": (odd, odd, odd),
    }  # fmt: skip
    found = {}
    for name, tensors in calls.items():
        try:
            parallel.attention(*tensors)
        except ArgumentError as error:
            found[name] = str(error)
    return found


def compiled(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """A compiled function with calls in it gives what it gives eagerly, forward and backward, for several lengths."""
    parallel = context_parallel()

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ weight).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind()
        return parallel.attention(q, k, v, causal=True).transpose(1, 2).flatten(2).relu()

    torch.manual_seed(0)
    weight, found = torch.randn(16, 96), []
    fast = torch.compile(layer, backend="aot_eager")
    for length in (8, 12):
        made = []
        for function in (layer, fast):
            x = torch.randn(2, length, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            out = function(x, weight)
            out.square().sum().backward()
            made.append((out, x.grad))
        found.append(max(float((a - b).detach().abs().max()) for a, b in zip(*made, strict=True)))
    try:
        torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(2, 8, 16), weight)
        refused = ""
    except Exception as error:  # noqa: BLE001 - dynamo's own
        refused = str(error)
    return {"furthest": found, "says why": "context parallel calls torch.distributed" in refused}


def seen(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    parallel, heads = context_parallel(), context_parallel(method="ulysses")
    whole = _whole(heads_k=2)
    q, k, v = (parallel.shard(whole[name].float()) for name in "qkv")
    with torch.autocast("cpu", torch.bfloat16):
        found = {p.shards.inner: str(p.attention(q, k, v, causal=True).dtype) for p in (parallel, heads)}
        leaf = q.clone().requires_grad_()
        parallel.attention(leaf, k, v).sum().backward()
    plan = portattn.last_plan()
    x = torch.arange(32.0).reshape(1, 1, 32, 1).expand(2, 3, 32, 2)
    own = parallel.positions(32)
    assert torch.equal(parallel.shard(x)[0, 0, :, 0].long(), own)
    assert torch.equal(parallel.unshard(parallel.shard(x)), x)
    assert torch.equal(heads.unshard(heads.shard(x, -2), -2), x)
    with torch.no_grad():
        parallel.attention(q.clone().requires_grad_(), k, v)
    rows = [int(place) for place in own]
    return {"dtypes": list(found.values()), "gradient": str(leaf.grad.dtype), "plan": plan.path, "rows": rows}


class Live(TorchDispatchMode):
    """Bytes of the tensors that operators have made and that are still there, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or not size:
            return
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def traffic(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Elements of k and v that a rank sends in a forward pass, by mask and layout, in shards of k and v."""
    sent, move = 0, execution._move

    def counted(of: Any, to: int, tensors: Any, source: int, into: torch.Tensor) -> Any:
        nonlocal sent
        sent += sum(tensor.numel() for tensor in tensors)
        return move(of, to, tensors, source, into)

    execution._move = counted
    found = {}
    for layout in ("zigzag", "contiguous"):
        parallel, x = context_parallel(layout=layout), torch.randn(1, 2, 32, 8)
        for name, options in {"full": {}, "causal": {"causal": True},
                "window": {"causal": True, "window": (7, 0)}}.items():  # fmt: skip
            sent = 0
            parallel.attention(x, x, x, **options)
            found[f"{layout}: {name}"] = sent / (2 * x.numel())
    execution._move = move
    return found


def memory(rank: int, ranks: int, folder: Path) -> dict[str, float]:
    """The most that a pass has beside local calls' own memory, in shards of k of float32."""
    parallel, found = context_parallel(layout="contiguous"), {}
    # In the place of local calls, whose own memory the mode would see too: results of their sizes.
    execution.attend = lambda span, q, *_: (torch.zeros_like(q), q.new_zeros(q.shape[:3]))
    execution.differentiate = lambda span, rows, k, v, _: tuple(map(torch.zeros_like, (rows.q, k, v)))
    q, k, v = (torch.randn(1, 4, 256, 32, requires_grad=True) for _ in range(3))
    shard = 4 * k.numel()
    with Live() as live:
        out = parallel.attention(q, k, v)
    found["forward"] = live.most / shard - 2  # views of k and v count as what they are views of
    ones = torch.ones_like(out)
    with Live() as live:
        torch.autograd.grad(out, (q, k, v), ones)
    found["backward"] = live.most / shard - 3  # of out too
    return found
