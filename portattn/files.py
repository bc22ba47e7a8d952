"""Files: where portattn's own are, whose they are, written whole or not at all, read under a limit, locked.

A file or a folder is trusted if its owner is this process's effective user or root, and no other user may write to it.
A folder may be writable for others where it is sticky: there they can add files, and neither replace nor remove ours.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import grp
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import filelock
import platformdirs

_PART = re.compile(r"\..*\.[0-9a-z_]{8}\.part")
_OLD = "old"  # in a workshop: the folder that is being replaced, under its own name
_LINKS = 40  # as Linux follows
_TRIAL_BYTES = 1 << 16  # more than a file system keeps beside a file's name: a full disk does not take it
_LEFT_OVER_SECONDS = 3600.0  # nothing of portattn's writes one file for so long
LARGEST_GIVEN = 256 << 20  # bytes of a file that a user names: a matrix of 100,000 cells has some 100 MB
_ROOM = 1 << 16  # bytes that are asked for beyond a file's size
_ACCOUNTS, _GROUPS = Path("/etc/passwd"), Path("/etc/group")
_KINDS: dict[int, str] = {
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class UntrustedPath(Exception):
    """A file or folder that another user owns or can change. The text names its owner or its mode."""


def cache_folder(given: str = "") -> Path:
    """portattn's cache folder: the given one, or else the platform's.

    An account without a home folder has none; then it is a folder beside its temporary files, named by the user's id
    (see `_temporary_cache`).
    """
    if given:
        return Path(given)
    with contextlib.suppress(RuntimeError):  # what releases of platformdirs raise then; others give a relative folder
        found = Path(platformdirs.user_cache_dir("portattn", appauthor=False))
        if found.is_absolute():
            return found
    return _temporary_cache(tempfile.gettempdir(), os.geteuid())


@functools.lru_cache(maxsize=4)
def _temporary_cache(parent: str, user: int) -> Path:
    """Return the cache folder of a user without a home: `portattn-UID` in the folder of temporary files.

    Any user can make a folder of that name first. This process then warns, and takes a new folder, which it removes
    when it ends.
    """
    place = Path(parent, f"portattn-{user}")
    try:
        with trusted_folder(place, make=True):
            return place
    except OSError:
        return place  # there is nothing to take over; whoever writes a file to it says why it cannot
    except UntrustedPath as error:
        text = (
            f"portattn keeps nothing for later processes: {error}; set HOME, or PORTATTN_CACHE_DIR to your own folder"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    made, owner = tempfile.mkdtemp(prefix=f"{place.name}-", dir=parent), os.getpid()
    # A forked process has the same exit functions, and its parent still needs the folder.
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == owner else None)
    return Path(made)


def check_owner(seen: os.stat_result, name: str, kind: str, *, private_group: bool = False) -> None:
    """Raise UntrustedPath where another user owns a file or folder, or may write to it.

    private_group  whether the group may write if it is this user's private group (see `_is_private`). Debian and RHEL
                   make such a group for each user, and a umask of 0002: files that are made by the umask need this
    """
    mode = stat.S_IMODE(seen.st_mode)
    if seen.st_uid not in (os.geteuid(), 0):
        raise UntrustedPath(
            f"the {kind} {name} belongs to user {seen.st_uid} (mode {mode:04o}), "
            f"and this process is user {os.geteuid()}'s"
        )
    if stat.S_ISLNK(seen.st_mode) or (kind == "folder" and mode & stat.S_ISVTX):
        return
    others = mode & 0o022
    if others == 0o020 and private_group and _is_private(seen.st_gid, os.geteuid()):
        return
    if others:
        raise UntrustedPath(f"the {kind} {name} may be written by others (mode {mode:04o})")


@functools.lru_cache(maxsize=16)
def _is_private(group: int, user: int) -> bool:
    """Return whether a group has the user's name and no other member, as primary group or by its list of members.

    The account must be in /etc/passwd: a directory service (LDAP) need not list its accounts, and may be slow.
    Group 0 is never private: containers run as any user of group 0.
    """
    if group == 0:
        return False
    try:
        accounts, groups = _table(_ACCOUNTS), _table(_GROUPS)
        found = grp.getgrgid(group)  # with the members that a directory service adds
    except (OSError, KeyError):
        return False
    own = {name for name, _, uid, *_ in accounts if uid == str(user)}
    primary = {name for name, _, _, gid, *_ in accounts if gid == str(group)}
    listed = {name for _, _, gid, names, *_ in groups if gid == str(group) for name in names.split(",") if name}
    return found.gr_name in own & primary and primary | listed | {*found.gr_mem} <= own


def _table(path: Path) -> list[list[str]]:
    """Return the fields of each line of /etc/passwd or /etc/group."""
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return [fields for line in lines if len(fields := line.split(":")) >= 4]


@contextlib.contextmanager
def trusted_folder(path: Path, make: bool = False) -> Iterator[int]:
    """Yield the descriptor of a folder that is trusted. Raises UntrustedPath and OSError.

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
        raise UntrustedPath(f"{path} is no folder, or a symbolic link") from None
    try:
        seen = os.fstat(handle)
        if make and seen.st_uid == os.geteuid() and seen.st_mode & 0o022 and not seen.st_mode & stat.S_ISVTX:
            os.fchmod(handle, stat.S_IMODE(seen.st_mode) & ~0o022)
            seen = os.fstat(handle)
        check_owner(seen, str(path), "folder")
        yield handle
    finally:
        os.close(handle)


