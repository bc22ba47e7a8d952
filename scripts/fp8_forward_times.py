"""Times and errors of attention over e4m3 queries, keys and values, beside the same call in bfloat16.

    python scripts/fp8_forward_times.py --json > fp8.json
    python scripts/fp8_forward_times.py --peer-libs FOLDER    # FlashAttention-3's float8 forward too
    python scripts/fp8_forward_times.py --tiny                # small sizes, on a CPU as well

Widths 128 and 256, 4,096 and 16,384 tokens, full and causal; 16,384 tokens in all, 2,048 columns of all heads. Tensors
are quantised beforehand, with a scale for each head. Times are medians of rounds in which all take turns, of calls back
to back; TFLOP/s count two products of 2·Sq·Sk·D, of causal calls half. `rms` is the root mean square error of one
head's last rows against float64 attention over the tensors before they were quantised, by its root mean square.

The exit status is 1 when a result is further from float64 than `--most` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import portattn
from portattn.tools.bench.peers.availability import has_op

TOKENS, COLUMNS, ROUNDS, CHECKED = 16384, 2048, 7, 256
CASES = [(dim, length, causal) for dim in (128, 256) for length in (4096, 16384) for causal in (False, True)]
TINY = [(64, 64, False), (64, 64, True)]
Runs = dict[str, Callable[[], torch.Tensor]]


def tensors(dim: int, length: int, tokens: int, columns: int, device: str) -> list[torch.Tensor]:
    """q, k and v."""
    torch.manual_seed(0)
    shape = (max(1, tokens // length), columns // dim, length, dim)
    return [torch.randn(shape, device=device, dtype=torch.float32).bfloat16() for _ in range(3)]


def fa3(narrow: Any, causal: bool) -> Callable[[], torch.Tensor]:
    """FlashAttention-3 of vllm, in its own layout."""
    from portattn.tools.bench.peers.fa3 import neutral

    batch, heads, keys, width = narrow.k.shape
    given = neutral() | {f"{name}_descale": getattr(narrow, f"{name}_scale").expand(batch, heads) for name in "qkv"}
    given |= {name: getattr(narrow, name).transpose(1, 2).contiguous() for name in "qkv"}
    given |= {"seqused_k": torch.full((batch,), keys, dtype=torch.int32, device=narrow.k.device)}
    given |= {"softmax_scale": width**-0.5, "is_causal": causal}
    return lambda: torch.ops._vllm_fa3_C.fwd(**given)[0].transpose(1, 2)


def contenders(case: tuple[int, int, bool], sizes: tuple[int, int], device: str) -> tuple[Runs, list[torch.Tensor]]:
    dim, length, causal = case
    wide = tensors(dim, length, *sizes, device)
    narrow = portattn.quantize(*wide, "e4m3")
    given = narrow.arguments()
    asked = "gluon_forward_fp8" if device == "cuda" else None  # e4m3 probabilities must be asked for
    runs: Runs = {
        "e4m3": lambda: portattn.attention(**given, causal=causal, backend=asked),
        "bf16": lambda: portattn.attention(*wide, causal=causal),
    }
    if device == "cuda":
        runs["e4m3, core"] = lambda: portattn.attention(**given, causal=causal, backend="triton")
        if has_op("_vllm_fa3_C", "fwd"):
            runs["FlashAttention-3, e4m3"] = fa3(narrow, causal)
    return runs, wide


def error(out: torch.Tensor, wide: Sequence[torch.Tensor], causal: bool) -> float:
    """Of the last rows of one head, whose position is the end of the keys."""
    q, k, v = (t[0, 0].double() for t in wide)
    rows = min(CHECKED, q.shape[0])
    scores = q[-rows:] @ k.T * q.shape[1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape, dtype=torch.bool, device=q.device).triu(1 + k.shape[0] - rows)
        scores = scores.masked_fill(hidden, float("-inf"))
    exact = torch.softmax(scores, dim=-1) @ v
    return float(((out[0, 0, -rows:].double() - exact).pow(2).mean() / exact.pow(2).mean()).sqrt())


def seconds(run: Callable[[], torch.Tensor], calls: int, device: str) -> float:
    """Of a call."""
    if device == "cpu":
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begun) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / calls


def measured(case: tuple[int, int, bool], sizes: tuple[int, int], device: str) -> list[dict[str, Any]]:
    """A row for each contender."""
    dim, length, causal = case
    runs, wide = contenders(case, sizes, device)
    flops = 4 * wide[0].numel() * length * (0.5 if causal else 1.0)
    rows, turns = [], {name: list[float]() for name in runs}
    for name, run in runs.items():
        out, ours = run(), not name.startswith("Flash")
        path = portattn.last_plan().path if ours else ""
        rows.append({"contender": name, "path": path, "rms": error(out, wide, causal)})
    for _ in range(ROUNDS):
        for name, run in runs.items():
            turns[name].append(seconds(run, 3, device))
    for row in rows:
        took = statistics.median(turns[row["contender"]])
        row |= {"D": dim, "S": length, "causal": causal, "ms": took * 1e3, "tflops": flops / took * 1e-12}
    return rows


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU where there is no GPU")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--peer-libs", type=Path, metavar="FOLDER", help="libraries that register peers' kernels")
    parser.add_argument("--most", type=float, default=0.1, help="largest rms that is right; 0.1 by default")
    options = parser.parse_args(given)
    if not torch.cuda.is_available() and not options.tiny:
        parser.error("there is no GPU: --tiny times small sizes on a CPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.peer_libs:
        from portattn.tools.bench.peers import libraries

        for name, what in libraries.load(options.peer_libs).items():
            print(f"{name}: {what}", file=sys.stderr)
    sizes = (128, 128) if options.tiny else (TOKENS, COLUMNS)
    rows = [row for case in (TINY if options.tiny else CASES) for row in measured(case, sizes, device)]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            mask = "causal" if row["causal"] else "full"
            print(
                f"D={row['D']:<3} S={row['S']:<5} {mask:6} {row['contender']:22} "
                f"{row['path']:18} {row['ms']:9.3f} ms {row['tflops']:7.1f} TFLOP/s rms {row['rms']:.4f}"
            )
    wrong = [row for row in rows if not row["rms"] <= options.most]
    for row in wrong:
        print(f"{row['contender']} D={row['D']} S={row['S']}: rms {row['rms']:.4f}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
