"""The tables of docs/performance/context-parallel.md, from what scripts/context_parallel_times.py wrote.

    python scripts/context_parallel_page.py docs/performance/context-parallel.json

Prints them one after the other, as the page has them; the test of this script compares.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20


def rows(cells: Iterable[Iterable[str]]) -> str:
    """A table of markdown; the first row is its head."""
    found = [f"| {' | '.join(row)} |" for row in cells]
    found.insert(1, f"|{' --- |' * (found[0].count(' | ') + 1)}")
    return "\n".join(found) + "\n"


def torchs_best(contenders: dict[str, Any]) -> tuple[str, float, float] | None:
    """(kernel, ms, its time over the ring's) of the fastest of torch's own variants. The ring took turns with each of
    the variants; its time is the median of those."""
    own = {name: one["ms"] for name, one in contenders.items() if name.startswith("torch, ") and "portattn" not in name}
    if not own:
        return None
    best = min(own, key=lambda name: own[name])
    beside = statistics.median(one["ms"] for name, one in contenders.items() if name.startswith("ring beside "))
    return best.split(", ")[1], own[best], own[best] / beside


def times(report: dict[str, Any]) -> str:
    head = [
        "heads", "tokens", "pass", "one GPU", "ring", "one / ring", "Ulysses", "one / Ulysses", "model", "torch's",
        "torch's / ring",
    ]  # fmt: skip
    found = [head]
    for name, shape in report["parts"]["attention"]["shapes"].items():
        heads, tokens = name.removesuffix(" tokens").split(" heads, ")
        for phase, contenders in shape["times"].items():
            one, ring, ulysses = (contenders[which]["ms"] for which in ("one", "ring", "ulysses"))
            best = torchs_best(contenders)
            theirs = [f"{best[1]:.1f} ({best[0]})", f"{best[2]:.2f}"] if best else ["", ""]
            found.append([
                heads, f"{int(tokens):,}", phase, f"{one:.1f}", f"{ring:.1f}", f"{one / ring:.2f}", f"{ulysses:.1f}",
                f"{one / ulysses:.2f}", f"{shape['model ms'][phase]:.1f}", *theirs,
            ])  # fmt: skip
    return rows(found)


def memory(report: dict[str, Any]) -> str:
    found = [["heads", "tokens", "pass", "one GPU", "ring", "the model of the ring", "Ulysses"]]
    for name, shape in report["parts"]["attention"]["shapes"].items():
        heads, tokens = name.removesuffix(" tokens").split(" heads, ")
        held = shape["memory"]
        result = int(heads.split("/")[0]) * int(tokens) * 128 * 2 / report["ranks"]
        for phase, suffix in (("forward", ""), ("backward", ", backward")):
            model = f"{(shape['model ms']['memory'] + result) / MIB:,.0f}" if phase == "forward" else ""
            one, ring, ulysses = (f"{held[which + suffix] / MIB:,.0f}" for which in ("one", "ring", "ulysses"))
            found.append([heads, f"{int(tokens):,}", phase, one, ring, model, ulysses])
    return rows(found)


def decode(report: dict[str, Any]) -> str:
    part = report["parts"]["decode"]
    found = [["a call", "one GPU, ms", "two, all heads", "one / two", "two, own heads", "one / two"]]
    for kind, words in (("eager", "eager"), ("graph", "replayed from a CUDA graph")):
        one, everything, own = (part[kind][which]["ms"] for which in ("one", "several, all", "several, shard"))
        found.append([
            words, f"{one:.3f}", f"{everything:.3f}", f"{one / everything:.2f}", f"{own:.3f}", f"{one / own:.2f}",
        ])  # fmt: skip
    return rows(found)


def llama(report: dict[str, Any]) -> str:
    part = report["parts"]["llama"]
    found = [["", "one GPU", "two", "one / two"]]
    for kind, words in (("forward", "forward with the loss, ms"), ("step", "forward and backward, ms")):
        one, two = part[kind]["one"]["ms"], part[kind]["several"]["ms"]
        found.append([words, f"{one:,.0f}", f"{two:,.0f}", f"{one / two:.2f}"])
    for suffix, words in (("forward", "memory of the forward, GiB"), ("step, in all", "memory of a step in all, GiB")):
        one, two = (part["memory"][f"{which}, {suffix}"] / 2**30 for which in ("one", "several"))
        found.append([words, f"{one:.1f}", f"{two:.1f}", f"{one / two:.2f}"])
    found.append(["loss", *(f"{part['loss'][which]:.5f}" for which in ("one", "several")), ""])
    return rows(found)


def rates(report: dict[str, Any]) -> str:
    found = report["parts"]["attention"]["rates"]
    named = (
        ("link", "messages both ways at once, each way", "GB/s", 1e-9), ("one way", "messages one way", "GB/s", 1e-9),
        ("latency", "an exchange of 8 bytes", "µs", 1e6), ("forward", "attention, forward", "TFLOP/s", 1e-12),
        ("backward", "attention, backward", "TFLOP/s", 1e-12),
    )  # fmt: skip
    said = [[words, f"{found[name] * factor:.0f} {unit}"] for name, words, unit, factor in named]
    return rows(
        [["rate", "measured"], *said, ["decoding reads", f"{report['parts']['decode']['rate'] / 1e12:.2f} TB/s"]]
    )


TABLES = (times, memory, decode, llama, rates)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="JSON of context_parallel_times.py, of all parts")
    options = parser.parse_args(arguments)
    report = json.loads(options.report.read_text(encoding="utf-8"))
    print("\n".join(table(report) for table in TABLES), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
