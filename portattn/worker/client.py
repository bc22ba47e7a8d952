"""The parent's side of a worker: send a request, wait under a time limit, and turn any end into a Reply."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import msgspec

Outcome = Literal["ok", "error", "crash", "hang"]
SERVE = Path(__file__).with_name("serve.py")
# Bytes of a log that are kept: MLIR names the error first, then prints the whole module after it.
LOG_HEAD, LOG_TAIL = 8_000, 16_000
PROTOCOL = 1  # of the JSON lines; serve.py, which runs in the child, says the same


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended.

    outcome    ok; error: the compiler raised; crash: the process died; hang: the time limit passed
    stage      the compiler stage it was in
    kind       exception type, or the signal's name
    toolchain  version of the Triton that the child really used; empty where it does not say
    """

    outcome: Outcome
    facts: dict[str, int | str | float] = {}
    stage: str = ""
    kind: str = ""
    message: str = ""
    log: str = ""
    toolchain: str = ""


class Worker:
    """A child process that compiles. It is started at the first request, and again after a crash or a hang.

    python       the interpreter to run it under; another toolchain's environment, for example
    environment  variables to set in it beside this process's own, which with None it has not
    runs         "" only compiles; "kernels" also runs them, on a device; "interpreter" runs them under Triton's
                 interpreter. To run anything, portattn must be installed in that Python
    """

    def __init__(
        self,
        python: str = sys.executable,
        environment: Mapping[str, str | None] | None = None,
        runs: Literal["", "kernels", "interpreter"] = "",
    ) -> None:
        self.python = python
        interpret = {"TRITON_INTERPRET": "1" if runs == "interpreter" else None}
        self.environment = {**interpret, **(environment or {})}
        self.runs = runs
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._folder = ""  # the child's own, for temporary files: nothing is left of a child that is killed
        self._remove: weakref.finalize[..., Worker] | None = None
        self._log: Any = None
        self._lock = threading.Lock()  # held for a whole request
        self._state = threading.Lock()  # held while the process or the log is looked at: close() does not wait
        _workers.add(self)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def request(self, task: str, seconds: float, **fields: Any) -> Reply:
        """Send one request and wait for its answer, at most `seconds`. Never raises for what the child does."""
        with self._lock:
            try:
                process, lines, begun = self._start()
            except OSError as error:  # a Python that is gone, or no process to be had
                text = f"{self.python} cannot be started: {error.strerror}"
                return Reply(outcome="crash", stage="start", kind=type(error).__name__, message=text)
            assert process.stdin is not None
            deadline = time.monotonic() + seconds
            stage = "start"
            with contextlib.suppress(BrokenPipeError):  # the child died early: its end is read below
                process.stdin.write(json.dumps({"version": PROTOCOL, "task": task, **fields}) + "\n")
                process.stdin.flush()
            while True:
                try:
                    line = lines.get(timeout=max(deadline - time.monotonic(), 0.001))
                except queue.Empty:
                    self._kill()
                    return Reply(
                        outcome="hang",
                        stage=stage,
                        kind="timeout",
                        message=f"no answer in {seconds:g} s",
                        log=self._tail(begun),
                    )
                if line is None:
                    try:
                        status = process.wait(max(deadline - time.monotonic(), 1.0))
                    except subprocess.TimeoutExpired:
                        self._kill()
                        return Reply(
                            outcome="hang", stage=stage, kind="timeout",
                            message=f"closed its answers, and did not end in {seconds:g} s", log=self._tail(begun),
                        )  # fmt: skip
                    self._process = None
                    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                    log = self._tail(begun)
                    return Reply(outcome="crash", stage=stage, kind=name, message=_cause(log) or name, log=log)
                try:
                    message = _message(line)
                except ValueError as error:
                    self._kill()
                    return Reply(
                        outcome="error", stage=stage, kind="ProtocolError", message=f"the worker {error}",
                        log=self._tail(begun),
                    )  # fmt: skip
                if isinstance(message, _Stage):
                    stage = message.stage
                elif message.ok:
                    return Reply(outcome="ok", facts=message.facts, stage=stage, toolchain=message.toolchain)
                else:
                    log = f"{self._tail(begun)}\n{message.log[-LOG_TAIL:]}"
                    return Reply(
                        outcome="error", stage=message.stage, kind=message.kind, message=message.message, log=log,
                        facts=message.facts,
                    )  # fmt: skip

    def close(self) -> None:
        """End the child. A request under way in another thread is answered as a crash."""
        with self._state:
            self._end()

    def _start(self) -> tuple[subprocess.Popen[str], queue.Queue[str | None], int]:
        """The running child, the lines that it answers, and where in the log the next request's part begins."""
        with self._state:
            if self._log is not None and not os.path.exists(self._log.name):
                self._end()  # somebody tidied up: a child whose folder is gone could compile nothing
            # Before the start: a child that dies at once has written its reason by the time it is spoken to.
            begun = int(self._log.seek(0, os.SEEK_END)) if self._log is not None else 0
            if self._process is None or self._process.poll() is not None:
                self._process, self._lines = self._begin()
            return self._process, self._lines, begun

    def _begin(self) -> tuple[subprocess.Popen[str], queue.Queue[str | None]]:
        if self._log is None:
            self._folder = tempfile.mkdtemp(prefix="portattn-worker-")
            self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._log = open(os.path.join(self._folder, "log"), "w+b")  # noqa: SIM115 - closed by _end()
        given = {**os.environ, "TMPDIR": self._folder, **self.environment}
        environment = {k: v for k, v in given.items() if v is not None}
        # A parent that is killed removes nothing: its child does, when nothing more can be asked.
        command = [self.python, "-u", str(SERVE), *(["--installed"] if self.runs else []), f"--folder={self._folder}"]
        # The child appends through a descriptor of its own, so that reading the log does not move where it writes.
        # A process group of its own: a compiler's children (ptxas, linkers) end with it.
        with open(self._log.name, "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
        return process, lines

    def _end(self) -> None:
        self._kill()
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._remove is not None:
            self._remove()

    def _forget(self) -> None:
        """In a process that was just forked: the child, its folder and whoever held a lock are the parent's."""
        self._lock, self._state = threading.Lock(), threading.Lock()
        self._process, self._log = None, None
        if self._remove is not None:
            self._remove.detach()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _tail(self, begun: int) -> str:
        """The beginning and the end of the log from there on; nothing once the worker is closed."""
        with self._state:
            if self._log is None:
                return ""
            end = self._log.seek(0, os.SEEK_END)
            self._log.seek(begun)
            head = bytes(self._log.read(LOG_HEAD))
            left_out = max(end - LOG_TAIL - begun - len(head), 0)
            self._log.seek(begun + len(head) + left_out)
            cut = f"\n… {left_out} bytes …\n".encode() if left_out else b""
            return (head + cut + bytes(self._log.read())).decode(errors="replace")


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _forked() -> None:
    for worker in list(_workers):
        worker._forget()


os.register_at_fork(after_in_child=_forked)


class _Stage(msgspec.Struct):
    stage: str


class _Answer(msgspec.Struct):
    """An answer as the child sends it. version: of the protocol that it speaks."""

    ok: bool
    version: int = PROTOCOL
    facts: dict[str, Any] = {}
    toolchain: str = ""
    stage: str = ""
    kind: str = ""
    message: str = ""
    log: str = ""


def _message(line: str) -> _Stage | _Answer:
    """One line of a child. Raises ValueError, whose text goes on from "the worker", on what is not this protocol's."""
    try:
        found = json.loads(line)
    except ValueError:
        raise ValueError(f"answered {line[:200]!r}, which is not JSON") from None
    kind: type[_Stage | _Answer] = _Answer if isinstance(found, dict) and "ok" in found else _Stage
    try:
        message = msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"answered {line[:200]!r}, which is no message of protocol {PROTOCOL}: {error}") from None
    if isinstance(message, _Answer) and message.version != PROTOCOL:
        ours = f"this portattn speaks {PROTOCOL}: they are of different releases, install one of them anew"
        raise ValueError(f"speaks protocol {message.version}, and {ours}")
    return message


def _pump(stream: IO[str] | None, lines: queue.Queue[str | None]) -> None:
    assert stream is not None
    for line in stream:
        lines.put(line)
    lines.put(None)


def _cause(log: str) -> str:
    """The line of a crash log that names the cause: an assertion, an MLIR or LLVM error, or else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for mark in ("Assertion", "LLVM ERROR", "error:", "UNREACHABLE", "what():"):
        for line in lines:
            if mark in line:
                return line[:500]
    return lines[-1][:500] if lines else ""
