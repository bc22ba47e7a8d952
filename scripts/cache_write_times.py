"""Times of write_pages beside a device-to-device copy of as many bytes: a decode step and a prompt.

    python scripts/cache_write_times.py --json > writes.json
    python scripts/cache_write_times.py --tiny      # small sizes, on a CPU as well, where the reference runs

Eight heads of 128 bfloat16 columns go into pages of 16 tokens, as they are or as e4m3, with a scale for each head or
for each token and head, and with the keys rotated. Before a case is timed, what it stored is compared bit by bit with
the reference path's. `ms` is the median of the rounds, calls back to back; `graph_ms` the same replayed from a CUDA
graph; `cold_ms` after the L2 was written over. GB/s are of the bytes that are read and written, `of copy` is the
share of what torch's copy_ of as many bytes reached, in the same rounds.

The exit status is 1 when a case stored other bits than the reference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import portattn

HEADS, WIDTH, PAGE, ANGLES = 8, 128, 16, 16384
ROUNDS, CALLS = 9, 50
TOKENS = {"decode": 64, "prompt": 8192}
TINY = {"decode": 4, "prompt": 40}
E4M3 = torch.float8_e4m3fn
# Name -> (dtype of the cache, what a scale belongs to, whether keys are rotated).
KINDS: dict[str, tuple[torch.dtype, str, bool]] = {
    "bf16": (torch.bfloat16, "", False),
    "bf16, rotated": (torch.bfloat16, "", True),
    "e4m3, a scale for each head": (E4M3, "head", False),
    "e4m3, a scale for each token": (E4M3, "token", False),
    "e4m3, a scale for each token, rotated": (E4M3, "token", True),
}


def arguments(tokens: int, kind: str, device: str) -> dict[str, Any]:
    """Arguments of write_pages: random tokens into random slots of a cache four times as large."""
    dtype, scales, rotated = KINDS[kind]
    torch.manual_seed(0)
    pages = -(-4 * tokens // PAGE)
    given: dict[str, Any] = {name: torch.randn(tokens, HEADS, WIDTH, device=device).bfloat16() for name in "kv"}
    for name in ("k", "v"):
        given[f"{name}_pages"] = torch.zeros(pages, PAGE, HEADS, WIDTH, device=device, dtype=torch.float32).to(dtype)
        if scales:
            shape = (HEADS,) if scales == "head" else (pages, PAGE, HEADS)
            given[f"{name}_scale"] = torch.full(shape, 0.01, device=device)
    given["slot_mapping"] = torch.randperm(pages * PAGE, device=device)[:tokens]
    if rotated:
        angles = torch.arange(ANGLES, device=device)[:, None] * 1e4 ** -torch.linspace(0, 1, WIDTH // 2, device=device)
        given |= {"cos": angles.cos(), "sin": angles.sin()}
        given["positions"] = torch.randint(0, ANGLES, (tokens,), device=device)
    return given


def moved(given: dict[str, Any]) -> int:
    """Bytes that are read and written: tokens, what they become, scales that are computed, and angles."""
    tokens = given["k"].shape[0]
    found = 2 * given["k"].numel() * (given["k"].itemsize + given["k_pages"].itemsize) + 8 * tokens
    if given.get("k_scale") is not None and given["k_scale"].ndim == 3:
        found += 2 * tokens * HEADS * 4
    return found + (tokens * (WIDTH * 4 + 8) if "cos" in given else 0)


def stored(given: dict[str, Any]) -> list[torch.Tensor]:
    names = [name for name in ("k_pages", "v_pages", "k_scale", "v_scale") if name in given]
    return [given[name].view(torch.uint8) for name in names]


def as_the_reference(tokens: int, kind: str, device: str) -> bool:
    ours, theirs = arguments(tokens, kind, device), arguments(tokens, kind, device)
    portattn.write_pages(**ours)
    portattn.write_pages(**theirs, backend="reference")
    return all(torch.equal(one, other) for one, other in zip(stored(ours), stored(theirs), strict=True))


class HostClock:
    """Wall time, for a machine without a GPU."""

    def turn_ms(self, run: Callable[[], Any], timing: str, calls: int, expected_ms: float) -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begun) * 1e3 / calls


def medians(runs: dict[str, Callable[[], Any]], clock: Any, timing: str, calls: int) -> dict[str, float]:
    """Milliseconds of each, in turns."""
    turns: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        clock.turn_ms(run, timing, calls, 1e-3)
    for _ in range(ROUNDS):
        for name, run in runs.items():
            turns[name].append(clock.turn_ms(run, timing, calls, 1e-3))
    return {name: statistics.median(times) for name, times in turns.items()}


def measured(tokens: int, kind: str, device: str, clock: Any, calls: int) -> dict[str, Any]:
    given = arguments(tokens, kind, device)
    count = moved(given)
    source = torch.zeros(count // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    runs = {"ours": lambda: portattn.write_pages(**given), "copy": lambda: target.copy_(source)}
    hot = medians(runs, clock, "hot", calls)
    row = {"bytes": count, "path": portattn.last_plan().path, "ms": hot["ours"], "copy_ms": hot["copy"]}
    if device == "cuda":
        from portattn.tools.bench.contenders import Contender

        replays = {name: clock.graphed(Contender(run)) for name, run in runs.items()}
        row |= {f"graph_{name}_ms": ms for name, ms in medians(replays, clock, "hot", calls).items()}
        row |= {f"cold_{name}_ms": ms for name, ms in medians(runs, clock, "cold", calls).items()}
        row |= {"extra_bytes": clock.peak_extra_bytes(runs["ours"]), "host_us": clock.host_us(runs["ours"]).median}
    return row | {"gb_s": count / row["ms"] / 1e6, "of_copy": row["copy_ms"] / row["ms"]}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes and few calls, on a CPU where there is no GPU")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    options = parser.parse_args(given)
    if not torch.cuda.is_available() and not options.tiny:
        parser.error("there is no GPU: --tiny times small sizes on a CPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock: Any = HostClock()
    if device == "cuda":
        from portattn.tools.bench.clock import DeviceClock

        clock = DeviceClock()
    rows, wrong = [], []
    for name, tokens in (TINY if options.tiny else TOKENS).items():
        for kind in KINDS:
            print(f"{name}, {kind}", file=sys.stderr)
            if not as_the_reference(tokens, kind, device):
                wrong.append(f"{name}, {kind}")
                continue
            rows.append({"case": name, "tokens": tokens, "cache": kind}
                        | measured(tokens, kind, device, clock, 2 if options.tiny else CALLS))  # fmt: skip
    if options.json:
        print(json.dumps({"rows": rows, "wrong": wrong}, indent=1))
    else:
        for row in rows:
            print(f"{row['case']:7} {row['cache']:38} {row['path']:10} {row['ms'] * 1e3:9.2f} us"
                  f" {row['gb_s']:8.1f} GB/s {row['of_copy']:6.2f} of copy")  # fmt: skip
    for one in wrong:
        print(f"{one}: other bits than the reference's", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
