"""One rank of the set context-parallel: its measurements, and the parts that time attention and decoding.

Each part takes a Run and returns its results. One GPU's times are measured by all ranks at once, each with the whole
problem; several GPUs are compared with their mean."""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import portattn
from portattn.distributed import (
    ContextParallel,
    Rates,
    context_parallel,
    context_parallel_cost,
    decode_parallel,
    decode_parallel_cost,
)
from portattn.tools.bench.rounds import DeviceClock

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from torch_context_parallel import torch_context_parallel

LEAST = 120.0  # ms of a round that count
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Run:
    """One rank: its number, world size, device, small sizes, end time, and the file of its results so far.

    The file's results count if the rank fails later."""

    rank: int
    ranks: int
    device: torch.device
    small: bool
    until: float
    so_far: Path

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def late(self) -> bool:
        """Return whether the time is over, on any rank: all answer alike."""
        return max(self.gather(time.monotonic() > self.until))

    def keep(self, found: dict[str, Any]) -> None:
        self.so_far.write_text(json.dumps(found), encoding="utf-8")

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def milliseconds(self, function: Callable[[], Any], repeats: int) -> float:
        """Return the time of one of `repeats` calls, made back to back after a barrier.

        On a device an uncounted call comes first, so that the host is ahead."""
        dist.barrier()
        self.wait()
        if not self.cuda:
            begin = time.perf_counter()
            for _ in range(repeats):
                function()
            return (time.perf_counter() - begin) / repeats * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        function()
        first.record()
        for _ in range(repeats):
            function()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / repeats

    def compared(
        self, contenders: dict[str, Callable[[], Any]], least: float, rounds: int = 5, warm: int = 2
    ) -> dict[str, dict[str, Any]]:
        """Return each contender's ms, by rank, and spread, the contenders taking turns in rounds.

        ms is the largest of the ranks' medians (the mean for "one"), the spread the slowest rank's largest round over
        its smallest; `least`: ms that a round should take, which sets the number of calls."""
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        counts = {}
        for name, function in contenders.items():
            for _ in range(warm):
                function()
            counts[name] = 1
            if least:
                counts[name] = max(1, min(200, round(least / max(self.gather(self.milliseconds(function, 1))))))
        for turn in range(rounds):
            for name in list(contenders)[:: 1 if turn % 2 else -1]:
                taken[name].append(self.milliseconds(contenders[name], counts[name]))
            if turn >= 2 and self.late():
                break
        found = {}
        for name, times in taken.items():
            medians = self.gather(statistics.median(times))
            spread = max(self.gather(max(times) / min(times)))
            joined = statistics.mean(medians) if name.startswith("one") else max(medians)
            found[name] = {"ms": joined, "by rank": medians, "spread": spread}
        return found

    def memory(self, function: Callable[[], Any]) -> int:
        if not self.cuda:
            return 0
        function()
        return max(self.gather(DeviceClock().peak_extra_bytes(function)))


