"""Code from a cache folder: a library is run only if this user (or root) wrote it, nobody else can, and it is whole.

Checked are the folder and the file themselves, each opened once and never by a symbolic link:

- owner and mode (portattn/files.py), without the exception for private groups: this library is made with mode 0644;
- the file ends with the digest of what is before it (loaders do not read that far), so that a file which was cut short,
  or changed on the disk, is not mapped: a page that is not there ends the process.

Folders further up need no check: who can rename one of them puts another folder in its place, and that is looked at.
The checked descriptor itself is loaded, so that what was checked is what runs.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from portattn.files import Untrusted, check_owner, read_open, trusted_folder, write_whole

_MARK = b"\nportattn sealed "
MOST = 64 << 20  # bytes of a library


def seal(code: bytes) -> bytes:
    """A library's bytes with their digest at the end."""
    return code + _MARK + hashlib.sha256(code).digest()


def keep(place: Path, code: bytes) -> None:
    """Write a library, whole or not at all, in a folder that is made safe. Raises Untrusted, OSError."""
    with trusted_folder(place.parent, make=True):
        # Not synced: what a power failure leaves is not whole, and made anew.
        write_whole(place, seal(code), durable=False, mode=0o644)


def opened(place: Path) -> int:
    """A descriptor of a library that was checked. Raises Untrusted, FileNotFoundError, and OSError."""
    with trusted_folder(place.parent) as folder:
        handle = os.open(place.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        check_owner(os.fstat(handle), str(place), "file")
        data = read_open(handle, place, MOST)
        end = len(data) - len(_MARK) - hashlib.sha256().digest_size
        if end < 0 or seal(data[:end]) != data:
            raise Untrusted(f"{place} is not whole")
    except BaseException:
        os.close(handle)
        raise
    return handle
