"""More parts of the set context-parallel in each rank: decoding, a timeline, a Llama, a killed rank."""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from context_parallel_ranks import Run, difference, last_path, leaves, whole_tensors

import portattn
from portattn.distributed import Rates, context_parallel, decode_parallel, decode_parallel_cost


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


def timeline(run: Run) -> dict[str, Any]:
    """Return each rank's stream events in a forward and a backward of 64k tokens: [name, stream, begin, length], µs."""
    if not run.cuda:
        return {}
    from torch.profiler import ProfilerActivity, profile

    heads, length = (32, 8), 65536 if not run.small else 2048
    shared = context_parallel()
    *mine, grad_out = (shared.shard(tensor) for tensor in whole_tensors(run, heads, length))
    own = leaves(*mine)

    def step() -> None:
        out = shared.attention(*own, causal=True)
        torch.autograd.grad(out, own, grad_out)

    for _ in range(3):
        step()
    run.wait()
    dist.barrier()
    run.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        step()
        run.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
    events = [
        [event["name"][:60], event["args"].get("stream", -1), float(event["ts"]) + base, float(event["dur"])]
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    everything = run.gather(events)
    first = min(begin for some in everything for _, _, begin, _ in some)
    return {
        "tokens": length, "heads": heads,
        "ranks": [
            sorted(([n, s, round(b - first, 1), round(d, 1)] for n, s, b, d in some), key=lambda e: e[2])
            for some in everything
        ],
    }  # fmt: skip


def llama(run: Run) -> dict[str, Any]:
    """Time a Llama of 1.2 B random weights on one sequence, over all ranks and on one GPU.

    Timed are a forward with its loss, and a step of training with checkpoints."""
    from models import checkpointed, projections

    import portattn.integrations.transformers as alone
    from portattn.integrations.transformers_context_parallel import register_parallel, shard_batch

    length = 65536 if not run.small else 256
    model = a_llama(run)
    ids = torch.randint(5, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(2))
    ids = ids.to(run.device)
    shared = context_parallel()
    names = {"one": "portattn", "several": "portattn_parallel"}
    implementations = names | {"one, by sdpa": "sdpa"}
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "tokens": length}
    with contextlib.ExitStack() as stack:
        for handle in (alone.register(), register_parallel(shared)):
            stack.callback(handle.remove)
        given = {"one": {"input_ids": ids, "labels": ids, "use_cache": False}}
        given["several"] = shard_batch(shared, ids, ids)

        def loss_of(which: str) -> torch.Tensor:
            model.set_attn_implementation(implementations[which])
            loss: torch.Tensor = model(**given[which.split(",")[0]]).loss
            return loss

        def forward(which: str) -> float:
            with torch.no_grad():
                loss = loss_of(which).detach().float()
            if which == "several":
                dist.all_reduce(loss)
            return float(loss)

        def step(which: str) -> None:
            model.zero_grad(set_to_none=True)
            loss_of(which).backward()
            if which == "several":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)

        model.eval()
        found["loss"] = {which: forward(which) for which in names}
        found["memory"] = {f"{which}, forward": run.memory(lambda which=which: forward(which)) for which in names}
        found["forward"] = run.compared({which: lambda which=which: forward(which) for which in names}, 0, 3, 0)
        run.keep(found)
        if run.late():
            return found
        model.train()
        stack.enter_context(checkpointed(model))
        made = {}
        for which in names:
            if run.cuda:
                torch.cuda.reset_peak_memory_stats()
            step(which)
            if run.cuda:
                found["memory"][f"{which}, step, in all"] = torch.cuda.max_memory_allocated()
            made[which] = projections(model)
        if not run.late():  # what another kernel's rounding makes of the same gradients
            step("one, by sdpa")
            made["one, by sdpa"] = projections(model)
        found["gradients apart"] = {
            which: {name: difference(other[name], right) for name, right in made["one"].items()}
            for which, other in made.items()
            if which != "one"
        }
        run.keep(found)
        if not run.late():
            found["step"] = run.compared({which: lambda which=which: step(which) for which in names}, 0, 2, 0)
    return found


def a_llama(run: Run) -> Any:
    from models import Sizes, llama

    sizes = Sizes(hidden=2048, intermediate=5632, layers=24, heads=(16, 8), vocabulary=32000)
    if run.small:
        sizes = Sizes(hidden=64, intermediate=96, layers=2, heads=(4, 2), vocabulary=200)
    model = llama(sizes, run.device.type, use_cache=False)
    return model if run.cuda else model.float()


def gone(run: Run) -> dict[str, Any]:
    """Return a rank's error, and its seconds, after the last rank was killed after the call before."""
    shared, rows = context_parallel(), torch.ones(1, 2, 256, 64, device=run.device, dtype=torch.bfloat16)
    shared.attention(rows, rows, rows)
    run.wait()
    if run.rank == run.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        shared.attention(rows, rows, rows)
    except Exception as error:  # noqa: BLE001  # which one is the question
        found = {"raised": type(error).__name__, "text": str(error)[:200], "seconds": time.monotonic() - begin}
        run.keep(found)
        os._exit(0)  # torch's own end of a process group would wait for the other rank
    return {"raised": ""}
