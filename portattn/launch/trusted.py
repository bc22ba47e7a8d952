"""Code from a cache folder: a library is run only if this user (or root) wrote it, nobody else can, and it is whole.

Checked are the folder and the file themselves, each opened once and never by a symbolic link:

- the owner is this process's effective user, or root;
- neither the group nor others may write to it. A folder may be writable for others where it is sticky: there they can
  add files, and neither replace nor remove ours;
- the file ends with the digest of what is before it (loaders do not read that far), so that a file which was cut short,
  or changed on the disk, is not mapped: a page that is not there ends the process.

Folders further up need no check: who can rename one of them puts another folder in its place, and that is looked at.
The checked descriptor itself is loaded, so that what was checked is what runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from portattn.files import read_open, write_whole

_MARK = b"\nportattn sealed "
MOST = 64 << 20  # bytes of a library


class Untrusted(Exception):
    """Code that must not run here; the text says why."""


def seal(code: bytes) -> bytes:
    """A library's bytes with their digest at the end."""
    return code + _MARK + hashlib.sha256(code).digest()


def keep(place: Path, code: bytes) -> None:
    """Write a library, whole or not at all, in a folder that is made safe. Raises Untrusted, OSError."""
    with _folder(place.parent, make=True):
        # Not synced: what a power failure leaves is not whole, and made anew.
        write_whole(place, seal(code), durable=False, mode=0o644)


@contextlib.contextmanager
def making(parent: Path) -> Iterator[None]:
    """The block may put files into a folder, which is made: nobody else can change them. Raises Untrusted, OSError."""
    with _folder(parent, make=True):
        yield


def opened(place: Path) -> int:
    """A descriptor of a library that was checked. Raises Untrusted, FileNotFoundError, and OSError."""
    with _folder(place.parent) as folder:
        handle = os.open(place.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        _check(os.fstat(handle), str(place), "file")
        data = read_open(handle, place, MOST)
        end = len(data) - len(_MARK) - hashlib.sha256().digest_size
        if end < 0 or seal(data[:end]) != data:
            raise Untrusted(f"{place} is not whole")
    except BaseException:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def _folder(path: Path, make: bool = False) -> Iterator[int]:
    """A folder's descriptor, checked.

    make  make it where it is not there, and take the right to write to it from others where it is ours: earlier
          releases left that to the user's umask. What others wrote there before fails its own check
    """
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise Untrusted(f"{path} is no folder, or a symbolic link") from None
    try:
        seen = os.fstat(handle)
        if make and seen.st_uid == os.geteuid() and seen.st_mode & 0o022 and not seen.st_mode & stat.S_ISVTX:
            os.fchmod(handle, stat.S_IMODE(seen.st_mode) & ~0o022)
            seen = os.fstat(handle)
        _check(seen, str(path), "folder")
        yield handle
    finally:
        os.close(handle)


def _check(seen: os.stat_result, name: str, kind: str) -> None:
    """Raise Untrusted where somebody else owns it, or may write to it."""
    if seen.st_uid not in (os.geteuid(), 0):
        raise Untrusted(f"the {kind} {name} belongs to user {seen.st_uid}, and this process is user {os.geteuid()}'s")
    sticky = kind == "folder" and seen.st_mode & stat.S_ISVTX
    if seen.st_mode & 0o022 and not sticky:
        raise Untrusted(f"the {kind} {name} may be written by others (mode {stat.S_IMODE(seen.st_mode):04o})")
