"""One child process, its streams, and the messages on them.

It has its own process group and folder, and ends with both. The caller that waits for an answer also writes the request
and reads the log, without blocking: no thread is left behind, and endless output is read and dropped. Messages are JSON
lines; serve.py handles the same by hand, as it has only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import msgspec

from portattn.errors import ArgumentError

PROTOCOL = 2
# Stages that both sides of a worker know, beside the stages of the task.
START = "start"  # the parent's: nothing was heard of the child yet
IMPORT_STAGE, PROTOCOL_STAGE = "import", "protocol"  # the child's: it imports the task, or could not read the request
BEFORE_THE_TASK = (START, IMPORT_STAGE, PROTOCOL_STAGE)  # a failure here says nothing about the task
RUNS = "run"  # of a task that runs a plan: imports are done, and kernels are compiled and run
# Characters of a message's texts that are kept. serve.py cuts its own messages before, at half of that.
NAME_LIMIT, MESSAGE_LIMIT = 200, 16_000


class ProtocolError(Exception):
    """A child's message is no answer to its request. The text continues "the worker"."""


class Stage(msgspec.Struct):
    """Progress: the compiler stage that the child enters."""

    id: int
    stage: str


class Answer(msgspec.Struct):
    """The end of a request; `version` is the child's protocol."""

    id: int
    ok: bool
    version: int
    facts: dict[str, int | str | float] = {}
    toolchain: str = ""
    stage: str = ""
    kind: str = ""
    message: str = ""
    log: str = ""


def encode(number: int, task: str, fields: Mapping[str, Any]) -> bytes:
    """Return a request's line. Raise ArgumentError on a field that JSON cannot carry, or that the protocol uses."""
    own = {"version": PROTOCOL, "id": number, "task": task}
    for name in fields:
        if name in own:
            raise ArgumentError("Worker.request", "fields", name, f"{', '.join(own)} are the protocol's own")
    try:
        return json.dumps({**own, **fields}).encode() + b"\n"
    except (TypeError, ValueError, RecursionError):
        name = next((name for name, value in fields.items() if not _carried(value)), "fields")
        value, limit = (
            fields.get(name, fields),
            "must be what JSON can carry: numbers, texts, lists and mappings with texts as keys",
        )
        raise ArgumentError("Worker.request", name, _Named(type(value)), limit) from None


class _Named:
    """A value shown by its type in an error: its repr may be huge or endless."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"a {self.kind.__qualname__}"


def _carried(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def decode(line: bytes, number: int) -> Stage | Answer:
    """Parse a child's line as an answer to request `number`. Raise ProtocolError on anything else."""
    shown = repr(line[:NAME_LIMIT].decode(errors="backslashreplace"))
    try:
        found = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ProtocolError(f"answered {shown}, which is not UTF-8") from None
    except (ValueError, RecursionError):  # RecursionError if nested deeply
        raise ProtocolError(f"answered {shown}, which is not JSON") from None
    kind: type[Stage | Answer] = Answer if isinstance(found, dict) and "ok" in found else Stage
    spoken = found.get("version") if kind is Answer else PROTOCOL
    if isinstance(spoken, int) and spoken != PROTOCOL:  # looked at first: its other fields may be others
        ours = f"this portattn speaks {PROTOCOL}: they are of different releases, install one of them anew"
        raise ProtocolError(f"speaks protocol {spoken}, and {ours}")
    try:
        message = msgspec.convert(found, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"answered {shown}, which is no message of protocol {PROTOCOL}: {error}") from None
    if message.id != number:
        raise ProtocolError(f"answered request {message.id} where it was asked request {number}")
    return _plain(message)


def _plain(message: Stage | Answer) -> Stage | Answer:
    """Return the message with valid UTF-8 texts of bounded length."""
    if isinstance(message, Stage):
        return msgspec.structs.replace(message, stage=_text(message.stage, NAME_LIMIT))
    return msgspec.structs.replace(
        message,
        facts={_text(k): _text(v) if isinstance(v, str) else v for k, v in message.facts.items()},
        toolchain=_text(message.toolchain, NAME_LIMIT),
        stage=_text(message.stage, NAME_LIMIT),
        kind=_text(message.kind, NAME_LIMIT),
        message=_text(message.message, MESSAGE_LIMIT),
        log=_text(message.log),
    )


def _text(text: str, limit: int | None = None) -> str:
    """Replace lone surrogates, which JSON can name but no file takes, and cut the text."""
    return text[:limit].encode(errors="replace").decode()


READ = 65_536  # bytes moved between two looks at the time: a pipe's capacity
LINE_LIMIT = 32 * 2**20  # bytes of an answer: the longest hold assembly texts of some megabytes
LEFT = 2**20 // READ  # reads of a child's rest in a pipe, which holds no more unless root made it larger
# Bytes of a log that are kept: MLIR names the error first, then prints the whole module after it.
LOG_HEAD, LOG_TAIL = 8_000, 16_000


class LineTooLong(Exception):
    """A child\'s line is longer than LINE_LIMIT bytes."""


