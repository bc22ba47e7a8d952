"""A file of JSON lines that one run at a time writes: locked, extended by whole lines, replaced as a whole."""

import datetime
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import msgspec

from portattn.errors import ArgumentError, DataError
from portattn.files import LARGEST_GIVEN, read_limited
from portattn.schema import toml_reader

_SUM = re.compile(rb',"sum":"([0-9a-f]{16})"}$')
# What msgspec raises for bytes that are no record.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class RunLog:
    """The lines of one run; a context that holds the lock. Raises ArgumentError (`op`, `option`, `shown`)."""

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

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def rotate(self) -> Path | None:
        """Rename an existing file by its date; return the new path, or None."""
        if not self.path.exists():
            return None
        kept = self.dated()
        self.path.rename(kept)
        return kept

    def dated(self) -> Path:
        changed = datetime.datetime.fromtimestamp(self.path.stat().st_mtime, datetime.timezone.utc)
        stem = f"{self.path.stem}-{changed:%Y%m%d-%H%M%S}"
        names = (f"{stem}{'' if n == 1 else f'-{n}'}{self.path.suffix}" for n in range(1, 10_000))
        return next(path for name in names if not (path := self.path.with_name(name)).exists())

    def append(self, record: msgspec.Struct) -> None:
        line = encode_record(record)
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                written = os.write(handle, line)
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise DataError(self.path, None, f"cannot be written: {error.strerror}; what is in it stays") from None
        if written != len(line):
            raise DataError(self.path, None, "the disk took only part of a line; free space and --resume")


def read(path: Path) -> bytes:
    """Return a named file's bytes. Raises DataError, also for a device, for a pipe and for a file that is too large."""
    try:
        return read_limited(path, LARGEST_GIVEN)
    except OSError as error:
        raise DataError(path, None, f"cannot be read: {error.strerror}") from None


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    try:
        return toml_reader.read(path)
    except OSError as error:
        raise DataError(path, None, f"cannot be read: {error.strerror}") from None


def encode_record(record: msgspec.Struct) -> bytes:
    plain = msgspec.json.encode(record)
    return plain[:-1] + b',"sum":"%s"}\n' % _sum(plain)


def lines(path: Path, data: bytes, resumed: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, JSON) of each line but an unfinished last one. Raises DataError on a changed line.
    `resumed` requires a checksum of every line, which lines of earlier releases lack."""
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        found = _SUM.search(line)
        if found is None:
            if resumed:
                text = "has no checksum: it is damaged, or an older portattn wrote it; run without --resume"
                raise DataError(path, number, text)
            yield number, line
            continue
        plain = line[: found.start()] + b"}"
        if found[1] != _sum(plain):
            raise DataError(path, number, "is not as it was written: its checksum differs; run without --resume")
        yield number, plain


def _sum(plain: bytes) -> bytes:
    return hashlib.sha256(plain).hexdigest()[:16].encode()
