"""What runs in each rank: calls that must be one error on every rank, and ranks that are gone."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import portattn
from portattn.distributed import context_parallel, execution
from portattn.errors import ArgumentError


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except ArgumentError as error:
        return str(error)
    return "nothing was raised"


def all_refusals(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """By name: the error. After each of them a right call must work."""
    zigzag, heads = context_parallel(), context_parallel(method="ulysses")
    both = context_parallel(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses")))
    rows, packed = torch.ones(1, 4, 16, 8), torch.ones(16, 4, 8)
    cu = (0, 20, 64)
    found: dict[str, str] = {}

    def tell(name: str, call: Callable[[], Any]) -> None:
        found[name] = refused(call)
        for parallel in (zigzag, heads, both):
            assert torch.allclose(parallel.attention(rows, rows, rows, causal=True), torch.ones(()))

    def at(place: int, one: Any, other: Any) -> Any:
        return one if rank == place else other

    for name, parallel in (("ring", zigzag), ("both", both)):
        short = at(3, rows[:, :, :12], rows)
        tell(f"{name}: uneven shards", lambda p=parallel, q=short: p.attention(q, q, q))
        half = at(1, rows.bfloat16(), rows)
        tell(f"{name}: dtype", lambda p=parallel, q=half: p.attention(q, q, q))
        flat = at(2, rows[0], rows)
        tell(f"{name}: one rank's own error", lambda p=parallel, q=flat: p.attention(q, q, q))
    tell("causal", lambda: zigzag.attention(rows, rows, rows, causal=rank < 2))
    tell("key's rows", lambda: zigzag.attention(rows, rows[:, :, :8], rows[:, :, :8]))
    tell("gradients", lambda: zigzag.attention(rows.clone().requires_grad_(rank == 0), rows, rows))
    asked = rows.clone().requires_grad_()
    for name, parallel in (("ring", zigzag), ("ulysses", heads)):
        one, other = (asked, rows) if rank == 0 else (rows, asked)
        tell(f"{name}: gradients of another tensor", lambda p=parallel, q=one, k=other: p.attention(q, k, rows))
    sinks = torch.zeros(4, requires_grad=rank == 0)
    tell("gradients of sinks alone", lambda: heads.attention(rows, rows, rows if rank == 0 else asked, sinks=sinks))
    tell("documents", lambda: zigzag.varlen_attention(packed, packed, packed, at(0, (0, 21, 64), cu)))
    tell("documents too long", lambda: zigzag.varlen_attention(packed, packed, packed, (0, 65)))
    tell("documents fall", lambda: zigzag.varlen_attention(packed, packed, packed, torch.tensor([0, 9, 5])))
    tell("odd shards", lambda: zigzag.attention(rows[:, :, :15], rows[:, :, :15], rows[:, :, :15]))
    tell("length", lambda: zigzag.shard(torch.ones(1, 1, 60, 1)))
    tell("heads", lambda: heads.attention(rows[:, :2], rows[:, :2], rows[:, :2]))
    tell("dropout", lambda: zigzag.attention(rows, rows, rows, dropout_p=0.1))
    tell("bias", lambda: zigzag.attention(rows, rows, rows, bias=torch.zeros(16, 64)))
    tell("chunk", lambda: zigzag.attention(rows, rows, rows, chunk=4))
    tell("packed chunk", lambda: zigzag.varlen_attention(packed, packed, packed, cu, chunk=4))
    tell("mask", lambda: heads.attention(rows, rows, rows, mask=torch.ones(16, 64, dtype=torch.bool)))
    tell("slopes", lambda: zigzag.attention(rows, rows, rows, alibi_slopes=torch.ones(4, requires_grad=True)))
    tell("window", lambda: zigzag.attention(rows, rows, rows, window=(-3, 0)))
    tell("layout", lambda: zigzag.attention(rows, rows, rows, layout="sbhd"))
    tell("layout of one rank", lambda: zigzag.attention(rows, rows, rows, layout=at(1, [1], "bhsd")))
    two = torch.zeros(2)
    tell("dropout of one rank", lambda: zigzag.attention(rows, rows, rows, dropout_p=at(2, two, 0.0)))
    tell("unshard of nothing", lambda: zigzag.unshard(at(0, None, rows)))
    tell("unshard along a name", lambda: zigzag.unshard(rows, at(3, "x", 2)))
    tell("no tensor", lambda: zigzag.attention(rows, None, rows))
    tell("quantised", lambda: zigzag.attention(rows, rows.to(torch.float8_e4m3fn), rows.to(torch.float8_e4m3fn)))
    small = rows.to(torch.float8_e4m3fn)
    tell("all quantised", lambda: zigzag.attention(small, small, small))
    for name, parallel in (("ring", zigzag), ("ulysses", heads), ("both", both)):
        tell(f"{name}: backend", lambda p=parallel: p.attention(rows, rows, rows, causal=True, backend="triton"))
    tell("backend of packed rows", lambda: zigzag.varlen_attention(packed, packed, packed, cu, backend="triton"))
    tell("unknown backend", lambda: both.attention(rows, rows, rows, backend="cutlass"))
    named = at(1, "triton", "auto")
    tell("one rank's backend", lambda: _with(named, lambda: zigzag.attention(rows, rows, rows, window=(9, 0))))
    slopes = torch.full((4,), 0.5)
    with portattn.settings(fallback="error"):  # each local call is planned first
        for parallel in (zigzag, heads, both):
            assert parallel.attention(rows, rows, rows, causal=True, alibi_slopes=slopes).shape == rows.shape
            assert parallel.varlen_attention(packed, packed, packed, cu, window=(9, 3)).shape == packed.shape
    tell("unshard with gradients", lambda: zigzag.unshard(rows.clone().requires_grad_()))
    tell("unshard of other shapes", lambda: zigzag.unshard(at(2, rows[:, :1], rows)))
    tell("made differently", lambda: context_parallel(layout=at(1, "contiguous", "zigzag")))
    tell("unknown layout", lambda: context_parallel(layout="striped"))
    tell("unknown method", lambda: context_parallel(method="alltoall"))
    tell("two methods", lambda: context_parallel(init_device_mesh("cpu", (2, 2)), method="ring"))
    tell("no group", lambda: context_parallel("cuda"))
    return found


def _with(backend: str, call: Callable[[], Any]) -> Any:
    with portattn.settings(backend=backend):
        return call()


def _timed(call: Callable[[], Any]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - which one is the question
        return {"raised": type(error).__name__, "seconds": time.monotonic() - started, "text": str(error)[:200]}
    return {"raised": "", "seconds": time.monotonic() - started, "text": ""}


def killed_between_calls(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    parallel, rows = context_parallel(), torch.ones(1, 2, 16, 8)
    parallel.attention(rows, rows, rows)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _timed(lambda: parallel.attention(rows, rows, rows))


def killed_inside_a_call(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    parallel, rows = context_parallel(), torch.ones(1, 2, 16, 8, requires_grad=True)
    out = parallel.attention(rows, rows, rows)
    if rank == 1:
        execution.differentiate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return _timed(lambda: out.sum().backward())


def never_comes(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """A rank makes no call: the others wait as long as the group's time-out, and no longer."""
    parallel, rows = context_parallel(), torch.ones(1, 2, 16, 8)
    if rank == 1:
        time.sleep(14)
        return {}
    return _timed(lambda: parallel.attention(rows, rows, rows))


def differ_after_the_first_check(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """With check="first" a later difference is found by the time-out, on every rank."""
    parallel, rows = context_parallel(check="first"), torch.ones(1, 2, 16, 8)
    parallel.attention(rows, rows, rows)
    other = rows[:, :, :8] if rank == 1 else rows
    return _timed(lambda: parallel.attention(other, other, other))


for program in (killed_between_calls, killed_inside_a_call, never_comes, differ_after_the_first_check):
    program.timeout = 8  # type: ignore[attr-defined]
