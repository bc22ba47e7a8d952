"""The parent's side of a worker: sends a request, waits under a time limit, and returns any end as a Reply."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from portattn.errors import ArgumentError
from portattn.worker import child as worker_child
from portattn.worker.child import (
    BEFORE_THE_TASK,
    LINE_LIMIT,
    START,
    Answer,
    Child,
    LineTooLong,
    ProtocolError,
    Stage,
)
from portattn.worker.child import PROTOCOL as PROTOCOL


class _Compiles:
    """The compiling thread, and the former values of its variables (inner compiles last)."""

    def __init__(self) -> None:
        self.turn = threading.RLock()  # held for a whole compile
        self.change = threading.RLock()  # held while os.environ and `before` change; never for long
        self.thread = 0
        self.before: list[dict[str, str | None]] = []


_now = _Compiles()


@contextlib.contextmanager
def compile_environment(env: Mapping[str, str]) -> Iterator[None]:
    """Set the variables for the time of a compile in this thread; other threads' compiles wait.

    Forked processes, Worker children and programs started with `env=outside()` do not inherit them. Any other program
    that another thread starts meanwhile does: the C library hands them on, and the compiler must find them there."""
    now = _now
    with now.turn:
        before = {name: os.environ.get(name) for name in env}
        try:
            with now.change:
                now.thread = threading.get_ident()
                now.before.append(before)  # first: a concurrent reader needs the former values
                os.environ.update(env)
            yield
        finally:
            with now.change:
                if now.before and now.before[-1] is before:  # not where an interrupt came before it was noted
                    _put_back(os.environ, before)
                    now.before.pop()


def outside() -> dict[str, str]:
    """Return this process's environment without variables of a compile in any thread."""
    with _now.change:
        # One by one: other threads may take away variables of their own.
        found = {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}
        for before in reversed(_now.before):
            _put_back(found, before)
    return found