class StderrLog:
    """The beginning and the end of a child's error stream."""

    def __init__(self) -> None:
        self._head, self._tail, self._size = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        room = max(LOG_HEAD - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > LOG_TAIL:
            del self._tail[:-LOG_TAIL]

    def text(self) -> str:
        left_out = self._size - len(self._head) - len(self._tail)
        cut = f"\n… {left_out} bytes …\n".encode() if left_out else b""
        return (self._head + cut + self._tail).decode(errors="replace")


class Pipes:
    """The parent's ends of a child's streams; requests go by a socket, as a closed pipe would raise SIGPIPE."""

    def __init__(self, requests: socket.socket, answers: IO[bytes], errors: IO[bytes]) -> None:
        self._requests, self._answers, self._errors = requests, answers, errors
        self._selector = selectors.PollSelector()  # the one kind that takes no descriptor
        requests.setblocking(False)
        for stream in (answers, errors):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ)
        self._unsent = memoryview(b"")
        self._got, self._searched = bytearray(), 0
        self.log, self.taken, self.answered = StderrLog(), False, True

    def send(self, data: bytes) -> None:
        """Queue a request for `move`; the log begins anew."""
        if self.taken:
            self.drain()  # output after the last answer is not this request's
            self.log = StderrLog()
        self._unsent, self.taken = memoryview(data), False
        self._selector.register(self._requests, selectors.EVENT_WRITE)

    def move(self, seconds: float) -> bool:
        """Wait until a stream is ready, move at most READ bytes of each, and return whether any moved."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.fileobj is self._requests:
                self._write()
            else:
                self._read(key.fileobj)
        return bool(ready)

    def drain(self) -> None:
        for _ in range(LEFT):
            if not self.move(0):
                return

    def lines(self) -> Iterator[bytes]:
        """Yield complete lines, without their ends. Raise LineTooLong beyond LINE_LIMIT bytes."""
        while (end := self._got.find(b"\n", self._searched)) >= 0:
            line = bytes(self._got[:end])
            del self._got[: end + 1]
            self._searched = 0
            yield line
        self._searched = len(self._got)
        if self._searched > LINE_LIMIT:
            raise LineTooLong

    def close(self) -> None:
        self._selector.close()
        for stream in (self._requests, self._answers, self._errors):
            stream.close()

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[self._requests.send(self._unsent[:READ], socket.MSG_NOSIGNAL) :]
            self.taken = not self._unsent
        except BlockingIOError:
            return
        except ConnectionError:  # the child is gone, or does not listen: how it ends says more
            self._unsent = memoryview(b"")
        if not self._unsent:
            self._selector.unregister(self._requests)

    def _read(self, stream: object) -> None:
        assert stream is self._answers or stream is self._errors
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(stream.fileno(), READ)
            if not data:  # its end
                self._selector.unregister(stream)
                self.answered = self.answered and stream is not self._answers
        if stream is self._answers:
            self._got += data
        else:
            self.log.add(data)


END_SECONDS = 10.0  # how long a killed process is waited for: one in an uninterruptible system call ends when it can


class Child:
    """A started process, with a folder for its temporary files. Raises OSError if the system has no room for it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.folder = tempfile.mkdtemp(prefix="portattn-worker-")
        self._remove = weakref.finalize(self, _remove, self.folder)
        self._ending = threading.RLock()
        self.idle = True
        try:
            with contextlib.ExitStack() as opened:
                ours, theirs = socket.socketpair()
                opened.callback(ours.close)
                with theirs:
                    # A parent that is killed removes nothing: its child does, when nothing more can be asked.
                    # A process group of its own: a compiler's children (ptxas, linkers) end with it.
                    self.process = subprocess.Popen(
                        [*command, f"--folder={self.folder}"],
                        stdin=theirs.fileno(),
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        bufsize=0,
                        env={"TMPDIR": self.folder, **environment},
                        start_new_session=True,
                    )
                assert self.process.stdout is not None
                assert self.process.stderr is not None
                self.pipes = Pipes(ours, self.process.stdout, self.process.stderr)
                opened.pop_all()
        except BaseException:
            self._remove()
            raise

    @property
    def usable(self) -> bool:
        """Whether it can take a request: it runs, owes no answer, and its folder still exists."""
        return self.idle and not self.ended() and os.path.isdir(self.folder)

    def ended(self) -> bool:
        """Return whether the process has ended, without reaping it: its number stays its own until `end`."""
        with self._ending:
            if self.process.returncode is not None:
                return True
            try:
                return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            except ChildProcessError:  # reaped by a thread that waits for every process
                self.process.poll()
                return True

    def end(self) -> int | None:
        """Kill and reap the process group, and return the return code; None if the process still has not ended."""
        with self._ending:
            self.ended()
            if self.process.returncode is None:  # an unreaped process keeps its number
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_SECONDS)
            return self.process.returncode

    def close(self) -> None:
        """Close the streams and remove the folder. No other thread may use the streams."""
        self.pipes.close()
        self._remove()

    def forget(self) -> None:
        """Close the copies of descriptors in a fork: the parent owns the child, which must see that parent's end."""
        self._ending = threading.RLock()
        self._remove.detach()
        self.pipes.close()


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)  # an empty one needs no descriptor, of which there may be none
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
