"""The parent's side of a worker: send a request, wait under a time limit, and turn any end into a Reply."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from portattn.errors import ArgumentError
from portattn.worker import environment as variables
from portattn.worker import protocol
from portattn.worker.child import Child
from portattn.worker.protocol import PROTOCOL as PROTOCOL
from portattn.worker.protocol import Answer, ProtocolError, Stage
from portattn.worker.stages import BEFORE_THE_TASK, START
from portattn.worker.transport import LINE_LIMIT, LOG_TAIL, LineTooLong

Outcome = Literal["ok", "error", "crash", "hang"]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended.

    outcome      ok; error: the compiler raised; crash: the process died; hang: the time limit passed
    stage        the compiler stage it was in
    kind         exception type, or the signal's name
    toolchain    version of the Triton that the child really used; empty where it does not say
    unavailable  nothing was learnt about what was asked, whatever the outcome: the child could not be started or ended
                 before it began, was closed, did not speak the protocol, or the system failed the parent (no process,
                 no descriptor, no memory). `message` says which. Not set where a compiler may have been the cause,
                 as where a child is killed by somebody: worker/exit_status.py judges those by their kind
    """

    outcome: Outcome
    facts: dict[str, int | str | float] = {}
    stage: str = ""
    kind: str = ""
    message: str = ""
    log: str = ""
    toolchain: str = ""
    unavailable: bool = False


def ended_by(status: int) -> str:
    """The name of how a process ended, from its return code: SIGABRT, SIGRTMIN+6, `exit status 3`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # only the first and the last of the real-time signals have names
        return f"SIGRTMIN+{-status - signal.SIGRTMIN}" if -status > signal.SIGRTMIN else f"SIG{-status}"


def cause(log: str) -> str:
    """The line of a crash log that names the cause: an assertion, an MLIR or LLVM error, or else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for mark in ("Assertion", "LLVM ERROR", "error:", "UNREACHABLE", "what():"):
        for line in lines:
            if mark in line:
                return line[:500]
    return lines[-1][:500] if lines else ""


SERVE = Path(__file__).with_name("serve.py")
LOOK_SECONDS = 0.1  # how often it is looked whether the child has ended: its streams may stay open in its own children
SOON_SECONDS = 0.005  # the same once it has closed its answers: it is about to end


class Worker:
    """A child process that compiles. It is started at the first request, and again after any end but an answer.

    python       the interpreter to run it under; another toolchain's environment, for example. This process's own
                 by default
    environment  variables to set in it beside this process's own, which with None it has not. What a quirk has set
                 here for the time of a compile is no variable of this process's own
    runs         "" only compiles; "kernels" also runs them, on a device; "interpreter" runs them under Triton's
                 interpreter. To run anything, that Python needs portattn's dependencies; portattn is this process's own
    ahead        its child imports the compiler as it starts, not as it is first asked to compile

    Any thread may ask, one request after another; close() may be called while a request is under way. In a process
    that was forked it starts a child of its own. Raises ArgumentError on variables that no process can have.
    """

    def __init__(
        self,
        python: str | None = None,
        environment: Mapping[str, str | None] | None = None,
        runs: Literal["", "kernels", "interpreter"] = "",
        ahead: bool = False,
    ) -> None:
        self.python = python or sys.executable or ""
        interpret = {"TRITON_INTERPRET": "1" if runs == "interpreter" else None}
        self.environment = {**interpret, **(environment or {})}
        _check(self.python, self.environment)
        self.runs = runs
        self._options = [*(["--whole"] if runs else []), *(["--ahead"] if ahead else [])]
        self._ids = itertools.count(1)
        self._child: Child | None = None
        self._used: Child | None = None  # by the request under way: its thread closes the streams, nobody else
        self._lock = threading.Lock()  # held for a whole request
        self._state = threading.RLock()  # held while the child is started or ended: close() waits for no answer
        _workers.add(self)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the child now, where none runs and nobody asks. What fails is found, and told, at the first request."""
        if not self._lock.acquire(blocking=False):
            return  # whoever asks has started it
        try:
            with contextlib.suppress(OSError, MemoryError):
                self._started()
        finally:
            self._let_go()
            self._lock.release()

    def request(self, task: str, seconds: float, **fields: Any) -> Reply:
        """Send one request and wait for its answer, at most `seconds`, once other threads' requests are answered.

        Never raises for what the child or the system does: Reply.unavailable says where nothing was learnt. What a
        signal handler raises meanwhile (KeyboardInterrupt) passes through, after the child was ended.
        Raises ArgumentError on seconds that are no length of time, and on a field that JSON cannot carry.
        """
        if not seconds >= 0:
            raise ArgumentError("Worker.request", "seconds", seconds, "must be 0 or more")
        with self._lock:
            number = next(self._ids)
            line = protocol.encode(number, task, fields)
            asked = _Asked(number, seconds)
            try:
                return self._ask(asked, line)
            except (OSError, MemoryError) as error:
                text = f"the worker cannot be spoken to: {_reason(error)}"
                return asked.reply("crash", type(error).__name__, text, unavailable=True)
            finally:
                self._let_go()

    def close(self) -> None:
        """End the child. A request under way in another thread is answered as a crash, which is `unavailable`."""
        with self._state:
            self._end()

    def _ask(self, asked: _Asked, line: bytes) -> Reply:
        try:
            child = self._started()
        except (OSError, MemoryError) as error:  # a Python that is gone; no process, descriptor or folder to be had
            text = f"{self.python or 'a worker'} cannot be started: {_reason(error)}"
            return asked.reply("crash", type(error).__name__, text, unavailable=True)
        child.idle = False  # until it has answered: whatever happens before ends it
        asked.child = child
        child.pipes.send(line)
        ended = False
        while True:
            try:
                answer = asked.hear()
            except ProtocolError as error:
                child.end()
                return asked.reply("error", "ProtocolError", f"the worker {error}", unavailable=True)
            if answer is not None:
                child.pipes.drain()  # what it printed before it answered
                child.idle = child.pipes.taken
                return asked.answered(answer)
            if ended:
                return self._died(asked, child)
            left = asked.deadline - time.monotonic()
            if left <= 0:
                child.end()
                return asked.out_of_time()
            ended = child.ended()
            if ended:
                child.end()  # its own children, which could go on writing
                child.pipes.drain()
            else:
                child.pipes.move(min(left, LOOK_SECONDS if child.pipes.answered else SOON_SECONDS))

    def _died(self, asked: _Asked, child: Child) -> Reply:
        name = ended_by(child.end() or 0)
        if self._child is not child:
            return asked.reply("crash", name, "the worker was closed while it was asked", unavailable=True)
        return asked.reply("crash", name, cause(child.pipes.log.text()) or name)

    def _started(self) -> Child:
        """The child to ask: the one that runs, or a new one. Raises OSError."""
        with self._state:
            self._used = None  # left behind where an interrupt came twice
            child = self._child
            if child is not None and not child.usable:
                self._end()
                child = None
            if child is None:
                if not self.python:
                    raise FileNotFoundError("sys.executable is empty, and Worker was given no `python`")
                given = {**variables.outside(), "TMPDIR": None, **self.environment}
                command = [self.python, "-u", str(SERVE), *self._options]
                child = self._child = Child(command, {k: v for k, v in given.items() if v is not None})
            self._used = child
            return child

    def _let_go(self) -> None:
        """After a request: end a child that owes an answer still, and close one that was ended meanwhile."""
        with self._state:
            child = self._used
            if child is not None and not child.idle and self._child is child:
                child.end()
                self._child = None
            self._used = None
            if child is not None and child is not self._child:
                child.close()

    def _end(self) -> None:
        child = self._child
        if child is None:
            return
        child.end()
        self._child = None
        if child is not self._used:
            child.close()

    def _forget(self) -> None:
        """In a process that was just forked: the child is the parent's, and so is whoever held a lock."""
        self._lock, self._state = threading.Lock(), threading.RLock()
        for child in {self._child, self._used} - {None}:
            assert child is not None
            child.forget()
        self._child = self._used = None


