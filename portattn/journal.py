"""A file of lines that one run at a time writes: locked, added to by whole lines, replaced as a whole."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import filelock
import msgspec

from portattn.errors import ArgumentError, DataError


class Journal:
    """The lines of one run. Use it as a context: it holds the lock.

    path   the file; its folder is made
    lock   the lock's file
    op, option  what the caller knows the place by, for errors; `shown` is what they name

    Raises ArgumentError when the place cannot be written, or another run writes there at this moment.
    """

    def __init__(self, path: Path, lock: Path, *, op: str, option: str, shown: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(lock)
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ArgumentError(op, option, str(shown), "another run is writing there now") from None
        except OSError as error:
            raise ArgumentError(op, option, str(shown), f"cannot be written: {error.strerror}") from None

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def put_away(self) -> Path | None:
        """Give the file that is there a name with its date. Returns where it went, if there was one."""
        if not self.path.exists():
            return None
        changed = datetime.datetime.fromtimestamp(self.path.stat().st_mtime, datetime.timezone.utc)
        stem = f"{self.path.stem}-{changed:%Y%m%d-%H%M%S}"
        names = (f"{stem}{'' if n == 1 else f'-{n}'}{self.path.suffix}" for n in range(1, 10_000))
        kept = next(path for name in names if not (path := self.path.with_name(name)).exists())
        self.path.rename(kept)
        return kept

    def append(self, record: msgspec.Struct) -> None:
        """Add one record, by one write of one whole line, and have it on the disk.

        Raises DataError when the disk takes only part of it.
        """
        line = msgspec.json.encode(record) + b"\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            written = os.write(handle, line)
            os.fsync(handle)
        finally:
            os.close(handle)
        if written != len(line):
            raise DataError(self.path, None, "the disk took only part of a line; free space and --resume")


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the file and rename over it: a reader sees the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
