"""Host time of cached calls on a machine without a GPU: kernels are compiled for an H100, a libcuda takes the launches.

    python scripts/host_cost_without_gpu.py [--against CHECKOUT] [--rounds 3]

What a launch costs in CUDA's driver, and memory from torch's CUDA allocator, are not in it: compare only what this
prints, of two checkouts in turns. µs of CPU time of the calling thread, lower quartile of 60 loops of 100 calls. SDPA
on the CPU stands beside as a measure of the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
LOOPS, CALLS = 60, 100


def parent() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, which takes turns with this one")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    checkouts = [*([asked.against.resolve()] if asked.against else []), HERE]
    sys.path.insert(0, str(HERE / "tests"))
    import fakedriver

    with tempfile.TemporaryDirectory() as place:
        folder, triton = Path(place), next(iter(fakedriver.triton_folders().values()))
        fakedriver.build(folder, triton / "backends" / "nvidia" / "include")
        found: dict[str, list[dict[str, float]]] = {str(checkout): [] for checkout in checkouts}
        for _ in range(asked.rounds):
            for checkout in checkouts:
                own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
                own |= fakedriver.environment(folder) | {
                    "PORTATTN_CACHE_DIR": str(folder / f"portattn{checkouts.index(checkout)}"),
                    "PYTHONPATH": os.pathsep.join((str(checkout), str(checkout / "tests"))),
                }
                command = [sys.executable, str(Path(__file__).resolve()), "child"]
                done = subprocess.run(command, env=own, capture_output=True, text=True, check=True, cwd=checkout)
                found[str(checkout)].append(json.loads(done.stdout.splitlines()[-1]))
    for name in found[str(HERE)][0]:
        best = [min(one[name] for one in rounds) for rounds in found.values()]
        print(f"{name:24}", *(f"{value:8.2f}" for value in best), f"ratio {best[-1] / best[0]:.2f}")


def child() -> None:
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
    print(json.dumps(times))


def calls() -> dict[str, Callable[[], Any]]:
    """What is called, by name. Decode and paged decode split their keys: two launches. Prepared ones have a place for
    their result."""
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
    child() if "child" in sys.argv else parent()
