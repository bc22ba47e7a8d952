"""Run programs for the lab: pip and apt, told line by line and ended on interrupt; workers under its Pythons."""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from portattn.schema.toolchain import is_installed
from portattn.tools.lab import folders
from portattn.worker.client import Worker

LAST_LINES = 12  # of a failed program's output that its error keeps

Say = Callable[[str], None]
Job = TypeVar("Job")
Found = TypeVar("Found")


class CommandError(Exception):
    """A program could not be started, ended badly or was `late`; `lines` are the last ones that it printed."""

    def __init__(self, program: str, why: str, lines: Iterable[str] = (), late: bool = False) -> None:
        self.why, self.lines, self.late = why, list(lines), late
        super().__init__("\n  ".join([f"{program}: {why}", *self.lines]))


class Commands:
    """Runs programs; `stop` ends running programs, from any thread, and refuses further ones."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._state = threading.Lock()
        self._stopped = False

    def run(
        self, command: Sequence[str], say: Say, environment: Mapping[str, str] | None = None,
        folder: Path | None = None, until: float = math.inf,
    ) -> list[str]:  # fmt: skip
        """Run a program, telling each line; return all. It ends at an interrupt, or `until`. Raises CommandError."""
        program = os.path.basename(command[0])
        lines: list[str] = []
        with self._state:
            if self._stopped:
                raise CommandError(program, "not started: interrupted")
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    errors="replace", env=environment, cwd=folder, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise CommandError(program, f"cannot be started: {error.strerror}") from None
            self._running.add(process)
        timer = threading.Timer(min(max(until - time.monotonic(), 0.0), threading.TIMEOUT_MAX), _kill, [process])
        timer.daemon = True
        if math.isfinite(until):
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                if line.strip():
                    say(line.strip())
            status = process.wait()
        except BaseException:
            _kill(process)
            raise
        finally:
            timer.cancel()
            with self._state:
                self._running.discard(process)
            if process.stdout is not None:
                process.stdout.close()
        if status:
            why = f"died of {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            last = deque((line for line in lines if line.strip()), LAST_LINES)
            raise CommandError(program, why, last, late=time.monotonic() >= until)
        return lines

    def stop(self) -> None:
        with self._state:
            self._stopped = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def quiet(_: str) -> None:
    """Ignore a line: a `say` without output."""


def worker(toolchain: str | None = None, **options: Any) -> Worker:
    """Return a child that compiles with a toolchain, the installed one for None. Raises LabError or ArgumentError."""
    own: dict[str, str | None] = options.pop("environment", None) or {}
    if toolchain is None or is_installed(toolchain):
        # The very Triton that this process would import, however it came to be on the path.
        path = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        return Worker(environment={**path, **own}, **options)
    return Worker(python=folders.need(toolchain).python, environment={**isolation_variables(), **own}, **options)


def isolation_variables() -> dict[str, str | None]:
    """Return the variables to unset for a lab's Python: they bring this process's packages or another ptxas into it."""
    return dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"))


OpenWorker = Callable[[Hashable, Callable[[], Worker]], Worker]


def run_in_threads(
    jobs: Iterable[Job], work: Callable[[Job, OpenWorker], Found], parallel: int, done: Callable[[Job, Found], None],
    out_of_time: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Work on jobs side by side, telling `done` in this thread; no job begins once `out_of_time`.

    `work` gets a function that returns the thread's worker of a key, started by the given function if the thread has
    none. An interrupt or an error kills the workers and drops the other jobs."""
    local, opened, closed = threading.local(), list[Worker](), threading.Event()

    def open_worker(key: Hashable, start: Callable[[], Worker]) -> Worker:
        own: dict[Any, Worker] = local.__dict__
        if key not in own:
            if closed.is_set():
                raise CancelledError("the run has ended")
            own[key] = start()
            opened.append(own[key])
        return own[key]

    pool = ThreadPoolExecutor(parallel, thread_name_prefix="portattn")
    try:
        # A few at a time: an interrupt then finds little under way.
        waiting, running = list(jobs)[::-1], dict[Future[Found], Job]()
        while waiting or running:
            if out_of_time():
                waiting.clear()
            while waiting and len(running) < parallel:
                job = waiting.pop()
                # With this thread's settings.
                running[pool.submit(contextvars.copy_context().run, work, job, open_worker)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done(running.pop(future), future.result())
    finally:
        closed.set()
        for worker in opened:
            worker.close()
        pool.shutdown(cancel_futures=True)
        for worker in opened:  # a thread can have started a child between the two
            worker.close()
