"""Draw the timeline of the set context-parallel: each GPU's kernels and messages.

Each rank has a row for what it computes and one for what it sends, on one axis of time. The timeline has two equal
steps, and the second one is drawn. The SVG has no script and no font of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portattn.tools.bench.report import render_template

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


def kind_of(name: str) -> str:
    lowered = name.lower()
    return next(kind for kind, (_, words) in KINDS.items() if any(word in lowered for word in words))


def second_half(events: Sequence[Sequence[Any]]) -> list[Event]:
    """Return one rank's second of two equal steps, in order."""
    ordered = sorted(events, key=lambda event: event[2])
    return [(kind_of(name), begin / 1e3, length / 1e3) for name, _, begin, length in ordered[len(ordered) // 2 :]]


def busy(events: Sequence[Event], sends: bool) -> list[tuple[float, float]]:
    """Return merged (begin, end) intervals of sending, or of computing."""
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
    """Return (ms of sending, ms of sending during computation)."""
    computing = busy(events, sends=False)
    total = covered = 0.0
    for begin, end in busy(events, sends=True):
        total += end - begin
        covered += sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in computing)
    return total, covered


def step_of(length: float) -> float:
    """Return the distance of an axis's marks: 1, 2 or 5 times a power of ten."""
    sizes = (factor * 10.0**power for power in range(-6, 12) for factor in (1, 2, 5))
    return next(size for size in sizes if length / size <= TICKS)


def picture(timeline: dict[str, Any]) -> str:
    ranks = [second_half(events) for events in timeline["ranks"]]
    first = min(begin for events in ranks for _, begin, _ in events)
    length = max(begin + length for events in ranks for _, begin, length in events) - first
    rows, y = [], TOP
    for rank, events in enumerate(ranks):
        for sends, name in ((False, "computes"), (True, "sends")):
            rows.append((y, f"rank {rank} {name}", [event for event in events if (event[0] == SENDS) is sends]))
            y += ROW + 2 * GAP * sends
    every = step_of(length)
    return render_template(
        Path(__file__).with_suffix(".jinja"), ranks=ranks, tokens=timeline["tokens"], heads=timeline["heads"],
        rows=rows, end=y, height=y + 70, first=first, scale=(WIDTH - LEFT - 10) / length, kinds=KINDS, width=WIDTH,
        left=LEFT, row=ROW, top=TOP, marks=[mark * every for mark in range(int(length / every) + 1)],
    )  # fmt: skip


def messages(timeline: dict[str, Any]) -> list[str]:
    """Return, for each rank, how much of its sending its computation hides."""
    totals = [hidden(second_half(events)) for events in timeline["ranks"]]
    return [
        f"rank {rank}: {total:.2f} ms of messages, {covered:.2f} ms of them while it computes"
        for rank, (total, covered) in enumerate(totals)
    ]
