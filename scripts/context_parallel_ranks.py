"""Attention over several GPUs, as scripts/context_parallel_times.py times it in each rank.

Each part takes a Run and returns what it found, alike on every rank where ranks have to agree on it. One GPU's times
are measured by all ranks at once, each with the whole problem: their mean is what several GPUs are compared with.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from context_parallel_run import (
    LEAST,
    Run,
    Tensors,
    backward_call,
    difference,
    host_milliseconds,
    largest_apart,
    last_path,
    leaves,
    whole_tensors,
)

import portattn
from portattn.distributed import (
    ContextParallel,
    Rates,
    context_parallel,
    context_parallel_cost,
    torch_context_parallel,
)

Part = tuple[ContextParallel, list[torch.Tensor]]  # q, k, v and grad_out of this rank


def shapes(run: Run) -> list[tuple[tuple[int, int], int]]:
    """(heads, tokens) of what is timed."""
    if run.small:
        return [((4, 2), 256)]
    return [((32, 8), 65536), ((16, 16), 65536), ((32, 8), 131072), ((16, 16), 131072)]


def attention(run: Run) -> dict[str, Any]:
    """A ring and Ulysses over all ranks, one GPU, and torch's context_parallel: causal, forward and backward."""
    found: dict[str, Any] = {}
    rates = link(run)
    for heads, length in shapes(run):
        if run.late():
            break
        name = f"{heads[0]}/{heads[1]} heads, {length} tokens"
        found[name] = one_shape(run, heads, length, rates)
        run.keep({"shapes": found, "rates": rates})
        if run.rank == 0:
            print(f"  {name}: {json.dumps(found[name]['ms'])}", flush=True)
    return {"shapes": found, "rates": rates}


def one_shape(run: Run, heads: tuple[int, int], length: int, rates: dict[str, float]) -> dict[str, Any]:
    q, k, v, grad_out = whole_tensors(run, heads, length)
    parts: dict[str, Part] = {}
    for method in ("ring", "ulysses"):
        shared = context_parallel(method=method)
        parts[method] = shared, [shared.shard(tensor) for tensor in (q, k, v, grad_out)]
    found: dict[str, Any] = {"times": {}, "apart": {}, "memory": {}}
    forward_of(run, (q, k, v), parts, found)
    backward_of(run, (q, k, v, grad_out), parts, found)
    flop = 2.0 * heads[0] * length * length * 2 * 128 / 2
    for phase, factor in (("forward", 1.0), ("backward", 2.5)):
        rates[phase] = factor * flop / found["times"][phase]["one"]["ms"] * 1e3
    used = Rates(**{name: rates[name] for name in ("link", "latency", "forward", "backward")})
    sizes = (1, heads[0], length, 128), (1, heads[1], length, 128)
    cost = context_parallel_cost(*sizes, ranks=run.ranks, causal=True, rates=used)
    found["model ms"] = {"forward": cost.forward.seconds * 1e3, "memory": cost.memory}
    if cost.backward is not None:
        found["model ms"]["backward"] = cost.backward.seconds * 1e3
    found["torch failed"] = {}
    if run.cuda and heads[0] == heads[1]:
        more, found["torch failed"] = torchs(run, (q, k, v), parts["ring"], found["apart"])
        for phase, contenders in more.items():
            found["times"][phase] |= contenders
    found["ms"] = {
        phase: {name: round(one["ms"], 3) for name, one in contenders.items()}
        for phase, contenders in found["times"].items()
    }
    return found


def forward_of(run: Run, whole: Tensors, parts: dict[str, Part], found: dict[str, Any]) -> None:
    calls: dict[str, Callable[[], Any]] = {"one": lambda: portattn.attention(*whole, causal=True)}
    for name, (shared, mine) in parts.items():
        calls[name] = lambda shared=shared, mine=mine: shared.attention(*mine[:3], causal=True)
    expected = calls["one"]()
    for name, (shared, _) in parts.items():
        found["apart"][name] = largest_apart(run, shared, calls[name](), expected)
    found["path"] = last_path()
    del expected
    found["memory"] |= {name: run.memory(call) for name, call in calls.items()}
    unchecked = context_parallel(method="ring", check="first")
    host = calls | {"ring, check=first": lambda: unchecked.attention(*parts["ring"][1][:3], causal=True)}
    found["host ms"] = {name: max(run.gather(host_milliseconds(run, call))) for name, call in host.items()}
    found["times"]["forward"] = run.compared(calls, LEAST)


def backward_of(run: Run, whole: Tensors, parts: dict[str, Part], found: dict[str, Any]) -> None:
    own = leaves(*whole[:3])
    calls = {"one": backward_call(portattn.attention(*own, causal=True), own, whole[3])}
    for name, (shared, mine) in parts.items():
        own = leaves(*mine[:3])
        calls[name] = backward_call(shared.attention(*own, causal=True), own, mine[3])
    expected = calls["one"]()
    for name, (shared, _) in parts.items():
        for which, a, b in zip("qkv", calls[name](), expected, strict=True):
            found["apart"][f"{name}, grad_{which}"] = largest_apart(run, shared, a, b)
    del a, b, expected
    found["memory"] |= {f"{name}, backward": run.memory(call) for name, call in calls.items()}
    found["times"]["backward"] = run.compared(calls, LEAST)


