"""Files of portattn's own: where they are, written whole or not at all, read under a limit, locked among processes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import filelock
import platformdirs

_PART = re.compile(r"\..*\.[0-9a-z_]{8}\.part")
_OLD = "old"  # in a workshop: the folder that is being replaced, under its own name
_LINKS = 40  # as Linux follows
_TRIAL_BYTES = 1 << 16  # more than a file system keeps beside a file's name: a full disk does not take it
_LEFT_OVER_SECONDS = 3600.0  # nothing of portattn's writes one file for so long


def cache_folder(given: str = "") -> Path:
    """portattn's cache folder: the given one, or else the platform's.

    An account without a home folder has none; then it is a folder beside its temporary files, named by the user's id.
    """
    if given:
        return Path(given)
    with contextlib.suppress(RuntimeError):  # what releases of platformdirs raise then; others give a relative folder
        found = Path(platformdirs.user_cache_dir("portattn", appauthor=False))
        if found.is_absolute():
            return found
    return Path(tempfile.gettempdir(), f"portattn-{os.geteuid()}")


def write_whole(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o666, parents: bool = False) -> None:
    """Write beside the file and rename over it: a reader sees the old file or the new one.

    durable  have the bytes on the disk before the rename. Without, a machine that loses its power may leave an empty
             file: enough for a cache whose files carry a checksum, and not worth an fsync in a call

    mode     the file's permissions, of which the user's umask takes some away
    parents  make its folder: for a cache, and not where a user names the place

    Raises OSError; the old file stays then, and nothing is left beside it.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        # Not by tempfile.mkstemp: the file gets the permissions that the user's umask gives to any other.
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            part.unlink(missing_ok=True)
        raise


def write_named(path: Path, data: bytes) -> None:
    """Write a file that a user names: whole or not at all, where it is a regular file or is none yet.

    A link stays one, and the file that it leads to is replaced. What is no regular file (a pipe, a device) is written
    into, as is what this process has open (/dev/stdout): a rename would put a file in its place. Raises OSError.
    """
    place = _place(path)
    if isinstance(place, int):
        handle = os.dup(place)
    elif place.is_file() or not place.exists():
        write_whole(place, data)
        return
    else:
        handle = os.open(place, os.O_WRONLY | os.O_CLOEXEC)
    with open(handle, "wb") as file:
        file.write(data)


def takes_no_file(path: Path) -> str:
    """Why a file that a user names cannot be written; empty where it can."""
    try:
        place = _place(path)
    except OSError as error:
        return error.strerror or str(error)
    if isinstance(place, int):
        return ""
    if place.is_dir():
        return "it is a folder"
    return takes_no_files(place.parent) if place.is_file() or not place.exists() else ""


def _place(path: Path) -> Path | int:
    """What a path's links lead to; the descriptor, where that is what this process has open.

    The kernel's links of open files show the names that they were opened by, which may be other files by now.
    """
    opened = Path("/proc/self/fd").resolve()
    for _ in range(_LINKS):
        folder = path.parent.resolve()
        if folder == opened and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return path
        path = folder / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def read_limited(path: Path, most: int) -> bytes:
    """A regular file's bytes. Raises OSError when it is anything else (a pipe is not waited for) or longer."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        return read_open(file.fileno(), path, most)


def read_open(handle: int, path: Path, most: int) -> bytes:
    """All bytes of an open descriptor, from its beginning. Raises OSError as `read_limited`."""
    seen = os.fstat(handle)
    if not stat.S_ISREG(seen.st_mode):
        raise OSError(f"{path} is no regular file")
    if seen.st_size > most:
        raise OSError(f"{path} has {seen.st_size} bytes, and at most {most} are read")
    parts, place = [], 0
    while place < most and (part := os.pread(handle, most - place, place)):
        parts.append(part)
        place += len(part)
    return b"".join(parts)


def takes_no_files(folder: Path) -> str:
    """Why a folder takes no files; empty where it does. Makes the folder, and writes a file that is removed again."""
    if folder.exists() and not folder.is_dir():
        return "it is not a folder"
    trial = folder / f".trial.{secrets.token_hex(4)}"
    try:
        write_whole(trial, bytes(_TRIAL_BYTES), parents=True)
        trial.unlink(missing_ok=True)
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror}"
    return ""


@contextlib.contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """A folder of its own inside a folder, gone with all that is in it after the block, or when the process ends."""
    with tempfile.TemporaryDirectory(prefix=".making.", suffix=".part", dir=folder, ignore_cleanup_errors=True) as made:
        yield Path(made)


def replace_folder(folder: Path, files: Iterable[tuple[str, bytes]]) -> int:
    """Write a folder as a whole, beside its place, and put it there: a reader finds the old folder or the new one.

    files  paths in the folder, and what each file holds; they may be made as they are asked for

    Returns how many were written. Raises OSError; after that, and after an interrupt, the old folder is there as it
    was. Between two renames there is neither: where a process was killed at that moment, the next call that replaces a
    folder beside it first puts the old one back. The files are not synced.
    """
    folder = folder.resolve()  # a link stays one: what it leads to is replaced
    folder.parent.mkdir(parents=True, exist_ok=True)
    _put_back(folder.parent)
    sweep(folder.parent)
    count = 0
    with workshop(folder.parent) as place:
        new, old = place / "new", place / _OLD / folder.name
        new.mkdir()
        old.parent.mkdir()
        for name, data in files:
            file = new / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            count += 1
        try:
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except BaseException as error:
            if old.exists() and not folder.exists():
                old.rename(folder)
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise OSError(errno.EBUSY, "another process writes it at this moment", str(folder)) from None
            raise
    return count


def _put_back(parent: Path) -> None:
    """Put folders back that were moved away by processes which were killed before their new ones were there.

    A process that lives, and is between its two renames at this moment, is told that another one writes the folder.
    """
    for old in parent.glob(f".*.part/{_OLD}/*"):
        if _PART.fullmatch(old.parent.parent.name) and not os.path.lexists(parent / old.name):
            with contextlib.suppress(OSError):  # somebody else put it back, or it is not ours
                old.rename(parent / old.name)


def sweep(folder: Path) -> None:
    """Remove what was being made in a folder by processes that were killed."""
    old = time.time() - _LEFT_OVER_SECONDS
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if not _PART.fullmatch(entry.name) or entry.stat(follow_symlinks=False).st_mtime > old:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[bool]:
    """Hold a lock among processes inside the block; whether it is held.

    It is not where the folder takes no files, the file system has no locks, or another process holds it for longer
    than `seconds` (it is stopped, or stuck). The block runs all the same: this is for work that may be done twice.
    The kernel releases it when its holder dies.
    """
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        lock.acquire(timeout=seconds)
    except (OSError, filelock.Timeout, NotImplementedError, RuntimeError):
        # NotImplementedError and RuntimeError: filelock's own, for file systems without locks, and around a fork.
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            with contextlib.suppress(OSError, RuntimeError):  # it ends with its descriptor
                lock.release()
