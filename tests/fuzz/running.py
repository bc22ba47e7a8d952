"""Cases shared out to processes, each with a seed of its own; what they found; what became of those that died."""

import collections
import multiprocessing
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from portattn.worker.child import END_SECONDS

HANG_S = 300.0  # a process that reports nothing for so long hangs: a case compiles for some seconds at most
LOOK_S = 0.5
SHOWN_S = 5.0  # between lines of progress


class Failure(msgspec.Struct, kw_only=True):
    """What went wrong: the seed and the number of the case, why, and Python that shows it again."""

    seed: int
    case: int
    why: str
    snippet: str = ""


class Found(msgspec.Struct, kw_only=True):
    """What a process, or all of them, did. counts: cases by what they ran on."""

    cases: int = 0
    counts: dict[str, int] = {}
    failures: list[Failure] = []

    def add(self, other: "Found") -> None:
        self.cases += other.cases
        for name, number in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + number
        self.failures += other.failures


class Report(Found, kw_only=True):
    """A whole run. ended: "time", "interrupt" or "cases"."""

    mode: str
    device: str
    seed: int
    processes: int
    seconds: float = 0.0
    ended: str = "time"

    @property
    def green(self) -> bool:
        return bool(self.cases) and not self.failures


# What a mode does in one process: (seed, device, seconds, whether to stop) -> what was found, piece by piece. Before a
# case it gives its number alone, so that it is known of a process that dies.
Work = Callable[[int, str, float, Callable[[], bool]], Iterator["Found | int"]]


def run(mode: str, work: Work, seed: int, device: str, seconds: float, processes: int) -> Report:
    """Let `processes` work for so many seconds, and a little to end; Ctrl-C ends them earlier. Never raises what a
    process raises: that is a failure of the case which it was at."""
    context = multiprocessing.get_context("spawn")
    report = Report(mode=mode, device=device, seed=seed, processes=processes)
    stop, events = context.Event(), context.Queue()
    children = {}
    for number in range(processes):
        arguments = (work, seed + number, device, seconds, stop, events)
        children[seed + number] = context.Process(target=_child, args=arguments, daemon=False)
        children[seed + number].start()
    begun = shown = time.monotonic()
    at, heard = dict.fromkeys(children, -1), dict.fromkeys(children, begun)
    try:
        while children:
            try:
                shown = _listen(events, report, children, at, heard, begun, shown)
            except KeyboardInterrupt:
                if stop.is_set():
                    raise
                report.ended = "interrupt"
                print("\ninterrupted: waiting for the cases that are running", file=sys.stderr, flush=True)
                stop.set()
    finally:
        for child in children.values():
            child.kill()
        for child in children.values():
            child.join(END_SECONDS)
    report.seconds = round(time.monotonic() - begun, 1)
    return report


def _listen(events: Any, report: Report, children: dict[int, Any], at: dict[int, int], heard: dict[int, float],
        begun: float, shown: float) -> float:  # fmt: skip
    """Take in what has been sent, and look after processes that sent nothing; returns when progress was shown last."""
    try:
        seed, found = events.get(timeout=LOOK_S)
        heard[seed] = time.monotonic()
        if found is None:
            children.pop(seed).join(END_SECONDS)
        elif isinstance(found, int):
            at[seed] = found
        else:
            report.add(found)
            for failure in found.failures:
                print(f"\nseed {failure.seed}, case {failure.case}: {failure.why}\n{failure.snippet}", flush=True)
        quiet = False
    except queue.Empty:
        quiet = True
    now = time.monotonic()
    for seed, child in list(children.items()):
        hangs = now - heard[seed] > HANG_S
        if hangs or (quiet and not child.is_alive()):
            why = f"hangs: nothing for {HANG_S:g} s" if hangs else f"died: exit status {child.exitcode}"
            report.failures.append(Failure(seed=seed, case=at[seed], why=why))
            print(f"\nseed {seed}, case {at[seed]}: {why}", flush=True)
            child.kill()
            children.pop(seed).join(END_SECONDS)
    if now - shown > SHOWN_S:
        text = f"{now - begun:6.0f} s  {report.cases} cases  {len(report.failures)} failures  {len(children)} processes"
        print(text, file=sys.stderr, flush=True)
        return now
    return shown


def _child(work: Work, seed: int, device: str, seconds: float, stop: Any, events: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone answers Ctrl-C
    import torch

    torch.set_num_threads(1)
    for found in work(seed, device, seconds, stop.is_set):
        events.put((seed, found))
    events.put((seed, None))


def collected(work: Iterator[Found | int]) -> Found:
    total = Found(counts=collections.Counter(), failures=[])
    for found in work:
        if not isinstance(found, int):
            total.add(found)
    return total