def torchs(run: Run, whole: Tensors, part: Part, apart: dict[str, float]) -> tuple[dict[str, Any], dict[str, str]]:
    """torch's context_parallel with several kernels and ways to pass keys on, beside the ring in the same rounds; its
    ranks have the rows that zig-zag shards have."""
    import torch.nn.functional as F  # noqa: N812
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as torchs_own
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ring, (*mine, grad_out) = part
    mesh = init_device_mesh("cuda", (run.ranks,))
    times: dict[str, Any] = {"forward": {}, "backward": {}}
    failed: dict[str, str] = {}
    own = leaves(*mine)
    ours = {
        "forward": lambda: ring.attention(*mine, causal=True),
        "backward": backward_call(ring.attention(*own, causal=True), own, grad_out),
    }
    cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    chosen = {
        "cudnn": lambda: sdpa_kernel(cudnn), "flash": lambda: sdpa_kernel(flash), "portattn": torch_context_parallel,
    }  # fmt: skip
    ways = (("cudnn", "allgather"), ("cudnn", "alltoall"), ("flash", "allgather"), ("portattn", "allgather"))
    for kernel, way in ways:
        name, block = f"torch, {kernel}, {way}", chosen[kernel]
        set_rotate_method(way)
        given = [tensor.clone() for tensor in whole]
        cut = torchs_own(mesh, buffers=given, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(given))
        try:
            with block(), cut:
                call = functools.partial(F.scaled_dot_product_attention, *given, is_causal=True)
                beside = f"ring beside {name}"
                times["forward"] |= run.compared({beside: ours["forward"], name: call}, LEAST, 4)
                for tensor in given:
                    tensor.requires_grad_()
                result = call()
                theirs = backward_call(result, given, grad_out)
                for what, a, b in zip(("", ", grad_q", ", grad_k", ", grad_v"), (result, *theirs()),
                                      (ours["forward"](), *ours["backward"]()), strict=True):  # fmt: skip
                    apart[name + what] = max(run.gather(difference(a, b)))
                del result, a, b
                times["backward"] |= run.compared({beside: ours["backward"], name: theirs}, LEAST, 3)
                del theirs
        except Exception as error:  # noqa: BLE001  # reported; what one rank alone raises ends by the time-out
            failed[name] = f"{type(error).__name__}: {error}"[:300]
        del given
    return times, failed


def link(run: Run) -> dict[str, float]:
    """Bytes a second of messages to the next rank, one way, and both ways at once ("link"); and seconds of an exchange
    of a few bytes, one after the other ("latency")."""
    size = 2**28 if not run.small else 2**12
    sent, into = (torch.zeros(size, dtype=torch.uint8, device=run.device) for _ in range(2))
    little, back = (torch.zeros(8, dtype=torch.uint8, device=run.device) for _ in range(2))
    after, before = (run.rank + 1) % run.ranks, (run.rank - 1) % run.ranks

    def move(out: torch.Tensor, to: torch.Tensor, ways: int) -> None:
        operations = []
        if ways == 2 or run.rank % 2 == 0:
            operations.append(dist.P2POp(dist.isend, out, after))
        if ways == 2 or run.rank % 2 == 1:
            operations.append(dist.P2POp(dist.irecv, to, before))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    dist.all_reduce(little)
    found = run.compared({
        "one way": lambda: move(sent, into, 1), "exchange": lambda: move(sent, into, 2),
        "small": lambda: move(little, back, 2),
    }, 20.0, 3)  # fmt: skip
    return {
        "one way": size / found["one way"]["ms"] * 1e3, "link": size / found["exchange"]["ms"] * 1e3,
        "latency": found["small"]["ms"] / 1e3,
    }  # fmt: skip


def warm(run: Run, what: str) -> None:
    """Compile what is timed later, in a process of its own beside others: nothing is kept but the compiler's cache."""
    heads, lengths = ((32, 8), (16, 16), (16, 8)), sorted({length for _, length in shapes(run)})
    for some in heads:
        for length in lengths[:1]:
            q, k, v, grad_out = whole_tensors(run, some, length)
            shared = context_parallel()
            call: Callable[..., Any] = portattn.attention
            if what.startswith("ring"):
                q, k, v, grad_out = (shared.shard(t) for t in (q, k, v, grad_out))
                call = shared.attention
            backward = what.endswith("backward")
            given = leaves(q, k, v) if backward else [q, k, v]
            out = call(*given, causal=True)
            if backward:
                torch.autograd.grad(out, given, grad_out)
            run.wait()