class _Asked:
    """A request under way: what was asked, and how far the child is."""

    def __init__(self, number: int, seconds: float) -> None:
        self.number, self.seconds = number, seconds
        self.deadline = time.monotonic() + seconds
        self.stage = START
        self.child: Child | None = None

    def hear(self) -> Answer | None:
        """The answer, if it has come; stages that came before it are noted. Raises ProtocolError."""
        assert self.child is not None
        try:
            for line in self.child.pipes.lines():
                message = protocol.decode(line, self.number)
                if not isinstance(message, Stage):
                    return message
                self.stage = message.stage
        except LineTooLong:
            raise ProtocolError(f"answered a line of more than {LINE_LIMIT} bytes") from None
        return None

    def reply(
        self, outcome: Literal["error", "crash", "hang"], kind: str, text: str, unavailable: bool = False
    ) -> Reply:
        log = self.child.pipes.log.text() if self.child is not None else ""
        unheard = self.stage in BEFORE_THE_TASK
        return Reply(
            outcome=outcome, stage=self.stage, kind=kind, message=text, log=log, unavailable=unavailable or unheard
        )

    def answered(self, answer: Answer) -> Reply:
        if answer.ok:
            return Reply(outcome="ok", facts=answer.facts, stage=self.stage, toolchain=answer.toolchain)
        assert self.child is not None
        return Reply(
            outcome="error",
            stage=answer.stage,
            kind=answer.kind,
            message=answer.message,
            log=f"{self.child.pipes.log.text()}\n{answer.log[-LOG_TAIL:]}",
            facts=answer.facts,
            unavailable=answer.stage in BEFORE_THE_TASK,
        )

    def out_of_time(self) -> Reply:
        assert self.child is not None
        limit = f"{self.seconds:g} s"
        answered = self.child.pipes.answered
        text = f"no answer in {limit}" if answered else f"closed its answers, and did not end in {limit}"
        return self.reply("hang", "timeout", text)


def _check(python: str, environment: Mapping[str, str | None]) -> None:
    """Raises ArgumentError on what no process can be given."""
    if not _passable(python):
        raise ArgumentError("Worker", "python", python, "must be the path of a file")
    for name, value in environment.items():
        if not name or "=" in name or not _passable(name):
            raise ArgumentError("Worker", "environment", name, "a variable's name is not empty and without = and NUL")
        if value is not None and not _passable(value):
            raise ArgumentError("Worker", f"environment[{name!r}]", value, "must be a text without NUL, or None")


def _passable(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _reason(error: OSError | MemoryError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _forked() -> None:
    for worker in list(_workers):
        worker._forget()


os.register_at_fork(after_in_child=_forked)