def check_tree(folder: Path) -> None:
    """Check a folder, all in it, and all that its links lead to. Raises UntrustedPath, OSError if unreadable.

    A link's target is checked together with the folder that holds it, since another user who may write to that folder
    can replace the target: a virtual environment's Python is such a link. A missing target passes: it holds no code.
    The Python of this process passes, too: its owner's code runs already.
    """
    if folder.is_symlink():
        check_owner(os.lstat(folder), str(folder), "file", private_group=True)
        _check_targets(str(folder))
    waiting = [os.path.realpath(folder)]
    known = set(waiting)
    for place in waiting:  # grows meanwhile
        check_owner(os.lstat(place), place, "folder", private_group=True)
        with os.scandir(place) as entries:
            for entry in entries:
                inner = entry.path
                if not entry.is_dir(follow_symlinks=False):
                    check_owner(entry.stat(follow_symlinks=False), inner, "file", private_group=True)
                    if not entry.is_symlink():
                        continue
                    _check_targets(inner)
                    inner = os.path.realpath(inner)
                if inner not in known and os.path.isdir(inner):
                    known.add(inner)
                    waiting.append(inner)


def _check_targets(link: str) -> None:
    """Check a link's target and the folder that holds it; then, if the target is a link, the target's target."""
    for _ in range(_LINKS):
        folder, name = os.path.split(os.path.join(os.path.dirname(link), os.readlink(link).rstrip("/")))
        folder = os.path.realpath(folder)
        link = os.path.join(folder, name)
        if not os.path.lexists(link) or link == os.path.realpath(sys.executable):
            return
        seen = os.lstat(link)
        check_owner(os.lstat(folder), folder, "folder", private_group=True)
        check_owner(seen, link, "folder" if stat.S_ISDIR(seen.st_mode) else "file", private_group=True)
        if not stat.S_ISLNK(seen.st_mode):
            return


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


def read_limited(path: Path, most: int, *, owned: bool = False) -> bytes:
    """Return a regular file's bytes.

    owned  check the opened file's owner and mode first

    Raises OSError for anything else (a device, a pipe, which is not waited for), a longer file, and UntrustedPath.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if owned:
            check_owner(os.fstat(handle), str(path), "file", private_group=True)
        return read_open(handle, path, most)
    finally:
        os.close(handle)


def read_open(handle: int, path: Path, most: int) -> bytes:
    """Return all bytes of an open descriptor, from its beginning. Raises OSError as `read_limited`."""
    seen = os.fstat(handle)
    if stat.S_ISDIR(seen.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(seen.st_mode):
        kind = _KINDS.get(stat.S_IFMT(seen.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, and only regular files are read", str(path))
    parts, place, size = [], 0, seen.st_size
    # Growing files, and files of /proc, have more bytes than they say.
    while size <= most and (part := os.pread(handle, min(most + 1, size + _ROOM) - place, place)):
        parts.append(part)
        place += len(part)
        size = max(size, place)
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most} are read", str(path))
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
def hold_lock(path: Path, seconds: float) -> Iterator[bool]:
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