def whole_tensors(run: Run, heads: tuple[int, int], length: int, width: int = 128) -> Tensors:
    """Return q, k, v and grad_out of (1, H, S, D) bf16, alike on every rank."""
    generator = torch.Generator(run.device).manual_seed(7)
    counts = (heads[0], heads[1], heads[1], heads[0])
    return tuple(
        torch.randn(1, count, length, width, generator=generator, device=run.device, dtype=torch.bfloat16)
        for count in counts
    )


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def backward_call(out: torch.Tensor, own: list[torch.Tensor], grad_out: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(out, own, grad_out, retain_graph=True)


def host_milliseconds(run: Run, function: Callable[[], Any]) -> float:
    """Return the time until a call returns on an idle device: the median of five."""
    taken = []
    for _ in range(5):
        run.wait()
        dist.barrier()
        run.wait()
        begin = time.perf_counter()
        function()
        taken.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(taken)


def last_path() -> str:
    plan = portattn.last_plan()
    return "" if plan is None else f"{plan.path}"


def largest_apart(run: Run, shared: Any, mine: torch.Tensor, whole: torch.Tensor) -> float:
    """Return ||ours - one GPU's|| / ||one GPU's|| of each rank's rows, the largest of the ranks."""
    return max(run.gather(difference(mine, shared.shard(whole))))


def difference(ours: torch.Tensor, right: torch.Tensor) -> float:
    """Return ||ours - right|| / ||right||."""
    return float((ours.detach().float() - right.float()).norm() / right.float().norm())


Part = tuple[ContextParallel, list[torch.Tensor]]  # q, k, v and grad_out of this rank


def shapes(run: Run) -> list[tuple[tuple[int, int], int]]:
    if run.small:
        return [((4, 2), 256)]
    return [((32, 8), 65536), ((16, 16), 65536), ((32, 8), 131072), ((16, 16), 131072)]


def attention(run: Run) -> dict[str, Any]:
    """Time a ring and Ulysses over all ranks, one GPU, and torch's context_parallel: causal, forward and backward."""
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
    """Time torch's context_parallel with several kernels and rotations, beside the ring in the same rounds.

    Its ranks have the rows of zig-zag shards."""
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


def decode(run: Run) -> dict[str, Any]:
    """Time a cache of a million tokens over all ranks and on one GPU: eager, and replayed from a CUDA graph."""
    length, heads, width = (2**20, (64, 8), 128) if not run.small else (512, (8, 2), 64)
    generator = torch.Generator(run.device).manual_seed(3)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=run.device, dtype=torch.bfloat16)

    q, k, v = random(1, heads[0], 1, width), random(1, heads[1], length, width), random(1, heads[1], length, width)
    lengths = torch.tensor([length], dtype=torch.int32, device=run.device)
    contenders: dict[str, Callable[[], Any]] = {"one": lambda: portattn.decode_attention(q, k, v, lengths)}
    right = contenders["one"]()
    apart, memory = {}, {}
    for split in ("all", "shard"):
        shared = decode_parallel(interleave=length // run.ranks, heads=split)
        at = slice(run.rank * length // run.ranks, (run.rank + 1) * length // run.ranks)
        part = [tensor[:, :, at].contiguous() for tensor in (k, v)]
        name = f"several, {split}"
        contenders[name] = lambda shared=shared, part=part: shared.decode_attention(q, *part, lengths)
        each = heads[0] // run.ranks if split == "shard" else heads[0]
        mine = right[:, run.rank * each : (run.rank + 1) * each] if split == "shard" else right
        apart[name] = max(run.gather(float((contenders[name]() - mine).float().norm() / mine.float().norm())))
        memory[name] = run.memory(contenders[name])
    path = last_path()
    found: dict[str, Any] = {"eager": run.compared(contenders, 20.0), "apart": apart, "memory": memory, "path": path}
    run.keep(found)
    if run.cuda:
        replayed = {}
        for name, function in contenders.items():
            replayed[name], made = captured(function)
            before = function()
            lengths.fill_(length // 2)
            replayed[name]()
            halved = function()
            found.setdefault("graph has the same bits", {})[name] = all(run.gather(bool(torch.equal(made, halved))))
            lengths.fill_(length)
            replayed[name]()
            assert torch.equal(made, before), name
        found["graph"] = run.compared(replayed, 20.0)
    one = found.get("graph", found["eager"])["one"]["ms"] / 1e3
    rates = Rates(memory=length * heads[1] * width * 4 / one)
    cost = decode_parallel_cost((1, heads[0], 1, width), (1, heads[1], length, width), ranks=run.ranks, rates=rates)
    return found | {"rate": rates.memory, "model ms": cost.forward.seconds * 1e3}


def captured(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Return a replay of a call's CUDA graph, and its result tensor."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = function()
    return graph.replay, made


def link(run: Run) -> dict[str, float]:
    """Return bytes a second to the next rank, one way and both ways ("link"), and seconds of a tiny exchange."""
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
    """Compile later timed kernels, in a process of its own: only the compiler's cache remains."""
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
