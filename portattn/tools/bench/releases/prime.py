"""Compiling what the cases need with each release, side by side, before anything is timed."""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from portattn.tools.bench.cases import Case
from portattn.tools.bench.releases.named import Release
from portattn.tools.bench.releases.process import PREPARE_S, ReleaseProcess
from portattn.tools.bench.schedule import spread

Done = Callable[[Release, Case, str], None]


def prime_all(
    releases: Sequence[Release], cases: Sequence[Case], backend: str, core: bool, jobs: int, done: Done,
    seconds: float = math.inf, task: str = "",
) -> bool:  # fmt: skip
    """Run every case once with every release, in so many processes; whether all were run in time.

    done  is called here as each is finished, with why a case does not run, or an empty text
    """
    todo: queue.SimpleQueue[tuple[Release, Case]] = queue.SimpleQueue()
    found: queue.SimpleQueue[tuple[Release, Case, str] | None] = queue.SimpleQueue()
    # A process is of one release: as many of one as there are threads follow each other.
    for release in releases:
        for case in spread(cases):
            todo.put((release, case))
    total, end = len(releases) * len(cases), time.monotonic() + seconds
    asked: list[ReleaseProcess] = []
    stopped = False

    def compiles() -> None:
        process: ReleaseProcess | None = None
        try:
            while not stopped:
                try:
                    release, case = todo.get_nowait()
                except queue.Empty:
                    return
                left = end - time.monotonic()
                if left <= 0:
                    return
                if process is None or process.release != release:
                    if process is not None:
                        process.close()
                    process = ReleaseProcess(release, task)
                    asked.append(process)
                    if stopped:  # since it was looked at: nobody would end the process
                        return
                found.put((release, case, process.compile(case, backend, core, min(left, PREPARE_S))))
        finally:
            if process is not None:
                process.close()
            found.put(None)

    def close() -> None:
        for process in list(asked):
            process.close()

    count = 0
    threads = min(jobs, total)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(max(threads, 1)))
        stack.callback(close)  # where a thread asks one still
        try:
            working = [pool.submit(compiles) for _ in range(threads)]
            while threads:
                item = found.get()
                if item is None:
                    threads -= 1
                    continue
                count += 1
                done(*item)
            for thread in working:
                thread.result()  # raises what ended it
        finally:
            stopped = True
    return count == total
