"""Work shared out to child processes, one of which may die or hang without harm to this one."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")
LOOK_SECONDS = 1.0  # how often the time is looked at while children work
END_SECONDS = 10.0  # how long a killed child is waited for: until then it holds the device's memory


def in_children(
    items: Sequence[Item],
    work: Callable[[Item], Found],
    processes: int,
    done: Callable[[Item, Found], None],
    out_of_time: Callable[[], bool] = lambda: False,
) -> bool:
    """Do `work` on every item in spawned children; `done(item, what it returned)` is called in this thread.

    Over when all is done, when time is, or when a child dies: nobody knows which item that was then. Whatever runs at
    that moment is killed. Returns whether all was done. What `work` or `done` raises is raised here.
    """
    if not items:
        return True
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(items)), mp_context=context, initializer=_leave_interrupts)
    try:
        running: dict[Future[Found], Item] = {pool.submit(work, item): item for item in items}
        while running and not out_of_time():
            for future in wait(running, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED).done:
                item = running.pop(future)
                done(item, future.result())
        return not running
    except BrokenProcessPool:
        return False
    finally:
        children = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:  # one may hang in a kernel
            child.kill()
        for child in children:
            child.join(END_SECONDS)


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal: the parent alone answers it, and ends the children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
