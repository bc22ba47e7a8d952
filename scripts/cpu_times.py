"""Time and memory of attention on this machine's CPU: torch's SDPA, portattn, and its reference path, in one run.

    python scripts/cpu_times.py [--before CHECKOUT] [--rounds 3] [--threads N]

Each measurement is a process of its own, which calls a case a few times: its least CPU time (of one thread unless told
otherwise, so that other processes of the machine do not count), and how far the process's peak
of resident memory was above what it held before, less the output. Rounds go through all contenders in turn, and the
least time of all rounds counts. --before adds another checkout of portattn to the contenders. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAST_CALLS = 3  # the first of a process plans, and touches new memory
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


def contender(who: str, case: str) -> Callable[[], object] | None:
    """What runs the case; None where SDPA has no such thing."""
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
    """Bytes of VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(who: str, case: str, threads: int) -> dict[str, float] | None:
    """Seconds and bytes of a case, in this process."""
    import torch

    torch.set_num_threads(threads)
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
    while spent < 1.0 or calls < LEAST_CALLS:
        begun = time.process_time()
        run()
        taken = time.process_time() - begun
        least, spent, calls = min(least, taken), spent + taken, calls + 1
    return {"seconds": least, "bytes": max(peak, 0)}


def shown(found: dict[str, float] | None) -> str:
    if found is None:
        return "–"
    seconds = found["seconds"]
    value = (
        f"{seconds * 1e6:.0f} µs"
        if seconds < 1e-3
        else f"{seconds * 1e3:.1f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )
    return f"{value}, {found['bytes'] / 2**20:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout of portattn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(*given.measure, given.threads)))
        return
    whose = {"sdpa": ROOT, **({"before": given.before} if given.before else {}), "portattn": ROOT, "reference": ROOT}
    print(f"| case | {' | '.join(whose)} |\n| {'--- | ' * (len(whose) + 1)}")
    for case in (name for name in CASES if given.only in name):
        best: dict[str, dict[str, float] | None] = {}
        for _ in range(given.rounds):
            for who, checkout in whose.items():
                line = [sys.executable, __file__, "--threads", str(given.threads), "--measure", who, case]
                environment = {**os.environ, "PYTHONPATH": str(checkout)}
                done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout)
                if found is not None and best.get(who) is not None:
                    found = {name: min(value, best[who][name]) for name, value in found.items()}  # type: ignore[index]
                best[who] = found
        print(f"| {case} | {' | '.join(shown(best[who]) for who in whose)} |", flush=True)


if __name__ == "__main__":
    main()