def _put_back(environment: os._Environ[str] | dict[str, str], before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value


def _renew_lock() -> None:
    """Restore the variables in a fork, unless the forking thread itself compiles."""
    global _now
    if _now.before and _now.thread == threading.get_ident():
        _now.change = threading.RLock()  # this thread compiles here too, and restores its variables
        return
    for before in reversed(_now.before):
        _put_back(os.environ, before)
    _now = _Compiles()


os.register_at_fork(after_in_child=_renew_lock)


Outcome = Literal["ok", "error", "crash", "hang"]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended: error: the compiler raised; crash: the process died; hang: the time limit passed."""

    outcome: Outcome
    facts: dict[str, int | str | float] = {}
    stage: str = ""
    kind: str = ""  # exception type, or the signal's name
    message: str = ""
    log: str = ""
    toolchain: str = ""  # version of the child's Triton, if it told
    unavailable: bool = False  # the child or the system failed before a compiler could be the cause; see `message`


def ended_by(status: int) -> str:
    """Name a process's end from its return code: SIGABRT, SIGRTMIN+6, `exit status 3`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # only the first and the last of the real-time signals have names
        return f"SIGRTMIN+{-status - signal.SIGRTMIN}" if -status > signal.SIGRTMIN else f"SIG{-status}"


def cause(log: str) -> str:
    """Return the line of a crash log that names the cause: an assertion, an MLIR or LLVM error, or the last line."""
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
    """A child process that compiles, started at the first request and again after any end but an answer.

    Args:
        python: interpreter, of another toolchain's environment for example; this process's own by default
        environment: variables to set, or with None to remove; quirks' variables for a compile here are never inherited
        runs: "" only compiles; "kernels" runs them on a device, "interpreter" under Triton's interpreter, for which
            that Python needs portattn's dependencies
        ahead: whether the child imports the compiler as it starts, not at its first compile

    Any thread may send requests, which run one by one; close() may interrupt one. A forked process starts its own
    child. Raises ArgumentError on variables that no process can have.
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
        self._used: Child | None = None  # by the current request, whose thread alone closes the streams
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
        """Start the child now unless one runs or is in use; the first request reports a failure."""
        if not self._lock.acquire(blocking=False):
            return  # the requesting thread has started it
        try:
            with contextlib.suppress(OSError, MemoryError):
                self._started()
        finally:
            self._let_go()
            self._lock.release()

    def request(self, task: str, seconds: float, **fields: Any) -> Reply:
        """Send one request and wait at most `seconds` for its answer, after other threads' requests.

        Failures of the child or the system are returned (Reply.unavailable), not raised. An exception of a signal
        handler (KeyboardInterrupt) ends the child and passes through. Raises ArgumentError on bad seconds and on a
        field that JSON cannot carry."""
        if not seconds >= 0:
            raise ArgumentError("Worker.request", "seconds", seconds, "must be 0 or more")
        with self._lock:
            number = next(self._ids)
            line = worker_child.encode(number, task, fields)
            asked = _Asked(number, seconds)
            try:
                return self._ask(asked, line)
            except (OSError, MemoryError) as error:
                text = f"the worker cannot be spoken to: {_reason(error)}"
                return asked.reply("crash", type(error).__name__, text, unavailable=True)
            finally:
                self._let_go()

    def close(self) -> None:
        """End the child. Another thread's current request gets a crash that is `unavailable`."""
        with self._state:
            self._end()

    def _ask(self, asked: _Asked, line: bytes) -> Reply:
        try:
            child = self._started()
        except (OSError, MemoryError) as error:  # a Python that is gone; no process, descriptor or folder to be had
            text = f"{self.python or 'a worker'} cannot be started: {_reason(error)}"
            return asked.reply("crash", type(error).__name__, text, unavailable=True)
        child.idle = False  # until it has answered: any end before kills it
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
                child.pipes.drain()  # its output before the answer
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
        with self._state:
            self._used = None  # left behind where an interrupt came twice
            child = self._child
            if child is not None and not child.usable:
                self._end()
                child = None
            if child is None:
                if not self.python:
                    raise FileNotFoundError("sys.executable is empty, and Worker was given no `python`")
                given = {**outside(), "TMPDIR": None, **self.environment}
                command = [self.python, "-u", str(SERVE), *self._options]
                child = self._child = Child(command, {k: v for k, v in given.items() if v is not None})
            self._used = child
            return child

    def _let_go(self) -> None:
        """Kill a child that still owes an answer, and close one that was ended meanwhile."""
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
        """Replace locks and forget children after a fork: they are the parent's."""
        self._lock, self._state = threading.Lock(), threading.RLock()
        for child in {self._child, self._used} - {None}:
            assert child is not None
            child.forget()
        self._child = self._used = None


class _Asked:
    def __init__(self, number: int, seconds: float) -> None:
        self.number, self.seconds = number, seconds
        self.deadline = time.monotonic() + seconds
        self.stage = START
        self.child: Child | None = None

    def hear(self) -> Answer | None:
        """Return the answer if it has come, and record the stages before it."""
        assert self.child is not None
        try:
            for line in self.child.pipes.lines():
                message = worker_child.decode(line, self.number)
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
            log=f"{self.child.pipes.log.text()}\n{answer.log}",
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


# Ends that say nothing about a compiler in an arm of a probe, only about that moment.
TRANSIENT_STAGES = ("start", "import", "protocol")
TRANSIENT_KINDS = ("SIGKILL", "SIGTERM", "SIGINT", "MemoryError", "ImportError", "ModuleNotFoundError", "ProtocolError")
# By which a program ends itself. What somebody sends, and the system's limits (SIGXFSZ, SIGXCPU), are not among them.
OWN_SIGNALS = ("SIGABRT", "SIGSEGV", "SIGILL", "SIGFPE", "SIGTRAP", "SIGBUS")

# The wording of worker/ascend.py, of subprocess.CalledProcessError, and of Triton for ptxas.
_DEATH = re.compile(
    r"\bdied (?:of signal |with <Signals\.(?P<name>SIG\w+): )(?P<number>\d+)|`\w+` raised (?P<raised>SIG\w+)"
    r"|`\w+` failed with error code -(?P<code>\d+)"
)


def death(reply: Reply) -> str:
    """Return the signal that the compiler, or a program that it calls, died of; else ""."""
    if reply.outcome == "crash":
        return reply.kind if reply.kind.startswith("SIG") else ""
    found = _DEATH.search(reply.message) if reply.outcome == "error" else None
    if found is None:
        return ""
    number = int(found["number"] or found["code"] or 0)
    return found["raised"] or found["name"] or next((s.name for s in signal.Signals if s == number), f"signal {number}")


def is_crash(reply: Reply) -> bool:
    """Return whether the compiler died of a signal by which programs end themselves, and so is worth a retry."""
    return death(reply) in OWN_SIGNALS
