"""A picture of what GPUs did, from the timeline that scripts/context_parallel_times.py writes.

    python scripts/timeline_picture.py cp-timeline.json docs/performance/plots/context-parallel.svg

Of each rank there is a row for what it computes and one for what it sends, on one axis of time. The timeline has two
equal steps, and the second one is drawn. The SVG has no script and no font of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

Event = tuple[str, float, float]  # kind, begin and length in ms
# Kind -> (colour, words that a kernel's name has one of). The first that fits counts.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sends and receives": ("#d1495b", ("nccl",)),
    "attention, forward": ("#2e6f95", ("scheduled_forward", "dense_forward")),
    "attention, backward": ("#5f9ea0", ("backward", "row_statistics", "query_gradients", "scheduled_queries")),
    "merge": ("#edae49", ("merge_rows",)),
    "copies and sums": ("#8d8d8d", ("",)),
}
SENDS = "sends and receives"
WIDTH, LEFT, ROW, GAP, TOP = 1000, 150, 26, 8, 40
TICKS = 8
FONT = 'font-family="sans-serif" font-size="13"'


def kind_of(name: str) -> str:
    lowered = name.lower()
    return next(kind for kind, (_, words) in KINDS.items() if any(word in lowered for word in words))


def second_half(events: Sequence[Sequence[Any]]) -> list[Event]:
    """Of one rank, in order of their beginning: the second of two equal steps."""
    ordered = sorted(events, key=lambda event: event[2])
    return [(kind_of(name), begin / 1e3, length / 1e3) for name, _, begin, length in ordered[len(ordered) // 2 :]]


def busy(events: Sequence[Event], sends: bool) -> list[tuple[float, float]]:
    """(begin, end) of what sends, or of what computes: overlapping ones as one."""
    found: list[tuple[float, float]] = []
    for kind, begin, length in sorted(events, key=lambda event: event[1]):
        if (kind == SENDS) is not sends:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], begin + length)
        else:
            found.append((begin, begin + length))
    return found


def hidden(events: Sequence[Event]) -> tuple[float, float]:
    """(ms of sending, ms of these in which the rank computes as well)."""
    computing = busy(events, sends=False)
    total = covered = 0.0
    for begin, end in busy(events, sends=True):
        total += end - begin
        covered += sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in computing)
    return total, covered


def step_of(length: float) -> float:
    """Between the marks of an axis: 1, 2 or 5 times a power of ten."""
    size = 10.0**-6
    while True:
        for factor in (1, 2, 5):
            if length / (size * factor) <= TICKS:
                return size * factor
        size *= 10


def picture(timeline: dict[str, Any]) -> str:
    """The SVG."""
    ranks = [second_half(events) for events in timeline["ranks"]]
    first = min(begin for events in ranks for _, begin, _ in events)
    last = max(begin + length for events in ranks for _, begin, length in events)
    scale = (WIDTH - LEFT - 10) / (last - first)
    height = TOP + len(ranks) * (2 * ROW + 2 * GAP) + 70
    found = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" {FONT}>']
    found.append(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    heads = "/".join(map(str, timeline["heads"]))
    title = f"{len(ranks)} GPUs, {timeline['tokens']} tokens, {heads} heads, causal: forward, then backward"
    found.append(f'<text x="{LEFT}" y="20">{escape(title)}</text>')
    y = TOP
    for rank, events in enumerate(ranks):
        for sends in (False, True):
            what = "sends" if sends else "computes"
            found.append(f'<text x="8" y="{y + ROW * 0.7:.0f}">{escape(f"rank {rank} {what}")}</text>')
            for kind, begin, length in events:
                if (kind == SENDS) is sends:
                    x, width = LEFT + (begin - first) * scale, max(length * scale, 0.3)
                    found.append(f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" '
                                 f'fill="{KINDS[kind][0]}"/>')  # fmt: skip
            y += ROW + (GAP * 2 if sends else 0)
    every = step_of(last - first)
    for mark in range(int((last - first) / every) + 1):
        x = LEFT + mark * every * scale
        found.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{y}" stroke="#bbb" stroke-width="0.6"/>')
        found.append(f'<text x="{x:.1f}" y="{y + 14}" text-anchor="middle">{mark * every:g}</text>')
    found.append(f'<text x="{LEFT - 40}" y="{y + 14}">ms</text>')
    x = LEFT
    for kind, (colour, _) in KINDS.items():
        found.append(f'<rect x="{x}" y="{y + 28}" width="12" height="12" fill="{colour}"/>')
        found.append(f'<text x="{x + 17}" y="{y + 39}">{escape(kind)}</text>')
        x += 40 + 7 * len(kind)
    return "\n".join([*found, "</svg>"]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timeline", type=Path, help="JSON of context_parallel_times.py")
    parser.add_argument("picture", type=Path, help="SVG to write")
    options = parser.parse_args(arguments)
    timeline = json.loads(options.timeline.read_text(encoding="utf-8"))
    if not timeline.get("ranks"):
        print(f"{options.timeline} has no events", file=sys.stderr)
        return 2
    options.picture.write_text(picture(timeline), encoding="utf-8")
    for rank, events in enumerate(timeline["ranks"]):
        total, covered = hidden(second_half(events))
        print(f"rank {rank}: {total:.2f} ms of messages, {covered:.2f} ms of them while it computes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
