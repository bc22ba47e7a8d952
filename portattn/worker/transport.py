"""The streams of a child, moved by one thread that never blocks: bytes under a limit, and time under the caller's.

Whoever waits for an answer also writes the request and reads the child's log: there is no thread that could be left
behind, and a child that writes without end is read and forgotten, never kept in memory or on disk.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Iterator
from typing import IO

READ = 65_536  # bytes moved between two looks at the time: a pipe's capacity
LINE_LIMIT = 32 * 2**20  # bytes of an answer: the longest hold assembly texts of some megabytes
LEFT = 2**20 // READ  # reads of a child's rest in a pipe, which holds no more unless root made it larger
# Bytes of a log that are kept: MLIR names the error first, then prints the whole module after it.
LOG_HEAD, LOG_TAIL = 8_000, 16_000


class LineTooLong(Exception):
    """A child's line is longer than LINE_LIMIT bytes."""


class StderrLog:
    """The beginning and the end of what a child wrote to its error stream."""

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
    """The parent's ends of a child's streams.

    requests  a socket: unlike a pipe it can be written to without a signal where the child is gone, whatever this
              process does about SIGPIPE
    log       of the request under way, of the first one with what the child wrote before it
    taken     whether the child has been given the whole request
    answered  False once the child has closed its answers
    """

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
        """Have `move` send this, a request. The log begins anew."""
        if self.taken:
            self.drain()  # what was printed after the last answer is no part of this one's log
            self.log = StderrLog()
        self._unsent, self.taken = memoryview(data), False
        self._selector.register(self._requests, selectors.EVENT_WRITE)

    def move(self, seconds: float) -> bool:
        """Wait at most so long until something can be moved, and move at most READ bytes of each stream.

        Returns whether there was anything.
        """
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.fileobj is self._requests:
                self._write()
            else:
                self._read(key.fileobj)
        return bool(ready)

    def drain(self) -> None:
        """Move what is there now, and wait for nothing."""
        for _ in range(LEFT):
            if not self.move(0):
                return

    def lines(self) -> Iterator[bytes]:
        """The whole lines that have come, without their ends. Raises LineTooLong."""
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
