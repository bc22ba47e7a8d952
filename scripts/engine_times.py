"""Times of portattn's adapters on one GPU, each beside what its engine runs there, after their results were checked.

    python scripts/engine_times.py --peer-libs FOLDER --out times.json     # all parts
    python scripts/engine_times.py --part vllm --case decode --check       # right or not, without times
    python scripts/engine_times.py --tiny                                  # the same of small sizes, on a CPU as well

    vllm        Impl.forward of the real adapter over a paged cache: decode, mixed prefill, a float8 cache; beside
                FlashAttention-3 as vLLM builds it, and the kernel of vLLM's own Triton backend
    flash_attn  flash_attn_func, and flash_attn_with_kvcache with an append; beside FlashAttention-3
    diffusers   a block of Flux with random weights, 4096 + 512 tokens; beside diffusers' native backend (SDPA)
    masks       attention with lists of blocks beside FlexAttention, and tree masks over a paged cache

Every result is compared with float64, within the budget of portattn.testing.tolerance. What can be captured is replayed
from a CUDA graph, with other lengths and pages than at the capture; on a CPU it is called again with them. `ms` is the
median of rounds in which the contenders take turns, `graph_ms` the same from graphs, `host_us` the median time that a
call takes the host. A part needs its engine, or its Python files alone (vLLM); what is absent is named and costs
nothing.

The exit status is 1 when a result is wrong or a contender fails, and 2 when nothing could be measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from engine_parts.measure import Absent, Measure

from portattn.tools.bench.peers import libraries

PARTS = ("vllm", "flash_attn", "diffusers", "masks")
COLUMNS = ("case", "contender", "ms", "of_peer", "graph_ms", "graph_of_peer", "host_us", "error", "path", "note")


def shown(row: dict[str, Any]) -> str:
    """One line of the table."""
    cells = []
    for name in COLUMNS:
        value = row.get(name, "")
        if name == "error" and value != "":
            text = f"{value:.2g} of {row['budget']:.2g}" + ("" if row["right"] else " WRONG")
        else:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
        cells.append(text)
    return " | ".join(cells)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="these alone; all by default")
    parser.add_argument("--case", default="", help="only cases whose name has this text in it")
    parser.add_argument("--peer-libs", type=Path, help="a folder of op libraries, as of portattn bench")
    parser.add_argument("--seconds", type=float, default=600.0, help="no case begins after these (%(default).0f)")
    parser.add_argument("--check", action="store_true", help="check results, and time nothing")
    parser.add_argument("--tiny", action="store_true", help="small sizes; without a GPU their results alone")
    parser.add_argument("--out", type=Path, help="a file of JSON, written after each case")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.tiny:
        print("engine_times.py: there is no CUDA device; --tiny checks small sizes on a CPU", file=sys.stderr)
        return 2
    loaded = libraries.load(given.peer_libs)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "libraries": loaded, "absent": {}, "rows": [],
    }  # fmt: skip
    print(json.dumps({"device": found["device"], "torch": found["torch"], "libraries": loaded}), flush=True)
    print(" | ".join(COLUMNS), flush=True)
    end = time.monotonic() + given.seconds
    for name in given.part or PARTS:
        measure = Measure(given.case, given.check or device == "cpu", end, given.tiny, device)
        try:
            part = importlib.import_module(f"engine_parts.{name}_part")
            for row in part.rows(measure):
                found["rows"].append({"part": name} | row)
                print(shown(row), flush=True)
                if given.out:
                    given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        except (Absent, ImportError) as reason:
            found["absent"][name] = f"{type(reason).__name__}: {reason}"
            print(f"{name}: absent: {found['absent'][name]}", flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if not found["rows"]:
        return 2
    return int(any(not row.get("right", True) or "failed" in row for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
