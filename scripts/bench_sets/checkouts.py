"""Sets whose contenders are processes, so that another checkout of portattn can take turns with this one (--against).

The processes run this file, with one of the checkouts first on PYTHONPATH: beside the standard library it imports torch
and the checkout's portattn alone. Rounds go through all contenders in turn, and the least of all rounds counts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portattn.tools.bench.workloads import Measure, Row

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 3
LOOPS, CALLS = 60, 100
# name -> (q shape, Hk, Sk, dtype, arguments)
CASES: dict[str, tuple[tuple[int, int, int, int], int, int, str, dict[str, object]]] = {
    "(1,32,2048,128) bf16 causal": ((1, 32, 2048, 128), 32, 2048, "bfloat16", {"causal": True}),
    "(1,32,2048,128) fp16 causal": ((1, 32, 2048, 128), 32, 2048, "float16", {"causal": True}),
    "(1,32,2048,128) fp32 causal": ((1, 32, 2048, 128), 32, 2048, "float32", {"causal": True}),
    "(1,32,2048,128) fp32 causal, 8 key heads": ((1, 32, 2048, 128), 8, 2048, "float32", {"causal": True}),
    "(1,32,512,128) over 2048 keys fp32 causal": ((1, 32, 512, 128), 32, 2048, "float32", {"causal": True}),
    "(1,8,8192,64) fp32 window 1024": ((1, 8, 8192, 64), 8, 8192, "float32", {"causal": True, "window": (1023, 0)}),
    "(1,8,8192,64) bf16 window 1024": ((1, 8, 8192, 64), 8, 8192, "bfloat16", {"causal": True, "window": (1023, 0)}),
    "(8,32,1,128) over 2048 keys bf16, 8 key heads": ((8, 32, 1, 128), 8, 2048, "bfloat16", {}),
    "(8,32,1,128) over 2048 keys fp32, 8 key heads": ((8, 32, 1, 128), 8, 2048, "float32", {}),
    "(1,8,2048,64) fp32 causal softcap": ((1, 8, 2048, 64), 8, 2048, "float32", {"causal": True, "softcap": 30.0}),
    "(1,2,8,32) fp32": ((1, 2, 8, 32), 2, 8, "float32", {}),
}


def cpu(measure: Measure) -> Iterator[Row]:
    """Time and memory of attention on this machine's CPU: torch's SDPA, portattn, and its reference path.

    Each measurement is a process of its own, which calls a case a few times. `ms` is its least CPU time, of one thread
    unless OMP_NUM_THREADS says otherwise, so that other processes of the machine do not count; `bytes` is the peak of
    resident memory above the memory held before, less the output."""
    whose = {"sdpa": ROOT, **({"against": measure.against} if measure.against else {}), "portattn": ROOT}
    for case in CASES:
        if measure.wanted(case):
            asked = {who: (at, os.environ, ["cpu", who, case]) for who, at in (whose | {"reference": ROOT}).items()}
            best = least(measure, asked)
            for who, found in best.items():
                over = {"of_peer": best["sdpa"]["ms"] / found["ms"]} if "sdpa" in best and who != "sdpa" else {}
                yield {"case": case, "contender": who, **found, **over}


def host_without_gpu(measure: Measure) -> Iterator[Row]:
    """Host time of cached calls on a machine without a GPU: kernels are compiled for an H100, a libcuda takes launches.

    The cost of a launch in CUDA's driver, and memory from torch's CUDA allocator, are not in it: only figures of one
    run compare, of two checkouts in turns. `host_us` is CPU time of the calling thread. SDPA on the CPU stands beside
    as a measure of the machine."""
    sys.path.insert(0, str(ROOT / "tests"))
    import fakedriver

    whose = {**({"against": measure.against.resolve()} if measure.against else {}), "portattn": ROOT}
    with tempfile.TemporaryDirectory() as place:
        folder, triton = Path(place), next(iter(fakedriver.triton_folders().values()))
        fakedriver.build(folder, triton / "backends" / "nvidia" / "include")
        asked: dict[str, Any] = {}
        for who, at in whose.items():
            own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
            own |= fakedriver.environment(folder) | {"PORTATTN_CACHE_DIR": str(folder / who)}
            asked[who] = at, own, ["host"]
        best = least(measure, asked)
    for case in best["portattn"]:
        if measure.wanted(case):
            for who, found in best.items():
                over = {"of_peer": best["against"][case] / found[case]} if len(best) > 1 and who == "portattn" else {}
                yield {"case": case, "contender": who, "host_us": found[case], **over}


def least(measure: Measure, asked: dict[str, tuple[Path, Any, list[str]]]) -> dict[str, dict[str, float]]:
    """Run each contender's process in rounds; return the least of each figure by contender, without unable ones."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(measure.rounds or ROUNDS):
        for who, (checkout, environment, words) in asked.items():
            path = os.pathsep.join((str(checkout), str(checkout / "tests")))
            done = subprocess.run(
                [sys.executable, __file__, *words], env={**environment, "PYTHONPATH": path}, cwd=checkout,
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            found = json.loads(done.stdout.splitlines()[-1])
            if found is not None:
                before = best.get(who, found)
                best[who] = {name: min(value, before[name]) for name, value in found.items()}
    return best


def contender(who: str, case: str) -> Callable[[], object] | None:
    """Return a call of the case; None if SDPA has no such feature."""
    import torch

    shape, heads_k, seq_k, dtype, arguments = CASES[case]
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    q = torch.randn(shape, dtype=kind)
    k, v = (torch.randn(shape[0], heads_k, seq_k, shape[3], dtype=kind) for _ in range(2))
    if who != "sdpa":
        import portattn

        backend = {"backend": "reference"} if who == "reference" else {}
        return lambda: portattn.attention(q, k, v, **arguments, **backend)
    if "softcap" in arguments:
        return None
    given: dict[str, object] = {"enable_gqa": heads_k != shape[1]}
    if "window" in arguments:
        place = torch.arange(shape[2])[:, None] - torch.arange(seq_k)
        given["attn_mask"] = (place >= 0) & (place <= arguments["window"][0])  # type: ignore[index]
    elif "causal" in arguments and seq_k == shape[2]:
        given["is_causal"] = True
    elif "causal" in arguments:
        given["attn_mask"] = torch.ones(shape[2], seq_k, dtype=torch.bool).tril(seq_k - shape[2])
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **given)


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def cpu_child(who: str, case: str) -> dict[str, float] | None:
    """Return the least CPU time of a call, in ms, and the bytes by which resident memory grew beyond the output."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    run = contender(who, case)
    if run is None:
        return None
    small = torch.randn(1, 2, 64, 32)
    torch.nn.functional.scaled_dot_product_attention(small, small, small)  # libraries are loaded
    held = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    begun = time.process_time()
    out = run()
    least = spent = time.process_time() - begun
    calls = 1
    peak = resident("VmHWM") - held - out.numel() * out.element_size()  # type: ignore[attr-defined]
    while spent < 1.0 or calls < 3:  # the first of a process plans, and touches new memory
        begun = time.process_time()
        run()
        taken = time.process_time() - begun
        least, spent, calls = min(least, taken), spent + taken, calls + 1
    return {"ms": least * 1e3, "bytes": max(peak, 0)}


def host_child() -> dict[str, float]:
    """Return µs of each call: the lower quartile of LOOPS loops of CALLS."""
    import fakedriver

    fake = fakedriver.install()
    import fakechip
    import torch
    from torch._C._dynamo import guards

    import portattn

    chip = fakechip.Chip(fake)
    # C functions, as torch's for CUDA are.
    fakechip.pretend({}.clear, {None: 7}.__getitem__, guards._empty_strided_cpu)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    times: dict[str, float] = {}
    gc.disable()
    with portattn.settings(isolate="never", canary="never"):
        for name, call in calls().items():
            for _ in range(3):  # compiles, keeps, and is found
                call()
            loops = []
            for _ in range(LOOPS):
                fake.library.fake_clear()
                chip.allocated.clear()
                begun = time.thread_time_ns()
                for _ in range(CALLS):
                    call()
                loops.append((time.thread_time_ns() - begun) / CALLS / 1e3)
            times[name] = round(sorted(loops)[LOOPS // 4], 2)
    return times


def calls() -> dict[str, Callable[[], Any]]:
    """Return the calls by name. Decode and paged decode split their keys: two launches. Prepared ones pass `out`."""
    import torch

    import portattn
    from portattn.api.out_argument import into

    def some(*shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.bfloat16)

    q, k, v = some(2, 8, 256, 64), some(2, 8, 256, 64), some(2, 8, 256, 64)
    one, cache = some(1, 32, 1, 128), [some(1, 8, 8192, 128) for _ in range(2)]
    several, pages = some(8, 32, 1, 128), [some(600, 16, 8, 128) for _ in range(2)]
    table = torch.arange(512, dtype=torch.int32).view(8, 64)
    keys, long = torch.full((8,), 1000, dtype=torch.int32), torch.full((1,), 8192, dtype=torch.int32)
    decode = portattn.prepare("decode_attention", one, *cache, long)
    paged = portattn.prepare("paged_attention", several, *pages, table, keys)
    place, places = torch.empty_like(one), torch.empty_like(several)
    trained = [some(1, 4, 32, 64).requires_grad_() for _ in range(3)]
    small = [torch.zeros(1, 1, 1, 8).requires_grad_() for _ in range(3)]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def gradients(function: Callable[..., Any], tensors: list[Any], **given: Any) -> Any:
        out = function(*tensors, **given)
        return torch.autograd.grad(out, tensors, torch.zeros_like(out))

    return {
        "attention": lambda: portattn.attention(q, k, v, causal=True),
        "decode_attention": lambda: portattn.decode_attention(one, *cache, long),
        "paged_attention": lambda: portattn.paged_attention(several, *pages, table, keys),
        "decode, prepared": lambda: decode.run(one, *cache, long, out=place),
        "paged, prepared": lambda: paged.run(several, *pages, table, keys, out=places),
        "paged, into a place": lambda: into(places, "paged_attention", several, *pages, table, keys),
        "attention, trained": lambda: portattn.attention(*trained, causal=True),
        "… and its gradients": lambda: gradients(portattn.attention, trained, causal=True),
        "SDPA of a CPU": lambda: sdpa(*small),
        "… and its gradients ": lambda: gradients(sdpa, small),
    }


if __name__ == "__main__":
    print(json.dumps(cpu_child(*sys.argv[2:]) if sys.argv[1] == "cpu" else host_child()))
